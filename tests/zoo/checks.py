"""What every case must satisfy. Each check returns the sentences of what is wrong; none means that the case holds."""

from collections import Counter
from collections.abc import Callable, Iterator

from tests.zoo import world
from tests.zoo.cases import Case
from tests.zoo.places import Place
from tests.zoo.scene import STEPS, Key, Sight, streams_of
from torchtitan.experiments.rl.errors import ConfigError, RunError

Streams = dict[Key, list[dict]]


def problems(
    case: Case, sight: Sight, honest: Streams, honest_losses: list[float]
) -> Iterator[str]:
    """By how the case ends:

    refused    the culprit is named and nothing of it trained
    refused again  the same from its second group on: the first could be right
    harmless   what is trained is what an honest run trains, or it is refused
    noted      it undoes nothing: all is trained, and a line of the log, or the error at the end, names it
    overflows  no failure: the status says that the prompt has no room

    Args:
        honest: what an honest run of the same variant trains.
    """
    place, ends = case.place, case.ends
    if sight.loop_stopped is not None:
        yield f"user code stopped the event loop with {type(sight.loop_stopped).__name__}"
        return
    if not sight.loop_alive:
        yield "the event loop does not run any more"
    hurt = _hurt(case)
    if ends == "refused":
        yield from _named(place, sight)
        yield from _not_trained(place, sight, hurt)
    elif ends == "refused again":
        yield from _named(place, sight)
        if len(groups := {key[:2] for key in sight.planned if hurt(key)}) > 1:
            yield f"{len(groups)} groups of the culprit reached Batcher.plan"
    elif ends == "noted":
        yield from _noted(place, sight)
    elif ends == "overflows":
        yield from _not_trained(place, sight, hurt)
    if place.scope != "run" or ends != "refused":
        if not (
            ends in ("harmless", "noted")
            and sight.error is not None
            and names(place, _text(sight.error))
        ):
            yield from _run_went_on(sight)
        yield from _others_trained(case, sight, hurt)
    elif sight.error is None and sight.steps < STEPS:
        yield f"the run ended after {sight.steps} of {STEPS} steps without an error"
    yield from _trained_as_honest(case, sight, honest, honest_losses)
    yield from _one_line(sight)
    yield from _closed_once(sight)
    yield from _ledger_balances(sight)


def _hurt(case: Case) -> Callable[[Key], bool]:
    """Whether a rollout is the culprit's."""
    if case.place.scope == "rollout":
        return lambda key: key[0] == "bad" and key[2] >= 2
    return lambda key: key[0] == "bad"


def errors_of(sight: Sight) -> list[str]:
    """Every line a person may read an error in."""
    texts = [error for _, _, error, _ in sight.records.values() if error]
    if sight.error is not None:
        texts.append(_text(sight.error))
    return [line for text in texts for line in text.splitlines()]


def names(place: Place, line: str) -> bool:
    plain = line.lower().replace("_", "")
    words = [word.lower().replace("_", "").split("|") for word in place.culprit.split()]
    return all(any(alternative in plain for alternative in alternatives) for alternatives in words)


def _text(error: BaseException) -> str:
    try:
        return (
            str(error)
            if isinstance(error, RunError | ConfigError)
            else f"{type(error).__name__}: {error}"
        )
    except BaseException:  # the __str__ of a misbehaving error may exit
        return f"{type(error).__name__} without a text"


def _named(place: Place, sight: Sight) -> Iterator[str]:
    lines = errors_of(sight)
    if not any(names(place, line) for line in lines):
        seen = Counter(line[:160] for line in lines).most_common(2)
        yield f"no line names {place.culprit!r}: {[line for line, _ in seen] or 'no error at all'}"


def _noted(place: Place, sight: Sight) -> Iterator[str]:
    if sight.steps != STEPS:
        yield f"the run took {sight.steps} of {STEPS} steps"
    if not any(names(place, line) for line in [*sight.log, *errors_of(sight)]):
        yield f"no line of the log names {place.culprit!r}"


def _not_trained(place: Place, sight: Sight, hurt: Callable[[Key], bool]) -> Iterator[str]:
    # The loss is computed from what was planned: there, no optimizer step may follow.
    planned = {} if place.variant == "custom loss" else sight.planned
    for what, rollouts in (("reached Batcher.plan", planned), ("was trained on", sight.trained)):
        if found := sorted(key for key in rollouts if hurt(key)):
            yield f"the culprit's rollout {found[0]} {what}"
            return


def _run_went_on(sight: Sight) -> Iterator[str]:
    if sight.error is not None:
        yield f"a culprit that only hurts itself ended the run: {_text(sight.error)[:200]}"
    elif sight.steps != STEPS:
        yield f"the run took {sight.steps} of {STEPS} steps"


def _others_trained(case: Case, sight: Sight, hurt: Callable[[Key], bool]) -> Iterator[str]:
    """All rollouts but the culprit's are trained on or open when the run ends: none fails."""
    for key, (status, _, error, outcome) in sight.records.items():
        if hurt(key) and (
            case.ends in ("refused", "refused again", "overflows") or names(case.place, error or "")
        ):
            continue
        if outcome is not None and outcome not in (
            "trained",
            "untrained",
            "failed/group_too_small",
        ):
            yield f"the innocent rollout {key} ended as {outcome} ({status}): {(error or '')[:120]}"
            return


def _trained_as_honest(
    case: Case, sight: Sight, honest: Streams, honest_losses: list[float]
) -> Iterator[str]:
    for key, samples in sight.trained.items():
        if key not in honest:
            yield f"{key} was trained on, and no honest run has it"
            return
        once = samples[: len(honest[key])]  # an example may come again, in another epoch
        streams = streams_of(once)
        if streams != honest[key]:
            changed = [
                name
                for name in streams[0]
                if [s[name] for s in streams] != [s.get(name) for s in honest[key]]
            ]
            yield f"{key} was trained on with other {', '.join(changed)} than in an honest run"
            return
    if (
        case.ends == "harmless"
        and case.place.variant == "custom loss"
        and sight.error is None
        and sight.losses != honest_losses[: len(sight.losses)]
    ):
        yield f"the losses are {sight.losses}, of an honest run {honest_losses}"
    for key, (status, reward, error, outcome) in sight.records.items():
        if outcome == "trained" and (status != "completed" or error is not None):
            yield f"{key} was trained on and is recorded as {status}: {error}"
            return
        if outcome == "trained" and reward != world.REWARDS[key[2]]:
            yield f"{key} was trained on with the reward {reward}, of an honest run {world.REWARDS[key[2]]}"
            return


def _one_line(sight: Sight) -> Iterator[str]:
    for _, _, error, _ in sight.records.values():
        if error is not None and ("\n" in error or len(error) > 2000):
            yield f"an error of {len(error)} characters is no line: {error[:80]!r}"
            return
    if sight.error is not None and ("\n" in _text(sight.error) or len(_text(sight.error)) > 2000):
        yield f"the run's error of {len(_text(sight.error))} characters is no line: {_text(sight.error)[:80]!r}"


def _closed_once(sight: Sight) -> Iterator[str]:
    seen = world.WORLD
    if wrong := [env for env in seen.envs if env.closed != 1]:
        yield f"{len(wrong)} of {len(seen.envs)} envs were closed {wrong[0].closed} times"
    if wrong_sessions := [session for session in seen.sessions if session.closed != 1]:
        yield f"{len(wrong_sessions)} of {len(seen.sessions)} sessions were closed {wrong_sessions[0].closed} times"
    for name, count in Counter(seen.tasks_closed).items():
        if name not in seen.tasks_set_up:
            yield f"task {name} was closed and never set up"
        elif count != 1:
            yield f"task {name} was closed {count} times"
    if len(seen.closing) > 1:
        yield f"task {seen.closing[0]} was closed {len(seen.closing)} times"
    if missing := set(seen.tasks_set_up) - {*seen.tasks_closed, *seen.closing}:
        yield f"task {sorted(missing)[0]} was set up and not closed"
    if not sight.refused_before_start and sight.actors_closed != 1:
        yield f"the actors were closed {sight.actors_closed} times"
    for part in sight.left_open:
        yield f"{part} was left open"
    if not sight.refused_before_start and f" of {STEPS} in " not in sight.stdout:
        yield "no summary was printed"
    if unsafe := {
        character for character in sight.stdout if character != "\n" and not character.isprintable()
    }:
        yield f"what was printed holds {sorted(unsafe)!r}"


def _ledger_balances(sight: Sight) -> Iterator[str]:
    if sight.ledger is None:
        return
    for task in ("good", "bad"):
        columns = {
            name.partition("/")[2]: count
            for name, count in sight.ledger.items()
            if name.startswith(f"{task}/")
        }
        dispatched, still_open = columns.pop("dispatched", 0), columns.pop("open", 0)
        if still_open or dispatched != sum(columns.values()):
            yield f"the ledger of {task} does not balance: {dispatched} dispatched, {still_open} open, {columns}"
    dispatched = sum(count for name, count in sight.ledger.items() if name.endswith("/dispatched"))
    if sight.ledger_lines != dispatched:
        yield f"ledger.jsonl has {sight.ledger_lines} lines for {dispatched} dispatched rollouts"
