"""Records that flow from rollouts to the trainer: training samples, batches, loss denominators.

Every per-token stream is aligned with ``token_ids``: entry ``t`` describes token ``t``, never its
neighbour. The log-probability of token ``t`` is that of the token given all tokens before it in its
sample. A sample's first token has none, and is never a member of a loss.

Shape suffixes: B rows of a batch, L tokens of a row or sample, T tokens of a row of prefix trees.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Generic,
    Literal,
    TypeVar,
    get_args,
    get_type_hints,
)

import numpy as np

if TYPE_CHECKING:  # the report and the viewers read records, and start at once without torch
    import torch

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = get_args(Role)
"""Authors of messages. ``role_ids`` index into them."""

ROLE_IDS = {role: index for index, role in enumerate(ROLES)}


@dataclass(kw_only=True, slots=True, frozen=True)
class Stream:
    """Declaration of a per-token stream: how it is stored, and who reads it."""

    dtype: type[np.generic]
    """Element type. A stream with ``dims`` may have a wider one in a sample."""
    fill: float
    """Value on padding, and on every token of a sample that does not have the stream. -1 stands for
    the largest value of an unsigned ``dtype``."""
    in_loss: bool
    """True if a loss reads the stream, for its values or to tell which tokens are members. The
    model and the metrics may read any stream."""
    credit: bool = False
    """True if algorithms write the stream."""
    like: str | None = None
    """Name of the stream whose values a sample without this one takes, instead of ``fill``."""
    dims: int = 0
    """Number of dimensions of a token's entry. Samples decide on their sizes, which are 0 in a
    batch of samples without the stream."""

    def padding(self, length: int, given: np.ndarray | None) -> np.ndarray:
        """Return ``fill`` for ``length`` tokens.

        Args:
            given: the stream of a sample, whose dtype and sizes the padding takes if ``dims`` is
                above 0.
        """
        if given is None or self.dims == 0:
            given = np.empty((0,) * (1 + self.dims), self.dtype)
        return np.full((length, *given.shape[1:]), self.fill).astype(given.dtype)


Array = TypeVar("Array")
"""np.ndarray in a sample, torch.Tensor in a batch."""
OptionalArray = TypeVar("OptionalArray")
"""np.ndarray or None in a sample, torch.Tensor in a batch."""
NONE: Any = None
"""Default of an optional stream. Any, because a batch's streams are never None."""


@dataclass(kw_only=True)
class TokenStreams(Generic[Array, OptionalArray]):
    """The per-token streams: [L] in a sample, [B, L] in a batch, then a token's own dimensions.

    Batches, packing and records follow from the declarations here: a new stream is one line.
    """

    __slots__ = ()  # the subclasses store the fields

    token_ids: Annotated[Array, Stream(dtype=np.int32, fill=0, in_loss=False)]
    """Prompt, sampled and env-provided tokens, exactly as the generator saw or sampled them."""
    loss_mask: Annotated[Array, Stream(dtype=np.bool_, fill=False, in_loss=True)]
    """True where the policy sampled the token."""
    generator_logprobs: Annotated[Array, Stream(dtype=np.float32, fill=0, in_loss=True)]
    """Log-probability under the generator's weights and temperature; 0 where nothing was
    sampled."""
    policy_versions: Annotated[Array, Stream(dtype=np.int32, fill=-1, in_loss=False)]
    """Policy version that sampled the token; -1 where nothing was sampled."""
    replicas: Annotated[OptionalArray, Stream(dtype=np.int16, fill=-1, in_loss=False)] = NONE
    """Generator replica that sampled the token; -1 where nothing was sampled. A sample has None if
    the replicas are not known."""
    role_ids: Annotated[OptionalArray, Stream(dtype=np.int8, fill=-1, in_loss=False)] = NONE
    """Author of the token's message, an index into ROLES; -1 on template outside any message.
    Sampled tokens are the assistant's. A sample has None if the roles are not known."""
    advantages: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """Advantage of the token. A sample may have None only if no token has an rl weight."""
    rl_weights: Annotated[
        OptionalArray,
        Stream(dtype=np.float32, fill=0, in_loss=True, credit=True, like="loss_mask"),
    ] = NONE
    """Weight of the token in the rl component. None means 1.0 on every sampled token."""
    ce_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """Weight of the token in the ce component. None means 0.0 everywhere."""
    ref_kl_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """Weight of the token in the ref_kl component. None means 0.0 everywhere."""
    ref_logprobs: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """Log-probability of the token under the reference model. Needed where ref_kl_weights is not
    0."""
    routes: Annotated[OptionalArray, Stream(dtype=np.uint8, fill=-1, in_loss=False, dims=2)] = NONE
    """[..., layers, k]: experts that computed the token in the generator, where it was an input.
    The dtype is uint8 or uint16, and its largest value stands where the experts are not known, as
    for the last sampled token. A sample has None if they are known for no token."""


STREAMS: dict[str, Stream] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TokenStreams, include_extras=True).items()
}
"""Declaration of each stream by its name, in the order of the fields."""

CREDIT_STREAMS = tuple(name for name, declared in STREAMS.items() if declared.credit)
"""Names of the streams that algorithms write: advantages, weights of the loss components, and
log-probabilities of the reference."""


@dataclass(kw_only=True, slots=True)
class TrainingSample(TokenStreams[np.ndarray, np.ndarray | None]):
    """One token sequence and its per-token streams. A rollout makes one or more of them.

    Two turns, whose second prompt is the first prompt, the first completion and two tokens of the
    env, are one sample::

                            prompt   completion   env     completion
        token_ids           P  P  P  C   C        E  E    C
        loss_mask           0  0  0  1   1        0  0    1
        generator_logprobs  0  0  0  log p(C)     0  0    log p(C)
        policy_versions    -1 -1 -1  7   7       -1 -1    8
    """

    temperature: float = 1.0
    """Sampling temperature. The trainer divides its logits by it, as the generator did."""
    task_name: str
    rollout_id: str
    adapter: str = ""
    """Name of the adapter that sampled the sample, and that it trains. "" in a run without several
    adapters."""
    reference_ids: np.ndarray | None = None
    """int32 [R]. Tokens that the trainer's reference scores for ``ref_logprobs``: other tokens
    first, such as a prompt with a demonstration, then this sample's tokens from its first sampled
    one on. None if the algorithm sets ``ref_logprobs``."""
    trainer_logprobs: np.ndarray | None = None
    """float32 [L]. Log-probabilities of the sampled tokens at ``temperature``, under the weights
    with which the trainer's step began; 0 elsewhere. For the record only: the first step that
    trains on the sample sets it if ``recorder.trainer_logprobs`` is True. None if not known."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class PrefixTrees:
    """Rows of a TrainingBatch as the model computes them, with each shared prefix there once.

    Each tree is in depth-first order, so the positions alone describe it (`models/attention.py`).
    Two samples P A and P B, with one token of padding in the batch and two in the trees::

        batch   token_ids   p0 p1 a2 a3   p0 p1 b2    0
                positions    0  1  2  3    0  1  2    0
                slots        0  1  2  3    0  1  4    0
        trees   token_ids   p0 p1 a2 a3   b2    0  0
                positions    0  1  2  3    2    0  1

    b2 is predicted from the hidden state of p1. The streams of p0 and p1 stay those of each sample,
    in the batch.
    """

    token_ids: torch.Tensor
    """int32 [B, T]."""
    positions: torch.Tensor
    """int32 [B, T]. Distance from the root of the tree. 0 at a root, and where a row's padding
    begins."""
    temperatures: torch.Tensor
    """float32 [B, T]. Samples of different temperatures are in separate trees."""
    slots: torch.Tensor
    """int64 [B, L]. Index of each token of the batch among the B * T tokens of the trees; 0 on
    padding."""

    def any_of(self, mask: torch.Tensor) -> torch.Tensor:
        """Return which tokens of the trees stand for a masked token of the batch, bool [B, T].

        Args:
            mask: bool [B, L].
        """
        marked = mask.new_zeros(self.token_ids.numel())
        marked[self.slots[mask]] = True
        return marked.view_as(self.token_ids)

    def of_any(self, values: torch.Tensor, mask: torch.Tensor, otherwise: int) -> torch.Tensor:
        """Return for each token of the trees the value of a masked token that it stands for.

        Args:
            values: [B, L, ...].
            mask: bool [B, L]: tokens of the batch whose values may be taken.
            otherwise: value of a token that stands for no masked one.

        Returns:
            [B, T, ...].
        """
        taken = self.slots.new_full((self.token_ids.numel(),), -1)
        taken[self.slots[mask]] = mask.flatten().nonzero().squeeze(-1)
        found = values.flatten(0, 1)[taken.clamp(min=0)]
        known = (taken >= 0).view(-1, *[1] * (found.ndim - 1))
        return found.where(known, otherwise).view(*self.token_ids.shape, *values.shape[2:])

    def of_each(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token of the batch, [B, L], the value of the token that stands for it.

        Args:
            values: [B, T].
        """
        return (
            values.flatten().index_select(0, self.slots.flatten().clamp(min=0)).view_as(self.slots)
        )

    def to(self, device: torch.device | str) -> PrefixTrees:
        return PrefixTrees(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(kw_only=True, slots=True)
class TrainingBatch(TokenStreams["torch.Tensor", "torch.Tensor"]):
    """Rows of packed training samples. Padding has loss_mask False and every weight 0.

    A row of L = 8 holds sample a (3 tokens, of task 0), sample b (4 tokens, of task 1) and one
    token of padding::

        token_ids   a0 a1 a2   b0 b1 b2 b3    0
        positions    0  1  2    0  1  2  3    0
        loss_mask    0  1  1    0  0  1  1    0
        task_ids     0  0  0    1  1  1  1   -1
    """

    positions: torch.Tensor
    """int32 [B, L]. Restarts at 0 at each sample, and where a row's padding begins."""
    temperatures: torch.Tensor
    """float32 [B, L]. 1 on padding."""
    task_ids: torch.Tensor
    """int32 [B, L]. Index into ``task_names``; -1 on padding. Only metrics read it."""
    task_names: tuple[str, ...]
    trees: PrefixTrees | None = None
    """The same rows with shared prefixes, which the model computes in their place. None if no
    sample shares a prefix."""
    adapter: str = ""
    """Name of the adapter that every sample in this batch trains."""
    conditioned: PrefixTrees | None = None
    """The samples' ``reference_ids`` in rows of their own. ``slots`` is -1 where a token has no
    place in them. None if no sample of the step has any. If some has, a batch without them gets a
    row of padding, because all ranks compute together."""

    def __post_init__(self) -> None:
        if missing := [name for name in STREAMS if getattr(self, name) is None]:
            raise TypeError(f"a TrainingBatch needs every stream: {', '.join(missing)} missing")

    def to(self, device: torch.device | str) -> TrainingBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) if hasattr(value, "to") else value
            for name, value in values.items()
        }
        return TrainingBatch(**moved)


@dataclass(kw_only=True, slots=True, frozen=True)
class DataParallel:
    """A trainer rank's coordinate in the division of a step's rows.

    Ranks with the same coordinate are sent the same rows, and share the work on them.
    """

    rank: int
    """Index of the share that the rank is sent."""
    size: int
    """Number of shares of a step's rows. At most the number of trainer ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossDenominators:
    """Divisors of the loss components.

    By default a component's divisor is the number of its member tokens in the whole optimizer step,
    over all microbatches and data-parallel ranks. Each is above 0: a component without members
    divides 0 by 1.
    """

    rl: float
    ce: float
    ref_kl: float
