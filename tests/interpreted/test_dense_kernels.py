"""Triton's norms, rotation, activations and matmuls against their plain twins: odd shapes, NaN around the inputs."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.interface import Activation, KVSlots
from kernels.triton import elementwise, gemv, matmul
from kernels.triton.kernels import CublasLinear
from tests.support.interpreted import DTYPES, device
from tests.support.thoroughness import combined

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
HEAD_DIMS = (2, 64, 80, 96, 128, 256)


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def assert_like_twin(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    tolerance = TOLERANCES[expected.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance, atol=tolerance)


def poisoned(numbers: Tensor, dtype: torch.dtype) -> Tensor:
    """The same numbers in rows with NaN before, after and between them."""
    rows, rest = numbers.shape[0], numbers.shape[1:]
    around = torch.full((rows + 2, rest.numel() + 16), torch.nan, dtype=dtype, device=device())
    view = around[1:-1, : rest.numel()].view(rows, *rest)
    view.copy_(numbers)
    return view


def random(*shape: int, dtype: torch.dtype) -> Tensor:
    return poisoned(torch.randn(shape), dtype)


@combined(shape=[(1, 2), (63, 74), (3, 2100)], kind=get_args(Activation), dtype=DTYPES)
def test_gated_activation(dtype: torch.dtype, kind: Activation, shape: tuple[int, int]) -> None:
    gate_up = random(*shape, dtype=dtype) * 3
    before = gate_up.clone()
    assert_like_twin(elementwise.gated_activation(gate_up, kind), reference.gated_activation(gate_up, kind))
    assert torch.equal(gate_up, before)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_an_activation_far_out_is_finite(kind: Activation) -> None:
    gate_up = torch.tensor([[-1e4, 1e4, 0.0, 1.0, 1.0, 1.0]], device=device())
    actual = elementwise.gated_activation(gate_up, kind)
    assert actual[0, :2].tolist() == [0.0, 1e4]


@combined(
    shape=[(1, 7), (63, 64), (5, 576), (2, 3000), (4, 9, 80), (3, 5, 256)], wide_weight=[False, True], dtype=DTYPES
)
def test_rms_norm(dtype: torch.dtype, wide_weight: bool, shape: tuple[int, ...]) -> None:
    x = random(*shape, dtype=dtype) * 3
    weight = torch.randn(shape[1:], dtype=torch.float32 if wide_weight else dtype, device=device())
    assert_like_twin(elementwise.rms_norm(x, weight, 1e-5), reference.rms_norm(x, weight, 1e-5))


def test_rms_norm_of_heads_within_a_wider_row() -> None:
    qkv = random(6, 9, 80, dtype=torch.float32)
    heads, weight = qkv[:, 1:6], torch.randn(5, 80, device=device())
    assert_like_twin(elementwise.rms_norm(heads, weight, 1e-5), reference.rms_norm(heads, weight, 1e-5))


@combined(shape=[(1, 7), (63, 130), (3, 2500)], dtype=DTYPES)
def test_norm_of_a_sum(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    residual, y = random(*shape, dtype=dtype), random(*shape, dtype=dtype)
    weight = torch.randn(shape[1], dtype=dtype, device=device())
    before = residual.clone()
    normed, total = elementwise.add_rms_norm(residual, y, weight, 1e-5)
    expected_normed, expected_total = reference.add_rms_norm(residual, y, weight, 1e-5)
    assert torch.equal(total, expected_total)
    assert_like_twin(normed, expected_normed)
    assert torch.equal(residual, before)


def test_rows_too_wide_for_a_norm_are_refused() -> None:
    with pytest.raises(ValueError, match="rows of 20000 elements"):
        elementwise.rms_norm(torch.ones(1, 20000), torch.ones(20000), 1e-5)


def angles(num_tokens: int, head_dim: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    half = torch.randn(num_tokens, 1, head_dim // 2, device=device())
    cos, signed_sin = torch.cat((half.cos(), half.cos()), -1), torch.cat((-half.sin(), half.sin()), -1)
    return cos.to(dtype), signed_sin.to(dtype)


def empty_slots(num_slots: int, num_kv_heads: int, head_dim: int, slots: list[int], dtype: torch.dtype) -> KVSlots:
    """Keys and values block by block in one cache, as layers have them, all of it NaN."""
    cache = torch.full((2 * num_slots, num_kv_heads, head_dim), torch.nan, dtype=dtype, device=device())
    return KVSlots(cache, cache[4:], torch.tensor(slots, device=device()))


@combined(heads=[(9, 3), (8, 1)], head_dim=HEAD_DIMS, dtype=DTYPES)
def test_rotation_and_storage(dtype: torch.dtype, head_dim: int, heads: tuple[int, int]) -> None:
    num_heads, num_kv_heads = heads
    slots = [17, 0, 11, -1, 24]
    qkv = random(len(slots), num_heads + 2 * num_kv_heads, head_dim, dtype=dtype)
    rotation = angles(len(slots), head_dim, dtype)
    into, twin = (empty_slots(20, num_kv_heads, head_dim, slots, dtype) for _ in range(2))
    qk, v = qkv[:, : num_heads + num_kv_heads], qkv[:, num_heads + num_kv_heads :]
    expected_q, expected_k = reference.rotate_and_store(qk.clone(), v, *rotation, twin)
    before = v.clone()
    q, k = elementwise.rotate_and_store(qk, v, *rotation, into)
    assert_like_twin(q, expected_q)
    assert_like_twin(k, expected_k)
    assert torch.equal(v, before)
    torch.testing.assert_close(into.keys, twin.keys, equal_nan=True, rtol=1e-2, atol=TOLERANCES[dtype])
    assert torch.equal(into.keys.isnan(), twin.keys.isnan()), "no other slot may be written"


def test_a_latent_and_what_is_rotated_lie_side_by_side() -> None:
    qk, v = random(4, 6, 8, dtype=torch.float32), random(4, 1, 24, dtype=torch.float32)
    slots, rotation = torch.tensor([3, -1, 0, 5], device=device()), angles(4, 8, torch.float32)
    caches = [torch.full((7, 1, 32), torch.nan, device=device()) for _ in range(2)]
    for cache, rotate_and_store in zip(caches, (reference, elementwise), strict=True):
        rotate_and_store.rotate_and_store(qk.clone(), v, *rotation, KVSlots(cache[..., 24:], cache[..., :24], slots))
    torch.testing.assert_close(*caches, equal_nan=True, rtol=1e-5, atol=1e-5)
    with pytest.raises(ValueError, match="values of 24 elements"):
        elementwise.rotate_and_store(
            qk.view(4, 3, 16), v, *angles(4, 16, torch.float32), KVSlots(caches[0], caches[0], slots)
        )


def test_what_stands_in_values_does_not_reach_other_elements() -> None:
    qk, v = torch.randn(1, 2, 64, device=device()), torch.zeros(1, 1, 64, device=device())
    v[0, 0, 40] = torch.inf
    into = empty_slots(8, 1, 64, [2], torch.float32)
    elementwise.rotate_and_store(qk, v, *angles(1, 64, torch.float32), into)
    assert torch.equal(into.values[2], v[0])


def test_heads_that_cannot_be_rotated_are_refused() -> None:
    for head_dim in (63, 320):
        qk, v = torch.ones(1, 2, head_dim), torch.ones(1, 1, head_dim)
        with pytest.raises(ValueError, match=f"heads of {head_dim} elements"):
            elementwise.rotate_and_store(qk, v, *angles(1, head_dim, torch.float32), KVSlots(v, v, torch.zeros(1)))


@combined(sizes=[(1, 70, 67), (63, 33, 64), (130, 131, 200), (5, 1, 1000)], biased=[False, True], dtype=DTYPES)
def test_linear(dtype: torch.dtype, sizes: tuple[int, int, int], biased: bool) -> None:
    M, N, K = sizes
    x, residual = random(M, K, dtype=dtype), random(M, N, dtype=dtype)
    weight = (torch.randn(N, K, device=device()) / 8).to(dtype)
    bias = torch.randn(N, device=device()).to(dtype) if biased else None
    linear, twin = matmul.InvariantLinear(weight, bias), reference.pack_linear(weight, bias)
    assert_like_twin(linear(x), twin(x))
    assert_like_twin(linear.add_to(residual, x), twin.add_to(residual, x))


@combined(
    dtype=[dtype for dtype in DTYPES if dtype.itemsize == 2],
    sizes=[(256, 16), (1280, 48)],
    biased=[False, True],
    adds=[False, True],
)
def test_a_row_times_a_weight(dtype: torch.dtype, sizes: tuple[int, int], biased: bool, adds: bool) -> None:
    inputs, outputs = sizes
    x, residual = random(1, inputs, dtype=dtype), random(1, outputs, dtype=dtype)
    weight = random(1, outputs * inputs, dtype=dtype).view(outputs, inputs) / inputs**0.5
    bias = random(1, outputs, dtype=dtype)[0] if biased else None
    assert gemv.takes(x, weight)
    expected = torch.nn.functional.linear(x.float(), weight.float(), None if bias is None else bias.float())
    actual = gemv.gemv(x, weight, bias, residual.clone()) if adds else gemv.gemv(x, weight, bias)
    assert_like_twin(actual, (expected + residual.float() if adds else expected).to(dtype))
    linear = CublasLinear(weight, bias)
    assert torch.equal(actual, linear.add_to(residual, x) if adds else linear(x))
    assert not adds or torch.equal(residual, actual)  # in place


def test_what_is_no_row_times_a_weight() -> None:
    row, weight = torch.zeros(1, 256, dtype=torch.float16), torch.zeros(16, 256, dtype=torch.float16)
    assert gemv.takes(row, weight)
    for x, other in (
        (row.float(), weight.float()),
        (row.expand(2, -1), weight),
        (row[:, :240], weight[:, :240]),
        (row, weight[:15]),
    ):
        assert not gemv.takes(x, other)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype.itemsize == 2])
def test_all_ways_to_fetch_tiles_agree_to_the_bit(dtype: torch.dtype) -> None:
    x, weight = torch.randn(150, 136, device=device()).to(dtype), torch.randn(72, 136, device=device()).to(dtype)
    plain = matmul.matmul(x, weight, fetch="loads")
    assert torch.equal(matmul.matmul(x, weight), plain)
    if device().type != "cuda":
        assert torch.equal(matmul.matmul(x, weight, fetch="tma"), plain)
        assert torch.equal(matmul.matmul(x, weight, fetch="tma-specialised"), plain)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_the_same_alone_and_in_any_batch(dtype: torch.dtype) -> None:
    """Also across the two tile sizes, narrow for few rows and wide for many."""
    weight = torch.randn(96, 200, device=device()).to(dtype)
    x, residual = torch.randn(140, 200, device=device()).to(dtype), torch.randn(140, 96, device=device()).to(dtype)
    together = matmul.matmul(x, weight, residual=residual)
    for first, stop in ((0, 1), (139, 140), (60, 77), (3, 131)):
        rows = slice(first, stop)
        assert torch.equal(matmul.matmul(x[rows], weight, residual=residual[rows]), together[rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_and_activations_of_a_row_do_not_depend_on_others(dtype: torch.dtype) -> None:
    x, weight = torch.randn(70, 80, device=device()).to(dtype), torch.randn(80, device=device()).to(dtype)
    normed, (summed, _) = elementwise.rms_norm(x, weight, 1e-5), elementwise.add_rms_norm(x, x, weight, 1e-5)
    activated = elementwise.gated_activation(x, "silu")
    for rows in (slice(0, 1), slice(41, 42), slice(30, 50)):
        assert torch.equal(elementwise.rms_norm(x[rows], weight, 1e-5), normed[rows])
        assert torch.equal(elementwise.add_rms_norm(x[rows], x[rows], weight, 1e-5)[0], summed[rows])
        assert torch.equal(elementwise.gated_activation(x[rows], "silu"), activated[rows])


def test_nothing_is_written_beyond_the_output() -> None:
    """The kernel itself, into a piece of a larger tensor."""
    x, weight = torch.randn(3, 40, device=device()), torch.randn(37, 40, device=device())
    around = torch.full((5, 37), 7.0, device=device())
    shipped = matmul.configuration(torch.float32, wide=False, fetch="loads", has_bias=False, adds=False)
    out = around[1:4]
    sizes = {"M": 3, "N": 37, "K": 40, "x_stride": 40, "residual_stride": 37}
    shipped.launch((2,), x=x, weight=weight, bias=out, residual=out, out=out, **sizes)
    assert_like_twin(out, x @ weight.T)
    assert (around[[0, 4]] == 7.0).all()


def test_no_rows_are_no_work() -> None:
    x, weight = torch.ones(0, 8), torch.ones(4, 8)
    assert matmul.matmul(x, weight).shape == (0, 4)
    assert elementwise.rms_norm(x, torch.ones(8), 1e-5).shape == (0, 8)
    assert elementwise.gated_activation(x, "silu").shape == (0, 4)
