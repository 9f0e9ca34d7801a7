"""Projections by the C++ kernels, of weights as they are (`src/linear.cpp`) or of 4 or 8 bits (`src/quantised.cpp`)."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.huge_pages import PackingMemory, private_memory, whole_pages
from kernels.interface import Linear
from kernels.native.library import TYPE_NAMES, Flag, Function, Pointer, Size, declare
from kernels.quantised_weight import ActivationBits, CodeFormat, QuantisedWeight


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


def can_pack_linear(weight: Tensor) -> bool:
    return can_pack(weight.shape[1], weight.dtype)


def can_pack(num_inputs: int, dtype: torch.dtype) -> bool:
    """bfloat16 is multiplied in pairs of inputs."""
    return dtype in TYPE_NAMES and (dtype.itemsize == 4 or num_inputs % 2 == 0)


def packed_numbers(num_outputs: int, num_inputs: int) -> int:
    """Of a packed weight, without asking the library: see `packed_size` in `src/linear.cpp`."""
    return -(-num_outputs // 16) * 16 * num_inputs


def packed_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    """Of weights that can be packed, in memory apart."""
    return whole_pages(sum(itertools.starmap(packed_numbers, shapes)) * dtype.itemsize)


@functools.cache
def _linear_functions(library: ctypes.CDLL, name: str) -> tuple[Function, Function, Function]:
    """The functions that tell how large a packed weight is, pack it, and multiply by it. An adapter has hundreds of
    weights."""
    return (
        declare(library, "linear_packed_size", [Size, Size], Size),
        declare(library, f"linear_pack_{name}", [Pointer, Size, Size, Pointer]),
        declare(library, f"linear_{name}", [Pointer, Size, Size, Pointer, Size, Pointer, Pointer, Pointer]),
    )


def linear_of(
    library: ctypes.CDLL, packed: Tensor, num_outputs: int, num_inputs: int, bias: Tensor | None = None
) -> NativeLinear:
    """The projection by a weight that was packed before."""
    _, _, compute = _linear_functions(library, TYPE_NAMES[packed.dtype])
    return NativeLinear(
        compute=compute,
        packed=packed,
        dtype=packed.dtype,
        num_inputs=num_inputs,
        num_outputs=num_outputs,
        bias=None if bias is None else bias.contiguous(),
    )


def pack_linear(
    library: ctypes.CDLL, weight: Tensor, bias: Tensor | None, memory: PackingMemory = private_memory
) -> NativeLinear:
    packed_size, pack, _ = _linear_functions(library, TYPE_NAMES[weight.dtype])
    num_outputs, num_inputs = weight.shape

    def fill(packed: Tensor) -> None:
        rows = weight.contiguous()
        pack(rows.data_ptr(), num_inputs, num_outputs, packed.data_ptr())

    packed = memory(packed_size(num_inputs, num_outputs), weight.dtype, fill)
    return linear_of(library, packed, num_outputs, num_inputs, bias)


@dataclass(frozen=True, slots=True, kw_only=True)
class NativeHeads:
    """`kernels.interface.HeadwiseLinear`. A row's result is the same to the bit whatever the other rows are."""

    compute: Function
    packed: Tensor  # head after head, each as a projection's weight
    num_outputs: int

    def __call__(self, x: Tensor) -> Tensor:
        by_head = x.transpose(0, 1).contiguous()
        num_heads, num_rows, num_inputs = by_head.shape
        assert x.dtype == self.packed.dtype
        out = x.new_empty(num_heads, num_rows, self.num_outputs)
        self.compute(
            by_head.data_ptr(),
            num_heads,
            num_rows,
            num_inputs,
            self.packed.data_ptr(),
            self.num_outputs,
            out.data_ptr(),
        )
        return out.transpose(0, 1)


def pack_heads(library: ctypes.CDLL, weight: Tensor, memory: PackingMemory = private_memory) -> NativeHeads:
    """Pack a projection of each head, from `weight [Q, out, in]`."""
    num_heads, num_outputs, num_inputs = weight.shape
    packed_size, pack, _ = _linear_functions(library, TYPE_NAMES[weight.dtype])
    size = packed_size(num_inputs, num_outputs)

    def fill(packed: Tensor) -> None:
        for head, into in zip(weight.contiguous(), packed.view(num_heads, size), strict=True):
            pack(head.data_ptr(), num_inputs, num_outputs, into.data_ptr())

    packed = memory(num_heads * size, weight.dtype, fill)
    compute = declare(library, f"heads_{TYPE_NAMES[weight.dtype]}", [Pointer, *[Size] * 3, Pointer, Size, Pointer])
    return NativeHeads(compute=compute, packed=packed, num_outputs=num_outputs)


_LAYOUT = [Size, Size, Size, Flag, Flag, Size]


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLinear(NativeLinear):
    """A quantised projection of bfloat16 activations. Its panels have groups of inputs; each is codes, scales,
    minimums."""

    form: CodeFormat
    wide_factors: bool  # scales and minimums are float32, since some are not exact in float16
    activation_bits: ActivationBits  # to which inputs are rounded, by groups

    def _layout(self) -> tuple[int, ...]:
        form = self.form
        sizes = form.group_size, form.bits, form.lowest, self.wide_factors, form.has_minimums
        return *sizes, self.activation_bits // 8


def can_pack_quantised(weight: QuantisedWeight, dtype: torch.dtype) -> bool:
    return dtype == torch.bfloat16 and CodeFormat.of([weight]).on_cpus is not None


def pack_quantised(
    library: ctypes.CDLL,
    weight: QuantisedWeight,
    bias: Tensor | None,
    activation_bits: ActivationBits,
    memory: PackingMemory = private_memory,
) -> QuantisedLinear:
    packed_bytes = declare(library, "quantised_packed_bytes", [*[Size] * 4, Flag, Flag], Size)
    pack = declare(library, "quantised_pack", [*[Pointer] * 3, *[Size] * 5, Flag, Pointer])
    parameters = [Pointer, Size, Size, Pointer, Size, *_LAYOUT, Pointer, Pointer, Pointer]
    form = CodeFormat.of([weight]).on_cpus
    assert form is not None, "see can_pack_quantised"
    weight = weight.as_form(form)
    codes, scales = weight.codes.contiguous(), weight.scales.contiguous()
    minimums = None if weight.minimums is None else weight.minimums.contiguous()
    wide = not (_are_halves(scales) and (minimums is None or _are_halves(minimums)))
    num_outputs, num_inputs = weight.shape
    sizes = (num_inputs, num_outputs, form.group_size, form.bits)

    def fill(packed: Tensor) -> None:
        parts = [None if part is None else part.data_ptr() for part in (codes, scales, minimums)]
        pack(*parts, *sizes, form.lowest, wide, packed.data_ptr())

    packed = memory(packed_bytes(*sizes, wide, form.has_minimums), torch.uint8, fill)
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


class ProjectionRecord(ctypes.Structure):
    """The struct of `src/calls.h`, field by field, for calls that compute more than one projection."""

    _fields_ = (
        ("weight", Pointer),
        ("bias", Pointer),
        ("inputs", Size),
        ("outputs", Size),
        ("bits", Size),
        ("group", Size),
        ("lowest", Size),
        ("wide_factors", Flag),
        ("has_minimums", Flag),
        ("x_bytes", Size),
    )


def projection_record(linear: Linear) -> ProjectionRecord:
    """The record of one of the above, which has to outlive it."""
    assert isinstance(linear, NativeLinear)
    bias = None if linear.bias is None else linear.bias.data_ptr()
    record = ProjectionRecord(linear.packed.data_ptr(), bias, linear.num_inputs, linear.num_outputs, bits=0)
    if isinstance(linear, QuantisedLinear):
        record.bits, record.group = linear.form.bits, linear.form.group_size
        record.lowest, record.wide_factors = linear.form.lowest, linear.wide_factors
        record.has_minimums = linear.form.has_minimums
        record.x_bytes = linear.activation_bits // 8
    return record
