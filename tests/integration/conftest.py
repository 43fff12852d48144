"""Fixtures of the integration tests: models on disk, a reference for log-probabilities, learners, and runs of the command."""

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from tests.integration.command_runs import Run
from tests.integration.learners import compute_in_float64, fused_config, learner_of
from tests.integration.models import MODEL, llama_folder
from torchtitan.experiments.rl.models.policy import policy_spec
from torchtitan.experiments.rl.training.learner import Learner
from torchtitan.experiments.rl.training.trainer import init_process_group


@pytest.fixture(scope="session")
def tied_model() -> str:
    return str(MODEL)


@pytest.fixture(scope="session")
def untied_model(tmp_path_factory) -> str:
    """A random model with a head of its own, saved by transformers; its weights are large, its distributions far from flat."""
    path = tmp_path_factory.mktemp("untied")
    config = Qwen3Config(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=1024,
        tie_word_embeddings=False,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).float().save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def llama_model(tmp_path_factory) -> str:
    """A model like Llama 3.2: tied head, rotary frequencies scaled; so much, and from so few positions on, that it shows in a test."""
    rope = dict(
        rope_type="llama3",
        rope_theta=1000.0,
        factor=32.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
    )
    rope["original_max_position_embeddings"] = 64
    return llama_folder(
        tmp_path_factory.mktemp("llama"), tie_word_embeddings=True, rope_parameters=rope
    )


@pytest.fixture(scope="session")
def reference():
    """``reference(path, token_ids, temperature)``: log-probabilities by transformers, entry t of token t, entry 0 is 0."""
    loaded: dict[str, PreTrainedModel] = {}

    @torch.no_grad()
    def logprobs(path: str, token_ids: np.ndarray, temperature: float = 1.0) -> np.ndarray:
        if path not in loaded:
            # Other attentions of transformers leave out a cap of the scores.
            options = {"dtype": torch.float32, "attn_implementation": "eager"}
            loaded[path] = AutoModelForCausalLM.from_pretrained(path, **options).eval()
        tokens = torch.from_numpy(np.asarray(token_ids, np.int64))[None]
        logits = loaded[path](tokens).logits[0, :-1].double() / temperature
        chosen = logits.log_softmax(-1).gather(1, tokens[0, 1:, None]).squeeze(1)
        return np.concatenate([[0.0], chosen.numpy()])

    return logprobs


@pytest.fixture(scope="module")
def fused_model(tmp_path_factory) -> str:
    """A torchtitan flavor with fused q, k and v, saved to a hub folder by torchtitan's adapter. Its distributions are far from
    flat."""
    folder = tmp_path_factory.mktemp("debugmodel")
    spec = policy_spec(fused_config(str(folder)), device="cpu", max_seq_len=512)
    model = spec.model.build()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.15)  # vectors are the norms'
    tensors = spec.state_dict_adapter(spec.model, None).to_hf(model.state_dict())
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="float32",
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=3072,
        num_hidden_layers=8,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True,
    )
    config.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory) -> Iterator[None]:
    """This process is the only rank. Threads are one, for the same bits each time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    init_process_group(
        device="cpu", rank=0, world_size=1, url=f"file://{tmp_path_factory.mktemp('ranks')}/store"
    )
    yield
    dist.destroy_process_group()
    torch.set_num_threads(threads)


@pytest.fixture
def exact(one_rank, tmp_path, monkeypatch) -> Callable[..., Learner]:
    """Makes learners that compute in float64."""
    compute_in_float64(monkeypatch.setattr)

    def build(**config) -> Learner:
        learner = learner_of(tmp_path, dtype=torch.float64, **config)
        assert {parameter.dtype for parameter in learner.model.parameters()} == {torch.float64}
        return learner

    return build


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Iterator[Callable[..., Run]]:
    """Starts runs of the command, each in a folder of its own; kills what is left of them."""
    runs = []

    def start(*words: str, **options) -> Run:
        runs.append(Run(tmp_path_factory.mktemp("command"), *words, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.kill()
