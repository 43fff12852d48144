"""What flows from rollouts to the trainer: training samples, packed batches, loss denominators.

Every per-token stream is aligned with ``token_ids``: entry ``t`` describes token ``t``, never its neighbour. The
log-probability of token ``t`` is that of the token given all before it in its sample; a sample's first token has none and is
never a member of a loss.

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
"""Whose message a token belongs to; role_ids index into it."""

ROLE_IDS = {role: index for index, role in enumerate(ROLES)}


@dataclass(kw_only=True, slots=True, frozen=True)
class Stream:
    """How a per-token stream is stored, and who reads it."""

    dtype: type[np.generic]
    """With ``dims`` the narrowest: samples may have a wider one."""
    fill: float
    """Its value on padding, and on every token of a sample that has None. -1 is the largest value of an unsigned ``dtype``."""
    in_loss: bool
    """Whether a loss reads it, for its value or to tell which tokens are members. The model and the metrics may read any."""
    credit: bool = False
    """Whether algorithms write it."""
    like: str | None = None
    """The stream whose values it takes, instead of ``fill``, in a sample that has None."""
    dims: int = 0
    """Dimensions of a token's entry. Samples say their sizes; a batch none of whose samples has the stream has sizes of 0."""

    def padding(self, length: int, given: np.ndarray | None) -> np.ndarray:
        """``fill`` for ``length`` tokens, in the dtype and the sizes of ``given`` where samples decide on them."""
        like = (
            np.empty((0,) * (1 + self.dims), self.dtype)
            if given is None or not self.dims
            else given
        )
        return np.full((length, *like.shape[1:]), self.fill).astype(like.dtype)


Array = TypeVar("Array")
"""np.ndarray in a sample, torch.Tensor in a batch."""
OptionalArray = TypeVar("OptionalArray")
"""np.ndarray or None in a sample, torch.Tensor in a batch."""
NONE: Any = None
"""The default of an optional stream; Any, because the type of a batch's streams has no None."""


@dataclass(kw_only=True)
class TokenStreams(Generic[Array, OptionalArray]):
    """The per-token streams, each declared here alone: [L] in a sample, [B, L] in a batch, and a token's own dimensions after.

    Batches, packing and records follow from the declaration: a new stream is one line here.
    """

    __slots__ = ()  # the subclasses store the fields

    token_ids: Annotated[Array, Stream(dtype=np.int32, fill=0, in_loss=False)]
    """Prompt, sampled and env-provided tokens, exactly as the generator saw or sampled them."""
    loss_mask: Annotated[Array, Stream(dtype=np.bool_, fill=False, in_loss=True)]
    """True where the token was sampled by the policy."""
    generator_logprobs: Annotated[Array, Stream(dtype=np.float32, fill=0, in_loss=True)]
    """Log-probability under the generator's weights and temperature; 0 where nothing was sampled."""
    policy_versions: Annotated[Array, Stream(dtype=np.int32, fill=-1, in_loss=False)]
    """Policy version the token was sampled with; -1 where nothing was sampled."""
    replicas: Annotated[OptionalArray, Stream(dtype=np.int16, fill=-1, in_loss=False)] = NONE
    """Generator replica that sampled the token; -1 where nothing was sampled. None: not known."""
    role_ids: Annotated[OptionalArray, Stream(dtype=np.int8, fill=-1, in_loss=False)] = NONE
    """Whose message the token belongs to, an index into ROLES; -1 on template outside any message. Sampled tokens are the
    assistant's. None: not known."""
    advantages: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """None is legal only where no token has an rl weight."""
    rl_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True, like="loss_mask")
    ] = NONE
    """None means 1.0 on every loss-mask token."""
    ce_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """None means 0.0 everywhere."""
    ref_kl_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """None means 0.0 everywhere."""
    ref_logprobs: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = NONE
    """Log-probability of the same token under the reference model; needed where ref_kl_weights is not 0."""
    routes: Annotated[OptionalArray, Stream(dtype=np.uint8, fill=-1, in_loss=False, dims=2)] = NONE
    """[..., layers, k]: the experts that computed the token in the generator, where it was an input. The largest value of the
    dtype, uint8 or uint16, where that is not known, as of the last token sampled. None: of no token."""


STREAMS: dict[str, Stream] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TokenStreams, include_extras=True).items()
}
"""The declaration of each stream by its name, in the order of the fields."""

CREDIT_STREAMS = tuple(name for name, declared in STREAMS.items() if declared.credit)
"""What algorithms write: advantages, weights of the loss components, reference log-probabilities."""


@dataclass(kw_only=True, slots=True)
class TrainingSample(TokenStreams[np.ndarray, np.ndarray | None]):
    """One token sequence and its per-token streams. A rollout gives one or more of them.

    Two turns, whose second prompt is the first prompt, the first completion and two tokens of the env, are one sample::

                            prompt   completion   env     completion
        token_ids           P  P  P  C   C        E  E    C
        loss_mask           0  0  0  1   1        0  0    1
        generator_logprobs  0  0  0  log p(C)     0  0    log p(C)
        policy_versions    -1 -1 -1  7   7       -1 -1    8
    """

    temperature: float = 1.0
    """Sampling temperature: the trainer divides its logits by it, as the generator did."""
    task_name: str
    rollout_id: str
    adapter: str = ""
    """Which of the run's adapters it trains, and was sampled with; "" in a run that has no several."""
    reference_ids: np.ndarray | None = None
    """int32 [R]. What the trainer's reference scores for ``ref_logprobs``: other tokens first, such as a prompt with a
    demonstration, then this sample's from its first sampled one on. None: the algorithm sets ``ref_logprobs``."""
    trainer_logprobs: np.ndarray | None = None
    """float32 [L]. Log-probabilities of the sampled tokens under the weights with which the trainer's step began, at
    ``temperature``; 0 elsewhere. For the record: set by the first step that trains on the sample, where
    ``recorder.trainer_logprobs`` is True. None: not known."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class PrefixTrees:
    """The rows of a TrainingBatch as the model computes them: what samples of a row begin with alike is there once.

    Each tree is in depth-first order, so the positions tell it whole (`models/attention.py`). Two samples P A and P B, a
    token of padding in the batch and two in the trees::

        batch   token_ids   p0 p1 a2 a3   p0 p1 b2    0
                positions    0  1  2  3    0  1  2    0
                slots        0  1  2  3    0  1  4    0
        trees   token_ids   p0 p1 a2 a3   b2    0  0
                positions    0  1  2  3    2    0  1

    b2 is predicted from the hidden state of p1. The streams of p0 and p1 stay those of each sample, in the batch.
    """

    token_ids: torch.Tensor
    """int32 [B, T]."""
    positions: torch.Tensor
    """int32 [B, T]. From the root of the tree. 0 at a root, and at the padding that ends a row."""
    temperatures: torch.Tensor
    """float32 [B, T]. Samples of unequal temperature are in separate trees."""
    slots: torch.Tensor
    """int64 [B, L]. Where each token of the batch is among the B * T of the trees; 0 on padding."""

    def any_of(self, mask: torch.Tensor) -> torch.Tensor:
        """bool [B, T]: tokens that stand for one where ``mask``, bool [B, L], is True."""
        marked = mask.new_zeros(self.token_ids.numel())
        marked[self.slots[mask]] = True
        return marked.view_as(self.token_ids)

    def of_any(self, values: torch.Tensor, mask: torch.Tensor, otherwise: int) -> torch.Tensor:
        """[B, T, ...]: of each token the value, [B, L, ...], of one that it stands for where ``mask``, bool [B, L], is True."""
        taken = self.slots.new_full((self.token_ids.numel(),), -1)
        taken[self.slots[mask]] = mask.flatten().nonzero().squeeze(-1)
        found = values.flatten(0, 1)[taken.clamp(min=0)]
        known = (taken >= 0).view(-1, *[1] * (found.ndim - 1))
        return found.where(known, otherwise).view(*self.token_ids.shape, *values.shape[2:])

    def of_each(self, values: torch.Tensor) -> torch.Tensor:
        """[B, L]: of each token of the batch the value, [B, T], of the token that stands for it."""
        return (
            values.flatten().index_select(0, self.slots.flatten().clamp(min=0)).view_as(self.slots)
        )

    def to(self, device: torch.device | str) -> PrefixTrees:
        return PrefixTrees(**{f.name: getattr(self, f.name).to(device) for f in fields(self)})


@dataclass(kw_only=True, slots=True)
class TrainingBatch(TokenStreams["torch.Tensor", "torch.Tensor"]):
    """Rows of packed training samples. Padding has loss_mask False and every weight 0.

    A row of L = 8 holds sample a (3 tokens, of task 0), sample b (4 tokens, of task 1) and 1 token of padding::

        token_ids   a0 a1 a2   b0 b1 b2 b3    0
        positions    0  1  2    0  1  2  3    0
        loss_mask    0  1  1    0  0  1  1    0
        task_ids     0  0  0    1  1  1  1   -1
    """

    positions: torch.Tensor
    """int32 [B, L]. Restarts at 0 at each sample, and at the padding that ends a row."""
    temperatures: torch.Tensor
    """float32 [B, L]. 1 on padding."""
    task_ids: torch.Tensor
    """int32 [B, L]. Index into task_names; -1 on padding. Only metrics read it."""
    task_names: tuple[str, ...]
    trees: PrefixTrees | None = None
    """The same rows as the model computes them; None where no sample shares a prefix, and the model computes these."""
    adapter: str = ""
    """Of all its samples."""
    conditioned: PrefixTrees | None = None
    """The samples' ``reference_ids``, in rows of their own. ``slots`` is -1 where a token has no place in them. None where no
    sample of the step has any; else a batch without them has a row of padding, because all ranks compute together."""

    def __post_init__(self) -> None:
        if missing := [name for name in STREAMS if getattr(self, name) is None]:
            raise TypeError(f"a TrainingBatch needs every stream: {', '.join(missing)} missing")

    def to(self, device: torch.device | str) -> TrainingBatch:
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        moved: dict[str, Any] = {
            k: v.to(device) if hasattr(v, "to") else v for k, v in values.items()
        }
        return TrainingBatch(**moved)


@dataclass(kw_only=True, slots=True, frozen=True)
class DataParallel:
    """Which rows a trainer rank is sent. Ranks with the same coordinate are sent the same rows, and share the work on them."""

    rank: int
    """Index into the shares of a step's rows."""
    size: int
    """Shares of a step's rows. At most the number of trainer ranks."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossDenominators:
    """What each loss component is divided by: by default its member tokens over the whole optimizer step, which is all
    microbatches and all data-parallel ranks.

    Each is above 0; an empty component divides 0 by 1.
    """

    rl: float
    ce: float
    ref_kl: float
