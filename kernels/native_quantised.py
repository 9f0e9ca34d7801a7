"""Projections by weights of 4 or 8 bits by the C++ kernels: see `native/quantised.cpp`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.quantised_weight import Form, QuantisedWeight

# What sums of 32 bits have room for, and what activations are brought into fixed point by.
_LARGEST_GROUP, _GROUP_MULTIPLE = 256, 16
_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64
_Flag = ctypes.c_bool


def declare(library: ctypes.CDLL) -> None:
    library.quantised_packed_bytes.argtypes = [_Size, _Size, _Size, _Size, _Flag, _Flag]
    library.quantised_packed_bytes.restype = _Size
    library.quantised_pack.argtypes = [_Pointer, _Pointer, _Pointer, *([_Size] * 5), _Flag, _Pointer]
    library.quantised_pack.restype = None
    library.quantised_linear.argtypes = [
        *(_Pointer, _Size, _Size, _Pointer, _Size, _Size, _Size, _Size, _Flag, _Flag),
        *(_Pointer, _Pointer, _Pointer),
    ]
    library.quantised_linear.restype = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLinear:
    """Of bfloat16. A row's result is the same to the bit whatever the other rows are."""

    library: ctypes.CDLL
    packed: Tensor  # panels of 32 outputs, groups of inputs; each codes, scales, minimums
    num_inputs: int
    num_outputs: int
    form: Form
    wide_factors: bool  # scales and minimums are float32, since some are not exact in float16
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._compute(x, residual.contiguous())

    def _compute(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        assert x.dtype == torch.bfloat16 and x.shape[-1] == self.num_inputs
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self.library.quantised_linear(
            x.data_ptr(),
            x.numel() // self.num_inputs,
            self.num_inputs,
            self.packed.data_ptr(),
            self.num_outputs,
            self.form.group_size,
            self.form.bits,
            self.form.lowest,
            self.wide_factors,
            self.form.has_minimums,
            None if self.bias is None else self.bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out


def can_pack(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and Form.of([weight], _LARGEST_GROUP).group_size % _GROUP_MULTIPLE == 0


def pack_quantised(library: ctypes.CDLL, weight: QuantisedWeight, bias: Tensor | None) -> QuantisedLinear:
    form = Form.of([weight], _LARGEST_GROUP)
    weight = weight.as_form(form)
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    minimums = None if weight.minimums is None else weight.minimums.contiguous()
    wide = not (_are_halves(scales) and (minimums is None or _are_halves(minimums)))
    num_outputs, num_inputs = weight.shape
    sizes = (num_inputs, num_outputs, form.group_size, form.bits)
    packed = torch.zeros(library.quantised_packed_bytes(*sizes, wide, form.has_minimums), dtype=torch.uint8)
    library.quantised_pack(
        codes.data_ptr(),
        scales.data_ptr(),
        None if minimums is None else minimums.data_ptr(),
        *sizes,
        form.lowest,
        wide,
        packed.data_ptr(),
    )
    return QuantisedLinear(
        library=library,
        packed=packed,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        form=form,
        wide_factors=wide,
        bias=None if bias is None else bias.contiguous(),
    )


def _are_halves(factors: Tensor) -> bool:
    """Exact in float16."""
    return torch.equal(factors.half().float(), factors)
