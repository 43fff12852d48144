"""What is wrong with a run folder, read from its files alone. Each function returns faults, a line each; none is a good run."""

import gzip
import json
import re
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torchtitan.experiments.rl.checkpointing.folder import CheckpointError, checkpoints, verify
from torchtitan.experiments.rl.observability.metrics import without_timing

Record = dict[str, Any]


def json_lines(path: Path) -> list[Record]:
    """
    Raises:
        ValueError: a line is torn or is no JSON.
    """
    text = path.read_text() if path.exists() else ""
    if text and not text.endswith("\n"):
        raise ValueError("its last line is torn")
    return [json.loads(line) for line in text.splitlines()]


def whole_json_lines(path: Path) -> list[Record]:
    """Of a run that was killed: a torn last line is left out."""
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith(b"\n")]


def rollout_records(run: Path) -> list[Record]:
    """Of training; those of evaluations are in no ledger, and an evaluation that a kill met is begun again.

    Raises:
        ValueError: the file is torn.
    """
    try:
        text = gzip.decompress((run / "rollouts.jsonl.gz").read_bytes()).decode()
    except (EOFError, OSError) as error:
        raise ValueError(str(error)) from error
    records = [json.loads(line) for line in text.splitlines()]
    return [record for record in records if record.get("kind", "training") == "training"]


def torn_files(run: Path) -> list[str]:
    """Of a run that ended by itself: metrics, ledger, logs, records and checkpoints."""
    faults = []
    for path in [*run.glob("*.jsonl"), *run.glob("logs/*.jsonl")]:
        try:
            json_lines(path)
        except ValueError as error:
            faults.append(f"{path.name}: {error}")
    try:
        rollout_records(run)
    except ValueError as error:
        faults.append(f"rollouts.jsonl.gz: {error}")
    for path in checkpoints(run):
        try:
            verify(path)
        except CheckpointError as error:
            faults.append(str(error))
    faults += [f"{path.name} is left" for path in run.glob("checkpoints/.step-*")]
    return faults


def unbalanced(run: Path, *, steps: int, rollouts_per_step: int, max_age: int) -> list[str]:
    """Of a run that has taken all its steps: a step left out, a rollout in two columns or in none, a token too old."""
    metrics, ledger = json_lines(run / "metrics.jsonl"), json_lines(run / "ledger.jsonl")
    faults = []
    if (seen := [record["step"] for record in metrics]) != list(range(steps + 1)):
        faults.append(f"metrics have steps {seen}")
    ends = Counter(record["rollout_id"] for record in ledger)
    if twice := [rollout for rollout, count in ends.items() if count > 1]:
        faults.append(f"ledger: {len(twice)} rollouts end twice, such as {twice[0]}")
    columns = Counter(f"ledger/{record['task']}/{record['column']}" for record in ledger)
    last = (
        {key: value for key, value in metrics[-1].items() if key.startswith("ledger/")}
        if metrics
        else {}
    )
    trained = sum(count for column, count in columns.items() if column.endswith("/trained"))
    if trained != steps * rollouts_per_step:
        faults.append(
            f"ledger: {trained} rollouts were trained, and not {steps * rollouts_per_step}"
        )
    dispatched = sum(value for key, value in last.items() if key.endswith("/dispatched"))
    still_open = sum(value for key, value in last.items() if key.endswith("/open"))
    counted = sum(last.values()) - dispatched - still_open
    # Those open at the last step end afterwards, as "untrained".
    if dispatched != counted + still_open or dispatched != len(ends):
        faults.append(
            f"ledger: {dispatched} dispatched, {counted} in columns and {still_open} open, {len(ends)} in the file"
        )
    if any(record.get("policy/age_max", 0) > max_age for record in metrics):
        faults.append(f"a token is older than {max_age} versions")
    return faults


def final_reward(run: Path) -> float | None:
    """Of the last evaluation."""
    found = [
        record["validation/reward"]
        for record in json_lines(run / "metrics.jsonl")
        if "validation/reward" in record
    ]
    return found[-1] if found else None


def different_metrics(run: Path, reference: Path, *, whole: bool) -> list[str]:
    """Where the metrics of a run differ from those of another, timing aside. ``whole``: it has taken all the steps."""
    ours, theirs = (
        whole_json_lines(run / "metrics.jsonl"),
        whole_json_lines(reference / "metrics.jsonl"),
    )
    faults = []
    if whole and len(ours) != len(theirs):
        faults.append(f"metrics have {len(ours)} records, and not {len(theirs)}")
    for mine, other in zip(ours, theirs, strict=False):
        mine, other = without_timing(mine), without_timing(other)
        keys = sorted(key for key in mine.keys() | other.keys() if mine.get(key) != other.get(key))
        if keys:
            values = f"{keys[0]} = {mine.get(keys[0])}, and not {other.get(keys[0])}"
            return [*faults, f"metrics of step {mine['step']}: {values} ({len(keys)} keys differ)"]
    return faults


def different_files(run: Path, reference: Path) -> list[str]:
    """Where ledger, records and final policy of a finished run differ from another's. The order of lines and seconds do not
    count: groups of a step end in any order."""
    faults = []
    for name in ("ledger.jsonl", "rollouts.jsonl.gz"):
        ours, theirs = (Counter(_timeless_lines(path / name)) for path in (run, reference))
        if ours != theirs:
            more, fewer = (ours - theirs).total(), (theirs - ours).total()
            faults.append(f"{name}: {more} lines that the undisturbed run has not, {fewer} missing")
    ours, theirs = (
        {
            str(p.relative_to(path)): p.read_bytes()
            for p in path.glob("policy/step-*/**/*")
            if p.is_file()
        }
        for path in (run, reference)
    )
    faults += [
        f"final policy: {name} differs" for name in sorted(theirs) if ours.get(name) != theirs[name]
    ]
    return faults


def _timeless_lines(path: Path) -> list[str]:
    data = path.read_bytes()
    text = (gzip.decompress(data) if path.suffix == ".gz" else data).decode()
    return [re.sub(r'"(generate|env)_s":[^,}]*', "", line) for line in text.splitlines()]


def times_served(records: Iterable[Record]) -> Counter[str]:
    """How many groups each example was served in, by ``sample_id``, of rollouts that were recorded."""
    groups = {
        (record["data_sample"]["sample_id"], record["rollout"]["group_id"]) for record in records
    }
    return Counter(sample for sample, _ in groups)


def not_served(records: list[Record], *, examples: int, times: int) -> list[str]:
    """Where not each of so many examples was served in exactly so many groups."""
    served = times_served(records)
    wrong = {sample: count for sample, count in served.items() if count != times}
    faults = (
        [f"{len(served)} examples were served, and not {examples}"]
        if len(served) != examples
        else []
    )
    return faults + (
        [f"{len(wrong)} examples were not served {times} times: {dict(list(wrong.items())[:3])}"]
        if wrong
        else []
    )
