"""The groups that were dispatched and have not left, where their rollouts end, and what a checkpoint has of them.

``groups.jsonl.gz`` of a checkpoint holds the finished ones, in the format of the recorded rollouts: a member for each group and
in it a line for each rollout. Those that still ran are kept by their example and their id; a resumed run runs them again.
"""

import dataclasses
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from torchtitan.experiments.rl.controller.ledger import Ledger
from torchtitan.experiments.rl.controller.saved_state import OpenGroupState
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.filters import ZERO_ADVANTAGE
from torchtitan.experiments.rl.rollouts.record_file import compress, read_groups
from torchtitan.experiments.rl.rollouts.recorder import RolloutRecorder
from torchtitan.experiments.rl.rollouts.records import decode_rollout, encode_rollout, plain_example
from torchtitan.experiments.rl.rollouts.types import DataSample, RolloutGroup
from torchtitan.experiments.rl.tasks.task import Task

logger = logging.getLogger(__name__)

GROUPS_FILE = "groups.jsonl.gz"
WHOLE = 2**62
"""No rollout's line is longer: each is kept with its samples."""


def groups_in_slot(task: Task) -> int:
    """Groups that share a slot of the pacer. Those of a task without a barrier are single rollouts."""
    return 1 if task.needs_group else task.config.group_size


@dataclass(kw_only=True, slots=True)
class Slot:
    """What became of the groups of a slot."""

    kept: bool = False
    """Whether one of them was kept."""
    dropped: int = 0
    """How many were dropped and are not replaced."""


@dataclass(kw_only=True, slots=True)
class OpenGroup:
    task: Task
    slot: Slot = field(default_factory=Slot)
    rollout_ids: set[str]
    """Rollouts of the group that are in no ledger column yet."""
    example: DataSample | None = None
    """None until the sampler gave it."""
    group: RolloutGroup | None = None
    """All its rollouts; None until they were scored."""
    settling: bool = False
    """Scored, and not through the filters yet. It stays so if a filter fails."""
    signal: bool = False
    """Whether the scored group has a learning signal."""
    outcomes: dict[str, str] = field(default_factory=dict)
    """Ledger column of each rollout that has ended."""

    def kept(self) -> RolloutGroup:
        """The scored group with only the rollouts that are still open."""
        assert self.group is not None
        return replace(
            self.group,
            rollouts=[r for r in self.group.rollouts if r.rollout_id in self.rollout_ids],
        )

    def state(self, group_id: str) -> OpenGroupState:
        """
        Raises:
            RunError: it is neither running nor finished, because a filter failed.
        """
        if self.settling:
            raise RunError(
                f"group {group_id} is half filtered: the state of the run can't be saved"
            )
        example = None if self.example is None else plain_example(self.example)
        return OpenGroupState(
            group_id=group_id,
            task=self.task.name,
            example=example,
            example_is_json=self.example is not None
            and example == dataclasses.asdict(self.example),
            rollout_ids=sorted(self.rollout_ids),
            outcomes=dict(self.outcomes),
            finished=self.group is not None,
            signal=self.signal,
        )


@dataclass(kw_only=True, slots=True)
class StepGroups:
    """What one optimizer step trains on."""

    groups: list[RolloutGroup] = field(default_factory=list)
    """With only those rollouts that are trained on."""
    sampled: list[RolloutGroup] = field(default_factory=list)
    """The groups that the step took, with the rollouts that post-batch filters have dropped."""
    dropped_groups: int = 0
    """Groups dropped since the step before."""
    filter_matches: Counter[str] = field(default_factory=Counter)
    """Rollouts matched since the step before, by ``<slot>/<filter>``, monitors included."""
    replayed: list[RolloutGroup] = field(default_factory=list)
    """Groups that were trained on before, and are again."""
    filter_tokens: Counter[str] = field(default_factory=Counter)
    """Tokens that the policy sampled in these."""


class OpenGroups:
    """Open groups by id, in the order of their dispatch. A rollout's end goes to the ledger, a group's to the recorder."""

    def __init__(
        self, ledger: Ledger, recorder: RolloutRecorder | None, version: Callable[[], int]
    ):
        """``version`` returns what the generators hold."""
        self.ledger = ledger
        self._recorder, self._version = recorder, version
        self._groups: dict[str, OpenGroup] = {}

    def __getitem__(self, group_id: str) -> OpenGroup:
        return self._groups[group_id]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def dispatch(self, task: Task, group_id: str, slot: Slot) -> None:
        """Open a group, and a ledger record for each of its rollouts."""
        rollout_ids = {
            f"{group_id}/{index}"
            for index in range(task.config.group_size if task.needs_group else 1)
        }
        self._groups[group_id] = OpenGroup(task=task, slot=slot, rollout_ids=rollout_ids)
        self.ledger.dispatch(task.name, rollout_ids, version=self._version())

    def end(self, entry: OpenGroup, rollout_id: str, column: str, why: str | None = None) -> None:
        """A rollout ends in ``column``; ``why`` is logged."""
        entry.rollout_ids.remove(rollout_id)
        entry.outcomes[rollout_id] = column
        self.ledger.end(rollout_id, column, version=self._version())
        if why is not None:
            logger.info("%s: rollout %s: %s", column, rollout_id, why)

    def leave(self, group_id: str, column: str | None = None) -> OpenGroup:
        """Close a group; what is open of it ends in ``column``. A scored group is recorded."""
        entry = self._groups.pop(group_id)
        if column is not None:
            for rollout_id in sorted(entry.rollout_ids):
                self.end(entry, rollout_id, column)
        if self._recorder is not None and entry.group is not None:
            self._recorder.record(entry.group, entry.outcomes)
        return entry

    def check(self) -> None:
        """
        Raises:
            RunError: the ledger's open rollouts are others than those of the open groups.
        """
        self.ledger.check(
            {rollout_id for entry in self._groups.values() for rollout_id in entry.rollout_ids}
        )

    def finished(self) -> list[RolloutGroup]:
        return [entry.group for entry in self._groups.values() if entry.group is not None]

    def states(self) -> list[OpenGroupState]:
        """
        Raises:
            RunError: a filter failed in the middle of a group.
        """
        return [entry.state(group_id) for group_id, entry in self._groups.items()]

    def restore(
        self,
        states: Sequence[OpenGroupState],
        finished: Mapping[str, RolloutGroup],
        tasks: Mapping[str, Task],
        examples: Mapping[str, Mapping[str, DataSample]],
    ) -> list[str]:
        """Open the groups of a checkpoint again; the ledger has their rollouts already.

        Args:
            finished: the scored groups by id.
            examples: what the dataset of each task has, by id.

        Returns:
            Groups that can't be run again, because nothing gives their example again or their task is gone.

        Raises:
            RunError: a finished group is not among ``finished``.
        """
        lost = []
        for state in states:
            if state.finished and state.group_id not in finished:
                raise RunError(
                    f"the checkpoint lacks the rollouts of group {state.group_id}: resume from another checkpoint"
                )
            example = example_of(state, examples.get(state.task, {}))
            group = finished[state.group_id] if state.finished else None
            if group is not None and example is not None:
                group.data_sample = example
                for rollout in group.rollouts:
                    rollout.data_sample = example
            task = tasks[state.task]
            self._groups[state.group_id] = OpenGroup(
                task=task,
                slot=Slot(kept=not task.needs_group),  # the others of its slot are not known
                rollout_ids=set(state.rollout_ids),
                example=example,
                group=group,
                signal=state.signal,
                outcomes=dict(state.outcomes),
            )
            if state.example is not None and example is None:
                lost.append(state.group_id)
        return lost


def write_groups(folder: Path, groups: Iterable[RolloutGroup]) -> None:
    """Write finished groups into a checkpoint's folder. Nothing may change them meanwhile."""
    with (folder / GROUPS_FILE).open("wb") as file:
        for group in groups:
            lines = (
                encode_rollout(
                    rollout, outcome=None, admitted_version=group.admitted_version, max_bytes=WHOLE
                )
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
        raise RunError(
            f"{folder / GROUPS_FILE} can't be read ({error}): resume from another checkpoint"
        ) from error
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


def has_signal(group: RolloutGroup) -> bool:
    """Whether training on the group changes anything: some advantage is not 0, or some token feeds ce or ref_kl."""
    return not all(ZERO_ADVANTAGE.matches(group))
