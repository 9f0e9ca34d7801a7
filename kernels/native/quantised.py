"""Projections by weights of 4 or 8 bits by the C++ kernels: see `src/quantised.cpp`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.packing_memory import PRIVATE, PackingMemory
from kernels.native.library import Flag, Pointer, Size, declare
from kernels.native.linear import NativeLinear
from kernels.quantised_weight import ActivationBits, Form, QuantisedWeight

# What sums of 32 bits have room for, and how many activations are rounded at once.
_LARGEST_GROUP, _GROUP_MULTIPLE = 256, 16
_LAYOUT = [Size, Size, Size, Flag, Flag, Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLinear(NativeLinear):
    """Of bfloat16. Its panels have groups of inputs; each is codes, scales, minimums."""

    form: Form
    wide_factors: bool  # scales and minimums are float32, since some are not exact in float16
    activation_bits: ActivationBits  # to which inputs are rounded, by groups

    def _layout(self) -> tuple[int, ...]:
        form = self.form
        sizes = form.group_size, form.bits, form.lowest, self.wide_factors, form.has_minimums
        return *sizes, self.activation_bits // 8


def can_pack(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and Form.of([weight], _LARGEST_GROUP).group_size % _GROUP_MULTIPLE == 0


def pack_quantised(
    library: ctypes.CDLL,
    weight: QuantisedWeight,
    bias: Tensor | None,
    activation_bits: ActivationBits,
    memory: PackingMemory = PRIVATE,
) -> QuantisedLinear:
    packed_bytes = declare(library, "quantised_packed_bytes", [*[Size] * 4, Flag, Flag], Size)
    pack = declare(library, "quantised_pack", [*[Pointer] * 3, *[Size] * 5, Flag, Pointer])
    parameters = [Pointer, Size, Size, Pointer, Size, *_LAYOUT, Pointer, Pointer, Pointer]
    form = Form.of([weight], _LARGEST_GROUP)
    weight = weight.as_form(form)
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    minimums = None if weight.minimums is None else weight.minimums.contiguous()
    wide = not (_are_halves(scales) and (minimums is None or _are_halves(minimums)))
    num_outputs, num_inputs = weight.shape
    sizes = (num_inputs, num_outputs, form.group_size, form.bits)

    def fill(packed: Tensor) -> None:
        parts = [None if part is None else part.data_ptr() for part in (codes, scales, minimums)]
        pack(*parts, *sizes, form.lowest, wide, packed.data_ptr())

    packed = memory.lay_out(packed_bytes(*sizes, wide, form.has_minimums), torch.uint8, fill)
    return QuantisedLinear(
        compute=declare(library, "quantised_linear", parameters),
        packed=packed,
        dtype=torch.bfloat16,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        form=form,
        wide_factors=wide,
        activation_bits=activation_bits,
        bias=None if bias is None else bias.contiguous(),
    )


def _are_halves(factors: Tensor) -> bool:
    """Exact in float16."""
    return torch.equal(factors.half().float(), factors)
