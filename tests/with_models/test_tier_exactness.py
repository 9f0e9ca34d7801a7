"""Every way for KV to lie in the tiers, against Hugging Face: the choices are combined so that each meets each other.

Small random models in float32 in a local engine; for whole clusters see `test_tier_exactness_in_clusters`. A case that
does not make the tiers do what it is about fails, exact or not.
"""

from __future__ import annotations

from typing import Any

import pytest

from decode_workers.local_engine import LocalEngine
from decode_workers.offload_policy import OffloadPolicy
from decode_workers.pacing import LayerKvConfig
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence, StepPlan
from engine.steps.loading import EngineConfig, LoadedModel, load_model
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.thoroughness import in_test_long
from tests.support.tier_shapes import (
    LAYER_TOKEN_BYTES,
    NUM_LAYERS,
    Models,
    SteadyClock,
    TierShape,
    small_models,
    watching,
)

LENGTHS = [30, 7, 44, 19, 60, 3, 33, 48]
SAMPLED = SamplingParams(max_tokens=24, seed=11, temperature=0.9, top_p=0.95, ignore_eos=True)
PENALISED = SamplingParams(
    max_tokens=24,
    seed=5,
    temperature=0.7,
    top_k=40,
    presence_penalty=0.6,
    frequency_penalty=0.4,
    repetition_penalty=1.2,
    ignore_eos=True,
)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return small_models(tmp_path_factory)


def _local_engine(
    model: SmallModel, family: str, shape: TierShape, host_tokens: int
) -> tuple[LocalEngine, LoadedModel]:
    host_bytes = host_tokens * NUM_LAYERS * LAYER_TOKEN_BYTES[family]
    config: dict[str, Any] = shape.engine(family) | {"model_name": "model", "dtype": "float32", "num_threads": 1}
    loaded = load_model(EngineConfig(model_ref=str(model.folder), host_bytes=host_bytes, **config))
    assert loaded.layout.num_layer_groups == shape.num_groups
    layerkv = LayerKvConfig(growth_tokens=8)
    return LocalEngine(loaded, token_budget=24, layerkv=layerkv, clock=SteadyClock()), loaded


def _run(engine: LocalEngine, prompts: list[list[int]], params: list[SamplingParams]) -> list[list[int]]:
    seqs = [
        Sequence(request_id=f"r{n}", attempt=0, params=wishes, prompt_token_ids=prompt)
        for n, (prompt, wishes) in enumerate(zip(prompts, params, strict=True))
    ]
    for _ in engine.run(seqs):
        engine.scheduler.allocator.pool.check()
    return [seq.output_token_ids for seq in seqs]


def _check_idle(*models: LoadedModel) -> None:
    for model in models:
        model.block_pool.check_idle()
        assert model.host_pool is not None
        model.host_pool.check_idle()


LOCAL: list[tuple[str, TierShape, int]] = [
    ("llama", TierShape(block_size=4, layers_per_group=1, ring=1, device=96, staging=96), 1600),
    ("llama", TierShape(block_size=8, layers_per_group=2, ring=4, device=120, staging=160), 160),
    ("llama", TierShape(block_size=16, layers_per_group=3, ring=2, device=112, staging=112), 1600),
    ("mistral", TierShape(block_size=4, layers_per_group=2, ring=2, device=96, staging=160), 160),
    ("mistral", TierShape(block_size=8, layers_per_group=3, ring=1, device=96, staging=96), 1600),
    ("mistral", TierShape(block_size=16, layers_per_group=1, ring=4, device=48, staging=192), 1600),
    ("gemma3", TierShape(block_size=4, layers_per_group=3, ring=4, device=96, staging=96), 1600),
    ("gemma3", TierShape(block_size=8, layers_per_group=1, ring=2, device=24, staging=240), 1600),
    ("gemma3", TierShape(block_size=16, layers_per_group=2, ring=1, device=112, staging=96), 192),
    ("glm-4-moe", TierShape(block_size=8, layers_per_group=2, ring=2, device=96, staging=96), 1600),
    ("gpt-oss", TierShape(block_size=8, layers_per_group=2, ring=2, device=96, staging=96), 1600),
    ("deepseek-v3", TierShape(block_size=8, layers_per_group=1, ring=2, device=96, staging=96), 1600),
    ("olmoe", TierShape(block_size=8, layers_per_group=2, ring=2, device=96, staging=96), 1600),
    ("phi-3-long", TierShape(block_size=4, layers_per_group=1, ring=1, device=96, staging=96), 1600),
    ("glm-4", TierShape(block_size=8, layers_per_group=2, ring=2, device=96, staging=96), 1600),
    ("olmo-3", TierShape(block_size=8, layers_per_group=1, ring=2, device=96, staging=96), 1600),
    *in_test_long(
        ("mixtral", TierShape(block_size=8, layers_per_group=2, ring=2, device=96, staging=96), 1600),
        ("qwen2-moe", TierShape(block_size=8, layers_per_group=2, ring=2, device=96, staging=96), 1600),
    ),
]


@pytest.mark.parametrize(("family", "shape", "host_tokens"), LOCAL)
def test_local_engine(models: Models, family: str, shape: TierShape, host_tokens: int) -> None:
    """More sequences than the device holds; twice, so that the second time begins with prefixes in both tiers."""
    model, prompts = models(family), random_prompts(LENGTHS)
    engine, loaded = _local_engine(model, family, shape, host_tokens)
    with watching(loaded) as seen:
        found = _run(engine, prompts, [greedy(24)] * len(prompts))
        assert _run(engine, prompts, [greedy(24)] * len(prompts)) == found
    for prompt, tokens in zip(prompts, found, strict=True):
        assert tokens == model.hugging_face(prompt, 24, guess=tokens)
    assert max(seen.placements) > 0
    assert seen.copied_to
    _check_idle(loaded)


@pytest.mark.parametrize(("family", "shape", "host_tokens"), LOCAL[::4])
def test_what_is_sampled_does_not_depend_on_where_kv_rests(
    models: Models, family: str, shape: TierShape, host_tokens: int
) -> None:
    model, prompts = models(family), random_prompts(LENGTHS, seed=1)
    params = [SAMPLED, PENALISED] * (len(prompts) // 2)
    engine, loaded = _local_engine(model, family, shape, host_tokens)
    with watching(loaded) as seen:
        found = _run(engine, prompts, params)
    assert found == [model.local(prompt, wishes).tokens for prompt, wishes in zip(prompts, params, strict=True)]
    assert max(seen.placements) > 0
    _check_idle(loaded)


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_groups_that_wander_between_the_tiers_while_a_sequence_generates(models: Models, family: str) -> None:
    """Not by the scheduler's own choice: any groups, at any step, there and back."""
    model, [prompt] = models(family), random_prompts([75], seed=4)
    engine, loaded = _local_engine(model, family, TierShape(block_size=8, device=256, staging=160), 640)
    policy, allocator = engine.scheduler.tiers, engine.scheduler.allocator
    assert isinstance(policy, OffloadPolicy)
    seq = Sequence(request_id="r", attempt=0, params=greedy(40), prompt_token_ids=prompt)
    policy._restore = lambda selection, queue: None  # type: ignore[method-assign]
    engine.add(seq)
    moves = iter([{0}, {1, 3}, {-1}, {2}, {-4, -2}, {0, 1}, {-1, -2, -3}, {0, 1, 2}, {-3}] * 9)
    placements = set()
    while len(seq.output_token_ids) < 40:
        if seq.output_token_ids and seq.lease is not None:
            wish = next(moves)
            away = frozenset(group for group in wish if group >= 0) - seq.host_groups
            back = frozenset(-group - 1 for group in wish if group < 0) & seq.host_groups
            for copies in filter(
                None,
                (
                    allocator.begin_offload(seq, away) if away else (),
                    allocator.begin_restore(seq, back) if back else (),
                ),
            ):
                loaded.runner.execute(StepPlan((), copies))
                assert allocator.complete_move(seq, ok=True)
        placements.add(seq.host_groups)
        engine.step()
    assert len(placements) > 6
    assert seq.output_token_ids == model.hugging_face(prompt, 40, guess=seq.output_token_ids)
    _check_idle(loaded)
