"""Norms, rotary embeddings and gated activations in C++, against their twins: odd widths, views, tokens of nobody."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.interface import Activation, KVSlots
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import native_library

DTYPES = (torch.float32, torch.bfloat16)


LIBRARIES = [library for library in (native_library(),) if library is not None]  # none where torch computes


@pytest.fixture(params=LIBRARIES, ids=["native"] * len(LIBRARIES))
def native(request: pytest.FixtureRequest) -> NativeCpuKernels:
    return NativeCpuKernels(request.param)


def assert_like_twin(actual: Tensor, expected: Tensor) -> None:
    """As near as one rounding of the type."""
    assert actual.dtype == expected.dtype
    tolerance = 2e-6 if expected.dtype == torch.float32 else 8e-3
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("weight_dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 7), (5, 576), (70, 523)])
def test_norms(native: NativeCpuKernels, dtype: torch.dtype, weight_dtype: torch.dtype, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    x, y = torch.randn(shape).to(dtype) * 3, torch.randn(shape).to(dtype)
    weight = torch.randn(shape[1]).to(weight_dtype)
    assert_like_twin(native.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))
    normed, total = native.add_rms_norm(x, y, weight, 1e-5)
    assert torch.equal(total, x + y)
    assert torch.equal(normed, native.rms_norm(total, weight, 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_heads_are_normed_where_they_lie(native: NativeCpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    heads = torch.randn(4, 9, 33).to(dtype)[:, :5]
    weight = torch.randn(5, 33)
    assert_like_twin(native.rms_norm(heads, weight, 1e-6), reference.rms_norm(heads, weight, 1e-6))


def _turns(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    angles = torch.randn(num_tokens, 1, head_dim // 2)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((cos, cos), -1).to(dtype), torch.cat((-sin, sin), -1).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_latent_and_what_is_rotated_lie_side_by_side(native: NativeCpuKernels, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    num_tokens, num_heads, rotary_dim, latent_dim = 5, 3, 16, 40
    qk = torch.randn(num_tokens, num_heads + 2, rotary_dim).to(dtype)[:, 1:]
    v, turns = torch.randn(num_tokens, 1, latent_dim).to(dtype), _turns(num_tokens, rotary_dim, dtype)
    slots = torch.tensor([4, 0, -1, 7, 2])
    expected = torch.full((9, 1, latent_dim + rotary_dim), torch.nan, dtype=dtype)
    actual = expected.clone()
    for kernels, cache in ((reference, expected), (native, actual)):
        kernels.rotate_and_store(qk, v, *turns, KVSlots(cache[..., latent_dim:], cache[..., :latent_dim], slots))
    assert_like_twin(actual.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 6, 70])
@pytest.mark.parametrize("head_dim", [2, 64, 80])
def test_rotation_leaves_keys_and_values_in_their_slots_and_nowhere_else(
    native: NativeCpuKernels, dtype: torch.dtype, num_tokens: int, head_dim: int
) -> None:
    torch.manual_seed(0)
    num_heads, num_kv_heads = 5, 2
    qkv = torch.randn(num_tokens, num_heads + 2 * num_kv_heads, head_dim).to(dtype)
    qk, v = qkv[:, :-num_kv_heads], qkv[:, -num_kv_heads:]
    turns = _turns(num_tokens, head_dim, dtype)
    slots = torch.randperm(2 * num_tokens)[:num_tokens]
    slots[num_tokens // 2] = -1
    keys, values = torch.full((2, 2 * num_tokens, num_kv_heads, head_dim), torch.nan, dtype=dtype)
    expected, actual = KVSlots(keys, values, slots), KVSlots(keys.clone(), values.clone(), slots)
    twins = reference.rotate_and_store(qk, v, *turns, expected)
    q, k = native.rotate_and_store(qk, v, *turns, actual)
    assert_like_twin(q, twins[0])
    assert_like_twin(k, twins[1])
    assert torch.equal(actual.keys[slots[slots >= 0]], k[slots >= 0])
    assert torch.equal(actual.values.nan_to_num(7), expected.values.nan_to_num(7))
    assert torch.equal(actual.keys.isnan(), expected.keys.isnan())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", get_args(Activation))
def test_activations_of_any_size_of_number(
    native: NativeCpuKernels, dtype: torch.dtype, activation: Activation
) -> None:
    gate = torch.cat((torch.linspace(-120, 120, 40_003), torch.linspace(-4, 4, 997))).to(dtype)
    gate_up = torch.cat((gate, torch.ones_like(gate))).unsqueeze(0)
    expected = reference.gated_activation(gate_up.double(), activation).to(dtype)
    assert_like_twin(native.gated_activation(gate_up, activation), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_others(native: NativeCpuKernels, dtype: torch.dtype) -> None:
    """The larger batches are computed by all threads."""
    torch.manual_seed(0)
    x, weight = torch.randn(130, 2 * 300).to(dtype), torch.randn(600)
    normed, gated = native.rms_norm(x, weight, 1e-5), native.gated_activation(x, "silu")
    for row in range(130):
        assert torch.equal(native.rms_norm(x[row : row + 1], weight, 1e-5)[0], normed[row])
        assert torch.equal(native.gated_activation(x[row : row + 1], "silu")[0], gated[row])
