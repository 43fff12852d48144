"""Warns of a run that goes on and learns nothing, or waits for no good reason: by the metrics of its steps."""

from collections import Counter
from collections.abc import Callable, Mapping

STEPS = 3
"""In a row, before a warning: one step may be odd."""
LAG_S = 1.0
IDLE = 0.2
"""Share of its time that a generator works."""
WAITING = 0.5
"""Share of the step that the trainer waits."""
BROKEN = 0.05
"""Share of a step's rollouts that a filter of broken text matches. Of a healthy model it is below 0.005."""


class StepWarnings:
    """Each warning is given once a run."""

    def __init__(self, note: Callable[[str], None], *, compares_rewards: bool):
        """
        Args:
            note: prints a line.
            compares_rewards: some task's algorithm learns from differences between rewards.
        """
        self._note, self._compares_rewards = note, compares_rewards
        self._in_a_row: Counter[str] = Counter()
        self._given: set[str] = set()

    def step(self, metrics: Mapping[str, float]) -> None:
        """Look at the metrics of a step."""
        found = self._found(metrics)
        self._in_a_row = Counter({name: self._in_a_row[name] + 1 for name in found})
        for name, text in found.items():
            if self._in_a_row[name] >= STEPS and name not in self._given:
                self._given.add(name)
                self._note(f"warning: {text}")

    def _found(self, metrics: Mapping[str, float]) -> dict[str, str]:
        """What is wrong with this step, by name."""
        found = {}
        lag = metrics.get("perf/event_loop_lag_max_s", 0.0)
        if lag > LAG_S:
            found["lag"] = (
                f"something blocks the event loop of the rollouts, for {lag:.1f} s in this step: make an async function that "
                "computes or waits without await a plain one, or set rollout_workers"
            )
        if self._compares_rewards and metrics.get("rollout/reward_std") == 0:
            found["rewards"] = (
                f"every reward of the last {STEPS} steps is {metrics['rollout/reward_mean']:.4g}: nothing is learned from it; "
                "the examples are too easy or too hard for this model, or the rubric tells nothing apart"
            )
        truncated = sum(share for name, share in metrics.items() if name.startswith("rollout/status/truncated"))
        if truncated > 0.999:
            found["truncated"] = (
                f"every rollout of the last {STEPS} steps was cut off, at {metrics['rollout/completion_tokens_mean']:.0f} "
                "tokens on average: raise the task's sampling.max_tokens, env.max_rollout_tokens or env.max_turns"
            )
        for name in ("gibberish", "repetition"):
            share = metrics.get(f"filter/post/{name}", 0) / max(metrics.get("rollout/count", 0), 1)
            if share > BROKEN:
                found[name] = (
                    f"the filter {name} matches {share:.0%} of the rollouts: read some of these (rl-report, or observability."
                    "rollouts); if they are no broken text, --post-batch-filters zero_advantage leaves it out"
                )
        busy = [share for name, share in metrics.items() if name.startswith("perf/generator") and name.endswith("/busy")]
        waiting = metrics.get("time/wait_s", 0.0) / max(metrics.get("time/step_s", 0.0), 1e-9)
        if busy and max(busy) < IDLE and waiting > WAITING:
            found["idle"] = (
                f"the trainer waits for {waiting:.0%} of the step, and the generators work for {max(busy):.0%} of it: the envs "
                "or reward functions are slow, see env_s of the recorded rollouts, or take a profile (--profile-steps)"
            )
        return found
