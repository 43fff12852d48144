"""Writes rollouts to ``rollouts.jsonl.gz`` in the run folder (`record_file.py`), a line each (`records.py`), and reads them.

Recording never holds up or ends a run. A thread of its own encodes and writes; what it can't keep up with is dropped and
counted, and a disk that fails ends the recording with one line in the log.
"""

import hashlib
import logging
import queue
import re
import threading
from collections.abc import Iterator, Mapping
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
    RecordedRollout,
    RecordKind,
    decode_rollout,
    encode_rollout,
)
from torchtitan.experiments.rl.rollouts.types import RolloutGroup

logger = logging.getLogger(__name__)

QUEUED_GROUPS = 1024
"""Groups that may wait for the thread. A step ends all of its groups at once."""

CLOSE_LIMIT_S = 120.0
"""How long the end of a run waits for what is queued; a network disk may hang."""

RECORD_NOTHING = Cure("to record nothing set fraction to 0")


_Item = tuple[RolloutGroup, dict[str, str], RecordKind]


class RolloutRecorder(Configurable):
    @dataclass(kw_only=True, slots=True)
    class Config(Configurable.Config):
        fraction: Share = 1.0
        """Share of the groups that are recorded, each whole or not at all; 0 records none. Which ones follows from their ids,
        so two runs record the same. A run of 512 rollouts of 32k tokens a step writes 110 MB a step: there, 0.05 is plenty."""
        trainer_logprobs: bool = False
        """Record the trainer's log-probability of each sampled token beside the generator's: the report shows their ratio.
        The file grows by a third, and each step brings 4 bytes a token from the trainer."""
        max_rollout_bytes: Annotated[int, Ge(1), RECORD_NOTHING] = 4 * 2**20
        """Maximum length of a rollout's line before compression; some 150k tokens fit. A longer line loses the largest columns
        of its row, and where that is not enough its turns and samples. How the rollout ended, and its rewards, stay."""
        max_file_bytes: Annotated[int, Ge(1), RECORD_NOTHING] = 4 * 2**30
        """Recording ends when the file would become larger."""

    def __init__(self, config: Config, *, run_dir: Path):
        """Appends to the file of an earlier run in the same folder."""
        check_fields(config, field="recorder")
        self.config = config
        self.path = Path(run_dir) / ROLLOUTS_FILE
        self.recorded = 0
        """Rollouts written."""
        self._late = self._lost = 0
        self._ended: str | None = None
        self._queue: queue.Queue[_Item | Future[int] | None] = queue.Queue(QUEUED_GROUPS)
        self._thread: threading.Thread | None = None
        if config.fraction > 0:
            self._thread = threading.Thread(target=self._work, name="rollout-recorder", daemon=True)
            self._thread.start()

    @property
    def not_recorded(self) -> int:
        """Rollouts of chosen groups that are not in the file: the thread was late, the file full, or the disk failed."""
        return self._late + self._lost

    def chosen(self, group_id: str) -> bool:
        """Whether a group is among the recorded share. Each evaluation records the same examples, to be compared."""
        example = re.sub(r"@[^@-]*$", "", group_id)
        draw = int.from_bytes(hashlib.blake2b(example.encode(), digest_size=8).digest(), "big")
        return draw < self.config.fraction * 2**64

    def record(
        self, group: RolloutGroup, outcomes: Mapping[str, str], *, kind: RecordKind = "training"
    ) -> None:
        """Have a group that has left written, if it is chosen. Returns at once; nothing may change the group afterwards.

        Args:
            outcomes: column of the ledger by rollout id; "validation" of a validation group's.
        """
        if self._thread is None or not self.chosen(group.group_id):
            return
        try:
            self._queue.put_nowait((group, dict(outcomes), kind))
        except queue.Full:
            if not self._late:
                logger.warning(
                    "%s can't keep up: groups are dropped from it; lower recorder.fraction",
                    self.path,
                )
            self._late += len(group.rollouts)

    def size_by_now(self) -> Future[int] | None:
        """Size of the file in bytes, once everything recorded so far is in it. None: nothing is recorded."""
        if self._thread is None:
            return None
        size: Future[int] = Future()
        try:
            self._queue.put_nowait(size)
        except queue.Full:
            size.set_exception(RunError(f"{self.path} can't keep up; lower recorder.fraction"))
        return size

    def close(self) -> None:
        """Write what is queued. Blocks until then; a second call does nothing."""
        if self._thread is None:
            return
        thread, self._thread = self._thread, None
        try:
            self._queue.put(None, timeout=CLOSE_LIMIT_S)
            thread.join(CLOSE_LIMIT_S)
        except queue.Full:
            pass
        if thread.is_alive():
            logger.warning(
                "%s is not complete: its disk took more than %.0f s", self.path, CLOSE_LIMIT_S
            )

    def _work(self) -> None:
        file = None
        while (item := self._queue.get()) is not None:
            if isinstance(item, Future):
                try:
                    item.set_result(self.path.stat().st_size if self.path.exists() else 0)
                except OSError as error:
                    item.set_exception(error)
                continue
            group = item[0]
            written = False
            try:
                if self._ended is None:
                    file = file or RecordFile(self.path)
                    written = self._write(file, *item)
            except OSError as error:
                self._end(f"{type(error).__name__}: {error}")
            except Exception:  # no record of a rollout is worth the run
                if not self._lost:
                    logger.exception("group %s can't be recorded", group.group_id)
            if written:
                self.recorded += len(group.rollouts)
            else:
                self._lost += len(group.rollouts)
        if file is not None:
            file.close()

    def _write(
        self, file: RecordFile, group: RolloutGroup, outcomes: dict[str, str], kind: RecordKind
    ) -> bool:
        lines = (
            encode_rollout(
                rollout,
                outcome=outcomes.get(rollout.rollout_id),
                admitted_version=group.admitted_version,
                max_bytes=self.config.max_rollout_bytes,
                kind=kind,
            )
            for rollout in group.rollouts
        )
        data = compress(b"".join(lines))
        if file.size + len(data) > self.config.max_file_bytes:
            self._end(
                f"it has reached recorder.max_file_bytes ({self.config.max_file_bytes:,}); lower recorder.fraction"
            )
            return False
        file.append(data)
        return True

    def _end(self, why: str) -> None:
        self._ended = why
        logger.warning("%s: no further rollouts are recorded: %s", self.path, why)


def read_rollouts(
    path: str | Path, kind: RecordKind | None = "training"
) -> Iterator[RecordedRollout]:
    """The rollouts of a file, or of a run folder, in the order in which they ended; one group at a time, for large files.

    Those of one kind; None: all. Passes over a group torn by a process that was killed, with a warning unless it is the last.

    Raises:
        FileNotFoundError: nothing was recorded there.
    """
    path = Path(path)
    path = path / ROLLOUTS_FILE if path.is_dir() else path
    for offset, lines in read_groups(path):
        try:
            yield from [
                r for r in map(decode_rollout, lines.splitlines()) if kind in (None, r.kind)
            ]
        except ValueError as error:
            logger.warning("%s, group at byte %d: %s", path, offset, error)
