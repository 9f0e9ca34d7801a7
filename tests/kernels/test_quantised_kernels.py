"""Projections by weights of 4 and 8 bits: their values, and rows that do not depend on one another."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import reference
from kernels.cpu import kernels as cpu
from kernels.interface import Kernels
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import native_library
from kernels.native.linear import QuantisedLinear
from kernels.quantised_weight import LOWEST_E2M1, ActivationBits, CodeFormat, QuantisedWeight, side_by_side

FORMS = [(4, -8), (4, 0), (4, LOWEST_E2M1), (8, -128)]
DOUBLED_E2M1 = torch.tensor([-12, -8, -6, -4, -3, -2, -1, 0, 0, 1, 2, 3, 4, 6, 8, 12])
LIBRARY = native_library()
NATIVE: dict[ActivationBits, NativeCpuKernels] = (
    {} if LIBRARY is None else {8: NativeCpuKernels(LIBRARY, 8), 16: NativeCpuKernels(LIBRARY, 16)}
)  # torch's kernels round the values of weights, and promise no answers that do not depend on company
HALF_UNITS: dict[ActivationBits, float] = {8: 1 / 254, 16: 2**-15}
"""By which an activation is rounded at most, of the largest one of its group."""


def random_weight(
    num_outputs: int, num_inputs: int, group: int, bits: int, lowest: int, *, minimums: bool, halves: bool = True
) -> QuantisedWeight:
    """Every code occurs."""
    codes = torch.randint(2**bits, (num_outputs, num_inputs))
    codes = (DOUBLED_E2M1[codes] if lowest == LOWEST_E2M1 else codes + lowest).to(torch.int8)
    factors = torch.randn(2, num_outputs, num_inputs // group) / 2**bits
    factors = factors.half().float() if halves else factors
    return QuantisedWeight(
        codes=codes, scales=factors[0], minimums=factors[1] if minimums else None, bits=bits, lowest=lowest
    )


def test_a_value_is_scale_times_code_plus_minimum() -> None:
    weight = QuantisedWeight(
        codes=torch.tensor([[1, -2, 3, -128]], dtype=torch.int8),
        scales=torch.tensor([[0.5, 2.0]]),
        minimums=torch.tensor([[10.0, -1.0]]),
        bits=8,
        lowest=-128,
    )
    assert weight.dequantise(torch.float32).tolist() == [[10.5, 9.0, 5.0, -257.0]]
    assert (weight.shape, weight.group_size, weight.nbytes) == ((1, 4), 2, 4 + 4 * 2)


def rounded_activations(x: Tensor, group_size: int, bits: ActivationBits) -> Tensor:
    """What remains of `x [.., in]`, in float32, where the numbers of a group are whole multiples of a unit.

    The unit is 1/127 of the largest one, or, with 16 bits, the power of two of which it is less than 2^15.
    """
    groups = x.float().view(*x.shape[:-1], -1, group_size)
    largest = groups.abs().amax(-1, keepdim=True)
    unit = largest / 127 if bits == 8 else torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent - 15)
    whole = torch.where(largest > 0, groups / unit, 0.0).round()
    return (whole * unit).view(x.shape)


@pytest.mark.parametrize("kernels", [cpu, *NATIVE.values()], ids=["torch", *map(str, NATIVE)])
@pytest.mark.parametrize(("bits", "lowest"), FORMS)
@pytest.mark.parametrize("minimums", [True, False])
@pytest.mark.parametrize("halves", [True, False])
@pytest.mark.parametrize(("group", "num_inputs"), [(16, 48), (64, 192), (192, 192), (512, 512), (10, 60)])
def test_like_the_twin(
    kernels: Kernels, bits: int, lowest: int, minimums: bool, halves: bool, group: int, num_inputs: int
) -> None:
    torch.manual_seed(0)
    weight = random_weight(70, num_inputs, group, bits, lowest, minimums=minimums, halves=halves)
    bias = torch.randn(70)
    for dtype in (torch.float32, torch.bfloat16):
        x, residual = torch.randn(7, num_inputs).to(dtype), torch.randn(7, 70).to(dtype)
        twin = reference.pack_quantised(weight, bias.to(dtype).float(), torch.float32)  # bfloat16 would round weights
        packed = kernels.pack_quantised(weight, bias.to(dtype), dtype)
        tolerance = 2e-5 if dtype == torch.float32 else 2e-2
        taken = x.float()
        if isinstance(packed, QuantisedLinear):
            taken = rounded_activations(x, packed.form.group_size, packed.activation_bits)
        pairs = (packed(x), twin(taken)), (packed.add_to(residual, x), twin.add_to(residual.float(), taken))
        for actual, expected in pairs:
            assert actual.dtype == dtype
            torch.testing.assert_close(actual.float(), expected, rtol=tolerance, atol=tolerance * 4)


def exact_products(x: Tensor, weight: QuantisedWeight) -> Tensor:
    return x.double() @ weight.dequantise(torch.float32).double().T


@pytest.mark.parametrize("activation_bits", NATIVE)
@pytest.mark.parametrize(("bits", "lowest"), FORMS)
def test_nothing_is_lost_but_what_rounding_takes(bits: int, lowest: int, activation_bits: ActivationBits) -> None:
    """Of activations of very different sizes: 8 bits of an answer are right, but for what their groups lost."""
    torch.manual_seed(1)
    weight = random_weight(64, 256, 32, bits, lowest, minimums=True)
    sizes = torch.logspace(-6, 4, 40).unsqueeze(1) * torch.rand(40, 256).pow(8)
    x = (torch.randn(40, 256) * sizes).bfloat16()
    x[3, 64:128] = 0
    exact = exact_products(x, weight)
    largest = x.double().abs().view(40, -1, 32).amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    scale = largest @ weight.dequantise(torch.float32).double().abs().T
    actual = NATIVE[activation_bits].pack_quantised(weight, None, torch.bfloat16)(x).double()
    assert bool(((actual - exact).abs() <= exact.abs() * 2**-8 + scale * HALF_UNITS[activation_bits]).all())


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=map(str, NATIVE))
def test_zeros_and_the_smallest_and_largest_numbers(kernels: NativeCpuKernels) -> None:
    torch.manual_seed(0)
    weight = random_weight(32, 64, 32, 8, -128, minimums=True)
    linear = kernels.pack_quantised(weight, None, torch.bfloat16)
    assert linear(torch.zeros(3, 64).bfloat16()).abs().max() == 0
    assert linear(torch.full((3, 64), 1e-40).bfloat16()).abs().max() < 1e-36
    large = (torch.randn(3, 64) * 1e36).bfloat16()
    torch.testing.assert_close(linear(large).double(), exact_products(large, weight), rtol=2e-2, atol=2e35)


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=map(str, NATIVE))
@pytest.mark.parametrize("value", [torch.nan, -torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("size", [1e-10, 1.0])
def test_no_number_becomes_one_again(kernels: NativeCpuKernels, value: float, size: float) -> None:
    """The sampler finds out whether a model, or what it was given, is broken."""
    torch.manual_seed(0)
    weight = random_weight(32, 64, 32, 4, -8, minimums=False)
    weight.scales.mul_(size)
    x = torch.randn(3, 64).bfloat16()
    x[1, 40] = value
    finite = kernels.pack_quantised(weight, None, torch.bfloat16)(x).isfinite()
    assert finite[[0, 2]].all()
    assert not finite[1].any()


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=map(str, NATIVE))
@pytest.mark.parametrize("num_threads", [1, 2])
@pytest.mark.parametrize(("bits", "lowest"), FORMS)
def test_a_rows_projection_does_not_depend_on_the_others(
    kernels: NativeCpuKernels, num_threads: int, bits: int, lowest: int
) -> None:
    torch.manual_seed(0)
    linear = kernels.pack_quantised(
        random_weight(131, 192, 32, bits, lowest, minimums=True), torch.randn(131).bfloat16(), torch.bfloat16
    )
    assert isinstance(linear, QuantisedLinear)
    x, residual = torch.randn(50, 192).bfloat16(), torch.randn(50, 131).bfloat16()
    alone = torch.cat([linear.add_to(residual[row : row + 1], x[row : row + 1]) for row in range(50)])
    torch.set_num_threads(num_threads)
    for count in range(1, 51):
        assert torch.equal(linear.add_to(residual[:count], x[:count]), alone[:count])


@pytest.mark.parametrize("kernels", NATIVE.values(), ids=map(str, NATIVE))
@pytest.mark.parametrize(("bits", "lowest"), FORMS)
@pytest.mark.parametrize("minimums", [True, False])
@pytest.mark.parametrize(
    ("group", "num_inputs"), [(16, 80), (32, 1120), (48, 528), (64, 576), (80, 640), (128, 1024), (256, 4096)]
)
def test_many_rows_have_the_bits_of_few(
    kernels: NativeCpuKernels, bits: int, lowest: int, minimums: bool, group: int, num_inputs: int
) -> None:
    """More than a core's cache holds, and by more groups than are decoded at a time."""
    torch.manual_seed(0)
    weight = random_weight(70, num_inputs, group, bits, lowest, minimums=minimums, halves=minimums)
    linear = kernels.pack_quantised(weight, torch.randn(70).bfloat16(), torch.bfloat16)
    assert isinstance(linear, QuantisedLinear)
    x, residual = torch.randn(401, num_inputs).bfloat16(), torch.randn(401, 70).bfloat16()
    few = (slice(first, first + 5) for first in range(0, 401, 5))
    expected = torch.cat([linear.add_to(residual[rows], x[rows]) for rows in few])
    for count in (12, 17, 401):
        assert torch.equal(linear.add_to(residual[:count], x[:count]), expected[:count])


def test_weights_of_different_forms_lie_side_by_side_unchanged() -> None:
    torch.manual_seed(0)
    weights = [
        random_weight(6, 96, 32, 4, -8, minimums=False),
        random_weight(3, 96, 48, 4, 0, minimums=True),
        random_weight(5, 96, 16, 8, -128, minimums=False),
    ]
    joined = side_by_side(weights)
    assert CodeFormat.of([joined]) == CodeFormat(bits=8, lowest=-128, group_size=16, has_minimums=True)
    expected = torch.cat([weight.dequantise(torch.float32) for weight in weights])
    assert torch.equal(joined.dequantise(torch.float32), expected)
    alike = side_by_side(weights[:1] * 2)
    assert CodeFormat.of([alike]) == CodeFormat(bits=4, lowest=-8, group_size=32, has_minimums=False)
