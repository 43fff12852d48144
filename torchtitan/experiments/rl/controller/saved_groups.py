"""The open groups of a checkpoint: how they are written, and what they are again.

``groups.jsonl.gz`` holds the finished ones, in the format of the recorded rollouts: a member for each group, with a line for
each of its rollouts. Those that still ran are kept by their example and their id; a resumed run runs them again.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from torchtitan.experiments.rl.controller.saved_state import OpenGroupState
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.record_file import compress, read_groups
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout, plain_example
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup

GROUPS_FILE = "groups.jsonl.gz"

WHOLE = 2**62
"""No rollout's line is longer: each is kept with its samples."""


def write_groups(folder: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write finished groups into a checkpoint's folder. Nothing may change them meanwhile."""
    with (folder / GROUPS_FILE).open("wb") as file:
        for group in groups:
            lines = (
                encode_rollout(rollout, outcome=None, admitted_version=group.admitted_version, max_bytes=WHOLE)
                for rollout in group.rollouts
            )
            file.write(compress(b"".join(lines)))


def read_finished_groups(folder: Path) -> dict[str, RolloutGroup]:
    """The finished groups of a checkpoint, by id.

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
        raise RunError(f"{folder / GROUPS_FILE} can't be read ({error}): resume from another checkpoint") from error
    return groups


def example_of(state: OpenGroupState, of_dataset: Mapping[str, DataSample]) -> DataSample | None:
    """The example of an open group; None where the sampler had given none, or it can't be had again.

    Args:
        of_dataset: examples of the task's dataset by id. They are preferred: JSON makes lists of tuples.
    """
    if state.example is None:
        return None
    own = of_dataset.get(state.example["sample_id"])
    if own is None:
        return DataSample(**state.example) if state.example_is_json or state.finished else None
    # A sampler may hand out examples that it has changed.
    changed = state.example_is_json and plain_example(own) != state.example
    return DataSample(**state.example) if changed else own
