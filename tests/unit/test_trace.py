"""Profiled steps are recorded, and one file shows them."""

import asyncio
import json
import threading
from collections import defaultdict
from typing import Any

import pytest

from torchtitan.experiments.rl.command.checks import profiled_steps
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.trace import Event
from torchtitan.experiments.rl.watch.profile import write_trace


@pytest.fixture(autouse=True)
def nothing_recorded():
    yield
    trace.stop()


def spans(events: list[Event]) -> list[tuple[str, Any, int, int | None, dict[str, Any]]]:
    """Name, row, begin, end and details of each span, in the order of their beginnings; the end is None where there is none. A
    row is a kind and id, or a thread. In a row a span ends before the one around it: viewers draw anything else wrongly."""
    found, rows = [], defaultdict(list)
    for event in events:
        if event["ph"] == "M":
            continue
        row = (event["cat"], event["id"]) if event["ph"] in "be" else event["tid"]
        if event["ph"] in "bB":
            rows[row].append(len(found))
            found.append([event["name"], row, event["ts"], None, event["args"]])
        else:
            span = found[rows[row].pop()]
            assert span[0] == event["name"] and event["ph"] in "eE" and event["ts"] >= span[2]
            span[3] = event["ts"]
    return [tuple(span) for span in found]


def names_of_threads(events: list[Event]) -> dict[int, str]:
    return {
        event["tid"]: event["args"]["name"] for event in events if event["name"] == "thread_name"
    }


def test_nothing_is_recorded_and_nothing_made_while_no_step_is_profiled():
    assert trace.span("a", size=1) is trace.lane("b") is trace.span("c")
    with trace.span("a"):
        assert not trace.recording()
    assert trace.stop() == []


def test_a_thread_has_a_row_with_its_name():
    trace.start()
    recorded, go_on = threading.Event(), threading.Event()

    def work():
        with trace.span("outer", version=3), trace.span("inner"):
            pass
        recorded.set()
        go_on.wait()

    thread = threading.Thread(target=work, name="engine")
    thread.start()
    recorded.wait()
    events = trace.stop()
    go_on.set()
    thread.join()
    outer, inner = spans(events)
    assert (outer[0], outer[1], outer[4]) == ("outer", thread.native_id, {"version": 3})
    assert (inner[0], inner[1]) == ("inner", thread.native_id)
    assert outer[2] <= inner[2] <= inner[3] <= outer[3]
    assert names_of_threads(events) == {thread.native_id: "engine"}


def test_rollouts_at_once_have_lanes_of_their_own():
    async def rollout(name: str, enter: asyncio.Event, leave: asyncio.Event) -> None:
        with trace.lane("rollout", id=name), trace.span("env"):
            enter.set()
            await leave.wait()

    async def main() -> None:
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(3)]
        tasks = []
        for number in (0, 1):
            tasks.append(asyncio.create_task(rollout(f"r{number}", *events[number])))
            await events[number][0].wait()
        events[0][1].set()
        await tasks[0]
        tasks.append(asyncio.create_task(rollout("r2", *events[2])))
        await events[2][0].wait()
        events[1][1].set()
        events[2][1].set()
        await asyncio.gather(*tasks)

    trace.start()
    asyncio.run(main())
    found = spans(trace.stop())
    rows = {details["id"]: row for name, row, _, _, details in found if name == "rollout"}
    assert rows.keys() == {"r0", "r1", "r2"} and len(set(rows.values())) == 3
    assert {kind for kind, _ in rows.values()} == {"rollout"}
    assert [row for name, row, *_ in found if name == "env"] == list(rows.values()), (
        "in the order in which they began"
    )
    assert all(ended is not None for _, _, _, ended, _ in found)


def test_what_began_before_the_recording_is_not_in_it_and_what_goes_on_after_it_has_no_end():
    async def main() -> list[Event]:
        inside, go_on = asyncio.Event(), asyncio.Event()

        async def early() -> None:
            with trace.lane("rollout"):
                await go_on.wait()
                with trace.span("env"):
                    inside.set()
                    await asyncio.Event().wait()

        task = asyncio.create_task(early())
        await asyncio.sleep(0)
        trace.start()
        go_on.set()
        await inside.wait()
        with trace.lane("step", step=7), trace.span("wait"):
            found = trace.stop()
        task.cancel()
        return found

    step, wait = spans(asyncio.run(main()))
    assert (step[0], step[3], step[4]) == ("step", None, {"step": 7})
    assert (wait[0], wait[3]) == ("wait", None) and wait[1] == step[1]
    assert trace.stop() == []


def test_the_file_names_each_process_and_has_times_in_microseconds_from_the_first_event(tmp_path):
    lane = {"name": "rollout", "cat": "rollout", "id": "a1", "tid": 70}
    processes = {
        "controller": [
            {"ph": "b", "ts": 4_500, "args": {"id": "r"}, **lane},
            {"ph": "e", "ts": 7_500, **lane},
        ],
        "generator 0": [
            {"ph": "B", "name": "step", "tid": 80, "ts": 2_000, "args": {}},
            {"ph": "E", "name": "step", "tid": 80, "ts": 4_500},
            {"ph": "M", "name": "thread_name", "tid": 80, "ts": 9_000, "args": {"name": "engine"}},
        ],
    }
    write_trace(tmp_path / "trace.json", processes)
    written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert all({"name", "ph", "ts", "pid", "tid"} <= event.keys() for event in written), (
        "what the format asks of each"
    )
    named = {
        event["pid"]: event["args"]["name"] for event in written if event["name"] == "process_name"
    }
    assert named == {1: "controller", 2: "generator 0"}
    assert names_of_threads(written) == {80: "engine"}
    assert {pid: spans([event for event in written if event["pid"] == pid]) for pid in named} == {
        1: [("rollout", ("rollout", "a1"), 2.5, 5.5, {"id": "r"})],
        2: [("step", 80, 0.0, 2.5, {})],
    }


def test_steps_are_named_by_the_first_and_the_last():
    assert profiled_steps("") is None
    assert list(profiled_steps("3:5")) == [3, 4, 5]
    assert list(profiled_steps("1:1")) == [1]


@pytest.mark.parametrize("value", ["3", "0:2", "5:3", ":", "a:b", "1:2:3", "-1:2"])
def test_other_values_are_refused_in_one_line(value):
    with pytest.raises(
        ConfigError,
        match=r"^profile_steps = '.*': write the first and the last step to record, such as 3:5$",
    ):
        profiled_steps(value)
