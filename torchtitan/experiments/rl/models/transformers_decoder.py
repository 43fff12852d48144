"""Any causal decoder of transformers: its own modules, with our attention and our head.

    config.json ──▶ transformers' config ──▶ modules ──▶ TransformersPolicy
                                             attention   `transformers_attention.py`
                                             head        `LogprobHead`

Parameters keep their names, which are those of the hub folder. What is special about a model, such
as scaled embeddings, several rotary bases, or norms in other places, comes with its modules.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import extract_weight_conversions_for_model
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from torchtitan.config import TORCH_DTYPE_MAP, CompileConfig, ParallelismConfig, TrainingConfig
from torchtitan.distributed import ParallelDims
from torchtitan.distributed.activation_checkpoint import ActivationCheckpointingConfig
from torchtitan.distributed.compile import apply_compile
from torchtitan.distributed.fsdp import disable_fsdp_gradient_division
from torchtitan.experiments.rl.compat.transformers import fill_buffers, with_modules
from torchtitan.experiments.rl.errors import ConfigError
from torchtitan.experiments.rl.models.decoder import LogprobModel
from torchtitan.experiments.rl.models.family import UNUSED_INIT, DecoderShape
from torchtitan.experiments.rl.models.hub import HubConfig
from torchtitan.experiments.rl.models.logprob_head import LogprobHead
from torchtitan.experiments.rl.models.lora import LoRA, adapted_layers, check_targets
from torchtitan.experiments.rl.models.transformers_attention import (
    ATTENTION,
    PROBE,
    AttentionNotes,
    AttentionRows,
    MaskedRows,
    RowsInBlocks,
    RowsNotHandedOn,
    hand_on_as_mask,
)
from torchtitan.protocols.model import BaseModel
from torchtitan.protocols.model_spec import ModelSpec
from torchtitan.protocols.module import Module
from torchtitan.protocols.state_dict_adapter import StateDictAdapter

Experts = Literal["eager", "batched_mm", "grouped_mm"]
"""transformers' ways to compute experts: one after the other, each token's own copy, or grouped."""


class TransformersPolicy(LogprobModel, BaseModel):
    """A decoder of transformers, returning log-probabilities."""

    @dataclass(kw_only=True, slots=True)
    class Config(BaseModel.Config):
        path: str
        """Hub folder. Of its files only config.json is read."""
        shape: DecoderShape
        embedding: str
        """Name of the embedding's weight."""
        logit_scale: float
        logit_softcap: float | None
        """See `LogprobHead.Config`."""
        chunk_tokens: int
        rows_as_mask: bool
        """True if the layers are given the rows as their mask, see `hand_on_as_mask`."""
        device: Literal["cpu", "cuda"]
        """Device that computes the model. Attention and experts are computed otherwise on each."""
        lora: LoRA.Config | None = None

        @property
        def enable_weight_tying(self) -> bool:
            """True if the head is the embedding. The name is torchtitan's."""
            return self.shape.tied

        def update_from_config(self, *, config: Any, **kwargs: Any) -> None:  # noqa: ANN401
            """Do nothing: transformers' decoders are divided by FSDP alone."""

        def get_nparams_and_flops(self, model: Module, seq_len: int) -> tuple[int, int]:
            """Return the number of parameters, and FLOPs a token, as torchtitan counts them.

            Args:
                model: the built model.
                seq_len: number of tokens of a sample.
            """
            shape = self.shape
            sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
            parameters = sum(sizes.values())
            experts = sum(size for name, size in sizes.items() if ".experts." in name)
            # An embedding that is not also the head is only looked up, which costs no FLOPs.
            looked_up = 0 if shape.tied else shape.vocab_size * shape.dim
            multiplied = parameters - looked_up - experts * (1 - shape.chosen / shape.experts)
            attention = shape.layers * shape.heads * 2 * shape.head_dim * seq_len
            return parameters, round(6 * (multiplied + attention))

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        experts = _experts_on(config.device, config.shape.experts)
        causal = causal_model(config.path, attention=ATTENTION, experts=experts)
        self._decoder_name = causal.base_model_prefix
        self.add_module(self._decoder_name, causal.base_model)
        # The padding may also be the end of a turn: padding_idx would keep it from being trained.
        self.tok_embeddings.padding_idx = None
        if config.rows_as_mask:
            hand_on_as_mask(self.layers)
        self.lm_head = LogprobHead.Config(
            in_features=config.shape.dim,
            out_features=config.shape.vocab_size,
            chunk_tokens=config.chunk_tokens,
            scale=config.logit_scale,
            softcap=config.logit_softcap,
            param_init=UNUSED_INIT,
        ).build()
        self._tie_weights()
        if config.lora is not None:
            self.requires_grad_(False)
            add_adapters(self.decoder, config.lora)

    @property
    def decoder(self) -> Any:  # noqa: ANN401 - transformers' modules declare no attributes
        """The module of transformers that computes the hidden states."""
        return self.get_submodule(self._decoder_name)

    @property
    def layers(self) -> nn.ModuleList:
        return self.decoder.layers

    @property
    def tok_embeddings(self) -> nn.Embedding:
        return self.decoder.get_input_embeddings()

    def pieces(self) -> dict[str, nn.Module]:
        """Return embedding, layers, last norm and head, by the prefix of their tensors' names."""
        found: dict[str, nn.Module] = {}
        for name, child in self.decoder.named_children():
            prefix = f"{self._decoder_name}.{name}."
            if child is self.layers:
                found |= {f"{prefix}{index}.": layer for index, layer in enumerate(child)}
            else:
                found[prefix] = child
        return found | {"lm_head.": self.lm_head}

    def hidden_states(
        self, tokens: torch.Tensor, positions: torch.Tensor, attention_masks: AttentionRows
    ) -> torch.Tensor:
        """Return the hidden states after the last norm, [B, L, dim].

        Args:
            tokens: int64 [B, L].
            positions: int64 [B, L], place of each token in its sample.
            attention_masks: the rows, from ``get_attention_masks``.
        """
        output = self.decoder(
            input_ids=tokens, position_ids=positions, use_cache=False, rows=attention_masks
        )
        return output.last_hidden_state

    def get_attention_masks(self, positions: torch.Tensor) -> AttentionRows:
        context = None if self.context is None else self.context.get_group()
        if self.config.device == "cpu":
            return RowsInBlocks.of(positions, context)
        return MaskedRows.of(positions, context, self.config.shape.windows)

    def _tie_weights(self) -> None:
        if self.config.shape.tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def init_states(self, *, buffer_device: torch.device | None = None) -> None:
        """Fill the buffers that no checkpoint holds, such as rotary frequencies.

        They are float32 at least, as transformers has them, whatever the parameters are. Parameters
        keep what they have: a checkpoint or the hub folder is loaded into them.

        Args:
            buffer_device: device of the buffers; None for that of the model.

        Raises:
            RuntimeError: transformers does not fill a buffer.
        """
        self._tie_weights()  # to_empty separates them
        fill_buffers(self.decoder, buffer_device)


class HubNames(StateDictAdapter):
    """Converter between the names of a TransformersPolicy and the hub's, which are the same."""

    model_config: TransformersPolicy.Config

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Leave out what a hub folder does not hold: a tied head, and adapters."""
        state = {name: tensor for name, tensor in state_dict.items() if ".lora_" not in name}
        if self.model_config.enable_weight_tying:
            state.pop("lm_head.weight", None)
        return state

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        """Put a tied head, which is the embedding, in its place."""
        state = dict(hf_state_dict)
        if self.model_config.enable_weight_tying and self.model_config.embedding in state:
            state["lm_head.weight"] = state[self.model_config.embedding]
        return state


def transformers_spec(
    hub: HubConfig,
    *,
    device: Literal["cpu", "cuda"],
    chunk_tokens: int,
    lora: LoRA.Config | None = None,
) -> ModelSpec:
    """Return the spec of the model in a hub folder, to be trained as transformers defines it.

    Args:
        hub: the folder's config.json.
        device: where the model is computed.
        chunk_tokens: number of tokens whose logits the head holds at once.
        lora: adapters of the layers; the base model is then frozen.

    Raises:
        ConfigError: the model can't be trained here, or a target of the adapters names no linear
            layer.
    """
    checked = checked_model(hub)
    causal = checked.causal
    experts = _experts_on(device, checked.shape.experts)
    if experts == "grouped_mm":
        try:
            causal_model(hub.path, attention=PROBE, experts=experts)
        except ValueError as error:
            raise _refusal(hub, f"transformers does not group its experts: {error}") from error
    embedding = causal.get_input_embeddings().weight
    (embedding_name,) = (
        name for name, parameter in causal.named_parameters() if parameter is embedding
    )
    if lora is not None:
        targets_of(causal.base_model, lora)
    return ModelSpec(
        name="transformers",
        flavor=hub.architecture,
        model=TransformersPolicy.Config(
            path=hub.path,
            shape=checked.shape,
            embedding=embedding_name,
            logit_scale=checked.logit_scale,
            logit_softcap=checked.logit_softcap,
            rows_as_mask=checked.rows_as_mask,
            chunk_tokens=chunk_tokens,
            device=device,
            lora=lora,
        ),
        parallelize_fn=parallelize,
        pipelining_fn=None,
        post_optimizer_build_fn=None,
        state_dict_adapter=HubNames,
    )


def longest_sample(hub: HubConfig) -> int:
    """Return the number of tokens that the model of a hub folder has positions for."""
    return checked_model(hub).causal.config.max_position_embeddings


# ---- which models can be trained


@dataclass(frozen=True, slots=True)
class CheckedModel:
    """A model of transformers that can be trained here."""

    causal: PreTrainedModel
    """The model on the meta device."""
    shape: DecoderShape
    logit_scale: float
    logit_softcap: float | None
    """Scale and cap of its logits, see `LogprobHead.Config`."""
    rows_as_mask: bool
    """See `TransformersPolicy.Config`."""


class _Unsupported(Exception):  # noqa: N818 - becomes a ConfigError
    """Reason for which a model of transformers can't be trained."""


def checked_model(hub: HubConfig) -> CheckedModel:
    """Build the model of a hub folder on the meta device, and check that it can be trained.

    Raises:
        ConfigError: transformers has no causal decoder of this architecture, or it is one that does
            something which the trainer would not do.
    """
    try:
        return _checked_model(hub.path, (Path(hub.path) / "config.json").read_bytes())
    except _Unsupported as reason:
        raise _refusal(hub, reason) from reason.__cause__


def _refusal(hub: HubConfig, reason: object) -> ConfigError:
    return hub.error(f"its architecture {hub.architecture!r} can't be trained here: {reason}")


@functools.lru_cache(maxsize=8)  # a plan asks for its model's sizes many times
def _checked_model(path: str, config_json: bytes) -> CheckedModel:  # noqa: ARG001
    """Build and check the model of a hub folder.

    Args:
        path: the folder.
        config_json: content of its config.json: part of the cache's key alone, so that a changed
            file is read again.

    Raises:
        _Unsupported: the model can't be trained.
    """
    hub = HubConfig.read(path)
    if hub.architecture not in _architectures():
        is_own = hub.get("auto_map") is not None
        raise _Unsupported(
            "it is code of the folder, which is not executed"
            if is_own
            else "it is no causal language model of transformers"
        )
    if hub.get("vision_config") is not None:
        raise _Unsupported("it takes images too, and only models of text alone are trained")
    if hub.get("quantization_config") is not None:
        raise _Unsupported("its weights are quantized: take the model's folder in bfloat16")
    try:
        # Routing needs values, which the meta device lacks; "batched_mm" copies experts instead.
        causal = causal_model(path, attention=PROBE, experts="batched_mm")
    except Exception as error:
        if isinstance(error, KeyError) and error.args == (PROBE,):
            raise _Unsupported(
                "its layers do not call transformers' attention interface"
            ) from error
        raise _Unsupported(f"transformers can't build it: {_line(error)}") from error
    built = type(causal).__name__
    if built != hub.architecture:
        raise _Unsupported(f"transformers builds a {built} by the model_type of its config.json")
    fault = next(_faults_of(causal), None)
    if fault is not None:
        raise _Unsupported(fault)
    decoder: Any = causal.base_model
    try:
        fill_buffers(decoder, device=None)
    except Exception as error:
        raise _Unsupported(f"its buffers can't be computed again: {_line(error)}") from error
    rows_as_mask = False
    try:
        notes = _attention_of(causal)
    except RowsNotHandedOn:
        rows_as_mask = True
        hand_on_as_mask(decoder.layers)
        try:
            notes = _attention_of(causal)
        except RowsNotHandedOn as error:
            raise _Unsupported(
                "its layers hand on neither keyword arguments nor a mask to the attention function"
            ) from error
    scale, softcap = _logits_of(causal)
    return CheckedModel(causal, _shape_of(causal, notes), scale, softcap, rows_as_mask)


def _line(error: Exception) -> str:
    """Return what an error of transformers says, in one line."""
    return " ".join(str(error).split())[:200]


def _architectures() -> set[str]:
    """Return the names of transformers' causal language models."""
    named = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return {name for names in named for name in ([names] if isinstance(names, str) else names)}


def causal_model(path: str, *, attention: str, experts: Experts) -> PreTrainedModel:
    """Return the model of a hub folder's config.json, without dropout, on the meta device.

    Args:
        path: the folder.
        attention: name of a function of transformers' attention interface.
        experts: transformers' way to compute experts, if the model has some.
    """
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    for name, value in config.to_dict().items():
        if "drop" in name and isinstance(value, float):
            setattr(config, name, 0.0)  # engines drop nothing either
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(
            config, attn_implementation=attention, experts_implementation=experts
        )


def _experts_on(device: Literal["cpu", "cuda"], experts: int) -> Experts:
    """Return how to compute experts: grouped on GPUs, one by one on CPUs, which lack the kernel."""
    return "grouped_mm" if device == "cuda" and experts > 1 else "eager"


def _faults_of(causal: PreTrainedModel) -> Iterator[str]:
    """Yield each reason for which a model can't be trained as transformers defines it."""
    config: Any = causal.config
    decoder: Any = causal.base_model
    head: Any = causal.get_output_embeddings()
    if decoder is causal or not isinstance(getattr(decoder, "layers", None), nn.ModuleList):
        yield "its layers are not a list called layers"
    if extract_weight_conversions_for_model(causal) is not None:
        yield "transformers holds its weights in another form than the hub"
    if head is None or head is not getattr(causal, "lm_head", None):
        yield "its head is not called lm_head"
    elif getattr(head, "bias", None) is not None:
        yield "its head has a bias"
    if getattr(config, "max_position_embeddings", None) is None:
        yield "its config.json does not say how many positions it has"
    parameters = {name for name, _ in causal.named_parameters(remove_duplicate=False)}
    for name in causal.state_dict().keys() - parameters:
        yield f"its weights have a buffer, {name}"
    for rope_type in sorted(_rope_types(config) & {"dynamic", "longrope"}):
        yield (
            f"its rotary angles ({rope_type!r}) depend on the longest of the samples that are "
            "computed together"
        )
    if any(isinstance(module, nn.Conv1d) for module in decoder.modules()):
        yield "its layers mix tokens by convolutions too"
    for name, _ in decoder.named_parameters(recurse=False):
        yield f"it has a parameter beside its layers, {name}"


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """Return the kinds of rotary angles of a model, which layers of several kinds may have."""
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer = [values for values in parameters.values() if isinstance(values, dict)]
    return {str(values.get("rope_type")) for values in [parameters, *by_layer]}


def _attention_of(causal: PreTrainedModel) -> AttentionNotes:
    """Return how a model's layers attend, by a pass on the meta device.

    Raises:
        RowsNotHandedOn: they hand on no keyword arguments to their attention.
        _Unsupported: they do something that `transformers_attention.attend` does not do, or not
            each of them calls the attention interface once.
    """
    decoder: Any = causal.base_model
    notes = AttentionNotes()
    tokens = torch.zeros(1, 4, dtype=torch.long, device="meta")
    try:
        decoder(input_ids=tokens, position_ids=tokens, use_cache=False, rows=notes)
    except RowsNotHandedOn:
        raise
    except Exception as error:
        cause = f"{type(error).__name__}: {_line(error)}"
        raise _Unsupported(f"its forward pass fails ({cause})") from error
    if notes.fault:
        raise _Unsupported(notes.fault)
    callers = [id(module) for module in notes.modules]
    layers = [[id(module) for module in layer.modules()] for layer in decoder.layers]
    if len(callers) != len(layers) or any(not set(callers) & set(layer) for layer in layers):
        raise _Unsupported("not each of its layers calls transformers' attention interface once")
    return notes


class _FixedHiddenStates(nn.Module):
    """Stand-in for a decoder, which returns the hidden states that it was made with."""

    def __init__(self, hidden: torch.Tensor):
        super().__init__()
        self._hidden = hidden

    def forward(self, *_: object, **__: object) -> MoeModelOutputWithPast:
        return MoeModelOutputWithPast(last_hidden_state=self._hidden)  # type: ignore[arg-type]


def _logits_of(causal: PreTrainedModel) -> tuple[float, float | None]:
    """Return the scale and the cap of a model's logits, as its own forward pass has them.

    The pass is given hidden states and a head that returns them, so that what it returns is what it
    does to logits. Its slope at 0 is the scale, and what it makes of huge ones is the cap.

    Raises:
        _Unsupported: it does something else.
    """
    small, huge = 2.0**-40, 2.0**60
    products = torch.cat(
        [torch.tensor([small, huge], dtype=torch.float64), torch.linspace(-99, 99, 199).double()]
    )
    hidden = _FixedHiddenStates(products.view(1, -1, 1))
    stand_in = with_modules(causal, **{causal.base_model_prefix: hidden, "lm_head": nn.Identity()})
    tokens = torch.zeros(1, len(products), dtype=torch.long)
    try:
        logits = stand_in(input_ids=tokens, use_cache=False).logits.flatten().double()
    except Exception as error:
        raise _Unsupported(f"what it does to its logits can't be tried ({_line(error)})") from error
    scale, softcap = float(logits[0]) / small, None
    expected = scale * products
    if logits[1] < expected[1] / 2:
        softcap = float(logits[1])
        expected = softcap * torch.tanh(expected / softcap)
    if not torch.allclose(logits, expected, rtol=1e-5, atol=1e-5):
        raise _Unsupported("it changes its logits by more than a scale and a cap")
    return scale, softcap


_EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")
"""Fields that hold the number of experts of a layer."""


def _shape_of(causal: PreTrainedModel, attention: AttentionNotes) -> DecoderShape:
    """Return the sizes of a model. Of numbers of heads that differ, the greatest common divisor.

    Ranks that divide it divide the heads of every layer.
    """
    config: Any = causal.config
    embedding: Any = causal.get_input_embeddings()
    layers: Any = causal.base_model.layers
    head: Any = causal.get_output_embeddings()
    experts = max(getattr(config, name, None) or 1 for name in _EXPERTS)
    width: Any = getattr(config, "intermediate_size", 0)
    chosen = 1
    if experts > 1:
        width = getattr(config, "moe_intermediate_size", None) or width
        chosen = config.num_experts_per_tok
    return DecoderShape(
        vocab_size=embedding.num_embeddings,
        dim=embedding.embedding_dim,
        layers=len(layers),
        heads=math.gcd(*attention.heads),
        kv_heads=math.gcd(*attention.kv_heads),
        head_dim=max(attention.head_dims),
        feed_forward_width=max(width) if isinstance(width, list) else width,
        rotations=0,
        tied=head.weight is embedding.weight,
        experts=experts,
        chosen=chosen,
        windows=frozenset(attention.windows),
    )


# ---- adapters


def _linears_of(decoder: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers that can have adapters, by their names in the decoder.

    They are those of the layers, but for the routers of experts.
    """
    return {
        name: module
        for name, module in decoder.named_modules()
        if name.startswith("layers.")
        and type(module) is nn.Linear  # a subclass may compute something else
        and name.rpartition(".")[2] not in ("gate", "router")
    }


def targets_of(decoder: nn.Module, lora: LoRA.Config) -> list[str]:
    """Return the names of the linear layers that have adapters.

    Raises:
        ConfigError: a target names no linear layer of the layers.
    """
    adaptable = {name.rpartition(".")[2] for name in _linears_of(decoder)}
    targets = sorted(adaptable) if lora.targets == "all-linear" else list(lora.targets)
    check_targets(targets, adaptable, lora)
    return targets


def adapted_modules(hub: HubConfig, lora: LoRA.Config) -> list[str]:
    """Return the names of the linear layers that have adapters in the model of a hub folder."""
    return targets_of(checked_model(hub).causal.base_model, lora)


def add_adapters(decoder: nn.Module, lora: LoRA.Config) -> None:
    """Put an adapter beside each linear layer that the config names."""
    targets = targets_of(decoder, lora)
    linears = {
        name: linear
        for name, linear in _linears_of(decoder).items()
        if name.rpartition(".")[2] in targets
    }
    for name, adapted in adapted_layers(linears, lora).items():
        parent, _, attribute = name.rpartition(".")
        setattr(decoder.get_submodule(parent), attribute, adapted)


# ---- ranks


def parallelize(
    model: TransformersPolicy,
    *,
    parallel_dims: ParallelDims,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    compile_config: CompileConfig,
    ac_config: ActivationCheckpointingConfig | None,
    dump_folder: str,
) -> None:
    """Recompute, compile and divide the model layer by layer, as torchtitan's decoders are.

    The arguments are those of torchtitan's functions of this kind. A copy of the model is divided
    by FSDP; there may be several copies.
    """
    if ac_config is not None:
        ac_config.build(dump_folder=dump_folder).apply(model)
    if compile_config.enable:
        apply_compile(model, compile_config=compile_config, parallel_dims=parallel_dims)
    names = ["dp_replicate", "fsdp"] if parallel_dims.dp_replicate_enabled else ["fsdp"]
    options: dict[str, Any] = {
        "mesh": parallel_dims.get_mesh(names),
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=TORCH_DTYPE_MAP[training.mixed_precision_param],
            reduce_dtype=TORCH_DTYPE_MAP[training.mixed_precision_reduce],
            cast_forward_inputs=False,
        ),
    }
    if training.enable_cpu_offload:
        options["offload_policy"] = CPUOffloadPolicy()
    for layer in model.layers:
        fully_shard(layer, **options)
    layers = set(model.layers)
    others = [
        piece
        for piece in model.pieces().values()
        if piece not in layers and any(True for _ in piece.parameters())
    ]
    if not model.config.enable_weight_tying:
        fully_shard(model.tok_embeddings, **options)
        others.remove(model.tok_embeddings)
    # The last norm and the head stay gathered, because the backward pass begins with them.
    fully_shard(others, **options, reshard_after_forward=False)
    fully_shard(model, **options)
    disable_fsdp_gradient_division(model)  # the loss is divided by what all ranks count
