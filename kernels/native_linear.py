"""Projections by the C++ kernels: see `native/linear.cpp`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kernels import huge_pages

Function = Any  # of ctypes, which has no name for them

_Pointer = ctypes.c_void_p
_Size = ctypes.c_int64


_TYPES = {torch.float32: "fp32", torch.bfloat16: "bf16"}


def declare(library: ctypes.CDLL) -> None:
    library.linear_packed_size.argtypes = [_Size, _Size]
    library.linear_packed_size.restype = _Size
    for name in _TYPES.values():
        pack, compute = _functions(library, name)
        pack.argtypes = [_Pointer, _Size, _Size, _Pointer]
        pack.restype = None
        compute.argtypes = [_Pointer, _Size, _Size, _Pointer, _Size, _Pointer, _Pointer, _Pointer]
        compute.restype = None


def _functions(library: ctypes.CDLL, name: str) -> tuple[Function, Function]:
    return getattr(library, f"linear_pack_{name}"), getattr(library, f"linear_{name}")


@dataclass(frozen=True, slots=True)
class NativeLinear:
    """A row's result is the same to the bit whatever the other rows are."""

    compute: Function
    packed: Tensor  # panels of 32 outputs
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
        self.compute(
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
    """bfloat16 is multiplied in pairs of inputs."""
    return weight.dtype in _TYPES and (weight.dtype.itemsize == 4 or weight.shape[1] % 2 == 0)


def pack_linear(library: ctypes.CDLL, weight: Tensor, bias: Tensor | None) -> NativeLinear:
    pack, compute = _functions(library, _TYPES[weight.dtype])
    num_outputs, num_inputs = weight.shape
    weight = weight.contiguous()
    packed = huge_pages.zeros([library.linear_packed_size(num_inputs, num_outputs)], weight.dtype)
    pack(weight.data_ptr(), num_inputs, num_outputs, packed.data_ptr())
    return NativeLinear(compute, packed, num_inputs, num_outputs, None if bias is None else bias.contiguous())
