"""Counts where every dispatched rollout ended.

Each rollout has one record, which ends in one column. The columns of a task, and its open rollouts,
always sum to the number that was dispatched.
"""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec

from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.loops.saved_state import LedgerEntry, LedgerState
from torchtitan.experiments.rl.rollouts.record_file import RecordFile


class Ledger:
    """Records of a run's rollouts, across its restarts.

    The columns are ``trained``, ``filtered/<slot>/<filter>`` (slot "pre" or "post"),
    ``failed/<why>`` (the rollout's status; or ``group_too_small``, if only its group failed),
    ``oversized`` (too long for a row), ``untrained`` (open when the run stopped) and ``lost`` (open
    in the checkpoint that a run was resumed from, and can't be run again). A rollout is open until
    it is in a column, also while it waits for a step after its last turn.
    """

    def __init__(self, path: Path | None = None):
        """Start empty.

        Args:
            path: file to which each record is appended as a JSON line, by the first `flush` or
                `check` after its rollout has ended. None keeps only the counts.
        """
        self._dispatched: Counter[str] = Counter()
        self._ended: dict[str, Counter[str]] = {}
        self._replayed: Counter[str] = Counter()
        self._open: dict[str, LedgerEntry] = {}
        self._file = RecordFile(path) if path is not None else None
        self._unwritten: list[str] = []

    def dispatch(self, task: str, rollout_ids: Collection[str], *, version: int) -> None:
        """Open a record for each rollout.

        Args:
            version: policy version that the generators hold.

        Raises:
            RunError: a rollout is open already.
        """
        for rollout_id in rollout_ids:
            if rollout_id in self._open:
                raise RunError(f"rollout {rollout_id} was dispatched twice")
            self._open[rollout_id] = LedgerEntry(
                rollout_id=rollout_id, task=task, dispatched_version=version
            )
        self._dispatched[task] += len(rollout_ids)

    def end(self, rollout_id: str, column: str, *, version: int) -> None:
        """End a rollout's record in a column.

        Raises:
            RunError: the rollout is not open: it has ended before, or was never dispatched.
        """
        record = self._open.pop(rollout_id, None)
        if record is None:
            raise RunError(
                f"rollout {rollout_id} ends as {column}, but it is not open: it has ended already, "
                "or was never dispatched"
            )
        self._ended.setdefault(record.task, Counter())[column] += 1
        if self._file is not None:
            line = msgspec.to_builtins(record) | {"column": column, "ended_version": version}
            self._unwritten.append(json.dumps(line) + "\n")

    def replay(self, task: str, rollouts: int) -> None:
        """Count rollouts that a step trains on again. They stay in their column."""
        self._replayed[task] += rollouts

    def open(self, task: str) -> int:
        """Return the number of the task's rollouts that were dispatched and have not ended."""
        return self._dispatched[task] - sum(self._ended.get(task, Counter()).values())

    def check(self, open_ids: Collection[str]) -> None:
        """Compare the open records with the caller's open rollouts, and both with the counts.

        Then write the records of rollouts that have ended (`flush`).

        Args:
            open_ids: ids of the rollouts that the caller has open.

        Raises:
            RunError: a rollout was lost or counted twice.
        """
        still_open = set(open_ids)
        if still_open != self._open.keys():
            lost = sorted(self._open.keys() - still_open)[:3] or "none"
            unknown = sorted(still_open - self._open.keys())[:3] or "none"
            raise RunError(
                f"the ledger does not balance: lost {lost}, ended but still seen {unknown}"
            )
        by_task = Counter(record.task for record in self._open.values())
        for task, dispatched in self._dispatched.items():
            if self.open(task) != by_task[task]:
                ended = dict(self._ended.get(task, {}))
                raise RunError(
                    f"the ledger of {task} does not balance: {dispatched} dispatched, {ended} "
                    f"ended, {by_task[task]} open"
                )
        self.flush()

    def flush(self) -> None:
        """Write the records of rollouts that have ended.

        Raises:
            OSError: the disk is full, or failed. The file still ends with a whole line, and the
                next call tries again.
        """
        if self._file is not None and self._unwritten:
            self._file.append("".join(self._unwritten).encode())
            self._unwritten.clear()

    def counts(self) -> dict[str, int]:
        """Return the number of rollouts by ``<task>/<column>``.

        ``<task>/dispatched`` and ``<task>/open`` are among them. ``<task>/replayed`` is there if
        rollouts were trained on again, and counts how often.
        """
        counts = {}
        for task, dispatched in self._dispatched.items():
            counts[f"{task}/dispatched"] = dispatched
            counts |= {
                f"{task}/{column}": n
                for column, n in sorted(self._ended.get(task, Counter()).items())
            }
            counts[f"{task}/open"] = self.open(task)
        return counts | {f"{task}/replayed": count for task, count in self._replayed.items()}

    def state(self) -> LedgerState:
        """Return the state that a checkpoint keeps."""
        return LedgerState(
            dispatched=dict(self._dispatched),
            ended={task: dict(columns) for task, columns in self._ended.items()},
            replayed=dict(self._replayed),
            open=list(self._open.values()),
        )

    def restore(self, state: LedgerState) -> None:
        """Continue from a checkpoint's counts and open rollouts."""
        self._dispatched = Counter(state.dispatched)
        self._ended = {task: Counter(columns) for task, columns in state.ended.items()}
        self._replayed = Counter(state.replayed)
        self._open = {entry.rollout_id: entry for entry in state.open}

    def close(self) -> None:
        if self._file is None:
            return
        try:
            self.flush()
        finally:
            self._file.close()
            self._file = None
