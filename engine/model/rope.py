"""Rotary position embeddings: which frequencies a model turns its heads with.

Knows the scaling methods by name and parameters; not where they stand in a config file (`engine.model.config`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional

RopeKind = Literal["default", "linear", "llama3", "yarn", "longrope"]
ROPE_KINDS: tuple[str, ...] = get_args(RopeKind)
_FEWEST_KNOWN = 2048  # positions; 0.5 MB of a head of 64 in bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Base period and scaling of one kind of layer. Fields that a method does not use keep their defaults."""

    theta: float
    kind: RopeKind = "default"
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: round the bounds of the ramp to whole dimensions
    short_factor: tuple[float, ...] = ()  # longrope: how much slower each pair turns, up to the original length
    magnitude: float = 1.0  # cosine and sine are multiplied by it (the attention factor of yarn and longrope)
    partial_rotary_factor: float = 1.0  # which share of a head's numbers turn: the first ones
    interleaved: bool = False  # pairs that turn together lie side by side in the checkpoint

    def rotary_dim(self, head_dim: int) -> int:
        """How many of a head's numbers turn."""
        return int(head_dim * self.partial_rotary_factor)

    @property
    def reorders_heads(self) -> bool:
        """Whether kernels want the numbers of queries' and keys' heads in another order than the checkpoint has them
        in."""
        return self.interleaved or self.partial_rotary_factor != 1.0

    def head_order(self, head_dim: int) -> Tensor:
        """That order, `[head_dim]`: numbers that turn together are half a head apart, and those that do not turn are
        pairs of no frequency. Queries and keys that are both in it have the same products."""
        turning = torch.arange(self.rotary_dim(head_dim))
        pairs = turning.view(-1, 2).t() if self.interleaved else turning.view(2, -1)
        still = torch.arange(len(turning), head_dim).view(2, -1)
        return torch.cat((pairs, still), dim=1).flatten()


def yarn_magnitude(factor: float, multiplier: float = 1.0) -> float:
    """How much YaRN sharpens attention on a context stretched by `factor` (arXiv:2309.00071, section 3.4)."""
    return 1.0 if factor <= 1.0 else 0.1 * multiplier * math.log(factor) + 1.0


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each pair of dimensions that turns, `[rotary_dim / 2]` float32."""
    rotary_dim = rope.rotary_dim(head_dim)
    periods = rope.theta ** (torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)
    plain = 1.0 / periods
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(plain, rope)
    if rope.kind == "yarn":
        return _yarn(plain, rope, rotary_dim)
    if rope.kind == "longrope":
        return 1.0 / (torch.tensor(rope.short_factor) * periods)
    return plain


def _llama3(plain: Tensor, rope: RopeConfig) -> Tensor:
    """Slow the dimensions that turn rarely within the original context, keep the fast ones, blend between.

    The blend's weight is how far the number of turns lies from `low_freq_factor` towards `high_freq_factor`.
    """
    turns = rope.original_max_position_embeddings * plain / (2 * math.pi)
    kept = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    kept = kept.clamp(0.0, 1.0)
    return plain * kept + plain / rope.factor * (1 - kept)


def _yarn(plain: Tensor, rope: RopeConfig, rotary_dim: int) -> Tensor:
    """Blend frequencies as `_llama3` does, but linearly in the dimension's index (arXiv:2309.00071, section 3.2)."""

    def dimension(turns: float) -> float:
        """The (fractional) pair of dimensions that makes so many turns within the original context."""
        period = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return rotary_dim * math.log(period) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0.0), min(high, rotary_dim - 1.0)
    width = high - low or 1e-3
    slowed = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / width).clamp(0.0, 1.0)
    return plain / rope.factor * slowed + plain * (1 - slowed)


class RotaryEmbedding:
    """Cosines and sines for positions, `[T, 1, head_dim]` each, in the form that `Kernels.rotate_and_store` takes: for
    heads in the order of `RopeConfig.head_order`.

    On a CPU they are looked up: for a few positions that takes a quarter of the time.
    """

    def __init__(self, rope: RopeConfig, head_dim: int, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._still = head_dim // 2 - len(self._frequencies)  # pairs of a head that do not turn
        self._magnitude = rope.magnitude
        self._known = (torch.empty(0), torch.empty(0))  # those of the positions from 0 to the highest one so far

    def __call__(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        if positions.device.type != "cpu":
            return self._compute(positions, dtype)
        num_positions = int(positions.max()) + 1
        if num_positions > len(self._known[0]) or self._known[0].dtype != dtype:
            rounded = max(_FEWEST_KNOWN, 1 << (num_positions - 1).bit_length())
            self._known = self._compute(torch.arange(rounded), dtype)
        cos, signed_sin = self._known
        return cos.index_select(0, positions), signed_sin.index_select(0, positions)

    def _compute(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        angles = positions.unsqueeze(1) * self._frequencies
        cos, sin = angles.cos() * self._magnitude, angles.sin() * self._magnitude
        if self._still:
            cos, sin = functional.pad(cos, (0, self._still), value=1.0), functional.pad(sin, (0, self._still))
        cos, signed_sin = torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)
        return cos.to(dtype).unsqueeze(1), signed_sin.to(dtype).unsqueeze(1)
