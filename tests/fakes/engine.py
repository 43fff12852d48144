"""An engine that samples from a table of known probabilities, by the last token only.

It serves real requests, seeds, versions and snapshots, and a step takes microseconds. A version's
weights are its table.
"""

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from torchtitan.experiments.rl.generation.engine import (
    EngineConfig,
    GenerateRequest,
    GenerateResult,
    LoadReport,
    Occupancy,
    Request,
    RequestFailed,
    Result,
    ScoreRequest,
    ScoreResult,
)
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import (
    Manifest,
    RankParts,
    SharedBuffer,
    SnapshotReader,
    buffer_bytes,
    digest,
    named,
    views,
    whole,
)

WEIGHTS = "model.safetensors"
TABLE = "table"
"""Name of the only tensor: float32 [V, V]. Row t has the probabilities of the token after t."""


def counting_table(successor: float, *, size: int = 16) -> torch.Tensor:
    """Return a table whose row t gives the probability ``successor`` to t + 1 (0 after the last).

    The other tokens share the rest.
    """
    table = torch.full((size, size), (1 - successor) / (size - 1))
    table[torch.arange(size), (torch.arange(size) + 1) % size] = successor
    return table


def save_table(table: torch.Tensor, folder: Path) -> str:
    """Write the folder that ``ScriptedEngineConfig.build`` takes as ``model_path``."""
    save_file({TABLE: table}, folder / WEIGHTS)
    return str(folder)


_PUBLISHED: list[SharedBuffer] = []
"""Buffers of all manifests: the path of a buffer is good while the buffer lives."""


def snapshot_of(version: int, table: torch.Tensor) -> Manifest:
    """Put the table into shared memory of this process, as a trainer publishes it."""
    shards = {TABLE: whole(table.shape)}
    buffer = SharedBuffer.create(buffer_bytes(shards, torch.float32))
    _PUBLISHED.append(buffer)
    views(buffer.bytes, shards, torch.float32)[TABLE].copy_(table)
    return Manifest(
        version=version,
        shapes={TABLE: tuple(table.shape)},
        dtype=torch.float32,
        parts=(RankParts("here", buffer.path, shards),),
        publication=f"v{version}",
        digests=digests_of(table),
    )


def digests_of(table: torch.Tensor) -> dict[str, str]:
    """Return the digests that a trainer publishes of the table."""
    return named([(TABLE, int(digest(table.float())))])


@dataclass(kw_only=True, slots=True)
class ScriptedEngineConfig(EngineConfig):
    reads_devices: ClassVar[bool] = True
    max_num_seqs: int = 4
    """Number of requests that get a token in one step: the oldest."""
    step_s: float = 0.0
    """Seconds that a step takes beside its own work, as a model's step would."""

    def build(self, *, model_path: str, device: Literal["cpu", "cuda"]) -> "ScriptedEngine":
        return ScriptedEngine(self, load_file(Path(model_path) / WEIGHTS)[TABLE])

    def process_memory(self, *, parameters: int, device: Literal["cpu", "cuda"]) -> float:
        return 0.0


@dataclass(kw_only=True, slots=True)
class _Open:
    """Request that is being served, with the tokens it has."""

    request: Request
    random: np.random.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class ScriptedEngine:
    """Engine (`generation/engine.py`) without top_p and top_k."""

    def __init__(self, config: ScriptedEngineConfig, table: torch.Tensor):
        self._config = config
        self._table = table.double().numpy()
        self._open: dict[int, _Open] = {}
        self._reader = SnapshotReader()
        self._version = 0
        self.recomputed: list[int] = []
        """Versions that were loaded with ``recompute``, which has no other effect: a table has no
        keys and values."""
        self.asleep = False
        self.closed = False

    @property
    def version(self) -> int:
        return self._version

    @property
    def busy(self) -> bool:
        return bool(self._open)

    def add(self, request: Request) -> RequestFailed | None:
        assert not self.asleep
        if isinstance(request, ScoreRequest):
            length, seed = len(request.token_ids), 0
        else:
            length = len(request.prompt_token_ids) + request.sampling.max_tokens
            seed = request.seed
        if length > self._config.max_model_len:
            cause = f"{length} tokens exceed max_model_len {self._config.max_model_len}"
            return RequestFailed(request_id=request.request_id, cause=cause)
        self._open[request.request_id] = _Open(request=request, random=np.random.default_rng(seed))
        return None

    def step(self) -> list[Result]:
        time.sleep(self._config.step_s)
        running = list(self._open.values())[: self._config.max_num_seqs]
        results = [result for each in running if (result := self._advance(each)) is not None]
        for result in results:
            del self._open[result.request_id]
        return results

    def occupancy(self) -> Occupancy:
        running = min(len(self._open), self._config.max_num_seqs)
        return Occupancy(running=running, waiting=len(self._open) - running, cache=0.0)

    def withdraw(self) -> list[Request]:
        requests = [each.request for each in self._open.values() if not each.token_ids]
        self.abort(request.request_id for request in requests)
        return requests

    def sleep(self) -> None:
        assert not self._open and not self.asleep
        self.asleep = True

    def load(self, manifest: Manifest, *, recompute: bool, verify: bool = True) -> LoadReport:
        tensors = self._reader.tensors(manifest)
        assert all(each.token_ids for each in self._open.values()), (
            "a request without a token was not withdrawn"
        )
        self._table = tensors[TABLE].double().numpy()
        digests = digests_of(torch.from_numpy(self._table)) if verify else {}
        self._version, self.asleep = manifest.version, False
        self.recomputed += [self._version] if recompute else []
        return LoadReport(digests=digests, verify_s=0.0, reload_s=0.0)

    def abort(self, request_ids: Iterable[int]) -> None:
        for request_id in request_ids:
            self._open.pop(request_id, None)

    def close(self) -> None:
        self.closed = True

    def _advance(self, each: _Open) -> Result | None:
        request = each.request
        if isinstance(request, ScoreRequest):
            before, after = request.token_ids[:-1], request.token_ids[1:]
            logprobs = np.concatenate([[0.0], np.log(self._table[before, after])]).astype(
                np.float32
            )
            return ScoreResult(request_id=request.request_id, logprobs=logprobs)
        self._sample(each, request)
        stopped = each.token_ids[-1] in request.stop_token_ids
        if not stopped and len(each.token_ids) < request.sampling.max_tokens:
            return None
        completion = Completion(
            token_ids=np.array(each.token_ids, np.int32),
            logprobs=np.array(each.logprobs, np.float32),
            policy_versions=np.array(each.versions, np.int32),
            finish_reason="stop" if stopped else "length",
        )
        return GenerateResult(request_id=request.request_id, completion=completion)

    def _sample(self, each: _Open, request: GenerateRequest) -> None:
        last = each.token_ids[-1] if each.token_ids else int(request.prompt_token_ids[-1])
        weights = self._table[last] ** (1 / (request.sampling.temperature or 1.0))
        probabilities = weights / weights.sum()
        if request.sampling.temperature == 0:
            token = int(probabilities.argmax())
        else:
            drawn = probabilities.cumsum().searchsorted(each.random.random(), side="right")
            token = min(int(drawn), len(probabilities) - 1)  # the sum may be a rounding below 1
        each.token_ids.append(token)
        each.logprobs.append(float(np.log(probabilities[token])))
        each.versions.append(self._version)
