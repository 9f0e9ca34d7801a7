"""Estimates from shapes and datasheets against published sizes and speeds."""

from __future__ import annotations

import dataclasses
import math

import pytest

from engine.cost_model.roofline import (
    A100_SXM,
    CPU_CORE,
    H100_SXM,
    L40S,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B,
    Device,
    activation_bytes,
    kv_capacity_tokens,
    predict_memory,
    roofline_cost,
)
from engine.cost_model.step_cost import StepCost, StepWork
from engine.model.config import ExpertsConfig, LatentConfig


def decode_s(cost: StepCost, batch: int, context: int) -> float:
    return cost.step_s(StepWork(decodes=batch, context_tokens=batch * context))


def test_sizes_are_the_published_ones() -> None:
    assert LLAMA_3_1_8B.num_weights == pytest.approx(8.03e9, rel=0.001)
    assert LLAMA_3_1_70B.num_weights == pytest.approx(70.55e9, rel=0.001)
    assert LLAMA_3_1_8B.kv_bytes_per_token == 128 * 1024
    assert LLAMA_3_1_70B.kv_bytes_per_token == 320 * 1024
    assert LLAMA_3_1_8B.weight_bytes == 2 * LLAMA_3_1_8B.num_weights


def test_a_mixture_holds_all_experts_and_a_token_reads_those_it_chose() -> None:
    """Mixtral 8x7B: 46.7 billion weights, 12.9 billion of them for a token (arXiv:2401.04088)."""
    experts = ExpertsConfig(num_experts=8, per_token=2, width=14336, normalised=True)
    mixtral = dataclasses.replace(
        LLAMA_3_1_8B, vocab_size=32000, num_sparse_layers=LLAMA_3_1_8B.num_layers, experts=experts
    )
    assert mixtral.num_weights == pytest.approx(46.7e9, rel=0.001)
    assert mixtral.layer_weights + 2 * mixtral.head_weights == pytest.approx(12.9e9, rel=0.002)
    cost, dense = (roofline_cost(shape, A100_SXM, num_devices=2) for shape in (mixtral, LLAMA_3_1_8B))
    assert 1.5 < cost.prefill_token_s / dense.prefill_token_s < 2
    assert 4 < cost.base_s / dense.base_s < 7


def test_prefill_of_8b_on_an_h100_runs_at_25000_tokens_per_second() -> None:
    cost = roofline_cost(LLAMA_3_1_8B, H100_SXM)
    assert 2048 / cost.prefill_s(2048) == pytest.approx(25_000, rel=0.1)
    assert 8192 / cost.prefill_s(8192, chunk_tokens=2048) == pytest.approx(25_000, rel=0.2)


def test_decoding_starts_at_the_time_it_takes_to_read_the_weights() -> None:
    """8B in bf16 on an H100 decodes some 140 tokens/s alone; 3.35 TB/s would read the weights 220 times a second."""
    alone = decode_s(roofline_cost(LLAMA_3_1_8B, H100_SXM), 1, 128)
    assert 1 / 160 < alone < 1 / 120


@pytest.mark.parametrize("device", [H100_SXM, A100_SXM, L40S], ids=lambda device: device.name)
def test_nothing_is_faster_than_the_datasheet(device: Device) -> None:
    cost = roofline_cost(LLAMA_3_1_8B, device)
    flops = 2 * LLAMA_3_1_8B.layer_weights * 4096 + LLAMA_3_1_8B.flops_per_pair * 4096 * 4097 / 2
    assert cost.prefill_s(4096) > flops / device.flops
    read = LLAMA_3_1_8B.layer_weights * 2 + 64 * 2000 * LLAMA_3_1_8B.kv_bytes_per_token
    assert decode_s(cost, 64, 2000) > read / device.memory_bytes_per_s


def test_devices_rank_as_they_do_in_life() -> None:
    costs = [roofline_cost(LLAMA_3_1_8B, device) for device in (H100_SXM, A100_SXM, L40S)]
    prompts = [cost.prefill_s(2048) for cost in costs]
    steps = [decode_s(cost, 32, 1000) for cost in costs]
    assert prompts[0] < min(prompts[1:]) / 1.8
    assert steps[0] < steps[1] < steps[2]


def test_more_devices_are_faster_but_not_in_proportion() -> None:
    four, eight = (roofline_cost(LLAMA_3_1_70B, H100_SXM, num_devices=n) for n in (4, 8))
    for seconds in (lambda cost: cost.prefill_s(2048), lambda cost: decode_s(cost, 16, 1000)):
        assert seconds(four) / 2 < seconds(eight) < seconds(four) / 1.5


def test_kv_capacity() -> None:
    assert kv_capacity_tokens(LLAMA_3_1_8B, H100_SXM) == pytest.approx((72e9 - 16.06e9) / 131072, rel=0.001)
    two, four = (kv_capacity_tokens(LLAMA_3_1_70B, H100_SXM, num_devices=n) for n in (4, 8))
    assert four > 2 * two
    assert kv_capacity_tokens(LLAMA_3_1_8B, H100_SXM, other_bytes=10e9) < kv_capacity_tokens(LLAMA_3_1_8B, H100_SXM)


def test_every_device_has_the_whole_of_a_latent() -> None:
    latent = LatentConfig(rank=512, query_rank=None, plain_dim=128, rotary_dim=64, value_dim=128, interleaved=True)
    shape = dataclasses.replace(LLAMA_3_1_8B, num_kv_heads=1, head_dim=576, latent=latent)
    assert shape.kv_bytes_per_token == 32 * 576 * 2
    one, four = (kv_capacity_tokens(shape, H100_SXM, num_devices=n) for n in (1, 4))
    assert one == pytest.approx((72e9 - shape.weight_bytes) / shape.kv_bytes_per_token, rel=0.001)
    assert four == pytest.approx((72e9 - shape.weight_bytes / 4) / shape.kv_bytes_per_token, rel=0.001)
    alone, cut = (roofline_cost(shape, H100_SXM, num_devices=n) for n in (1, 4))
    assert cut.context_token_s == alone.context_token_s
    assert cut.prefill_pair_s == alone.prefill_pair_s / 4
    with pytest.raises(ValueError, match="32 query heads, which 3 devices cannot share evenly"):
        roofline_cost(shape, H100_SXM, num_devices=3)


def test_memory_adds_up_and_is_cut_among_devices() -> None:
    alone = predict_memory(LLAMA_3_1_8B, H100_SXM, token_budget=2048, max_num_seqs=256, ring_bytes=10**9)
    parts = alone.weights_bytes + alone.activation_bytes + alone.ring_bytes + alone.kv_bytes + alone.unused_bytes
    assert parts == 80e9
    assert alone.unused_bytes == pytest.approx(8e9, abs=10**6)
    assert alone.kv_bytes == alone.kv_tokens * 131_072
    cut = predict_memory(LLAMA_3_1_8B, H100_SXM, num_devices=4, token_budget=2048, max_num_seqs=256)
    assert cut.weights_bytes == math.ceil(alone.weights_bytes / 4)
    assert cut.kv_tokens > 4 * alone.kv_tokens
    latent = LatentConfig(rank=512, query_rank=None, plain_dim=128, rotary_dim=64, value_dim=128, interleaved=True)
    shape = dataclasses.replace(LLAMA_3_1_8B, num_kv_heads=1, head_dim=576, latent=latent)
    whole = predict_memory(shape, H100_SXM, num_devices=4, token_budget=2048, max_num_seqs=256)
    assert whole.kv_bytes == whole.kv_tokens * shape.kv_bytes_per_token, "each device has the latents of all heads"
    assert whole.unused_bytes == pytest.approx(8e9, abs=10**6)
    with pytest.raises(ValueError, match="use more devices"):
        predict_memory(LLAMA_3_1_70B, L40S, token_budget=2048, max_num_seqs=256)


def test_activations_are_those_of_the_widest_moment() -> None:
    assert activation_bytes(LLAMA_3_1_8B, token_budget=4096, max_num_seqs=1) == 4096 * (2 * 4096 + 5 * 14336) * 2
    assert activation_bytes(LLAMA_3_1_8B, token_budget=1, max_num_seqs=64) == 64 * 128_256 * 16


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="use more devices"):
        kv_capacity_tokens(LLAMA_3_1_70B, H100_SXM)
    with pytest.raises(ValueError, match="cannot share evenly"):
        roofline_cost(LLAMA_3_1_8B, H100_SXM, num_devices=3)
    with pytest.raises(ValueError, match="states no link"):
        roofline_cost(LLAMA_3_1_8B, dataclasses.replace(CPU_CORE), num_devices=2)
