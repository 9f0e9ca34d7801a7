"""Prefill and decode workers of different tensor-parallel degrees: every hand-off converts, the tokens are exact."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from decode_workers.worker import DecodeWorkerConfig
from kv_transfer.transfer_config import TransferConfig
from tests.mini_cluster import cluster_of
from tests.small_models import SmallModel, greedy, random_prompts

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def two_heads(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """Of keys and values: four ranks have each of them twice."""
    return SmallModel("qwen3", tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def six_heads(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    """Two and three ranks cut them at different places."""
    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 6, "intermediate_size": 96}
    return SmallModel("llama", tmp_path_factory.mktemp("six"), **sizes)


@pytest.mark.parametrize(("prefill", "decode", "transport"), [(1, 2, "shm"), (4, 2, "tcp")])
async def test_with_two_heads(
    two_heads: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]
) -> None:
    await check(two_heads, prefill, decode, transport)


@pytest.mark.parametrize(("prefill", "decode", "transport"), [(2, 3, "shm"), (3, 1, "tcp")])
async def test_with_six_heads(
    six_heads: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]
) -> None:
    await check(six_heads, prefill, decode, transport)


async def check(model: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]) -> None:
    config: dict[str, Any] = {
        "prefill_engine": {"tensor_parallel": prefill, "block_size": 8},
        "decode_engine": {"tensor_parallel": decode, "layers_per_group": 2},
        "decode": DecodeWorkerConfig(overlap_steps=decode > 1),
        "transfer": TransferConfig(transport=transport),
    }
    prompts = random_prompts([3, 40, 70, 150], seed=prefill * 10 + decode)
    async with cluster_of(model, **config) as cluster:
        for number, prompt in enumerate([*prompts, prompts[3]]):  # the last one from the prefix cache
            events = await cluster.generate(f"r{number}", prompt, greedy(NUM_TOKENS))
            assert [event.token_id for event in events] == model.hugging_face(prompt, NUM_TOKENS)
