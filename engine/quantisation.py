"""Weights rounded to 4 or 8 bits when they are loaded.

Symmetric, by groups of inputs, with scales that float16 holds exactly. Knows numbers, no checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from kernels.quantised_weight import QuantisedWeight

QuantisationName = Literal["int8", "int4"]
GroupSize = Literal[32, 64, 128]

_CHUNK_VALUES = 2**17  # that are rounded at once: they stay in a core's cache
_LEAST_SCALE = 2.0**-24  # of float16
# With which the largest value of a group meets its code, from -7 to -9; the lowest code is -8.
_LARGEST_CODES = tuple(-7.0 - step / 4 for step in range(8))


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a model's projections are rounded."""

    name: QuantisationName
    group_size: int

    @classmethod
    def of(cls, name: QuantisationName | None, group_size: int | None) -> Quantisation | None:
        """8 bits lose little with larger groups, which are faster; of 4 bits, every bit counts."""
        if name is None:
            return None
        return cls(name=name, group_size=group_size or {"int8": 64, "int4": 32}[name])

    def quantise(self, weight: Tensor) -> QuantisedWeight:
        """From `[out, in]`. Raises ValueError if its inputs do not divide into groups."""
        num_outputs, num_inputs = weight.shape
        if num_inputs % self.group_size:
            raise ValueError(
                f"a projection of {num_inputs} inputs cannot be quantised in groups of {self.group_size}; set"
                " model.quantization_group to a number that divides them, 32 for most models"
            )
        rounded = {"int8": _to_8_bits, "int4": _to_4_bits}[self.name]
        codes = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
        scales = torch.empty(num_outputs, num_inputs // self.group_size)
        step = max(1, _CHUNK_VALUES // num_inputs)
        with _one_thread():
            for first in range(0, num_outputs, step):
                rows = slice(first, first + step)
                _round(weight[rows].float(), rounded, codes[rows], scales[rows])
        bits = {"int8": 8, "int4": 4}[self.name]
        return QuantisedWeight(codes=codes, scales=scales, minimums=None, bits=bits, lowest=-(2 ** (bits - 1)))


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads would meet after each operator on a chunk, and wait for the one that others keep from its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _round(values: Tensor, rounded: Callable[[Tensor], tuple[Tensor, Tensor]], codes: Tensor, scales: Tensor) -> None:
    """`[rows, in]` into `codes [rows, in]` and `scales [rows, groups]`."""
    group_codes, group_scales = rounded(values.view(*scales.shape, -1))
    codes.copy_(group_codes.view(codes.shape))
    scales.copy_(group_scales)


def _to_8_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """`[.., group]`: codes in [-127, 127] and scales `[..]`."""
    scales = _as_halves(groups.abs().amax(-1) / 127)
    return _codes(groups, scales, -127, 127), scales


def _to_4_bits(groups: Tensor) -> tuple[Tensor, Tensor]:
    """Of some codes for a group's largest value, the one after which the squared error is least.

    For given codes q of values w the best scale is wq / qq, and what it leaves is ww - (wq)² / qq.
    """
    largest = groups.gather(-1, groups.abs().argmax(-1, keepdim=True)).squeeze(-1)
    best = torch.full_like(largest, -1.0)
    scales = torch.zeros_like(largest)
    for largest_code in _LARGEST_CODES:
        codes = _codes(groups, largest / largest_code, -8, 7)
        products, squares = (groups * codes).sum(-1), codes.square().sum(-1).clamp_(min=1.0)
        explained = products.square() / squares
        better = explained > best
        best = torch.where(better, explained, best)
        scales = torch.where(better, products / squares, scales)
    scales = _as_halves(scales)
    return _codes(groups, scales, -8, 7), scales


def _codes(groups: Tensor, scales: Tensor, lowest: int, highest: int) -> Tensor:
    per_scale = torch.where(scales == 0, 0.0, 1 / scales).unsqueeze(-1)
    return (groups * per_scale).round_().clamp_(lowest, highest)


def _as_halves(scales: Tensor) -> Tensor:
    """To the nearest of float16; none but 0 becomes 0."""
    sign = torch.where(scales < 0, -1.0, 1.0)
    kept = torch.where(scales == 0, 0.0, scales.abs().clamp(min=_LEAST_SCALE))
    return (sign * kept).half().float()
