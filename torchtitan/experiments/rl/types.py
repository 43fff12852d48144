"""Records that flow from rollouts to the trainer: training samples, batches, loss denominators.

At the end are the checks of numbers that user code gives.

Every per-token stream is aligned with ``token_ids``: entry ``t`` describes token ``t``, never its
neighbour. The log-probability of token ``t`` is that of the token given all tokens before it in its
sample. The first token of a sample has no log-probability and never contributes to a loss.

Shapes: B rows of a batch, L tokens of a row or sample, T tokens of a row of prefix trees, R tokens
that a reference model scores.
"""

from __future__ import annotations

import math
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

from torchtitan.experiments.rl.frozen import Freezable

if TYPE_CHECKING:  # the report and the viewers import this module, and start fast without torch
    import torch

Role = Literal["system", "developer", "user", "assistant", "tool"]
ROLES = get_args(Role)
"""Authors of messages. ``role_ids`` index into them."""

ROLE_IDS = {role: index for index, role in enumerate(ROLES)}


@dataclass(kw_only=True, slots=True, frozen=True)
class Stream:
    """Declaration of a per-token stream: its storage, and which components read and write it."""

    dtype: type[np.generic]
    """Element type. If ``dims`` is above 0, a sample may have a wider one."""
    fill: float
    """Value on padding, and, if ``like`` is None, on every token of a sample that lacks the stream.
    -1 stands for the largest value of an unsigned ``dtype``."""
    in_loss: bool
    """True if a loss of the library reads the stream, as a value or as a mask. A test checks that
    the losses read these streams and no others. The model and the metrics may read any stream."""
    credit: bool = False
    """True if algorithms may write the stream. ``Algorithm.score_rollout`` may also write the
    streams that ``Algorithm.replaces`` names. An algorithm that changes any other stream fails its
    rollout in ``score_rollout``, and every rollout of its group in ``score_group``."""
    like: str | None = None
    """Name of another stream. A sample that lacks this stream gets the values of the other one in
    a batch. If None, the sample gets ``fill``."""
    dims: int = 0
    """Number of dimensions of each token's entry; 0 for a number. The samples' arrays decide the
    sizes of these dimensions. They are 0 in a batch in which no sample has the stream."""

    def padding(self, length: int, given: np.ndarray | None) -> np.ndarray:
        """Return padding for ``length`` tokens.

        Args:
            given: some array of the stream that the padding goes with; None if there is none. If
                ``dims`` is above 0, the padding has the dtype of this array and the sizes of its
                entries.
        """
        dtype, sizes = np.dtype(self.dtype), (0,) * self.dims
        if given is not None and self.dims > 0:
            dtype, sizes = given.dtype, given.shape[1:]
        # Cast after filling: -1 becomes the largest value of an unsigned dtype.
        return np.full((length, *sizes), self.fill).astype(dtype)


Array = TypeVar("Array")
"""np.ndarray in a sample, torch.Tensor in a batch."""
OptionalArray = TypeVar("OptionalArray")
"""np.ndarray or None in a sample, torch.Tensor in a batch."""
UNSET: Any = None
"""Default of an optional stream: None, typed Any because no stream of a batch is None."""


@dataclass(kw_only=True)
class TokenStreams(Generic[Array, OptionalArray]):
    """The per-token streams: [L] in a sample, [B, L] in a batch, then a token's own dimensions.

    A stream that is declared here is packed, batched and recorded without further code. The sample
    builder (rollouts/samples.py) or an algorithm sets it. An rl loss is given the streams of
    `RLTokens` (losses/variants.py) alone, so one that it should read is added there too.
    """

    __slots__ = ()  # the subclasses store the fields

    token_ids: Annotated[Array, Stream(dtype=np.int32, fill=0, in_loss=False)]
    """Prompt, sampled and env-provided tokens, exactly as the generator saw or sampled them."""
    loss_mask: Annotated[Array, Stream(dtype=np.bool_, fill=False, in_loss=True)]
    """True on the tokens that the policy sampled. False everywhere in a dataset's conversation."""
    generator_logprobs: Annotated[Array, Stream(dtype=np.float32, fill=0, in_loss=True)]
    """Log-probability under the generator's weights and temperature; 0 where nothing was
    sampled."""
    policy_versions: Annotated[Array, Stream(dtype=np.int32, fill=-1, in_loss=False)]
    """Policy version that sampled the token; -1 where nothing was sampled."""
    replicas: Annotated[OptionalArray, Stream(dtype=np.int16, fill=-1, in_loss=False)] = UNSET
    """Generator replica that sampled the token; -1 where nothing was sampled. A sample has None if
    the replicas are not known."""
    role_ids: Annotated[OptionalArray, Stream(dtype=np.int8, fill=-1, in_loss=False)] = UNSET
    """Author of the token's message, an index into ROLES; -1 on template outside any message.
    Sampled tokens are the assistant's. A sample has None if the roles are not known."""
    advantages: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = UNSET
    """Advantage of the token. A sample may have None only if all its rl weights are 0."""
    rl_weights: Annotated[
        OptionalArray,
        Stream(dtype=np.float32, fill=0, in_loss=True, credit=True, like="loss_mask"),
    ] = UNSET
    """Weight of the token in the policy-gradient loss. None means 1.0 on every sampled token."""
    ce_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = UNSET
    """Weight of the token in the cross-entropy loss. None means 0.0 everywhere."""
    ref_kl_weights: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = UNSET
    """Weight of the token in the KL divergence to a reference. None means 0.0 everywhere."""
    ref_logprobs: Annotated[
        OptionalArray, Stream(dtype=np.float32, fill=0, in_loss=True, credit=True)
    ] = UNSET
    """Log-probability of the token under the reference model. Required on every token whose
    ``ref_kl_weights`` is not 0."""
    routes: Annotated[OptionalArray, Stream(dtype=np.uint8, fill=-1, in_loss=False, dims=2)] = UNSET
    """[..., layers, k]: ids of the experts that the generator's router chose for the token as an
    input. The dtype is uint8 or uint16, and its largest value marks an unknown choice, as for the
    last sampled token. A sample has None if no choice is known."""


STREAMS: dict[str, Stream] = {
    name: hint.__metadata__[0]
    for name, hint in get_type_hints(TokenStreams, include_extras=True).items()
}
"""Declaration of each stream by its name, in the order of the fields."""

CREDIT_STREAMS = tuple(name for name, declared in STREAMS.items() if declared.credit)
"""Names of the streams that algorithms write: advantages, weights of the loss components, and
log-probabilities of the reference."""


@dataclass(kw_only=True, slots=True)
class TrainingSample(Freezable, TokenStreams[np.ndarray, np.ndarray | None]):
    """One token sequence and its per-token streams. A rollout makes one or more of them.

    A sample is read-only when its rollout has ended. An algorithm writes to a draft of it.

    A rollout of two turns, whose second prompt appends two tokens of the env to the first prompt
    and completion, is one sample::

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
    """Name of the LoRA adapter that sampled the completion, and that the sample trains. "" in a run
    without several adapters."""
    reference_ids: np.ndarray | None = None
    """int32 [R]. Sequence that the trainer's reference scores in this sample's place, to get
    ``ref_logprobs``: another prompt, such as one with a demonstration, then this sample from its
    first sampled token on. None if the algorithm sets ``ref_logprobs`` itself, or gives the sample
    no ref_kl weight."""
    trainer_logprobs: np.ndarray | None = None
    """float32 [L]. Log-probabilities of the sampled tokens at ``temperature``, under the weights
    with which the trainer's step began; 0 elsewhere. For the record only: the first step that
    trains on the sample sets it if ``recorder.trainer_logprobs`` is True. None if not set."""

    def __len__(self) -> int:
        return len(self.token_ids)


@dataclass(kw_only=True, slots=True)
class PrefixTrees:
    """Rows of a TrainingBatch as the model computes them, with each shared prefix stored once.

    Each tree is in depth-first order, so the positions alone describe it (`models/attention.py`).
    Two samples P A and P B, with one token of padding in the batch and two in the trees::

        batch   token_ids   p0 p1 a2 a3   p0 p1 b2    0
                positions    0  1  2  3    0  1  2    0
                slots        0  1  2  3    0  1  4    0
        trees   token_ids   p0 p1 a2 a3   b2    0  0
                positions    0  1  2  3    2    0  1

    b2 is predicted from the hidden state of p1. Streams that differ between the samples, such as
    weights, stay in the TrainingBatch.
    """

    token_ids: torch.Tensor
    """int32 [B, T]."""
    positions: torch.Tensor
    """int32 [B, T]. Distance from the root of the tree. 0 at a root, and where a row's padding
    begins."""
    temperatures: torch.Tensor
    """float32 [B, T]. Samples of different temperatures are in separate trees."""
    slots: torch.Tensor
    """int64 [B, L]. Index of each token of the batch among all tokens of the trees, counted row by
    row. 0 on padding. In ``TrainingBatch.conditioned``, -1 on a token that the reference does not
    score, padding included."""

    def mask_to_trees(self, mask: torch.Tensor) -> torch.Tensor:
        """Return which tokens of the trees stand for a selected token of the batch, bool [B, T].

        Args:
            mask: bool [B, L], True on the selected tokens. False wherever ``slots`` is -1.
        """
        selected = mask.new_zeros(self.token_ids.numel())
        selected[self.slots[mask]] = True
        return selected.view_as(self.token_ids)

    def values_to_trees(
        self, values: torch.Tensor, mask: torch.Tensor, otherwise: int
    ) -> torch.Tensor:
        """Return for each token of the trees the value of a selected token that it stands for.

        If it stands for several selected tokens, the value is that of any one of them.

        Args:
            values: [B, L, ...].
            mask: bool [B, L], True on the selected tokens. False wherever ``slots`` is -1.
            otherwise: value of a token that stands for no selected one.

        Returns:
            [B, T, ...].
        """
        source = self.slots.new_full((self.token_ids.numel(),), -1)
        source[self.slots[mask]] = mask.flatten().nonzero().squeeze(-1)
        found = values.flatten(0, 1)[source.clamp(min=0)]
        has_source = (source >= 0).view(-1, *[1] * (found.ndim - 1))
        return found.where(has_source, otherwise).view(*self.token_ids.shape, *values.shape[2:])

    def values_to_batch(self, values: torch.Tensor) -> torch.Tensor:
        """Return for each token of the batch, [B, L], the value of the token that stands for it.

        Where ``slots`` is -1 the value has no meaning.

        Args:
            values: [B, T].
        """
        slots = self.slots.flatten().clamp(min=0)
        return values.flatten().index_select(0, slots).view_as(self.slots)

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
    """int32 [B, L]. Index into ``task_names``; -1 on padding. Only metrics tell tasks apart by it;
    the model tells padding by it."""
    task_names: tuple[str, ...]
    trees: PrefixTrees | None = None
    """Layout of these rows with each shared prefix once. If set, the model computes the rows of the
    layout in place of the batch's own. None if no sample shares a prefix."""
    adapter: str = ""
    """Name of the adapter that every sample in this batch trains."""
    conditioned: PrefixTrees | None = None
    """Layout of the samples' ``reference_ids``. Its rows may differ from those of this batch in
    number and length; ``slots``, [B, L], says where the tokens of this batch are in them.

    None if no sample of the step has ``reference_ids``. Else every batch of the step has it, with a
    row of padding if need be, because the ranks compute together."""

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
    """Data-parallel rank of a trainer process, and number of data-parallel ranks.

    Processes with the same rank are sent the same rows, and share the work on them.
    """

    rank: int
    """Index of the share of a step's rows that the process is sent."""
    size: int
    """Number of shares of a step's rows. At most the number of trainer processes."""


@dataclass(kw_only=True, slots=True, frozen=True)
class LossDenominators:
    """Divisors of the loss components.

    By default each is the number of tokens that contribute to the component in the whole optimizer
    step, over all microbatches and data-parallel ranks; 1 if no token does. ``rl_denominator`` and
    its siblings (`losses.loss.LossConfig`) choose another count, or a fixed number.
    """

    rl: float
    ce: float
    ref_kl: float


# ---- checks of numbers that user code gives

FLOAT32_MAX = float(np.finfo(np.float32).max)


def is_finite_number(value: Any) -> bool:  # noqa: ANN401 - a user's value
    """Return True for a number or bool of Python or numpy that is neither NaN nor infinite.

    Strings and arrays are not numbers.
    """
    try:
        is_scalar = hasattr(value, "__float__") and not getattr(value, "shape", ())
        return is_scalar and math.isfinite(value)
    except BaseException:  # noqa: BLE001 - the value is the user's, and so is its __float__
        return False


def finite_float(value: Any) -> float | None:  # noqa: ANN401 - a user's value
    """Return the value as a float; None if it is not a finite number that float32 holds."""
    number = value
    if type(value) is not float:
        try:
            number = float(value) if is_finite_number(value) else math.nan
        except Exception:  # noqa: BLE001 - the value is the user's, and so is its __float__
            return None
    return number if abs(number) <= FLOAT32_MAX else None  # a NaN is not below anything


def first_non_finite(values: np.ndarray) -> int | None:
    """Return the index of the first NaN or infinity of a float [T]; None if all are finite."""
    are_finite = np.isfinite(values)
    if np.count_nonzero(are_finite) == len(values):
        return None
    return int(np.argmin(are_finite))


def checked_stream(name: str, values: Any, length: int) -> np.ndarray:  # noqa: ANN401 - the user's
    """Return the values as an array [length] of the stream's declared dtype.

    Raises:
        ValueError: the values are not one number for each token.
    """
    dtype = STREAMS[name].dtype
    if type(values) is np.ndarray and values.dtype == dtype and values.shape == (length,):
        return values
    wanted = f"want {length} numbers, one for each token"
    try:
        array = np.asarray(values)
    except BaseException:  # noqa: BLE001 - unequal lengths; a user's class may raise anything
        raise ValueError(
            f"{name} is a {type(values).__name__} that is no array: {wanted}"
        ) from None
    if array.dtype.kind not in "biuf":
        raise ValueError(f"{name} has a {type(values).__name__} of dtype {array.dtype}: {wanted}")
    if array.shape != (length,):
        raise ValueError(f"{name} has shape {array.shape}: {wanted}")
    # A number too large for float32 becomes infinite, which is refused after this.
    with np.errstate(over="ignore", invalid="ignore"):
        return array.astype(dtype)
