"""What the library asks of an inference engine. vLLM's is the folder ``generation/vllm``.

Requests and results are also the messages between a client and a generator: many travel in one actor message.

An engine has two parts: a config, which is plain data that any process can import, and the engine that the config's ``build``
makes in the generator's process. Import what only the engine needs inside ``build`` or later.
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
"""A request's id says whose it is: the client's id lies above this many bits, the client's own count below."""


@dataclass(kw_only=True, slots=True)
class GenerateRequest:
    request_id: int
    prompt_token_ids: np.ndarray
    """int32 [P]."""
    sampling: SamplingConfig
    seed: int
    stop_token_ids: list[int]
    cache_scope: str = ""
    """Requests share cached prefixes with those of the same scope only."""
    adapter: str = ""
    """Of the version's, which one samples. An engine that serves none has no choice."""
    routes_from: int = 0
    """The first token of the prompt whose route is wanted: those before it are known."""


@dataclass(kw_only=True, slots=True)
class ScoreRequest:
    request_id: int
    token_ids: np.ndarray
    """int32 [L], at least 2."""
    adapter: str = ""


@dataclass(kw_only=True, slots=True)
class GenerateResult:
    request_id: int
    completion: Completion

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickled as the bytes of its streams: with the arrays it takes three times as long, and hundreds are sent a second."""
        completion = self.completion
        streams = (completion.token_ids, completion.logprobs, completion.policy_versions)
        if any(
            type(stream) is not np.ndarray or stream.dtype.kind not in "fiu" or stream.ndim != 1
            for stream in streams
        ):
            return object.__reduce_ex__(self, protocol)  # an engine may be the user's own
        sent = [(stream.tobytes(), stream.dtype.str) for stream in streams]
        return _received, (
            self.request_id,
            sent,
            completion.finish_reason,
            completion.replica,
            completion.routes,
        )


def _received(
    request_id: int, streams: list[tuple[bytes, str]], finish_reason: str, replica: int, routes: Any
) -> GenerateResult:
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
    request_id: int
    logprobs: np.ndarray
    """float32 [L]; entry 0 is 0."""


@dataclass(kw_only=True, slots=True)
class RequestFailed:
    request_id: int
    cause: str


@dataclass(kw_only=True, slots=True)
class GeneratorFailed:
    """The engine can't go on: every open request of this replica is lost."""

    cause: str


Request = GenerateRequest | ScoreRequest
Result = GenerateResult | ScoreResult | RequestFailed
"""How a request ends: one for each, by its request_id."""
GeneratorMessage = Result | GeneratorFailed
"""What a generator sends to its clients."""


QUANTIZED = "quantized"
"""In place of a digest: the engine has made other values of what it was given."""


class WrongWeights(RunError):
    """The engine holds other weights than those it was given, or a part of them: it can't go on."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LoadReport:
    """What an engine says of a version that it loaded."""

    digests: dict[str, str]
    """What the engine holds after loading: ``weights.snapshot.named`` of each tensor, by the manifest's names in its order,
    ``of_copies`` where it holds several copies, and QUANTIZED where it made other values. They are taken from the engine's own
    copies, the packed ones that it computes with included, never from the snapshot. Empty where it was not asked to verify."""
    verify_s: float
    """Mapping the snapshot and taking digests, in seconds."""
    reload_s: float
    """Copying it into the model, in seconds."""


def check_held(report: LoadReport, version: int, published: Mapping[str, str]) -> None:
    """
    Args:
        published: digests of the version's tensors.

    Raises:
        WrongWeights: the engine holds other tensors than were published; names the first.
    """
    held = report.digests
    names = [
        name
        for name in {**published, **held}
        if held.get(name) not in (published.get(name), QUANTIZED)
    ]
    if not names:
        return
    first, others = (
        names[0],
        f" ({len(names)} of {len(published)} tensors differ)" if len(names) > 1 else "",
    )
    seen, wanted = held.get(first), published.get(first)
    raise WrongWeights(
        f"weights of version {version}: the engine holds {first} = {seen}, {wanted} was published{others}"
    )


@dataclass(kw_only=True, slots=True, frozen=True)
class Occupancy:
    """What an engine has to do at one moment."""

    running: int
    """Requests in the batch."""
    waiting: int
    """Requests that wait for a place in it, or for memory."""
    cache: float
    """Share of the memory for keys and values that open requests use, from 0 to 1."""
    prompt_tokens: int = 0
    """Of all requests that have finished so far. An engine that does not count leaves both at 0."""
    prompt_tokens_cached: int = 0
    """How many of them were not computed, because their keys and values were there."""
    routes_kept: int = 0
    """Tokens of these requests that were computed again, because the request was preempted or the weights changed, and keep the
    routes that they had first: the log-probabilities after them were computed with these."""


class Engine(Protocol):
    """Samples and scores tokens with one model, many requests at once.

    Synchronous, and used by one thread from ``build`` to ``close`` (``generation/generator.py``): an engine needs no lock.
    Requests are named by ``request_id``, which is unique among the open ones and may be negative. An exception from any method
    but ``load`` means that the engine can't go on: its generator fails, and every open request with it.
    """

    @property
    def version(self) -> int:
        """Policy version of the weights it holds. 0 is the checkpoint it was built on."""

    @property
    def busy(self) -> bool:
        """Whether a request is open: added, and not yet returned by ``step`` or ``withdraw``, or aborted."""

    def add(self, request: Request) -> RequestFailed | None:
        """Queue a request, which joins the batch at one of the next steps.

        Returns:
            The failure of a request that can never run, such as one longer than ``max_model_len``; it is not open then.
        """

    def step(self) -> list[Result]:
        """Run the model once over the batch. Called while ``busy``.

        Each sampled token's ``policy_versions`` entry is ``version`` at the step that sampled it. Log-probabilities are of the
        logits divided by the sampling temperature. The same seed and prompt give the same tokens, whatever else is in the
        batch. A score is computed by one version.

        Returns:
            Results of the requests that finished, each once.
        """

    def occupancy(self) -> Occupancy:
        """What it has to do now. Asked after each step, so it takes microseconds."""

    def withdraw(self) -> list[Request]:
        """Take back every open request that has no token yet, and return them, oldest first. They may be added again."""

    def load(self, manifest: Manifest, *, recompute: bool, verify: bool = True) -> LoadReport:
        """Replace the weights by a version, between two steps.

        The caller has withdrawn what has no token. Every other open request stays open and keeps its tokens and its stream of
        random numbers. Its next token is the new version's. No request added from now on reads what an older version cached.

        Args:
            manifest: its parts are this host's (``weights.snapshot.SnapshotReader`` reads them).
            recompute: compute the keys and values of open requests again, prompt and tokens so far, with the new weights.
                Otherwise they go on with those they have.
            verify: report the digests of what it holds.

        Returns:
            What it holds now. The caller compares it with what the trainer has published, and uses the engine no more where
            they differ.

        Raises:
            WrongWeights: it may hold a part of the new weights. The engine can't go on.
            Exception: any other: the snapshot is gone, or refused. The engine goes on with the weights it had.
        """

    def sleep(self) -> None:
        """Free the memory of weights, keys and values. No request is open, none is added, and the next call is ``load``, for
        which the engine takes that memory again. ``close`` may come instead."""

    def abort(self, request_ids: Iterable[int]) -> None:
        """End requests without a result. Ids that are not open are ignored: their results may have been returned."""

    def close(self) -> None:
        """End what would outlive this process. Called once and last, when its thread has ended. Requests may be open."""


@dataclass(kw_only=True, slots=True)
class EngineConfig(ABC):
    """What the library reads of every engine. An engine's own config extends it."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of weights and activations. The trainer publishes its weights in it."""
    max_model_len: Changeable[PositiveInt] = 2048
    """Longest prompt + completion, in tokens."""
    tensor_parallel_degree: Changeable[ProcessCount] = 1
    """GPUs that share one engine's model."""
    stops_at_texts: ClassVar[bool] = False
    """Whether the engine ends a completion at the texts of ``SamplingConfig.stop``. Tokens of ``stop_token_ids`` every engine
    does."""
    reads_devices: ClassVar[bool] = False
    """Whether the engine loads versions that the trainer's ranks hold on their devices (``Manifest.parts``)."""
    sleep: Changeable[bool] = False
    """Free the GPU's memory while the trainer steps, for a synchronous run on the trainer's own GPUs
    (``provision.share_gpus``). On CPU an engine keeps its memory, and answers no request while it sleeps."""

    @abstractmethod
    def build(self, *, model_path: str, device: Literal["cpu", "cuda"]) -> Engine:
        """Make the engine, in the process and on the thread that will use it.

        An engine whose ``check_adapter`` passes takes ``adapters`` too, which is given where a version is adapters: the rank of
        each by its name. Their tensors have PEFT's names (``models/lora.py``). The engine computes ``W + B A`` with those that
        a request names, and keeps W. One whose ``check_routes`` passes takes ``routes``: whether completions have theirs.

        Args:
            model_path: hub-format folder; its weights are version 0.
        """

    @property
    def warning(self) -> str | None:
        """What a user should know of these settings before a run."""
        return None

    def check_adapter(self, rank: int) -> None:
        """
        Raises:
            ConfigError: the engine can't serve adapters, or none of this rank.
        """
        cure = f"{type(self).__name__} serves no adapters: set merged, and the trainer publishes the whole model"
        raise ConfigError("trainer.lora.serve", "served", cure)

    def check_routes(self) -> None:
        """
        Raises:
            ConfigError: the engine can't say which experts computed each token.
        """
        cure = f'{type(self).__name__} does not say which experts it took: set it to "off"'
        raise ConfigError("trainer.router_replay", "ids", cure)

    @abstractmethod
    def process_memory(self, *, parameters: int, device: Literal["cpu", "cuda"]) -> float:
        """Memory of one process: GiB on CPU; on CUDA the share of its GPU, from 0 to 1."""

    def gpu_gib(self, *, parameters: int, asleep: bool = False) -> float | None:
        """Memory of one process on its GPU, in GiB. None: a share of what the GPU has, as ``process_memory`` says."""
        return None

    def validate(self, *, field: str) -> None:
        """Refuse fields that can't work together. An extension calls this too.

        Raises:
            ConfigError: by field, value and cure.
        """

    def check_present(self, *, field: str) -> None:
        """Refuse what this machine lacks, such as the engine's package.

        Raises:
            MissingError: by field, value and cure.
        """

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)
