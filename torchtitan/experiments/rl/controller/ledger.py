"""Where every dispatched rollout ended: one record a rollout, and columns that always sum to what was dispatched."""

import json
from collections import Counter
from collections.abc import Collection
from pathlib import Path

import msgspec

from torchtitan.experiments.rl.controller.saved_state import LedgerEntry, LedgerState
from torchtitan.experiments.rl.errors import RunError
from torchtitan.experiments.rl.rollouts.record_file import RecordFile


class Ledger:
    """Columns: ``trained``, ``filtered/<slot>/<filter>`` (slot "pre" or "post"), ``failed/<why>``, ``oversized``, ``untrained``
    (open when the run stopped), ``lost`` (open in the checkpoint that a run was resumed from, and can't be run again).

    With a path, each record is appended to that file as a JSON line, by the first ``flush`` or ``check``
    after its rollout ended.
    """

    def __init__(self, path: Path | None = None):
        self._dispatched: Counter[str] = Counter()
        self._ended: dict[str, Counter[str]] = {}
        self._replayed: Counter[str] = Counter()
        self._open: dict[str, LedgerEntry] = {}
        self._file = RecordFile(path) if path is not None else None
        self._unwritten: list[str] = []

    def dispatch(self, task: str, rollout_ids: Collection[str], *, version: int) -> None:
        for rollout_id in rollout_ids:
            if rollout_id in self._open:
                raise RunError(f"rollout {rollout_id} was dispatched twice")
            self._open[rollout_id] = LedgerEntry(
                rollout_id=rollout_id, task=task, dispatched_version=version
            )
        self._dispatched[task] += len(rollout_ids)

    def end(self, rollout_id: str, column: str, *, version: int) -> None:
        """
        Raises:
            RunError: it is not open: it ended before, or was never dispatched.
        """
        record = self._open.pop(rollout_id, None)
        if record is None:
            raise RunError(
                f"rollout {rollout_id} ends as {column}, but it is not open: it was counted before"
            )
        self._ended.setdefault(record.task, Counter())[column] += 1
        if self._file is not None:
            line = msgspec.to_builtins(record) | {"column": column, "ended_version": version}
            self._unwritten.append(json.dumps(line) + "\n")

    def replay(self, task: str, rollouts: int) -> None:
        """Rollouts that were trained on are trained on again: they stay in their column, and are counted beside it."""
        self._replayed[task] += rollouts

    def open(self, task: str) -> int:
        """Rollouts of a task that are in no column: dispatched less ended."""
        return self._dispatched[task] - sum(self._ended.get(task, Counter()).values())

    def check(self, seen: Collection[str]) -> None:
        """Compare the open records with the rollouts that the caller has open, and both with the counts.

        Raises:
            RunError: a rollout was lost or counted twice.
        """
        seen = set(seen)
        if seen != self._open.keys():
            lost, unknown = sorted(self._open.keys() - seen), sorted(seen - self._open.keys())
            raise RunError(
                f"the ledger does not balance: lost {lost[:3] or 'none'}, ended but still seen {unknown[:3] or 'none'}"
            )
        by_task = Counter(record.task for record in self._open.values())
        for task, dispatched in self._dispatched.items():
            if self.open(task) != by_task[task]:
                raise RunError(
                    f"the ledger of {task} does not balance: {dispatched} dispatched, {dict(self._ended.get(task, {}))} ended, "
                    f"{by_task[task]} open"
                )
        self.flush()

    def flush(self) -> None:
        """Write the records of rollouts that have ended.

        Raises:
            OSError: the disk is full, or failed. The file ends with a whole line, and the next call tries again.
        """
        if self._file is not None and self._unwritten:
            self._file.append("".join(self._unwritten).encode())
            self._unwritten.clear()

    def counts(self) -> dict[str, int]:
        """``<task>/<column>`` to rollouts, dispatched and open included.

        ``<task>/replayed``, where something was, is no column: it counts trainings of rollouts that ended before.
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
        """What a resumed run continues from."""
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
