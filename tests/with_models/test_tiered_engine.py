"""The local engine with host memory, against Hugging Face: wherever KV rests and moves, the tokens are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from decode_workers.local_engine import LocalEngine
from decode_workers.pacing import LayerKvConfig
from engine.kv.cache import KVLayout
from engine.model.config import ModelConfig
from engine.sequence import Sequence
from engine.steps.loading import EngineConfig, load_model
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.tier_shapes import SteadyClock

NUM_TOKENS = 24
LENGTHS = [30, 7, 44, 19, 52, 3, 33, 26]


@pytest.fixture(scope="module", params=["llama", "mistral"])
def small(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel(request.param, tmp_path_factory.mktemp(request.param))


def _engine(folder: Path, *, columns: int, host_columns: int, staging_columns: int, ring: int) -> LocalEngine:
    config = ModelConfig.from_folder(folder)
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=1,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        block_size=4,
        dtype=torch.float32,
    )
    model = load_model(
        EngineConfig(
            model_ref=str(folder),
            model_name="model",
            dtype="float32",
            block_size=4,
            layers_per_group=1,
            kv_blocks=columns * config.num_layers,
            host_bytes=host_columns * config.num_layers * layout.block_bytes,
            staging_bytes=staging_columns * ring * layout.block_bytes,
            ring_groups=ring,
            num_threads=1,
        )
    )
    assert model.staging_columns == staging_columns
    return LocalEngine(model, token_budget=24, layerkv=LayerKvConfig(growth_tokens=8), clock=SteadyClock())


@pytest.mark.parametrize(
    ("columns", "host_columns", "staging_columns", "ring"),
    [
        pytest.param(24, 400, 40, 2, id="offloaded and resumed"),
        pytest.param(24, 400, 20, 1, id="one slot, few columns"),
        pytest.param(24, 24, 24, 2, id="the host is full too"),
        pytest.param(6, 400, 60, 2, id="hardly a device"),
    ],
)
def test_tokens_are_hugging_face_s_wherever_layers_rest(
    small: SmallModel, columns: int, host_columns: int, staging_columns: int, ring: int
) -> None:
    engine = _engine(
        small.folder, columns=columns, host_columns=host_columns, staging_columns=staging_columns, ring=ring
    )
    prompts = random_prompts(LENGTHS)
    seqs = [
        Sequence(request_id=f"r{n}", attempt=0, params=greedy(NUM_TOKENS), prompt_token_ids=prompt)
        for n, prompt in enumerate(prompts)
    ]
    for seq in seqs:
        engine.add(seq)
    most_paused = 0
    while engine.scheduler.num_running or engine.scheduler.num_waiting:
        engine.step()
        most_paused = max(most_paused, engine.scheduler.num_paused)
    assert most_paused > 0
    assert [seq.output_token_ids for seq in seqs] == [small.hugging_face(prompt, NUM_TOKENS) for prompt in prompts]
    engine.scheduler.allocator.pool.check_idle()
    assert engine.scheduler.allocator.host_pool is not None
    engine.scheduler.allocator.host_pool.check_idle()
