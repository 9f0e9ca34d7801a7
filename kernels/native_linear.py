"""Projections in bfloat16 by the C++ kernels: see `native/linear.cpp`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64


def declare(library: ctypes.CDLL) -> None:
    library.linear_packed_size.argtypes = [_Size, _Size]
    library.linear_packed_size.restype = _Size
    library.linear_pack_bf16.argtypes = [_Pointer, _Size, _Size, _Pointer]
    library.linear_pack_bf16.restype = None
    library.linear_bf16.argtypes = [_Pointer, _Size, _Size, _Pointer, _Size, _Pointer, _Pointer, _Pointer]
    library.linear_bf16.restype = None


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A row's result is the same to the bit whatever the other rows are."""

    library: ctypes.CDLL
    packed: Tensor  # panels of 32 outputs, pairs of inputs side by side
    num_inputs: int
    num_outputs: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._compute(x, residual.contiguous())

    def _compute(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        assert x.dtype == self.packed.dtype and x.shape[-1] == self.num_inputs
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self.library.linear_bf16(
            x.data_ptr(),
            x.numel() // self.num_inputs,
            self.num_inputs,
            self.packed.data_ptr(),
            self.num_outputs,
            None if self.bias is None else self.bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out


def can_pack(weight: Tensor) -> bool:
    return weight.dtype == torch.bfloat16 and weight.shape[1] % 2 == 0


def pack_linear(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> NativeLinear:
    num_outputs, num_inputs = weight.shape
    weight = weight.contiguous()
    packed = torch.empty(library.linear_packed_size(num_inputs, num_outputs), dtype=weight.dtype)
    library.linear_pack_bf16(weight.data_ptr(), num_inputs, num_outputs, packed.data_ptr())
    return NativeLinear(library, packed, num_inputs, num_outputs, None if bias is None else bias.contiguous())
