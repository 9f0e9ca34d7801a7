"""Triton's mixtures of experts against their plain twin, and rows that do not depend on one another."""

from __future__ import annotations

import pytest
import torch

from kernels import reference
from kernels.interface import ExpertChoice
from kernels.triton.experts import GpuExperts, choose_experts
from kernels.triton.kernels import GpuKernels
from tests.support.interpreted import DTYPES, device
from tests.support.mixtures import MIXTURES, Mixture
from tests.support.thoroughness import combined

TOLERANCES = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
WIDE = Mixture(num_experts=2, hidden=16, width=8)  # enough rows for each that tiles are wide


@combined(one_in=3, mixture=[WIDE, *MIXTURES.values()], num_rows=[1, 5, 66], dtype=DTYPES)
def test_like_the_twin(mixture: Mixture, num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    weights, x = mixture.weights(dtype), mixture.rows(num_rows, dtype).to(device())
    residual = torch.randn(num_rows, mixture.hidden).to(device(), dtype)
    packed = mixture.packed(GpuKernels(device(), batch_invariant=True), [weight.to(device()) for weight in weights])
    assert isinstance(packed, GpuExperts)
    twin = mixture.packed(reference, [weight.to(device()).float() for weight in weights])
    for actual, expected in (
        (packed(x), twin(x.float())),
        (packed.add_to(residual, x), twin.add_to(residual.float(), x.float())),
    ):
        assert actual.dtype == dtype
        torch.testing.assert_close(actual.float(), expected, rtol=TOLERANCES[dtype], atol=TOLERANCES[dtype])


@pytest.mark.parametrize("name", ["two of eight", "four by corrected sigmoids"])
def test_processes_with_some_experts_each_make_the_whole_together(name: str) -> None:
    """Though what nobody computes stands in memory as numbers that are none."""
    torch.manual_seed(0)
    mixture = MIXTURES[name]
    kernels = GpuKernels(device(), batch_invariant=True)
    weights = [weight.to(device()) for weight in mixture.weights(torch.float32)]
    x = mixture.rows(3, torch.float32).to(device())
    whole = mixture.packed(kernels, weights)(x)
    torch.use_deterministic_algorithms(True)  # which fill new memory so
    try:
        parts = [mixture.packed(kernels, weights, held=held)(x) for held in mixture.shares()]
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(torch.stack(parts).sum(0), whole, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("normalised", [False, True])
def test_the_first_of_equal_logits_are_chosen(normalised: bool) -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0, 1.0], [-1.0, -1.0, -1.0, -torch.inf, -1.0]], device=device())
    choice = ExpertChoice(per_row=3, normalised=normalised)
    (numbers, shares), (expected, expected_shares) = (
        choose_experts(logits, choice),
        reference.choose_experts(logits, choice),
    )
    assert numbers.tolist() == expected.tolist() == [[1, 3, 2], [0, 1, 2]]
    torch.testing.assert_close(shares, expected_shares)


def test_rows_do_not_depend_on_each_other() -> None:
    torch.manual_seed(0)
    mixture = MIXTURES["two of eight"]
    kernels = GpuKernels(device(), batch_invariant=True)
    packed = mixture.packed(kernels, [weight.to(device()) for weight in mixture.weights(torch.float32)])
    x = mixture.rows(70, torch.float32).to(device())
    together = packed(x)
    assert torch.equal(packed(x.flip(0)).flip(0), together)
    for row in (0, 35, 69):
        assert torch.equal(packed(x[row : row + 1])[0], together[row])


def test_more_experts_than_the_kernels_look_at_are_refused() -> None:
    mixture = Mixture(num_experts=513, hidden=2, width=2)
    weights = [torch.ones(513, 2), *[torch.ones(4, 2), torch.ones(2, 2)] * 513]
    with pytest.raises(ValueError, match="2 of 513 experts"):
        mixture.packed(GpuKernels(device(), batch_invariant=True), weights)
