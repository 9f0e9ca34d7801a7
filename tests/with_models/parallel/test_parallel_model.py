"""A model cut into the shards of a tensor-parallel group: its weights, its logits, and what cannot be cut."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from engine.checkpoint.packing import WeightPacking
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.weights import load_weights
from engine.kv.cache import KVCache, KVLayout
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.shards import WHOLE, Shard, check_degree, possible_degrees, shards_of
from engine.model.transformer import Model
from engine.parallel.group import RankGroup
from kernels.interface import Segment
from kernels.native.library import native_library
from kernels.ops import kernels_for
from tests.support.exactness import hf_reference
from tests.support.model_families import FAMILIES, VOCAB_SIZE, build_oracle
from tests.support.thoroughness import combined
from tests.with_models.parallel.rank_threads import on_ranks

WHOLE_ON_EACH_RANK = (
    *("embed_tokens.weight", "norm.weight", "gate.weight", "gate.bias", "_correction_bias"),
    *(f"{name}.{kind}" for name in ("q_a_proj", "kv_a_proj_with_mqa") for kind in ("weight", "bias")),
)
BLOCK_SIZE = 4
NUM_BLOCKS = 40
NUM_TOKENS = 30


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp(request.param)
    return folder, build_oracle(request.param, folder)


def logits_of(
    folder: Path,
    token_ids: list[int],
    ranks: RankGroup | None,
    dtype: torch.dtype = torch.float32,
    first: int | None = None,
) -> Tensor:
    """Of all tokens `[T, V]`: the `first`, or half of them, as one chunk, then the others one by one."""
    first = len(token_ids) // 2 if first is None else first
    with torch.inference_mode():
        model = model_of(folder, ranks, dtype)
        kv_cache = poisoned_cache(model.config, dtype)
        spans = [(0, first), *((start, start + 1) for start in range(first, len(token_ids)))]
        return torch.cat(
            [model.logits(model.forward(one_batch(token_ids, *span, kv_cache), kv_cache)) for span in spans]
        )


def model_of(folder: Path, ranks: RankGroup | None, dtype: torch.dtype = torch.float32) -> Model:
    config = ModelConfig.from_folder(folder)
    weights = load_weights(folder, config, dtype=dtype, shard=WHOLE if ranks is None else ranks.shard)
    return Model(config, weights, kernels_for(torch.device("cpu")), ranks)


def poisoned_cache(config: ModelConfig, dtype: torch.dtype) -> KVCache:
    layout = KVLayout(
        num_layers=config.num_layers,
        layers_per_group=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        latent_dim=config.latent_dim,
        block_size=BLOCK_SIZE,
        dtype=dtype,
    )
    kv_cache = KVCache(layout, NUM_BLOCKS)
    kv_cache.tensor.fill_(torch.nan)
    return kv_cache


def tensors_of(folder: Path, shard: Shard) -> dict[str, Tensor]:
    weights = load_weights(folder, ModelConfig.from_folder(folder), dtype=torch.float32, shard=shard)
    return {name: weight for name, weight in weights.items() if isinstance(weight, Tensor)}


def one_batch(token_ids: list[int], start: int, stop: int, kv_cache: KVCache) -> Batch:
    """Tokens [start, stop) of one sequence; its blocks are in no order, the same on every rank."""
    table = np.array([random.Random(0).sample(range(NUM_BLOCKS), NUM_BLOCKS)], dtype=np.int32)
    positions = np.arange(start, stop)
    count = stop - start
    return Batch(
        token_ids=torch.tensor(token_ids[start:stop]),
        positions=torch.from_numpy(positions),
        slot_mapping=torch.from_numpy(kv_cache.slot_addresses(table, positions)),
        segments=(Segment(first_row=0, num_queries=count, context_len=stop, block_table=table),),
        output_rows=torch.arange(count),
        sampling_items=(0,),
        prompt_spans=(),
    )


def random_tokens(count: int = NUM_TOKENS) -> list[int]:
    return [random.Random(5).randrange(3, VOCAB_SIZE) for _ in range(count)]


# Of two key/value heads: one each, or each on two ranks.
@combined(degree=[2, 4], family=FAMILIES.keys(), indirect=["family"])
def test_the_ranks_together_compute_what_hugging_face_does(family: tuple[Path, Any], degree: int) -> None:
    require_hugging_faces_logits(*family, degree)


@pytest.mark.parametrize(
    "family", ["mixtral", "gpt-oss", "qwen2-moe", "glm-4-moe", "olmoe", "deepseek-v3"], indirect=True
)
def test_ranks_with_whole_experts_compute_what_hugging_face_does(family: tuple[Path, Any]) -> None:
    """Of six, one or two on each of four ranks."""
    require_hugging_faces_logits(*family, 4, expert_parallel=True)


def require_hugging_faces_logits(folder: Path, oracle: Any, degree: int, *, expert_parallel: bool = False) -> None:
    tokens = random_tokens()
    of_ranks = on_ranks(degree, lambda ranks: logits_of(folder, tokens, ranks), expert_parallel=expert_parallel)
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    torch.testing.assert_close(of_ranks[0], expected, rtol=1e-4, atol=1e-4)
    assert of_ranks[0].argmax(-1).tolist() == expected.argmax(-1).tolist()
    assert all(torch.equal(of_ranks[0], logits) for logits in of_ranks[1:])


def test_the_same_calls_give_the_same_bits(tmp_path: Path) -> None:
    build_oracle("llama", tmp_path)
    first, second = (
        on_ranks(2, lambda ranks: logits_of(tmp_path, random_tokens(), ranks, torch.bfloat16))[0] for _ in range(2)
    )
    assert torch.equal(first, second)


@pytest.mark.skipif(native_library() is None, reason="torch's kernels promise no such thing")
@pytest.mark.parametrize("expert_parallel", [False, True])
def test_a_token_has_the_same_bits_whatever_is_computed_beside_it(expert_parallel: bool, tmp_path: Path) -> None:
    build_oracle("qwen2-moe", tmp_path)

    def both(ranks: RankGroup) -> list[Tensor]:
        return [logits_of(tmp_path, random_tokens(), ranks, torch.bfloat16, first) for first in (1, NUM_TOKENS)]

    for one_by_one, together in on_ranks(2, both, expert_parallel=expert_parallel):
        assert torch.equal(one_by_one, together)


def test_three_key_value_heads_are_cut_for_three_ranks(smollm2_folder: Path) -> None:
    prompt = list(range(100, 116))
    [reference] = hf_reference(smollm2_folder, [prompt], 8)
    tokens = prompt + reference.token_ids
    logits = on_ranks(3, lambda ranks: logits_of(smollm2_folder, tokens, ranks))[0]
    assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == reference.token_ids


@pytest.mark.parametrize(("degree", "num_kv_heads"), [(2, 6), (3, 3), (4, 2), (6, 3)])
def test_heads_that_are_normalised_together_are_so_to_the_bits_of_one_process(
    degree: int, num_kv_heads: int, tmp_path: Path
) -> None:
    sizes = {"hidden_size": 96, "intermediate_size": 96, "num_attention_heads": 12, "num_hidden_layers": 1}
    build_oracle("olmo-2", tmp_path, num_key_value_heads=num_kv_heads, **sizes)
    config = ModelConfig.from_folder(tmp_path)
    check_degree(config, degree)
    qk = torch.randn(7, 12 + num_kv_heads, 8, generator=torch.Generator().manual_seed(0))

    def part(of_all: Tensor, shard: Shard) -> Tensor:
        return torch.cat((of_all[:, shard.query_heads(config)], of_all[:, 12:][:, shard.kv_heads(num_kv_heads)]), 1)

    def normed(ranks: RankGroup | None) -> Tensor:
        with torch.inference_mode():
            model = model_of(tmp_path, ranks)
            weight = model._layers[0].qk_norm
            assert weight is not None
            return model._norm_heads(part(qk, WHOLE if ranks is None else ranks.shard), weight)

    whole = normed(None)
    for rank, of_rank in enumerate(on_ranks(degree, normed)):
        assert torch.equal(of_rank, part(whole, Shard(rank, degree)))


def test_each_rank_reads_its_own_part_and_together_they_have_all(family: tuple[Path, Any]) -> None:
    folder, _ = family
    whole, halves = tensors_of(folder, WHOLE), [tensors_of(folder, Shard(rank, 2)) for rank in (0, 1)]
    assert whole
    for name, tensor in whole.items():
        parts = [half[name] for half in halves if name in half]
        if name.endswith(WHOLE_ON_EACH_RANK):
            assert all(torch.equal(part, tensor) for part in parts)
            continue
        if name.endswith(("o_proj.bias", "down_proj.bias")):
            assert len(parts) == 1
        cut_dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0
        assert torch.equal(torch.cat(parts, dim=cut_dim), tensor), name


@pytest.mark.parametrize("family", ["gpt-oss", "deepseek-v3"], indirect=True)
def test_a_whole_expert_is_read_by_one_rank(family: tuple[Path, Any]) -> None:
    """All else is on the ranks as it is where they have a part of each."""
    folder, _ = family
    whole, found = tensors_of(folder, WHOLE), Counter[str]()
    for rank in range(4):
        weights, cut = (tensors_of(folder, Shard(rank, 4, expert_parallel=way)) for way in (True, False))
        mine = {name for name in weights if ".experts." in name}
        found.update(mine)
        assert weights.keys() - mine == {name for name in cut if ".experts." not in name}
        assert all(torch.equal(weight, (whole if name in mine else cut)[name]) for name, weight in weights.items())
    assert found == {name: 1 for name in whole if ".experts." in name}


def test_ranks_beyond_the_key_value_heads_have_the_same_ones() -> None:
    heads = [Shard(rank, 6).kv_heads(3) for rank in range(6)]
    assert [(head.start, head.stop) for head in heads] == [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]


def test_what_cannot_be_cut_into_equal_parts_is_refused(smollm2_folder: Path) -> None:
    config = ModelConfig.from_folder(smollm2_folder)
    assert possible_degrees(config) == [1, 3]
    check_degree(config, 3)
    with pytest.raises(
        ValueError, match=r"tensor_parallel is 2, .* 9 query heads, 3 key/value heads .* only among 1, 3;"
    ):
        check_degree(config, 2)
    with_even_mlp = dataclasses.replace(config, intermediate_size=9 * 128)
    assert possible_degrees(with_even_mlp) == [1, 3, 9]


def test_a_latent_model_is_cut_by_its_query_heads(tmp_path: Path) -> None:
    build_oracle("deepseek-v3", tmp_path)
    config = ModelConfig.from_folder(tmp_path)
    assert possible_degrees(config) == [1, 2, 4, 8]
    with pytest.raises(ValueError, match=r"tensor_parallel is 3, .* 16 query heads, one latent and an MLP of 40 and"):
        check_degree(config, 3)


def test_experts_whose_width_does_not_divide_stay_whole(tmp_path: Path) -> None:
    build_oracle("mixtral", tmp_path, intermediate_size=90, num_attention_heads=16)
    config = ModelConfig.from_folder(tmp_path)
    assert possible_degrees(config) == [1, 2, 4, 8]
    assert possible_degrees(config, expert_parallel=False) == [1, 2]
    ways = [[None, False, True], [None, True]]
    assert [
        [[shard.expert_parallel for shard in shards_of(config, degree, expert_parallel=way)] for way in wished]
        for degree, wished in zip((2, 4), ways, strict=True)
    ] == [[[False] * 2, [False] * 2, [True] * 2], [[True] * 4] * 2]
    with pytest.raises(ValueError, match=r"tensor_parallel is 4, .* an MLP of 90 can be .* only among 1, 2;"):
        shards_of(config, 4, expert_parallel=False)
    with pytest.raises(ValueError, match=r"is 16, .* 2 key/value heads and 8 experts can be .* only among 1, 2, 4, 8;"):
        shards_of(config, 16, expert_parallel=True)


def test_experts_stay_whole_where_parts_would_lose_their_codes(tmp_path: Path) -> None:
    """Which stay codes for a CPU where at least 16 inputs have a scale in common."""
    build_oracle("qwen3-moe", tmp_path, moe_intermediate_size=48)
    config, int4 = ModelConfig.from_folder(tmp_path), Quantisation(name="int4", group_size=16)
    packed = dataclasses.replace(config, packing=WeightPacking(method="gptq", bits=4))
    assert not shards_of(config, 2)[0].expert_parallel
    assert shards_of(config, 2, quantisation=int4)[0].expert_parallel
    assert shards_of(packed, 2)[0].expert_parallel
    build_oracle("qwen3-moe", tmp_path, moe_intermediate_size=64)
    assert not shards_of(ModelConfig.from_folder(tmp_path), 2, quantisation=int4)[0].expert_parallel


def test_a_model_without_experts_has_none_to_divide(smollm2_folder: Path) -> None:
    with pytest.raises(ValueError, match="expert_parallel is on, but the model has no mixture of experts"):
        shards_of(ModelConfig.from_folder(smollm2_folder), 3, expert_parallel=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
def test_every_rank_has_the_same_latents(family: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """So those of any one are handed over, and written to all."""
    build_oracle(family, tmp_path)
    tokens = random_tokens()

    def cached(ranks: RankGroup) -> Tensor:
        with torch.inference_mode():
            model = model_of(tmp_path, ranks, dtype)
            kv_cache = poisoned_cache(model.config, dtype)
            kv_cache.tensor.zero_()
            model.forward(one_batch(tokens, 0, NUM_TOKENS, kv_cache), kv_cache)
            return kv_cache.tensor

    first, *others = on_ranks(4, cached)
    assert first.count_nonzero()
    assert all(torch.equal(first, other) for other in others)


def test_sums_are_in_float32_and_do_not_depend_on_the_place_in_a_batch() -> None:
    rows = torch.randn(3, 64, generator=torch.Generator().manual_seed(0)).bfloat16()

    def sums(ranks: RankGroup) -> tuple[Tensor, Tensor]:
        mine = rows[ranks.shard.rank].expand(9, -1)
        return ranks.sum(mine), ranks.sum(mine[:1])

    for many, alone in on_ranks(3, sums):
        assert torch.equal(many, rows.float().sum(0).bfloat16().expand(9, -1))
        assert torch.equal(many[8:], alone)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_large_tensor_is_summed_in_parts_to_the_same_bits(dtype: torch.dtype) -> None:
    """Of 1,050,001 values, which three ranks do not share equally."""
    partials = torch.randn(3, 1, 1_050_001, generator=torch.Generator().manual_seed(0)).to(dtype)

    def sums(ranks: RankGroup) -> tuple[Tensor, Tensor]:
        mine = partials[ranks.shard.rank]
        return ranks.sum(mine), ranks.sum(mine[:, -1000:])

    for large, small in on_ranks(3, sums):
        expected = ((partials[0].float() + partials[1].float()) + partials[2].float()).to(dtype)
        assert torch.equal(large, expected)
        assert torch.equal(large[:, -1000:], small)


def test_a_vocabulary_that_does_not_divide_is_joined_whole() -> None:
    row = torch.arange(307.0)[None]
    for joined in on_ranks(4, lambda ranks: ranks.join(row[:, ranks.shard.vocabulary(307)], 307)):
        assert torch.equal(joined, row)


def test_a_rank_that_never_comes_is_an_error_at_the_deadline() -> None:
    def lonely(ranks: RankGroup) -> None:
        if ranks.shard.rank == 0:
            with pytest.raises(RuntimeError):
                ranks.sum(torch.ones(2, 2))
        else:
            ranks.leave()

    on_ranks(2, lonely, timeout_s=5)
