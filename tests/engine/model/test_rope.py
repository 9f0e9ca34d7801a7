"""Rotary embeddings that are looked up are those that are computed, whichever positions were asked for before."""

from __future__ import annotations

import pytest
import torch

from engine.model.rope import RopeConfig, RotaryEmbedding


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [8, 64, 80])
def test_a_position_has_the_same_turns_in_any_step(dtype: torch.dtype, head_dim: int) -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=10_000.0, magnitude=1.25), head_dim, torch.device("cpu"))
    for positions in (torch.tensor([3, 0, 2047]), torch.tensor([2048, 7]), torch.tensor([70_001]), torch.arange(40)):
        frequencies = 10_000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = positions.unsqueeze(1) * frequencies
        cos, signed_sin = rotary(positions, dtype)
        assert cos.shape == signed_sin.shape == (len(positions), 1, head_dim)
        assert cos.is_contiguous() and signed_sin.is_contiguous() and cos.dtype == dtype
        # float32 angles of 70,000 radians are known to a few thousandths.
        tolerance = 2e-2 if dtype == torch.bfloat16 or positions.max() > 10_000 else 5e-4
        expected = 1.25 * torch.cat((angles.cos(), angles.cos()), 1)
        torch.testing.assert_close(cos[:, 0].double(), expected, rtol=0, atol=tolerance)
        expected = 1.25 * torch.cat((-angles.sin(), angles.sin()), 1)
        torch.testing.assert_close(signed_sin[:, 0].double(), expected, rtol=0, atol=tolerance)


def test_the_type_may_change() -> None:
    rotary = RotaryEmbedding(RopeConfig(theta=10_000.0), 8, torch.device("cpu"))
    wide, _ = rotary(torch.tensor([5]), torch.float32)
    narrow, _ = rotary(torch.tensor([5]), torch.bfloat16)
    assert torch.equal(wide.bfloat16(), narrow)
