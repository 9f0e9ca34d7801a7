"""Weights rounded to 4 or 8 bits when they are loaded.

By groups of inputs, with scales and minimums that float16 holds exactly: 8 bits around zero, 4 bits from a minimum on.
Knows numbers, no checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from kernels.quantised_weight import QuantisedWeight

QuantisationName = Literal["int8", "int4"]
Rounded = tuple[Tensor, Tensor, Tensor]
"""Of `[.., group]`: codes, and the scales and minimums `[..]`."""

_CHUNK_VALUES = 2**17  # that are rounded at once: they stay in a core's cache
_LEAST_SCALE = 2.0**-24  # of float16
# Into how many steps a group's numbers are divided, of which there are 15: fewer leave room at an end, more cut it off.
_STEPS = (13.0, 13.5, 14.0, 14.5, 15.0, 15.5, 16.0)
# A grid that misses zero is taken where it leaves so much less of the squared error: the numbers come from such a one,
# or lie far from zero.
_MISSING_ZERO = 0.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Quantisation:
    """How a model's projections are rounded."""

    name: QuantisationName
    group_size: int

    @classmethod
    def of(cls, name: QuantisationName | None) -> Quantisation | None:
        """8 bits lose little with larger groups, which are faster; of 4 bits, every bit counts."""
        if name is None:
            return None
        return cls(name=name, group_size={"int8": 64, "int4": 32}[name])

    @property
    def of_the_head(self) -> Quantisation:
        """The output layer gets 8 bits, as in GGUF files: its errors go straight into logits."""
        return replace(self, name="int8")

    def require_groups(self, num_inputs: int) -> None:
        """Raises ValueError where the inputs of a weight do not divide into groups."""
        if num_inputs % self.group_size:
            raise ValueError(
                f"a projection of {num_inputs} inputs cannot be quantised in groups of {self.group_size}; leave"
                " model.quantization out, or name a checkpoint whose weights come quantised"
            )

    def quantise(self, weight: Tensor) -> QuantisedWeight:
        """Quantise a weight `[out, in]`. Raises ValueError if its inputs do not divide into groups."""
        return self.quantise_part(weight, slice(None), slice(None))

    def quantise_part(self, weight: Tensor, rows: slice, columns: slice) -> QuantisedWeight:
        """What `quantise` makes of these outputs and inputs: of whole groups, whose scales all of their inputs have a
        part in. Raises as it does."""
        num_inputs = weight.shape[1]
        self.require_groups(num_inputs)
        start, stop, _ = columns.indices(num_inputs)
        first = start // self.group_size * self.group_size
        last = -(-stop // self.group_size) * self.group_size
        rounded = self._rounded(weight[rows, first:last])
        whole = (first, last) == (start, stop)
        return rounded if whole else rounded.part(slice(None), slice(start - first, stop - first))

    def _rounded(self, weight: Tensor) -> QuantisedWeight:
        num_outputs, num_inputs = weight.shape
        rounded = {"int8": _to_8_bits, "int4": _to_4_bits}[self.name]
        codes = torch.empty(num_outputs, num_inputs, dtype=torch.int8)
        scales, minimums = torch.empty(2, num_outputs, num_inputs // self.group_size)
        step = max(1, _CHUNK_VALUES // num_inputs)
        with _one_thread():
            for first in range(0, num_outputs, step):
                rows = slice(first, first + step)
                groups = weight[rows].float().view(*scales[rows].shape, -1)
                group_codes, scales[rows], minimums[rows] = rounded(groups)
                codes[rows] = group_codes.view(codes[rows].shape)
        if self.name == "int8":
            return QuantisedWeight(codes=codes, scales=scales, minimums=None, bits=8, lowest=-128)
        return QuantisedWeight(codes=codes, scales=scales, minimums=minimums, bits=4, lowest=0)


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads would meet after each operator on a chunk, and wait for the one that others keep from its core."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _to_8_bits(groups: Tensor) -> Rounded:
    """Codes in [-127, 127]; zero is one of them."""
    scales = _as_halves(groups.abs().amax(-1) / 127)
    return _codes(groups, scales, -127, 127), scales, torch.zeros_like(scales)


def _to_4_bits(groups: Tensor) -> Rounded:
    """Round groups to 4 bits on a grid that meets zero, but for numbers that lie on another.

    Inputs of large activations tend to have weights near zero: these keep their values, while the squared error, which
    knows no activations, would be less on a grid that starts at the least of them.
    """
    exact, free = _meeting_zero(groups), _from_the_least(groups)
    errors = [
        (codes * scales.unsqueeze(-1) + minimums.unsqueeze(-1) - groups).square().sum(-1)
        for codes, scales, minimums in (exact, free)
    ]
    better = errors[1] < errors[0] * _MISSING_ZERO
    codes = torch.where(better.unsqueeze(-1), free[0], exact[0])
    return codes, torch.where(better, free[1], exact[1]), torch.where(better, free[2], exact[2])


def _meeting_zero(groups: Tensor) -> Rounded:
    """Some code stands for zero. Of some grids, the one after which the squared error is least.

    For given numbers q of steps from zero the best scale of values w is wq / qq, and what it leaves is ww - (wq)² / qq.
    """
    least, largest = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    best, scales, zeros = torch.full_like(least, -1.0), torch.zeros_like(least), torch.zeros_like(least)
    for steps in _STEPS:
        step = (largest - least) / steps
        zero = torch.where(step > 0, -least / step, 0.0).round().clamp(0, 15)
        codes = _codes(groups, step, -zero.unsqueeze(-1), 15 - zero.unsqueeze(-1))
        products, squares = (groups * codes).sum(-1), codes.square().sum(-1).clamp_(min=1.0)
        explained = products.square() / squares
        better = explained > best
        best = torch.where(better, explained, best)
        scales, zeros = torch.where(better, products / squares, scales), torch.where(better, zero, zeros)
    return _on_grid(groups, scales, -zeros * scales)


def _from_the_least(groups: Tensor) -> Rounded:
    """The first code stands for the least, the last for the largest; then scale and minimum are fitted to the codes."""
    least, largest = groups.aminmax(dim=-1)
    codes = _codes(groups - least.unsqueeze(-1), (largest - least) / 15, 0, 15)
    means, mean_codes = groups.mean(-1), codes.mean(-1)
    offsets = codes - mean_codes.unsqueeze(-1)
    squares = offsets.square().sum(-1)
    scales = torch.where(squares > 0, (groups * offsets).sum(-1) / squares, 0.0)
    return _on_grid(groups, scales, means - scales * mean_codes)


def _on_grid(groups: Tensor, scales: Tensor, minimums: Tensor) -> Rounded:
    scales, minimums = _as_halves(scales), minimums.half().float()
    return _codes(groups - minimums.unsqueeze(-1), scales, 0, 15), scales, minimums


def _codes(groups: Tensor, scales: Tensor, lowest: int | Tensor, highest: int | Tensor) -> Tensor:
    per_scale = torch.where(scales == 0, 0.0, 1 / scales).unsqueeze(-1)
    return (groups * per_scale).round_().clamp_(torch.as_tensor(lowest), torch.as_tensor(highest))


def _as_halves(scales: Tensor) -> Tensor:
    """Round scales to the nearest of float16; none but 0 becomes 0."""
    sign = torch.where(scales < 0, -1.0, 1.0)
    kept = torch.where(scales == 0, 0.0, scales.abs().clamp(min=_LEAST_SCALE))
    return (sign * kept).half().float()
