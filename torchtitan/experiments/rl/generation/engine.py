"""The protocol of an inference engine, and the requests and results that it exchanges.

    client ──▶ GenerateRequest, ScoreRequest ──▶ generator ──▶ Engine.add, Engine.step
           ◀── Result, one for each request  ◀──

Many requests or results travel in one actor message. The engine of vLLM is the folder
``generation/vllm``.

An engine has two parts: a config, which is plain data that any process can import, and the engine
that the config's ``build`` makes in the generator's process. Import what only the engine needs
inside ``build`` or later.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch

from torchtitan.experiments.rl.bounds import Changeable, PositiveInt, ProcessCount
from torchtitan.experiments.rl.errors import ConfigError, RunError
from torchtitan.experiments.rl.rollouts.policy import SamplingConfig
from torchtitan.experiments.rl.rollouts.types import Completion
from torchtitan.experiments.rl.weights.snapshot import Manifest

CLIENT_BITS = 40
"""Number of low bits of a request's id that hold the client's own count. The client's id lies above
them."""


@dataclass(kw_only=True, slots=True)
class GenerateRequest:
    """Request to sample a completion of a prompt."""

    request_id: int
    prompt_token_ids: np.ndarray
    """Tokens of the prompt, int32 [P]."""
    sampling: SamplingConfig
    seed: int
    stop_token_ids: list[int]
    cache_scope: str = ""
    """Scope within which requests share cached prefixes."""
    adapter: str = ""
    """Name of the version's adapter that samples. An engine that serves no adapters ignores it."""
    routes_from: int = 0
    """Index of the first token of the prompt whose route is wanted. Earlier routes are known."""


@dataclass(kw_only=True, slots=True)
class ScoreRequest:
    """Request for the log-probability of each token given those before it."""

    request_id: int
    token_ids: np.ndarray
    """Tokens, int32 [L], at least 2."""
    adapter: str = ""
    """Name of the version's adapter that scores. An engine that serves no adapters ignores it."""


@dataclass(kw_only=True, slots=True)
class GenerateResult:
    """The completion of a request."""

    request_id: int
    completion: Completion

    def __reduce_ex__(self, protocol: Any) -> Any:  # noqa: ANN401 - pickle's
        """Pickle the bytes of the completion's streams.

        Hundreds of results are sent a second, and pickled arrays would take three times as long. An
        engine of a user's own may return other streams than arrays, which are pickled as they are.

        Every field of Completion is named here and in ``_received``: one that is added to
        Completion has to be added to both, or the receiver gets its default.
        """
        completion = self.completion
        streams = (completion.token_ids, completion.logprobs, completion.policy_versions)
        if any(
            type(stream) is not np.ndarray or stream.dtype.kind not in "fiu" or stream.ndim != 1
            for stream in streams
        ):
            return object.__reduce_ex__(self, protocol)
        sent = [(stream.tobytes(), stream.dtype.str) for stream in streams]
        return _received, (
            self.request_id,
            sent,
            completion.finish_reason,
            completion.replica,
            completion.routes,
        )


def _received(
    request_id: int,
    streams: list[tuple[bytes, str]],
    finish_reason: str,
    replica: int,
    routes: np.ndarray | None,
) -> GenerateResult:
    """Return the result that was pickled with these values."""
    token_ids, logprobs, policy_versions = (
        np.frombuffer(data, dtype).copy() for data, dtype in streams
    )
    completion = Completion(
        token_ids=token_ids,
        logprobs=logprobs,
        policy_versions=policy_versions,
        finish_reason=finish_reason,
        replica=replica,
        routes=routes,
    )
    return GenerateResult(request_id=request_id, completion=completion)


@dataclass(kw_only=True, slots=True)
class ScoreResult:
    """The log-probabilities of a request's tokens."""

    request_id: int
    logprobs: np.ndarray
    """Log-probability of each token given those before it, float32 [L]; entry 0 is 0."""


@dataclass(kw_only=True, slots=True)
class RequestFailed:
    """The end of a request that the engine can't serve."""

    request_id: int
    cause: str


@dataclass(kw_only=True, slots=True)
class GeneratorFailed:
    """The end of a replica whose engine can't go on. Every open request of it is lost."""

    cause: str


Request = GenerateRequest | ScoreRequest
Result = GenerateResult | ScoreResult | RequestFailed
"""The end of a request. Each request has one, with its request_id."""
GeneratorMessage = Result | GeneratorFailed
"""Message of a generator to its clients."""


QUANTIZED = "quantized"
"""Mark in place of a tensor's digest: the engine quantizes the tensor while loading, so its digest
can't be compared."""


class WrongWeights(RunError):
    """A load that left the engine with other weights than it was given. The engine can't go on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadReport:
    """An engine's report of a version that it has loaded."""

    digests: dict[str, str]
    """Digests of what the engine holds after loading, by the manifest's names and in its order.

    A digest is ``weights.snapshot.named`` of the tensor, ``of_copies`` if the engine holds several
    copies, and QUANTIZED if it has made other values. Digests are taken of the engine's own copies,
    also of the packed ones that it computes with, and never of the snapshot. There are none if the
    engine was not asked to verify."""
    verify_s: float
    """Duration of mapping the snapshot and taking digests, in seconds."""
    reload_s: float
    """Duration of copying the snapshot into the model, in seconds."""


def check_held(report: LoadReport, version: int, published: Mapping[str, str]) -> None:
    """Raise if an engine holds other tensors than were published.

    Args:
        report: the engine's report of the version.
        version: the version.
        published: digest of each of the version's tensors, by name.

    Raises:
        WrongWeights: a tensor differs, is missing or is unknown. The error names the first.
    """
    digests = report.digests
    different = [
        name
        for name in {**published, **digests}
        if digests.get(name) not in (published.get(name), QUANTIZED)
    ]
    if not different:
        return
    first = different[0]
    count = ""
    if len(different) > 1:
        count = f" ({len(different)} of {len(published)} tensors differ)"
    raise WrongWeights(
        f"weights of version {version}: the engine holds {first} = {digests.get(first)}, "
        f"{published.get(first)} was published{count}"
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Occupancy:
    """An engine's work at one moment, and what it has counted so far."""

    running: int
    """Number of requests in the batch."""
    waiting: int
    """Number of requests that wait for a place in the batch, or for memory."""
    cache: float
    """Share of the memory for keys and values that open requests use, from 0 to 1."""
    prompt_tokens: int = 0
    """Number of prompt tokens of finished requests. 0 if the engine does not count."""
    prompt_tokens_cached: int = 0
    """Number of these prompt tokens that were not computed, because their keys and values were
    cached. 0 if the engine does not count."""
    routes_kept: int = 0
    """Number of tokens of finished requests that were computed twice and keep their first routes.

    A token is computed again if its request is preempted or the weights change. The
    log-probabilities after it were computed with the first routes."""


class Engine(Protocol):
    """Samples and scores tokens with one model, many requests at once.

    An engine is synchronous, and one thread alone uses it from ``build`` to ``close``
    (``generation/engine_thread.py``), so it needs no lock. Requests are named by ``request_id``,
    which is unique among the open ones and may be negative. An exception from any method but
    ``load`` means that the engine can't go on: its generator fails, and every open request with it.
    """

    @property
    def version(self) -> int:
        """Policy version of the engine's weights. 0 is the checkpoint that it was built on."""

    @property
    def busy(self) -> bool:
        """True if a request is open.

        It is open from ``add`` until ``step`` or ``withdraw`` returns it, or it is aborted.
        """

    def add(self, request: Request) -> RequestFailed | None:
        """Queue a request, which joins the batch at one of the next steps.

        Returns:
            The failure of a request that can never run, such as one longer than ``max_model_len``.
            The request is not open then.
        """

    def step(self) -> list[Result]:
        """Run the model once over the batch. The caller calls it while the engine is ``busy``.

        Each sampled token's ``policy_versions`` entry is ``version`` at the step that sampled it.
        Log-probabilities are of the logits divided by the sampling temperature. The same seed and
        prompt give the same tokens, whatever else is in the batch. A score is computed by one
        version.

        Returns:
            Results of the requests that finished, each once.
        """

    def occupancy(self) -> Occupancy:
        """Return the engine's work at this moment.

        It is called after each step, so it takes microseconds.
        """

    def withdraw(self) -> list[Request]:
        """Close every open request that has no token yet, and return them, oldest first.

        The caller may add them again.
        """

    def load(self, manifest: Manifest, *, recompute: bool, verify: bool = True) -> LoadReport:
        """Replace the weights by a version, between two steps.

        The caller has withdrawn the requests that have no token. Every other open request stays
        open and keeps its tokens and its stream of random numbers. The new version samples its next
        token. No request that is added from now on reads what an older version cached.

        Args:
            manifest: the version's tensors, which lie on this host
                (``weights.snapshot.SnapshotReader`` reads them).
            recompute: True to compute the keys and values of open requests again, prompt and tokens
                so far, with the new weights. Otherwise they go on with those they have.
            verify: True to report the digests of what the engine holds.

        Returns:
            Digests of what the engine holds now. The caller compares them with what the trainer has
            published, and does not use the engine any more if they differ.

        Raises:
            WrongWeights: the engine may hold some of the new weights. It can't go on.
            Exception: the snapshot is gone, or refused. The engine goes on with the weights it had.
        """

    def sleep(self) -> None:
        """Free the memory of weights, keys and values.

        No request is open, and the caller adds none. The next call is ``load``, for which the
        engine takes that memory again, or ``close``.
        """

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests without a result.

        Ids that are not open are ignored: ``step`` may have returned their results.
        """

    def close(self) -> None:
        """End what would outlive this process.

        It is called once and last, when the engine's thread has ended. Requests may be open.
        """


@dataclass(kw_only=True, slots=True)
class EngineConfig(ABC):
    """The settings that the library reads of every engine. An engine's own config extends it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of weights and activations, in which the trainer publishes its weights."""
    max_model_len: Changeable[PositiveInt] = 2048
    """Maximum length of prompt and completion together, in tokens."""
    tensor_parallel_degree: Changeable[ProcessCount] = 1
    """Number of GPUs that share one engine's model."""
    adapted_modules: ClassVar[frozenset[str]] = frozenset()
    """Last parts of the hub's names of the modules that the engine serves adapters of."""
    wider_windows: ClassVar[frozenset[str]] = frozenset()
    """Architectures whose sliding window the engine makes one token wider than transformers."""
    ignored_fields: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Fields of config.json that the engine takes for false whatever they say, by architecture."""
    stops_at_texts: ClassVar[bool] = False
    """True if the engine ends a completion at the texts of ``SamplingConfig.stop``.

    Every engine ends it at the tokens of ``stop_token_ids``."""
    reads_devices: ClassVar[bool] = False
    """True if the engine loads versions that the trainer's ranks hold on their devices
    (``Manifest.parts``)."""
    sleep: Changeable[bool] = False
    """True to free the GPU's memory while the trainer steps, for a synchronous run on the trainer's
    own GPUs (``provision.share_gpus``).

    On CPU an engine keeps its memory, and answers no request while it sleeps."""

    @abstractmethod
    def build(self, *, model_path: str, device: Literal["cpu", "cuda"]) -> Engine:
        """Make the engine, in the process and on the thread that will use it.

        If ``check_adapter`` passes, ``build`` takes ``adapters`` too: the rank of each adapter by
        its name. It is given if the versions are adapters. Their tensors have PEFT's names
        (``models/lora.py``). The engine keeps W, and computes ``W + B A`` with the adapter that a
        request names.

        If ``check_routes`` passes, ``build`` takes ``routes`` too, which is True if completions
        carry their routes.

        Args:
            model_path: folder in hub format; its weights are version 0.
            device: kind of device that the engine computes on.
        """

    @property
    def warning(self) -> str | None:
        """Advice on these settings to show before a run, if there is any."""
        return None

    def check_adapter(self, rank: int) -> None:
        """Raise if the engine can't serve adapters of this rank.

        Raises:
            ConfigError: the engine serves no adapters, or none of this rank.
        """
        cure = (
            f"{type(self).__name__} serves no adapters: set merged, and the trainer publishes the "
            "whole model"
        )
        raise ConfigError("trainer.lora.serve", "served", cure)

    def check_routes(self) -> None:
        """Raise if the engine does not report routes.

        Raises:
            ConfigError: the engine can't say which experts computed each token.
        """
        cure = f'{type(self).__name__} does not say which experts it took: set it to "off"'
        raise ConfigError("trainer.router_replay", "ids", cure)

    @abstractmethod
    def process_memory(self, *, parameters: int, device: Literal["cpu", "cuda"]) -> float:
        """Return the memory of one process: in GiB on CPU; on CUDA as a share of its GPU, 0 to 1.

        Args:
            parameters: number of the model's parameters.
            device: kind of device that the engine computes on.
        """

    def gpu_gib(self, *, parameters: int, asleep: bool = False) -> float | None:
        """Return the memory of one process on its GPU, in GiB.

        None says that it is the share of the GPU which ``process_memory`` returns.

        Args:
            parameters: number of the model's parameters.
            asleep: True for the memory that is left while the engine sleeps.
        """
        return None

    def validate(self, *, field: str) -> None:
        """Raise if fields can't work together. An extension calls this too.

        Args:
            field: name of this config; errors name it.

        Raises:
            ConfigError: a field has a value that does not fit the others.
        """

    def check_present(self, *, field: str) -> None:
        """Raise if this machine lacks something, such as the engine's package.

        Args:
            field: name of this config; errors name it.

        Raises:
            MissingError: something is missing.
        """

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch has it."""
        return getattr(torch, self.dtype)
