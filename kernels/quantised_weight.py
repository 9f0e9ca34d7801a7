"""Weights of 4 or 8 bits: codes or numbers, and a scale and perhaps a minimum for each group of inputs.

Knows how codes stand for values; not where they come from, nor how a device lays them out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

ActivationBits = Literal[8, 16]
"""To how many bits activations may be rounded before they meet such weights."""

LOWEST_E2M1 = -12
LOWEST_E4M3 = -448
LOWEST = {4: (-8, 0, LOWEST_E2M1), 8: (-128, LOWEST_E4M3)}
"""What the lowest code of so many bits may stand for. Codes count up from it; but from `LOWEST_E2M1` on they are the
doubles of E2M1's numbers: 0, 1, 2, 3, 4, 6, 8, 12, and these below 0; and from `LOWEST_E4M3` on they are no codes, but
floating-point numbers of 8 bits (OCP 8-bit Floating Point Specification, E4M3)."""


GROUP_MULTIPLE, LARGEST_GROUP = 16, 256
"""A CPU's kernels round so many activations at once, and their sums of 32 bits have room for so many inputs. Where a
scale has not a multiple of the first, they compute with the weight's values in bfloat16."""


# Of a GPU's kernels, here for who reckons with them where there is no Triton.
STEPS_OF_E4M3, STEPS = (128,), (128, 64, 32)
"""How many inputs they may multiply at once by numbers of E4M3, and by codes: so many have a scale in common."""

VALUES_FROM_ROWS = 256
"""Of so many rows they multiply by a weight's values, which take memory for that time; see `expands` there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedWeight:
    """`[out, in]`: input i of an output is `scale * code + minimum`, in float32, with those of i's group."""

    codes: Tensor  # [out, in] int8; of E4M3 float8_e4m3fn
    scales: Tensor  # [out, groups] float32
    minimums: Tensor | None  # [out, groups] float32; None: 0
    bits: int  # 4 or 8
    lowest: int  # see `LOWEST`

    def __post_init__(self) -> None:
        assert self.lowest in LOWEST[self.bits]
        assert self.codes.dtype == (torch.float8_e4m3fn if self.lowest == LOWEST_E4M3 else torch.int8)
        assert self.scales.dtype == torch.float32
        assert self.codes.shape[0] == self.scales.shape[0] and self.codes.shape[1] % self.scales.shape[1] == 0
        assert self.minimums is None or self.minimums.shape == self.scales.shape

    @property
    def shape(self) -> tuple[int, int]:
        num_outputs, num_inputs = self.codes.shape
        return num_outputs, num_inputs

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    @property
    def form(self) -> CodeFormat:
        has_minimums = self.minimums is not None
        return CodeFormat(bits=self.bits, lowest=self.lowest, group_size=self.group_size, has_minimums=has_minimums)

    @property
    def nbytes(self) -> int:
        """Bytes of the weight as it is kept for computing: packed codes, factors in 16 bits, or in 32 beside E4M3."""
        factors = self.scales.numel() * (1 if self.minimums is None else 2)
        return self.codes.numel() * self.bits // 8 + factors * (4 if self.lowest == LOWEST_E4M3 else 2)

    def dequantise(self, dtype: torch.dtype) -> Tensor:
        """The values, rounded once where `dtype` is narrower than float32."""
        grouped = self.codes.view(*self.scales.shape, -1)
        if self.lowest == LOWEST_E4M3:
            grouped = grouped.float()  # torch multiplies no others by it
        values = grouped * self.scales.unsqueeze(-1)
        if self.minimums is not None:
            values += self.minimums.unsqueeze(-1)
        return values.view(self.shape).to(dtype)

    def rows(self, wanted: Tensor) -> QuantisedWeight:
        """The outputs of these indices, in this order."""
        minimums = None if self.minimums is None else self.minimums[wanted]
        # As bytes: not every device can look up FP8.
        codes = self.codes.view(torch.int8)[wanted].view(self.codes.dtype)
        return replace(self, codes=codes, scales=self.scales[wanted], minimums=minimums)

    def part(self, rows: slice, columns: slice) -> QuantisedWeight:
        """The values of these outputs for these inputs, copied. Where an end cuts a group, all groups are smaller."""
        start, stop, _ = columns.indices(self.shape[1])
        size = math.gcd(self.group_size, start, stop)
        repeats, groups = self.group_size // size, slice(start // size, stop // size)

        def factors(whole: Tensor) -> Tensor:
            return _copied(whole[rows].repeat_interleave(repeats, dim=1)[:, groups])

        minimums = None if self.minimums is None else factors(self.minimums)
        return replace(
            self, codes=_copied(self.codes[rows, start:stop]), scales=factors(self.scales), minimums=minimums
        )

    def as_form(self, form: CodeFormat) -> QuantisedWeight:
        """These values in a form that has room for them."""
        assert self.group_size % form.group_size == 0 and self.bits <= form.bits
        repeats = self.group_size // form.group_size
        minimums = self.minimums
        if form.has_minimums and minimums is None:
            minimums = torch.zeros_like(self.scales)
        return replace(
            self,
            scales=self.scales.repeat_interleave(repeats, dim=1),
            minimums=None if minimums is None else minimums.repeat_interleave(repeats, dim=1),
            bits=form.bits,
            lowest=form.lowest,
        )


def _copied(part: Tensor) -> Tensor:
    """Side by side in memory, and the whole is not kept for it."""
    return part.clone(memory_format=torch.contiguous_format)


@dataclass(frozen=True, slots=True, kw_only=True)
class CodeFormat:
    """How codes are stored: what weights must share to lie side by side, and what a kernel's packed weights have."""

    bits: int
    lowest: int
    group_size: int
    has_minimums: bool

    @property
    def inputs_at_once(self) -> int | None:
        """How many inputs a GPU's kernels multiply at once by such weights as they are stored. None: these have their
        values there. With minimums that is so too where these are no multiples of their scales."""
        if self.lowest == LOWEST_E2M1 or (self.bits == 8 and self.has_minimums):
            return None
        steps = STEPS_OF_E4M3 if self.lowest == LOWEST_E4M3 else STEPS
        return next((step for step in steps if self.group_size % step == 0), None)

    @property
    def on_cpus(self) -> CodeFormat | None:
        """How a CPU's kernels multiply by such weights: in groups of at most `LARGEST_GROUP`. None: these have their
        values there."""
        group_size = next(size for size in range(LARGEST_GROUP, 0, -1) if self.group_size % size == 0)
        if self.lowest == LOWEST_E4M3 or group_size % GROUP_MULTIPLE:
            return None
        return replace(self, group_size=group_size)

    @classmethod
    def of(cls, weights: Sequence[QuantisedWeight]) -> CodeFormat:
        """The narrowest that has room for all of them."""
        return cls.around([weight.form for weight in weights])

    @classmethod
    def around(cls, forms: Sequence[CodeFormat]) -> CodeFormat:
        """The narrowest that has room for weights of all these forms: the bits that they have if their lowest codes are
        one number, which says the bits too (`LOWEST`), else 8."""
        lowest = {form.lowest for form in forms}
        narrow = len(lowest) == 1
        assert narrow or LOWEST_E4M3 not in lowest, "its numbers are no codes of any other form"
        return cls(
            bits=forms[0].bits if narrow else 8,
            lowest=lowest.pop() if narrow else -128,
            group_size=math.gcd(*(form.group_size for form in forms)),
            has_minimums=any(form.has_minimums for form in forms),
        )


def side_by_side(weights: Sequence[QuantisedWeight]) -> QuantisedWeight:
    """All outputs of weights of the same inputs, in one."""
    form = CodeFormat.of(weights)
    parts = [weight.as_form(form) for weight in weights]
    minimums = [part.minimums for part in parts if part.minimums is not None]
    return QuantisedWeight(
        codes=torch.cat([part.codes.view(torch.int8) for part in parts]).view(weights[0].codes.dtype),
        scales=torch.cat([part.scales for part in parts]),
        minimums=torch.cat(minimums) if minimums else None,
        bits=form.bits,
        lowest=form.lowest,
    )
