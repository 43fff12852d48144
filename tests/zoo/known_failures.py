"""Cases that fail today, each with the reason. `test_zoo.py` leaves them out; the script runs and counts them."""

KNOWN_FAILURES: dict[str, tuple[str, ...]] = {
    "tool calls of an env's assistant message are not checked: the renderer is named, not the env": (
        "env.reset: messages with a bad tool call",
        "env.reset: messages with a text for tool calls",
        "env.step_message: messages with a bad tool call",
        "env.step_message: messages with a text for tool calls",
    ),
    "the text of an error calls the value's __repr__, which exits": (
        "env.step_message: done a lying number",
        "env.step_message: reward components a lying number",
        "reward function: answers a lying number",
        "reward function, group: answers lying numbers",
        "rubric.score_group: answers lying numbers",
    ),
    "a change of the rollouts' own lists by a group-level function is not undone": (
        "reward function, group: swaps the samples",
        "reward function, group: swaps the indices",
    ),
    "an error that a rubric sets on a rollout that goes on is recorded": ("rubric.score_group: ends a rollout",),
    "refused and logged, but the recorder can't write a stream of texts, so no record names it": (
        "algorithm.score_rollout: ce_weights a text",
        "algorithm.score_rollout: ce_weights texts",
        "algorithm.score_rollout: ce_weights a list of texts",
        "algorithm.score_rollout: ref_kl_weights a text",
        "algorithm.score_rollout: ref_kl_weights texts",
        "algorithm.score_rollout: ref_kl_weights a list of texts",
        "algorithm.score_rollout: rl_weights a text",
        "algorithm.score_rollout: rl_weights texts",
        "algorithm.score_rollout: rl_weights a list of texts",
        "algorithm.score_group: advantages a text",
        "algorithm.score_group: advantages texts",
        "algorithm.score_group: advantages a list of texts",
    ),
    "checked when the whole group is scored: the group fails, not the rollout": (
        "algorithm.score_rollout: sets ref kl weights without a reference",
        "algorithm.score_rollout: trains the first token",
    ),
    "what filters, samplers and mixes set on a scored group is not undone": (
        "filter.matches, pre: sets the status",
        "filter.matches, post: sets the status",
        "sampler.observe: sets rewards",
        "mix.observe: sets rewards",
    ),
    "an example that a sampler makes itself is not checked": (
        "sampler.next: answers an id of a number",
        "sampler.next: answers an id of None",
    ),
    "the info of an example is not checked": (
        "sampler.next: answers info of None",
        "sampler.next: answers info of a text",
        "dataset.__getitem__: answers info of a text",
        "dataset.__getitem__: answers info of None",
    ),
    "the error names the class and its lack of examples, not __len__": ("dataset.__len__: answers 0",),
    "the vocabulary's size is not known where ids are checked": (
        "renderer.render: ids too large",
        "engine.generate: ids beyond the vocabulary",
    ),
    "a session's versions are taken as they are; tests of the generator hold them": (
        "engine.generate: versions of the future",
    ),
    "a teacher's client is the library's own: gather passes its exits on before they are contained": (
        "teacher.score: exits",
        "teacher.score: interrupts",
        "teacher.score: exits after a while",
    ),
}
"""Names of cases by the reason why they fail."""

_REASONS = {name: reason for reason, names in KNOWN_FAILURES.items() for name in names}


def known_reason(name: str) -> str | None:
    """Why a case is known to fail; None for one that should hold."""
    return _REASONS.get(name)
