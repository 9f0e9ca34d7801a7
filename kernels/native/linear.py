"""Projections by the C++ kernels: see `src/linear.cpp`."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.packing_memory import PRIVATE, PackingMemory
from kernels.native.library import TYPE_NAMES, Function, Pointer, Size, declare


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeLinear:
    """A row's result is the same to the bit whatever the other rows are."""

    compute: Function
    packed: Tensor  # panels of 32 outputs
    dtype: torch.dtype  # of what comes in and goes out
    num_inputs: int
    num_outputs: int
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return self._compute(x, None)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._compute(x, residual.contiguous())

    def _compute(self, x: Tensor, residual: Tensor | None) -> Tensor:
        x = x.contiguous()
        assert x.dtype == self.dtype and x.shape[-1] == self.num_inputs
        out = x.new_empty((*x.shape[:-1], self.num_outputs))
        self.compute(
            x.data_ptr(),
            x.numel() // self.num_inputs,
            self.num_inputs,
            self.packed.data_ptr(),
            self.num_outputs,
            *self._layout(),
            None if self.bias is None else self.bias.data_ptr(),
            None if residual is None else residual.data_ptr(),
            out.data_ptr(),
        )
        return out

    def _layout(self) -> tuple[int, ...]:
        """Parameters that say how weights are packed."""
        return ()


def can_pack(weight: Tensor) -> bool:
    """bfloat16 is multiplied in pairs of inputs."""
    return weight.dtype in TYPE_NAMES and (weight.dtype.itemsize == 4 or weight.shape[1] % 2 == 0)


def pack_linear(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, memory: PackingMemory = PRIVATE
) -> NativeLinear:
    name = TYPE_NAMES[weight.dtype]
    packed_size = declare(library, "linear_packed_size", [Size, Size], Size)
    pack = declare(library, f"linear_pack_{name}", [Pointer, Size, Size, Pointer])
    parameters = [Pointer, Size, Size, Pointer, Size, Pointer, Pointer, Pointer]
    num_outputs, num_inputs = weight.shape

    def fill(packed: Tensor) -> None:
        rows = weight.contiguous()
        pack(rows.data_ptr(), num_inputs, num_outputs, packed.data_ptr())

    packed = memory.lay_out(packed_size(num_inputs, num_outputs), weight.dtype, fill)
    return NativeLinear(
        compute=declare(library, f"linear_{name}", parameters),
        packed=packed,
        dtype=weight.dtype,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        bias=None if bias is None else bias.contiguous(),
    )
