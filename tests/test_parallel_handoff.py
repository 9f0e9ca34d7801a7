"""Prefill and decode workers of different tensor-parallel degrees: every hand-off converts, the tokens are exact."""

from __future__ import annotations

from typing import Any, Literal

import pytest

from kv_transfer.transfer_config import TransferConfig
from tests.mini_cluster import cluster_of
from tests.small_models import SmallModel, greedy, random_prompts

NUM_TOKENS = 10


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("qwen3", tmp_path_factory.mktemp("model"))


@pytest.mark.parametrize(
    ("prefill", "decode", "transport"), [(1, 2, "shm"), (2, 1, "tcp"), (2, 4, "shm"), (4, 2, "tcp")]
)
async def test_the_tokens_are_those_of_one_process(
    model: SmallModel, prefill: int, decode: int, transport: Literal["shm", "tcp"]
) -> None:
    config: dict[str, Any] = {
        "prefill_engine": {"tensor_parallel": prefill, "block_size": 8},
        "decode_engine": {"tensor_parallel": decode, "layers_per_group": 2},
        "transfer": TransferConfig(transport=transport),
    }
    prompts = random_prompts([3, 40, 70, 150], seed=prefill * 10 + decode)
    async with cluster_of(model, **config) as cluster:
        for number, prompt in enumerate(prompts):
            events = await cluster.generate(f"r{number}", prompt, greedy(NUM_TOKENS))
            assert [event.token_id for event in events] == model.hugging_face(prompt, NUM_TOKENS)
        again = await cluster.generate("again", prompts[3], greedy(NUM_TOKENS))  # from the prefix cache
        assert [event.token_id for event in again] == model.hugging_face(prompts[3], NUM_TOKENS)
