"""Mixtures of experts on a CPU against their plain twin, and rows that do not depend on one another."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import get_args

import pytest
import torch

from engine.memory.devices import CPU
from kernels import reference
from kernels.cpu import kernels as cpu
from kernels.interface import Activation, ExpertChoice, Kernels
from kernels.native.experts import NativeExperts
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import native_library
from kernels.reference import PlainExperts, choose_experts
from tests.support.mixtures import MIXTURES, Mixture

DTYPES = (torch.float32, torch.bfloat16)
LIBRARIES = [library for library in (native_library(),) if library is not None]  # none where torch computes
KERNELS: list[Kernels] = [cpu, *map(NativeCpuKernels, LIBRARIES)]


@pytest.fixture(params=LIBRARIES, ids=["native"] * len(LIBRARIES))
def native(request: pytest.FixtureRequest) -> NativeCpuKernels:
    assert isinstance(request.param, ctypes.CDLL)
    return NativeCpuKernels(request.param)


def test_the_first_of_equal_logits_are_chosen() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0]])
    numbers, shares = choose_experts(logits, ExpertChoice(per_row=3, normalised=False))
    assert numbers.tolist() == [[1, 3, 2]]
    assert torch.equal(shares, logits.softmax(-1)[:, [1, 3, 2]])
    _, normalised = choose_experts(logits, ExpertChoice(per_row=3, normalised=True))
    torch.testing.assert_close(normalised, shares / shares.sum())


@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "native"][: len(KERNELS)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("num_rows", [1, 7, 130])
def test_like_the_twin(kernels: Kernels, name: str, dtype: torch.dtype, num_rows: int) -> None:
    torch.manual_seed(0)
    mixture = MIXTURES[name]
    weights, x = mixture.weights(dtype), mixture.rows(num_rows, dtype)
    residual = torch.randn(num_rows, mixture.hidden).to(dtype)
    packed = mixture.packed(kernels, weights)
    assert isinstance(packed, PlainExperts if kernels is cpu else NativeExperts)
    twin = mixture.packed(reference, [weight.float() for weight in weights])
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    for actual, expected in (
        (packed(x), twin(x.float())),
        (packed.add_to(residual, x), twin.add_to(residual.float(), x.float())),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "native"][: len(KERNELS)])
@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
def test_processes_with_some_experts_each_make_the_whole_together(kernels: Kernels, name: str, quantised: bool) -> None:
    """One that has none of a row's leaves the residual as it is, to the bit; and no row depends on another one."""
    torch.manual_seed(0)
    mixture = MIXTURES[name]
    dtype = torch.bfloat16 if quantised else torch.float32
    weights, x = mixture.weights(dtype), mixture.rows(23, dtype)
    residual = torch.randn(23, mixture.hidden).to(dtype)
    whole = mixture.packed(kernels, weights, quantised=quantised)
    parts = [mixture.packed(kernels, weights, quantised=quantised, held=held) for held in mixture.shares()]
    together = torch.stack([part(x).float() for part in parts]).sum(0)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    torch.testing.assert_close(together, whole(x).float(), rtol=tolerance, atol=tolerance)
    numbers, _ = choose_experts(x[:, : mixture.num_experts], mixture.choice(CPU))
    for held, part in zip(mixture.shares(), parts, strict=True):
        assert isinstance(part, PlainExperts if kernels is cpu else NativeExperts)
        added = part.add_to(residual, x)
        is_elsewhere = ~torch.isin(numbers, torch.tensor(held)).any(1)
        assert torch.equal(added[is_elsewhere], residual[is_elsewhere])
        assert not part(x)[is_elsewhere].any()
        if kernels is not cpu:
            assert torch.equal(torch.cat([part.add_to(residual[n : n + 1], x[n : n + 1]) for n in range(23)]), added)


@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "native"][: len(KERNELS)])
def test_a_router_in_float32_sees_what_bfloat16_does_not(kernels: Kernels) -> None:
    torch.manual_seed(0)
    mixture = Mixture(num_experts=5, per_row=1, normalised=True, router_in_float32=True)
    weights, x = mixture.close_call(torch.bfloat16)
    packed = mixture.packed(kernels, weights)
    assert isinstance(packed, PlainExperts | NativeExperts)
    first, *_, last = packed.experts
    assert first is not None and last is not None
    assert torch.equal(packed(x), last(x)), "the last one has the largest logit"
    rounded = replace(mixture, router_in_float32=False).packed(kernels, weights)
    assert torch.equal(rounded(x), first(x)), "all have the same one, and the first is chosen"


@pytest.mark.parametrize("quantised", [False, True])
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("num_threads", [1, 2])
def test_rows_do_not_depend_on_each_other_nor_on_threads(
    native: NativeCpuKernels, name: str, quantised: bool, num_threads: int
) -> None:
    torch.manual_seed(0)
    mixture = MIXTURES[name]
    packed = mixture.packed(native, mixture.weights(torch.bfloat16), quantised=quantised)
    assert isinstance(packed, NativeExperts)
    x, residual = mixture.rows(40, torch.bfloat16), torch.randn(40, mixture.hidden).bfloat16()
    alone = torch.cat([packed.add_to(residual[row : row + 1], x[row : row + 1]) for row in range(40)])
    torch.set_num_threads(num_threads)
    for count in (1, 2, 3, 7, 13, 25, 40):
        assert torch.equal(packed.add_to(residual[-count:], x[-count:]), alone[-count:])


@pytest.mark.parametrize("activation", get_args(Activation))
@pytest.mark.parametrize("dtype", DTYPES)
def test_an_experts_rows_are_the_same_in_a_block_and_by_all_threads(
    native: NativeCpuKernels, dtype: torch.dtype, activation: Activation
) -> None:
    """One expert has more rows than a thread takes at once, and the others so many that some numbers of threads take
    blocks of one expert's rows and others share all projections. Gates fill tiles, where a processor has these."""
    torch.manual_seed(0)
    mixture = Mixture(num_experts=4, per_row=2, width=64, activation=activation, biased=True)
    weights, x = mixture.weights(dtype), mixture.rows(600, dtype)
    x[:, 0] = 2  # the first expert has all rows
    packed = mixture.packed(native, weights)
    assert isinstance(packed, NativeExperts)
    torch.set_num_threads(1)
    alone = torch.cat([packed(x[row : row + 1]) for row in range(600)])
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    expected = mixture.packed(reference, [weight.float() for weight in weights])(x.float())
    torch.testing.assert_close(alone.float(), expected, rtol=tolerance, atol=tolerance)
    for num_threads in (1, 2, 4):
        torch.set_num_threads(num_threads)
        for count in (0, 2, 40, 300, 600):
            assert torch.equal(packed(x[:count]), alone[:count]), (num_threads, count)


def test_experts_of_which_some_are_quantised_are_computed_one_by_one(native: NativeCpuKernels) -> None:
    torch.manual_seed(0)
    mixture = Mixture(num_experts=2, per_row=2)
    weights = mixture.weights(torch.bfloat16)
    whole, quantised = mixture.packed(native, weights), mixture.packed(native, weights, quantised=True)
    assert isinstance(whole, NativeExperts)
    assert isinstance(quantised, NativeExperts)
    mixed = native.pack_experts(whole.router, [whole.experts[0], quantised.experts[1]], whole.choice)
    assert isinstance(mixed, PlainExperts)
    x = mixture.rows(9, torch.bfloat16)
    torch.testing.assert_close(mixed(x).float(), whole(x).float(), rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("kernels", KERNELS, ids=["torch", "native"][: len(KERNELS)])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(3, 40, 16), (16, 512, 128), (5, 6, 33)])
def test_each_head_has_a_projection_of_its_own(kernels: Kernels, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    num_heads, num_outputs, num_inputs = shape
    weight = (torch.randn(shape) / num_inputs**0.5).to(dtype)
    x = torch.randn(30, num_heads + 1, num_inputs).to(dtype)[:, 1:]
    packed = kernels.pack_heads(weight)
    actual = packed(x)
    assert actual.shape == (30, num_heads, num_outputs)
    tolerance = 2e-5 if dtype == torch.float32 else 4e-2
    expected = reference.pack_heads(weight.float())(x.float())
    torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance)
    if kernels is not cpu and num_inputs % 2 == 0:
        assert torch.equal(torch.cat([packed(x[row : row + 1]) for row in range(30)]), actual)
