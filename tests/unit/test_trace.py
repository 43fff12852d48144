"""What is recorded of a process while steps are profiled, and the file that shows it."""

import asyncio
import json
import threading
from collections import defaultdict

import pytest

from torchtitan.experiments.rl.config.checks import profiled_steps
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.operations.profile import trace_events, write_trace
from torchtitan.experiments.rl.process import trace
from torchtitan.experiments.rl.process.trace import Event


@pytest.fixture(autouse=True)
def nothing_recorded():
    yield
    trace.stop()


def assert_rows_nest(events: list[Event]) -> None:
    """In a row, two events are apart or one holds the other: viewers draw anything else wrongly."""
    rows = defaultdict(list)
    for event in events:
        rows[event.row].append((event.start_ns, event.start_ns + event.duration_ns, event.name))
    for row, spans in rows.items():
        around: list[tuple[int, int, str]] = []
        for span in sorted(spans, key=lambda span: (span[0], -span[1])):
            while around and around[-1][1] <= span[0]:
                around.pop()
            assert not around or span[1] <= around[-1][1], (row, span, around[-1])
            around.append(span)


def test_nothing_is_recorded_and_nothing_made_while_no_step_is_profiled():
    assert trace.span("a", size=1) is trace.lane("b") is trace.span("c")
    with trace.span("a"):
        assert not trace.recording()
    assert trace.stop() == []


def test_a_thread_has_a_row_of_its_name():
    trace.start()

    def work():
        with trace.span("outer", version=3), trace.span("inner"):
            pass

    thread = threading.Thread(target=work, name="engine")
    thread.start()
    thread.join()
    inner, outer = trace.stop()
    assert (outer.name, outer.row, outer.details) == ("outer", "engine", {"version": 3})
    assert (inner.name, inner.row) == ("inner", "engine")
    assert_rows_nest([inner, outer])


def test_rollouts_at_once_have_lanes_of_their_own_and_a_free_lane_is_used_again():
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
    found = trace.stop()
    rows = {event.details["id"]: event.row for event in found if event.name == "rollout"}
    assert rows == {"r0": "rollout 1", "r1": "rollout 2", "r2": "rollout 1"}
    assert sorted(event.row for event in found if event.name == "env") == ["rollout 1", "rollout 1", "rollout 2"]
    assert_rows_nest(found)


def test_what_began_before_the_recording_is_not_in_it_and_what_goes_on_after_it_is_cut():
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

    found = asyncio.run(main())
    assert [(event.name, event.row, event.details) for event in found] == [
        ("step", "step 1", {"step": 7, "unfinished": True}),
        ("wait", "step 1", {"unfinished": True}),
    ]
    assert_rows_nest(found)
    assert trace.stop() == []


def test_the_file_has_a_row_for_each_lane_and_times_in_microseconds_from_the_first_event(tmp_path):
    processes = {
        "controller": [Event("env", "rollout 10", 5_000, 1_000, {}), Event("rollout", "rollout 2", 4_500, 3_000, {"id": "r"})],
        "generator 0": [Event("step", "engine", 2_000, 2_500, {})],
    }
    write_trace(tmp_path / "trace.json", processes)
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written["traceEvents"] == trace_events(processes)
    named = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "process_name"}
    assert named == {(1, 0): "controller", (2, 0): "generator 0"}
    rows = {(e["pid"], e["tid"]): e["args"]["name"] for e in written["traceEvents"] if e["name"] == "thread_name"}
    assert rows == {(1, 1): "rollout 2", (1, 2): "rollout 10", (2, 1): "engine"}
    spans = [(e["pid"], e["tid"], e["name"], e["ts"], e["dur"]) for e in written["traceEvents"] if e["ph"] == "X"]
    assert spans == [(1, 1, "rollout", 2.5, 3.0), (1, 2, "env", 3.0, 1.0), (2, 1, "step", 0.0, 2.5)]


def test_steps_are_named_by_the_first_and_the_last():
    assert profiled_steps("") is None
    assert list(profiled_steps("3:5")) == [3, 4, 5]
    assert list(profiled_steps("1:1")) == [1]


@pytest.mark.parametrize("value", ["3", "0:2", "5:3", ":", "a:b", "1:2:3", "-1:2"])
def test_other_values_are_refused_in_one_line(value):
    with pytest.raises(ConfigError, match=r"^profile_steps = '.*': write the first and the last step to record, such as 3:5$"):
        profiled_steps(value)
