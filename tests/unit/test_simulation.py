"""Virtual time, simulated parts, and whole simulated runs of the real controller."""

import asyncio
import copy
import json
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.calibrate import HostRates, HostRun, SharedCores
from torchtitan.experiments.rl.config_registry import rl_grpo_qwen3_debug
from torchtitan.experiments.rl.config_registry.qwen3 import rl_grpo_qwen3_8b, rl_grpo_qwen3_30b_a3b
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.generation.client import GeneratorClient
from torchtitan.experiments.rl.models.lora import LoRA
from torchtitan.experiments.rl.plan.costs import EngineRates, TrainerRates
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.simulate import main
from torchtitan.experiments.rl.simulation.clock import Escape, run_virtually
from torchtitan.experiments.rl.simulation.engine import SimulatedReplica
from torchtitan.experiments.rl.simulation.lengths import LogNormal, lengths_of
from torchtitan.experiments.rl.simulation.local_actor import open_channel
from torchtitan.experiments.rl.simulation.rates import Rates
from torchtitan.experiments.rl.simulation.result import SimulationResult
from torchtitan.experiments.rl.simulation.run import Failures, SimulatedRun
from torchtitan.experiments.rl.simulation.study import Setting

ENGINE = EngineRates(
    step_s=1.0,
    sequence_s=0.1,
    context_s=0.001,
    prompt_s=0.0,
    prefill_token_s=0.01,
    cache_tokens=10_000,
    load_s=5.0,
)
TRAINER = TrainerRates(
    step_s=10.0, microbatch_s=0.0, token_s=1e-3, pair_s=0.0, publish_s=1.0, checkpoint_s=2.0
)
RATES = Rates(engine=ENGINE, trainer=TRAINER, fetch_s=3.0, start_s=20.0)
LENGTHS = LogNormal(mean=20, sigma=1, prompt=30, turns=1.5, env_s=2)


# The clock.


def test_the_clock_jumps_to_the_next_timer():
    async def work():
        await asyncio.sleep(86_400)
        return asyncio.get_running_loop().time()

    began = time.monotonic()
    assert run_virtually(work) == pytest.approx(86_400)
    assert time.monotonic() - began < 3_600


def test_a_thread_that_calls_into_the_loop_is_refused():
    async def work():
        loop, refused = asyncio.get_running_loop(), []

        def call():
            with pytest.raises(Escape):
                loop.call_soon_threadsafe(print)
            refused.append(True)

        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        return refused

    assert run_virtually(work) == [True]


def test_what_waits_for_something_outside_is_refused():
    async def work():
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Escape, match="nothing will ever happen again"):
        run_virtually(work)


def test_what_is_given_to_a_thread_is_done_at_once():
    async def work():
        return await asyncio.to_thread(sum, [1, 2]), asyncio.get_running_loop().time()

    assert run_virtually(work) == (3, 0.0)


def test_what_runs_on_one_core_has_half_of_it_each_and_the_last_all_of_it():
    async def work():
        cores, ended = SharedCores(1), []

        async def use(seconds):
            await cores.use(seconds)
            ended.append(asyncio.get_running_loop().time())

        await asyncio.gather(use(2), use(3))
        return ended

    assert run_virtually(work) == pytest.approx([4, 5])


# The engine.


@given(
    steps=st.integers(1, 5000),
    sequences=st.integers(1, 300),
    context=st.integers(0, 100_000),
    context_s=st.sampled_from([0.0, 1e-8, 1e-3]),
    skipped=st.sampled_from([0.0, 0.9]),
)
@settings(deadline=None, max_examples=50)
def test_decode_time_is_the_sum_of_its_steps(steps, sequences, context, context_s, skipped):
    """A step of one sequence reads a tenth of the experts, one of two 0.19, and so on, where 0.9 of them are skipped."""
    engine = dict(
        step_s=0.01,
        sequence_s=1e-5,
        context_s=context_s,
        prompt_s=0,
        prefill_token_s=0,
        cache_tokens=1,
        load_s=0,
    )
    rates = EngineRates(**engine, experts_s=0.009, skipped=skipped)
    read = 0.001 + 0.009 * (1 - skipped**sequences)
    expected = sum(
        read + 1e-5 * sequences + context_s * (context + sequences * step) for step in range(steps)
    )
    seconds = rates.decode_s(steps, sequences, context)
    assert seconds == pytest.approx(expected)
    assert rates.steps_in(seconds * (1 - 1e-9), sequences, context) == steps
    assert rates.steps_in(seconds * (1 + 1e-9), sequences, context) == steps + 1


def served(
    *requests: tuple[float, int, int],
    rates: EngineRates = ENGINE,
    update_at: float | None = None,
    how="keep",
    seqs=8,
):
    """Requests of (arrival, prompt tokens, completion tokens): the time of each one's answer and its versions; the totals."""

    async def work():
        replica = SimulatedReplica(rates, max_num_seqs=seqs, weight_update=how)
        client = GeneratorClient(open_channel=open_channel)
        await client.admit(0, replica)
        answers = {}

        async def ask(number, arrival, prompt, completion):
            await asyncio.sleep(arrival)
            ids = np.full(prompt, number, np.int32)
            ids[1] = prompt
            session = client.session(
                rollout_id=f"{number}/0",
                seed=number,
                sampling=SamplingConfig(max_tokens=9999),
                stop_token_ids=[completion],
            )
            answer = await session.generate(ids, max_tokens=9999)
            session.close()
            answers[number] = asyncio.get_running_loop().time(), answer.policy_versions.tolist()

        async def update():
            if update_at is not None:
                await asyncio.sleep(update_at)
                await client.update_weights(1, np.zeros(8, np.int32))

        await asyncio.gather(
            update(), *(ask(number, *request) for number, request in enumerate(requests))
        )
        client.close()
        return [answers[number] for number in sorted(answers)], replica.totals

    return run_virtually(work)


def test_one_request_takes_its_prompt_and_its_steps():
    [(ended, versions)], totals = served((0.0, 100, 3))
    # 100 tokens of prompt at 0.01; steps of 1 + 0.1 + 0.001 * 100, 101, 102.
    assert ended == pytest.approx(1.0 + 3 * 1.1 + 0.303)
    assert versions == [0, 0, 0] and totals.sampled == 3


def test_a_second_request_joins_after_the_step_that_is_under_way():
    (first, second), _ = served((0.0, 100, 3), (1.5, 100, 1))
    # Step 1 ends at 1 + 1.2; then the second's prompt, 1.0, and a step of both: 1 + 0.2 + 0.001 * 201.
    assert second[0] == pytest.approx(2.2 + 1.0 + 1.401)
    assert first[0] == pytest.approx(second[0] + 1 + 0.1 + 0.102)


def test_new_weights_pause_the_engine_and_label_what_follows():
    [(ended, versions)], totals = served((0.0, 100, 3), update_at=1.5)
    assert versions == [0, 1, 1] and ended == pytest.approx(1.0 + 3 * 1.1 + 0.303 + 5.0)
    assert totals.loading_s == 5.0
    [(ended, versions)], totals = served((0.0, 100, 3), update_at=1.5, how="recompute")
    assert versions == [0, 1, 1] and ended == pytest.approx(1.0 + 3 * 1.1 + 0.303 + 5.0 + 1.01)
    [(ended, versions), (_, later)], _ = served(
        (0.0, 100, 3), (2.0, 100, 1), update_at=1.5, how="drain"
    )
    assert versions == [0, 0, 0] and later == [1]


def test_what_has_no_room_is_preempted_and_computed_again():
    rates = EngineRates(
        **{**{name: getattr(ENGINE, name) for name in ENGINE.__slots__}, "cache_tokens": 300}
    )
    answers, totals = served((0.0, 100, 80), (0.0, 100, 80), rates=rates)
    assert totals.preemptions > 0 and totals.recomputed > 0
    assert [len(versions) for _, versions in answers] == [80, 80]
    assert totals.sampled == 160, "what was sampled before is not sampled again"


@given(data=st.data())
@settings(deadline=None, max_examples=30)
def test_every_request_gets_its_length_and_versions_that_never_fall(data):
    requests = data.draw(
        st.lists(
            st.tuples(st.floats(0, 50), st.integers(2, 200), st.integers(1, 100)),
            min_size=1,
            max_size=12,
        )
    )
    rates = EngineRates(
        **{**{name: getattr(ENGINE, name) for name in ENGINE.__slots__}, "cache_tokens": 400}
    )
    how = data.draw(st.sampled_from(["keep", "recompute", "drain"]))
    answers, totals = served(
        *requests, rates=rates, update_at=data.draw(st.floats(0, 60)), how=how, seqs=4
    )
    assert [len(versions) for _, versions in answers] == [length for _, _, length in requests]
    assert all(versions == sorted(versions) for _, versions in answers)
    assert totals.sampled == sum(length for _, _, length in requests)
    if how == "drain":
        assert all(len(set(versions)) == 1 for _, versions in answers)


# Whole runs.


def config_of(**fields):
    config = rl_grpo_qwen3_debug()
    config.steps, config.rollouts_per_step = 12, 64
    for name, value in fields.items():
        setattr(config, name, value)
    return config


def simulated(folder=None, failures: Failures | None = None, **fields) -> SimulationResult:
    return run_virtually(
        SimulatedRun(config_of(**fields), RATES, LENGTHS, failures=failures, run_dir=folder).run
    )


def host_rates(**fields) -> HostRates:
    return HostRates(**{name: getattr(RATES, name) for name in Rates.__slots__} | fields)


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_a_run_takes_every_step_and_its_ledger_balances(bound):
    result = simulated(max_offpolicy_steps=bound)
    assert sorted(result.steps) == list(range(1, 13))
    columns = {name.partition("/")[2]: count for name, count in result.ledger.items()}
    assert columns.pop("dispatched") == sum(columns.values())
    assert max(metrics["policy/age_max"] for metrics in result.steps.values()) <= bound
    # The trainer and the generators work one after the other, or side by side.
    assert result.seconds > result.trainer_busy_s + (result.engines.busy_s if bound == 0 else 0)


@pytest.mark.parametrize("end_run", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_the_same_seed_gives_the_same_files_byte_for_byte_with_failures_too(end_run, tmp_path):
    config = {"max_offpolicy_steps": 2, "steps": 30}
    failures = Failures(per_day=86_400 / 400, end_run=end_run, repair_s=50)
    files = []
    for name in ("first", "second"):
        folder = tmp_path / name
        folder.mkdir()
        result = simulated(
            folder, failures, checkpoint=every(5), generator=replicas(8), **copy.deepcopy(config)
        )
        assert result.deaths > 0 and sorted(result.steps) == list(range(1, 31))
        assert result.down_s > 0 or not end_run
        files.append({file.name: file.read_bytes() for file in sorted(folder.iterdir())})
    assert files[0] == files[1]
    steps = [json.loads(line)["step"] for line in files[0]["metrics.jsonl"].decode().splitlines()]
    assert steps == list(range(1, 31)), "what was repeated is there once"
    ended = [
        json.loads(line)["rollout_id"] for line in files[0]["ledger.jsonl"].decode().splitlines()
    ]
    assert len(ended) == len(set(ended)), "a rollout ends once, across restarts"


def test_a_run_whose_replicas_die_takes_all_its_steps():
    failures = Failures(per_day=86_400 / 400, end_run=False, repair_s=50)
    result = simulated(failures=failures, generator=replicas(8), steps=12)
    assert result.deaths > 0 and sorted(result.steps) == list(range(1, 13))


class Attempts(SimulatedRun):
    """Run whose hosts die after 100 s and again after 40 s, and which is complete 10 s later."""

    ends = ((100.0, True), (40.0, True), (10.0, False))

    def attempt(self, saved):
        if not hasattr(self, "left"):
            self.left = iter(self.ends)
        seconds, dies = next(self.left)

        class Attempt:
            async def run(self):
                await asyncio.sleep(seconds)
                return asyncio.get_running_loop().time() if dies else None

        return Attempt()


def test_work_that_no_checkpoint_has_is_repeated_once_for_each_death():
    failures = Failures(seen_s=10, repair_s=50)
    result = run_virtually(Attempts(config_of(), RATES, LENGTHS, failures=failures).run)
    assert (result.repeated_s, result.down_s) == (100 + 40, 2 * (10 + 50 + RATES.start_s))
    assert result.seconds == 100 + 40 + 10 + result.down_s


def test_a_replica_that_dies_alone_comes_back_and_its_requests_run_elsewhere():
    config, rates = config_of(generator=replicas(2), max_offpolicy_steps=1), host_rates(cores=100)
    run = HostRun(
        config, rates, LENGTHS, failures=Failures(seen_s=2, repair_s=0), replica_dies_after=3
    )
    result = run_virtually(run.run)
    assert sorted(result.steps) == list(range(1, 13)) and result.deaths == 0
    assert result.engine_down_s == pytest.approx(2 + RATES.start_s, abs=2 * TRAINER.step_s), (
        "until it has the weights"
    )
    assert result.lost_tokens > 0


def test_a_version_is_live_once_the_trainer_has_its_digests_and_the_generators_have_loaded_it():
    def seconds(digest_s):
        rates = host_rates(cores=100, digest_s=digest_s)
        config = config_of(max_offpolicy_steps=0, steps=2)
        return run_virtually(HostRun(config, rates, LENGTHS).run).seconds

    # A version takes 3 s to fetch, 5 s to load, and 1 s for the canary's step.
    without = seconds(0.0)
    assert seconds(8.0) == pytest.approx(without)
    assert seconds(59.0) == pytest.approx(without + 2 * 50.0)


@given(report=st.sampled_from([0.0, 0.013]), turn=st.sampled_from([0.0, 0.002]))
@settings(deadline=None, max_examples=4)
def test_on_shared_cores_a_step_takes_no_less_than_its_processes_compute(report, turn):
    """Neither turns nor the threads beside them run faster than one core, and all together than the cores."""
    rates, lengths = (
        host_rates(cores=2, turn_s=turn, report_s=report),
        LogNormal(mean=20, sigma=1, prompt=30),
    )
    result = run_virtually(HostRun(config_of(max_offpolicy_steps=1), rates, lengths).run)
    turns = sum(count for name, count in result.ledger.items() if name.endswith("/trained"))
    computed = (
        result.engines.computed_s
        + 12 * (TRAINER.step_s + TRAINER.publish_s + report)
        + turns * turn
    )
    assert result.seconds * 2 >= computed
    assert result.engines.computed_s <= result.engines.busy_s * (1 + 1e-9)


def every(steps):
    config = rl_grpo_qwen3_debug().checkpoint
    config.interval = steps
    return config


def replicas(count):
    config = rl_grpo_qwen3_debug().generator
    config.replicas = count
    config.engine.max_num_seqs = 4
    return config


def test_another_seed_gives_another_run():
    assert simulated(seed=0).seconds != simulated(seed=1).seconds


def test_asynchronous_runs_take_no_longer_than_synchronous_ones():
    assert simulated(max_offpolicy_steps=2).seconds < simulated(max_offpolicy_steps=0).seconds


# The command.


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "nowhere"], "--lengths = 'nowhere'"),
        (["--lengths", "lognormal:mean=0"], "mean"),
        (["--lengths", "lognormal:nose=1"], "nose"),
        (["--failures", "3/week"], "3/day"),
        (["--device", "TPU"], "--device"),
        (["--sweep", "lr"], "replicas"),
        (["--gpus", "1"], "--gpus"),
    ],
)
def test_bad_words_are_one_line(words, message, capsys):
    assert main(["--config", "rl_grpo_qwen3_8b", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1


def test_the_command_writes_a_run_folder_and_says_that_it_is_simulated(tmp_path, capsys):
    words = [
        "--config",
        "rl_grpo_qwen3_8b",
        "--steps",
        "3",
        "--rollouts-per-step",
        "64",
        "--run-dir",
        str(tmp_path / "run"),
    ]
    assert main([*words, "--gpus", "16"]) == 0
    printed = capsys.readouterr().out
    assert "No GPU has run it" in printed and "GPU hours a million tokens" in printed
    assert {"config.json", "metrics.jsonl", "ledger.jsonl", "events.jsonl"} <= {
        file.name for file in (tmp_path / "run").iterdir()
    }


def setting_of(config, device="H100") -> Setting:
    return Setting(
        config=config, lengths=lengths_of("lognormal:"), device=device, failures=Failures()
    )


def test_rates_of_adapters_of_selective_checkpointing_and_of_a_mixture_by_hand():
    setting, flops = setting_of(rl_grpo_qwen3_8b()), 989e12 * 0.4
    whole, head = setting.rates(), 151_936 * 4096
    layers = 8_190_735_360 - 2 * head
    assert whole.trainer.token_s == pytest.approx((8 * layers + 8 * head) / flops, rel=1e-4)
    # Computed again: attention's way out, and one product of the feed-forward part; attention itself is kept.
    selective = setting.changed({"trainer.activation_checkpoint": "selective"}).rates().trainer
    assert selective.token_s == pytest.approx(
        (6 * layers + 8 * head + 2 * 36 * 4096 * (4096 + 12288)) / flops, rel=1e-4
    )
    assert selective.pair_s == pytest.approx(7 / 9 * whole.trainer.pair_s)
    # Rank 16 of the five matrices of each layer, whose sides are these; they alone are published, loaded and kept.
    adapter = 36 * 16 * (4096 + 6144 + 4096 + 4096 + 3 * (4096 + 12288))
    lora = setting.changed({"trainer.lora": LoRA.Config(rank=16)}).rates()
    assert lora.trainer.token_s == pytest.approx(
        (6 * layers + 6 * head + 8 * adapter) / flops, rel=1e-4
    )
    assert (lora.engine.load_s, lora.trainer.checkpoint_s) == (
        2 * adapter / 20e9,
        12 * adapter / 4 / 20e9,
    )
    assert lora.fetch_s == pytest.approx(2 * adapter / 1.5e9)
    # 48 layers of 128 experts of 768 at a width of 2,048, of which a token takes 8; engines of two GPUs.
    mixture = setting_of(rl_grpo_qwen3_30b_a3b(), "H200").rates().engine
    assert mixture.skipped == 120 / 128
    assert mixture.experts_s == pytest.approx(48 * 128 * 3 * 2048 * 768 * 2 / (2 * 4.8e12 * 0.6))


def test_a_trainer_that_does_not_fit_is_refused():
    setting = setting_of(rl_grpo_qwen3_8b())
    with pytest.raises(ConfigError, match="trainer.ranks"):
        setting.changed({"trainer.ranks": 1}).rates()
