"""Records rollouts in the run folder, and reads them again.

    group that has ended ──record──▶ queue ──thread──▶ rollouts.jsonl.gz ──read_rollouts──▶

A rollout is a line (`records.py`), a group is a member of the file (`record_file.py`). Recording
never holds up or ends a run: a thread of its own encodes and writes. Groups that it can't keep up
with are dropped and counted, and a disk that fails ends the recording with one line in the log.
"""

import hashlib
import logging
import queue
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from torchtitan.config import Configurable
from torchtitan.experiments.rl.bounds import Cure, Share, check_fields
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.record_file import (
    ROLLOUTS_FILE,
    RecordFile,
    compress,
    read_groups,
)
from torchtitan.experiments.rl.rollouts.records import (
    TRAINED,
    RecordedRollout,
    RecordKind,
    decode_rollout,
    encode_rollout,
)
from torchtitan.experiments.rl.rollouts.types import RolloutGroup

logger = logging.getLogger(__name__)

QUEUED_GROUPS = 1024
"""Maximum number of entries that wait for the thread. An entry is a group, or all groups of an
evaluation. A step ends all of its groups at once."""

CLOSE_LIMIT_S = 120.0
"""Maximum time that the end of a run waits for queued groups, because a network disk may hang."""

RECORD_NOTHING = Cure("to record nothing set fraction to 0")


@dataclass(kw_only=True, slots=True, frozen=True)
class EndedGroup:
    """Group that waits to be written."""

    group: RolloutGroup
    outcomes: dict[str, str]
    kind: RecordKind
    trained_step: int | None = None
    """Step that trained on the rollouts whose outcome is "trained"."""


class RolloutRecorder(Configurable):
    """Writer of a run's rollouts. The loop hands it groups, and its thread writes them."""

    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        fraction: Share = 1.0
        """Share of the groups that are recorded, each whole or not at all; 0 records none. A
        group's id decides, so two runs record the same ones. A run of 512 rollouts of 32k tokens a
        step writes 110 MB a step: there, 0.05 is plenty."""
        trainer_logprobs: bool = False
        """True to record the trainer's log-probability of each sampled token beside the
        generator's: the report shows their ratio. The file grows by a third, and each step brings 4
        bytes a token from the trainer."""
        max_rollout_bytes: Annotated[int, Ge(1), RECORD_NOTHING] = 4 * 2**20
        """Maximum length of a rollout's line before compression; some 150k tokens fit. A longer
        line loses the largest columns of its row, and where that is not enough its turns and
        samples. It keeps how the rollout ended, and its rewards."""
        max_file_bytes: Annotated[int, Ge(1), RECORD_NOTHING] = 4 * 2**30
        """Maximum size of the file. Recording ends before a group that would exceed it."""

    def __init__(self, config: Config, *, run_dir: Path):
        """Start the thread. An earlier run's file in the same folder is appended to."""
        check_fields(config, field="recorder")
        self.config = config
        self.path = Path(run_dir) / ROLLOUTS_FILE
        self.recorded = 0
        """Number of rollouts written."""
        self._dropped = 0
        """Number of rollouts dropped because the queue was full."""
        self._unwritten = 0
        """Number of rollouts that the thread did not write, because of the disk, the file's size or
        the rollout itself."""
        self._has_ended = False
        """True once the disk has failed or the file is full: the thread writes nothing more."""
        self._queue: queue.Queue[list[EndedGroup] | Future[int] | None]
        self._queue = queue.Queue(QUEUED_GROUPS)
        self._thread: threading.Thread | None = None
        if config.fraction > 0:
            self._thread = threading.Thread(target=self._run, name="rollout-recorder", daemon=True)
            self._thread.start()

    @property
    def not_recorded(self) -> int:
        """Number of rollouts of chosen groups that are not in the file.

        The thread was late, the file was full, or the disk failed.
        """
        return self._dropped + self._unwritten

    def chosen(self, group_id: str) -> bool:
        """Return True if the group is among the recorded share.

        Every evaluation records the same examples, so that they can be compared.
        """
        example = re.sub(r"@[^@-]*$", "", group_id)
        digest = hashlib.blake2b(example.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") < self.config.fraction * 2**64

    def record(
        self,
        group: RolloutGroup,
        outcomes: Mapping[str, str],
        *,
        kind: RecordKind = "training",
        trained_step: int | None = None,
    ) -> None:
        """Have a group written, if it is chosen, and return at once.

        The loop calls it when the group has ended. Nothing may change the group afterwards.

        Args:
            outcomes: column of the ledger by rollout id; "validation" for a validation's group.
            trained_step: step that trained on the rollouts whose outcome is "trained".
        """
        ended = EndedGroup(
            group=group, outcomes=dict(outcomes), kind=kind, trained_step=trained_step
        )
        self._hand_over([ended])

    def record_validation(self, groups: Sequence[RolloutGroup]) -> None:
        """Have those groups of an evaluation written that are chosen, and return at once.

        They are one entry of the queue: an evaluation may have more groups than the queue has
        places, and ends all of them at once.
        """
        self._hand_over(
            [
                EndedGroup(
                    group=group,
                    outcomes={rollout.rollout_id: "validation" for rollout in group.rollouts},
                    kind="validation",
                )
                for group in groups
            ]
        )

    def _hand_over(self, ended: list[EndedGroup]) -> None:
        chosen = [entry for entry in ended if self.chosen(entry.group.group_id)]
        if self._thread is None or not chosen:
            return
        try:
            self._queue.put_nowait(chosen)
        except queue.Full:
            if not self._dropped:
                logger.warning(
                    "%s can't keep up: groups are dropped from it; lower recorder.fraction",
                    self.path,
                )
            self._dropped += sum(len(entry.group.rollouts) for entry in chosen)

    def size_by_now(self) -> Future[int] | None:
        """Return the file's size in bytes once every group handed over so far is in it.

        A checkpoint stores the size. None if nothing is recorded.
        """
        if self._thread is None:
            return None
        size: Future[int] = Future()
        try:
            self._queue.put_nowait(size)
        except queue.Full:
            size.set_exception(RunError(f"{self.path} can't keep up; lower recorder.fraction"))
        return size

    def close(self) -> None:
        """Write what is queued, and wait for it. A second call does nothing."""
        if self._thread is None:
            return
        thread = self._thread
        self._thread = None
        try:
            self._queue.put(None, timeout=CLOSE_LIMIT_S)
            thread.join(CLOSE_LIMIT_S)
        except queue.Full:
            pass
        if thread.is_alive():
            logger.warning(
                "%s is not complete: its disk took more than %.0f s", self.path, CLOSE_LIMIT_S
            )

    # ---- the thread

    def _run(self) -> None:
        file: RecordFile | None = None
        while True:
            item = self._queue.get()
            if item is None:
                break
            if isinstance(item, Future):
                self._answer_size(item)
                continue
            for ended in item:
                file = self._write_or_count(file, ended)
        if file is not None:
            file.close()

    def _write_or_count(self, file: RecordFile | None, ended: EndedGroup) -> RecordFile | None:
        """Append a group, or count it as unwritten. Return the file, which is opened if need be."""
        is_written = False
        try:
            if not self._has_ended:
                file = file or RecordFile(self.path)
                is_written = self._write(file, ended)
        except OSError as error:
            self._end(f"{type(error).__name__}: {error}")
        except Exception:  # noqa: BLE001 - no record of a rollout is worth the run
            if not self._unwritten:
                logger.exception("group %s can't be recorded", ended.group.group_id)
        if is_written:
            self.recorded += len(ended.group.rollouts)
        else:
            self._unwritten += len(ended.group.rollouts)
        return file

    def _answer_size(self, size: Future[int]) -> None:
        try:
            size.set_result(self.path.stat().st_size if self.path.exists() else 0)
        except OSError as error:
            size.set_exception(error)

    def _write(self, file: RecordFile, ended: EndedGroup) -> bool:
        """Append a group. Return False if the file would become too large."""
        lines = []
        for rollout in ended.group.rollouts:
            outcome = ended.outcomes.get(rollout.rollout_id)
            line = encode_rollout(
                rollout,
                outcome=outcome,
                admitted_version=ended.group.admitted_version,
                max_bytes=self.config.max_rollout_bytes,
                kind=ended.kind,
                trained_step=ended.trained_step if outcome == TRAINED else None,
            )
            lines.append(line)
        data = compress(b"".join(lines))
        limit = self.config.max_file_bytes
        if file.size + len(data) > limit:
            self._end(
                f"it has reached recorder.max_file_bytes ({limit:,}); lower recorder.fraction"
            )
            return False
        file.append(data)
        return True

    def _end(self, reason: str) -> None:
        self._has_ended = True
        logger.warning("%s: no further rollouts are recorded: %s", self.path, reason)


def read_rollouts(
    path: str | Path, kind: RecordKind | None = "training"
) -> Iterator[RecordedRollout]:
    """Yield the recorded rollouts in the order in which they ended.

    One group is read at a time, so a file may be larger than memory. A group that was torn when its
    process was killed is passed over, with a warning unless it is the last one; so is a group of
    another format.

    Args:
        path: a run folder, or its file of rollouts.
        kind: purpose of the rollouts; None for all.

    Raises:
        FileNotFoundError: nothing was recorded there.
    """
    path = Path(path)
    path = path / ROLLOUTS_FILE if path.is_dir() else path
    for offset, lines in read_groups(path):
        try:
            records = [decode_rollout(line) for line in lines.splitlines()]
        except ValueError as error:
            logger.warning("%s, group at byte %d: %s", path, offset, error)
            continue
        yield from [record for record in records if kind in (None, record.kind)]
