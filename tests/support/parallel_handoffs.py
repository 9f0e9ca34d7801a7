"""Hand-offs between workers of any two tensor-parallel degrees, held against Hugging Face."""

from __future__ import annotations

from typing import Any, Literal

from decode_workers.worker import DecodeWorkerConfig
from kv_transfer.transports.choose import TransferConfig
from tests.support.mini_cluster import cluster_of
from tests.support.small_models import SmallModel, greedy, random_prompts

NUM_TOKENS = 10


async def check_handoffs(model: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]) -> None:
    """Requests of several lengths, the last one with a prefix from the cache. A decoding group overlaps its steps."""
    config: dict[str, Any] = {
        "prefill_engine": {"tensor_parallel": prefill, "block_size": 8},
        "decode_engine": {"tensor_parallel": decode, "layers_per_group": 2},
        "decode": DecodeWorkerConfig(overlap_steps=decode > 1),
        "transfer": TransferConfig(transport=transport),
    }
    prompts = random_prompts([3, 40, 70, 150], seed=prefill * 10 + decode)
    async with cluster_of(model, **config) as cluster:
        for number, prompt in enumerate([*prompts, prompts[3]]):
            events = await cluster.generate(f"r{number}", prompt, greedy(NUM_TOKENS))
            assert [event.token_id for event in events] == model.hugging_face(prompt, NUM_TOKENS)
