"""vLLM's prefix cache, down to the last token of a prompt.

vLLM shares the full blocks of a prompt. A block has 32 tokens on CPU, so that a short prompt has none, and each rollout
of a group computes all of it again. This connector keeps the last block of a prompt, which is filled in part, and copies it for
each request that begins with the same tokens. Such a request computes one token, the prompt's last.

A prompt of 41 tokens in blocks of 32, by the rollouts of a group:

    tokens     0 .. 31        32 .. 39            40
    first      computed       computed, kept      computed
    others     vLLM's cache   copied              computed

The others wait for one engine step, in which the first is computed. What is kept is found by the prompt's tokens, its adapter
and its cache salt, which has the weights' version: keys and values of other weights are never used.
"""

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)


@dataclass
class Copies(KVConnectorMetadata):
    """What a step copies: pairs of a block of the cache and a place among the kept ones."""

    load: list[tuple[int, int]] = field(default_factory=list)
    """Before the step's forward, from the place to the block."""
    save: list[tuple[int, int]] = field(default_factory=list)
    """After it, from the block to the place."""


class LastBlocks(KVConnectorBase_V1):
    """One half is with vLLM's scheduler and says what is copied; the other is with each worker and copies."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        self._block_size: int = vllm_config.cache_config.block_size
        share = vllm_config.kv_transfer_config.kv_connector_extra_config["kept_share"]
        self._blocks: int = kv_cache_config.num_blocks
        self._capacity = max(
            1, min(vllm_config.scheduler_config.max_num_seqs, int(share * self._blocks))
        )
        # Of the scheduler's half.
        self._places: OrderedDict[Hashable, int] = OrderedDict()
        """By prompt, the longest unused first."""
        self._computing: dict[Hashable, int] = {}
        """Blocks that the step under way fills, by prompt."""
        self._load: list[tuple[int, int]] = []
        # Of a worker's half.
        self._caches: list[torch.Tensor] = []
        self._kept: list[torch.Tensor] = []
        self._copies = Copies()

    # In the scheduler.

    def get_num_new_matched_tokens(
        self, request: Any, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """How many tokens are copied into the request's blocks; None: not in this step."""
        prompt, tail = self._tail(request)
        if not tail or num_computed_tokens != request.num_prompt_tokens - 1 - tail:
            return 0, False
        if prompt in self._computing:
            return None, False
        return (tail if prompt in self._places else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        prompt, tail = self._tail(request)
        if not tail:
            return
        block = blocks.get_block_ids()[0][(request.num_prompt_tokens - 1) // self._block_size]
        if num_external_tokens:
            self._places.move_to_end(prompt)
            self._load.append((block, self._places[prompt]))
        elif prompt not in self._places:
            self._computing[prompt] = block

    def build_connector_meta(self, scheduler_output: Any) -> Copies:
        save: dict[
            int, int
        ] = {}  # by place: index_copy_ leaves open which of two blocks for one place it keeps
        for prompt, block in self._computing.items():
            place = (
                self._places.popitem(last=False)[1]
                if len(self._places) == self._capacity
                else len(self._places)
            )
            self._places[prompt] = place
            save[place] = block
        copies = Copies(load=self._load, save=[(block, place) for place, block in save.items()])
        self._load, self._computing = [], {}
        return copies

    def _tail(self, request: Any) -> tuple[Hashable, int]:
        """What names the prompt without its last token, and how many of its tokens are in its last block.

        0 tokens where nothing is shared: the full blocks hold all of it, or the request asks for the log-probabilities of its
        prompt, or it has sampled already and was preempted.
        """
        end = request.num_prompt_tokens - 1
        full, tail = divmod(end, self._block_size)
        if request.skip_reading_prefix_cache or request.num_output_tokens:
            return None, 0
        before = (
            request.block_hashes[full - 1] if full else None
        )  # a block's hash is of all tokens up to its end
        adapter = request.lora_request.lora_int_id if request.lora_request else 0
        return (
            adapter,
            request.cache_salt,
            before,
            tuple(request.prompt_token_ids[end - tail : end]),
        ), tail

    # In a worker.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert not self._caches, (
            "vLLM has one connector per process: close the other engine of this process first"
        )
        self._caches = list(kv_caches.values())
        shapes = {tuple(cache.shape) for cache in self._caches}
        assert all(shape[0] == self._blocks for shape in shapes), (
            f"{shapes}: the first dimension counts {self._blocks} blocks"
        )
        self._kept = [cache.new_empty((self._capacity, *cache.shape[1:])) for cache in self._caches]

    def keep_too(self, blocks: torch.Tensor) -> None:
        """[blocks, ...]: what else there is of each block of the cache, and is copied with it."""
        assert len(blocks) == self._blocks
        self._caches.append(blocks)
        self._kept.append(blocks.new_empty((self._capacity, *blocks.shape[1:])))

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, Copies)
        self._copies = connector_metadata

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._copy(self._kept, self._caches, [(place, block) for block, place in self._copies.load])

    def wait_for_save(self) -> None:
        self._copy(self._caches, self._kept, self._copies.save)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(
        self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any
    ) -> None:
        pass

    @staticmethod
    def _copy(
        sources: list[torch.Tensor], targets: list[torch.Tensor], pairs: list[tuple[int, int]]
    ) -> None:
        if not pairs:
            return
        here, there = torch.tensor(pairs).unbind(1)
        for source, target in zip(sources, targets, strict=True):
            target.index_copy_(0, there, source.index_select(0, here))
