"""Writes the groups of a checkpoint, and reads them again.

A checkpoint keeps the open groups in two files. ``controller.json`` has an ``OpenGroupState`` for
each. ``groups.jsonl.gz`` has the rollouts of the settled ones, in the format of the recorded
rollouts: a gzip member for each group, and in it a line for each rollout. Groups that are stored
for replay are in it too. Of another group only its id and its example are saved, and a resumed run
runs it again.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.groups import SharedExample
from torchtitan.experiments.rl.loops.saved_state import ExampleState
from torchtitan.experiments.rl.rollouts.record_file import compress, read_groups
from torchtitan.experiments.rl.rollouts.records import (
    decode_rollout,
    encode_rollout,
    plain_example,
)
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup

GROUPS_FILE = "groups.jsonl.gz"
"""Name of the file in a checkpoint's folder that has the rollouts of groups."""
UNLIMITED = 2**62
"""Size limit in bytes that no rollout reaches: a checkpoint never shortens a rollout."""


class SavedExamples:
    """Examples of a checkpoint's open groups and of its pick."""

    def __init__(self, dataset_examples: Mapping[str, Mapping[str, DataSample]]):
        """Begin with the examples of each task's dataset, by task and sample id."""
        self._dataset_examples = dataset_examples
        self._not_given: dict[str, SharedExample] = {}
        """Examples that the sampler had not given, by their key."""

    def restore(self, state: ExampleState, *, copy_is_enough: bool) -> SharedExample:
        """Return the example of a group or a pick, without a value if it can't be recovered.

        Groups that waited for one example share it again. See `example_of` for the rest.
        """
        dataset_examples = self._dataset_examples.get(state.task, {})
        value = example_of(state, dataset_examples, copy_is_enough=copy_is_enough)
        example = SharedExample(value, key=state.example_key)
        if state.example is None and state.example_key:
            return self._not_given.setdefault(state.example_key, example)
        return example


def write_groups(folder: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write groups with their rollouts into a checkpoint's folder.

    It may run in a thread beside the next step, so nothing may change the groups meanwhile but
    their samples' ``trainer_logprobs``. Their costs are in their `OpenGroupState`.
    """
    with (folder / GROUPS_FILE).open("wb") as file:
        for group in groups:
            lines = [
                encode_rollout(
                    rollout,
                    outcome=None,
                    admitted_version=group.admitted_version,
                    max_bytes=UNLIMITED,
                )
                for rollout in group.rollouts
            ]
            file.write(compress(b"".join(lines)))


def read_saved_groups(folder: Path) -> dict[str, RolloutGroup]:
    """Read the groups with rollouts of a checkpoint, by id.

    Raises:
        RunError: the file is damaged.
    """
    groups = {}
    try:
        for _, lines in read_groups(folder / GROUPS_FILE):
            records = [decode_rollout(line) for line in lines.splitlines()]
            first = records[0].rollout
            assert first.data_sample is not None, "every rollout of a run has an example"
            groups[first.group_id] = RolloutGroup(
                group_id=first.group_id,
                task_name=first.task_name,
                data_sample=first.data_sample,
                rollouts=[record.rollout for record in records],
                admitted_version=records[0].admitted_version,
            )
    except (OSError, ValueError) as error:
        raise RunError(
            f"{folder / GROUPS_FILE} can't be read ({error}): resume from another checkpoint"
        ) from error
    return groups


def example_of(
    state: ExampleState, dataset_examples: Mapping[str, DataSample], *, copy_is_enough: bool
) -> DataSample | None:
    """Return the example of a checkpoint's group.

    The dataset's own example is preferred, because JSON turns tuples into lists. The checkpoint's
    copy is used if it differs and JSON held it whole.

    Args:
        dataset_examples: examples of the task's dataset, by sample id.
        copy_is_enough: True if the group has settled. It is not run again, so a copy that lost its
            types will do.

    Returns:
        The example; None if the sampler had given none, or if it can't be recovered.
    """
    if state.example is None:
        return None
    own = dataset_examples.get(state.example["sample_id"])
    if own is None:
        is_enough = state.example_is_json or copy_is_enough
        return DataSample(**state.example) if is_enough else None
    was_changed = state.example_is_json and plain_example(own) != state.example
    return DataSample(**state.example) if was_changed else own
