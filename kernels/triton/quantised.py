"""Projections by weights that stay as they are stored: numbers of FP8 (E4M3), or codes of 8 or 4 bits, with scales.

A program reads bytes, makes them numbers of the activations' type in registers, which is exact, multiplies, and scales
the sums of a group of inputs in float32. So a product is that of the values, but that these are never rounded to the
activations' type.

Of few rows a program sums a part of K, so that all processors read; the parts are added up in their order. Of many, the
values are worked out into memory that is given back at once, and cuBLAS multiplies by them. Where batches must not
change a result, neither is done: each program sums over the whole of K, in steps of a fixed width and in one order.

Shape legend: M rows, K inputs, N outputs, G groups of inputs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.quantised_weight import LOWEST_E4M3, STEPS, STEPS_OF_E4M3, VALUES_FROM_ROWS, CodeFormat, QuantisedWeight
from kernels.triton.shipped import TYPE_NAMES, Shipped

Kind = Literal["e4m3", "int8", "int4"]
Rows = Literal["few", "few-wide", "some", "many"]
End = Literal["alone", "added", "parts"]
"""What becomes of sums: they are rounded, or others are added before, or they are parts of sums in float32."""

_PAIRED: Final = 16  # inputs of 4 bits lie in a byte with those so many further on
_FEW, _SOME = 16, 64  # rows, at most
_WIDE_OUTPUTS: Final = 512 * 32  # which narrow tiles are not needed for
# Programs that parts of K are to make. Of 4 bits a product takes longer than its bytes: more of them run side by side.
_PROGRAMS: Final[dict[Rows, int]] = {"few": 512, "few-wide": 512, "some": 256, "many": 1}
_PROGRAMS_OF_4_BITS: Final = 2048
_MOST_PARTS: Final = 4
_BLOCK: Final = 1024  # outputs of a sum of parts


# Four numbers of E4M3, a register, become four of bfloat16, two registers: sign, exponent and mantissa at their places
# there, of subnormal numbers as well, times the 2^120 by which the exponents' offsets differ.
_E4M3_TO_BF16 = tl.constexpr("""
{
.reg .b32 t0, t1, u0, u1, power, signs;
mov.b32 power, 0x7B807B80;
mov.b32 signs, 0x80008000;
prmt.b32 t0, $2, 0, 0x1404;
prmt.b32 t1, $2, 0, 0x3424;
shr.u32 u0, t0, 4;
shr.u32 u1, t1, 4;
and.b32 u0, u0, 0x07F007F0;
and.b32 u1, u1, 0x07F007F0;
lop3.b32 u0, t0, signs, u0, 0xEA;
lop3.b32 u1, t1, signs, u1, 0xEA;
fma.rn.bf16x2 $0, u0, power, signs;
fma.rn.bf16x2 $1, u1, power, signs;
}
""")


@triton.jit
def _of_bytes(codes, dtype: tl.constexpr, KIND: tl.constexpr, BY_FOUR: tl.constexpr):
    """What bytes stand for, as `dtype`, which is exact."""
    if KIND == "int8":
        # As mantissa of 2^23.
        bits = (codes.to(tl.int32) ^ 0x80) | 0x4B000000
        numbers = (bits.to(tl.float32, bitcast=True) - 8388736.0).to(dtype)
    elif BY_FOUR:
        numbers = tl.inline_asm_elementwise(_E4M3_TO_BF16, "=r,=r,r", [codes], dtype=tl.bfloat16, is_pure=True, pack=4)
    else:
        # As above, one by one, in float32.
        bits = ((codes.to(tl.int32) & 0x80) << 24) | ((codes.to(tl.int32) & 0x7F) << 20)
        numbers = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    return numbers


@triton.jit
def _above(halves, zeros, dtype: tl.constexpr):
    """How far `halves`, codes below 16 in int32, lie above `zeros`, as `dtype`, which is exact."""
    return ((halves | 0x4B000000).to(tl.float32, bitcast=True) - (zeros.to(tl.float32) + 8388608.0)).to(dtype)


@triton.jit(do_not_specialize=["M"])
def quantised_matmul_kernel(
    x, codes, scales, zeros, added, out, M, N, K, group_size, part_size, x_stride, added_stride,
    KIND: tl.constexpr, PAIRED: tl.constexpr, BY_FOUR: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (tile of outputs, tile of rows, part). `x [M, K]`, `codes [N, K]`, of 4 bits `[N, K / 2]`, `scales [G, N]`,
    `zeros [G, N]`, `added [M, N]`, `out [parts, M, N]`; rows of `x` and `added` every so many elements, all others
    contiguous. `zeros` (but of 4 bits) and `added` may be None. A part is of `part_size` inputs, which BLOCK_K divides
    as it does K and `group_size`.

    Weights are the left operand, since a tensor core takes that one from registers.
    """
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    part = tl.program_id(2)
    # Outputs beyond the last read the first instead, and are not stored: no mask in the loop.
    read_outputs = tl.where(outputs < N, outputs, 0)
    live_rows, wide_rows = (rows < M)[None, :], rows.to(tl.int64)[None, :]
    x_rows = x + wide_rows * x_stride
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(part * part_size, tl.minimum(part * part_size + part_size, K), BLOCK_K):
        factors = start // group_size * N + read_outputs
        if KIND == "int4":
            place = tl.arange(0, BLOCK_K // 2)
            depth = start + (place // PAIRED * (2 * PAIRED) + place % PAIRED)[:, None]
            pairs = tl.load(codes + read_outputs.to(tl.int64)[:, None] * (K // 2) + (start // 2 + place)[None, :])
            pairs, zero = pairs.to(tl.int32), tl.load(zeros + factors)[:, None]
            first = tl.load(x_rows + depth, mask=live_rows, other=0.0)
            second = tl.load(x_rows + depth + PAIRED, mask=live_rows, other=0.0)
            product = tl.dot(_above(pairs & 15, zero, x.dtype.element_ty), first, input_precision="ieee")
            product = tl.dot(_above(pairs >> 4, zero, x.dtype.element_ty), second, product, input_precision="ieee")
        else:
            depth = start + tl.arange(0, BLOCK_K)
            bytes = tl.load(codes + read_outputs.to(tl.int64)[:, None] * K + depth[None, :])
            inputs = tl.load(x_rows + depth[:, None], mask=live_rows, other=0.0)
            numbers = _of_bytes(bytes, x.dtype.element_ty, KIND, BY_FOUR)
            product = tl.dot(numbers, inputs, input_precision="ieee")
        total += product * tl.load(scales + factors)[:, None]
    live = (outputs[:, None] < N) & live_rows
    if added is not None:
        total += tl.load(added + wide_rows * added_stride + outputs[:, None], mask=live, other=0.0).to(tl.float32)
    target = out + (part.to(tl.int64) * M + wide_rows) * N + outputs[:, None]
    tl.store(target, total.to(out.dtype.element_ty), mask=live)


@triton.jit(do_not_specialize=["M", "num_parts"])
def sum_parts_kernel(parts, added, out, M, N, num_parts, added_stride, BLOCK: tl.constexpr):
    """Grid: (row, block of outputs). `parts [num_parts, M, N]`, `added [M, N]`, every so many elements a row, or None,
    `out [M, N]`."""
    row, outputs = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = outputs < N
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in range(num_parts):
        total += tl.load(parts + (part * M + row) * N + outputs, mask=live, other=0.0)
    if added is not None:
        total += tl.load(added + row * added_stride + outputs, mask=live, other=0.0).to(tl.float32)
    tl.store(out + row * N + outputs, total.to(out.dtype.element_ty), mask=live)


@triton.jit
def dequantise_kernel(
    codes, scales, zeros, out, N, K, group_size,
    KIND: tl.constexpr, PAIRED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Grid: (block of outputs, step of inputs). The values, `out [N, K]`; all else as above."""
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.program_id(1) * BLOCK_K + tl.arange(0, BLOCK_K)[None, :]
    live, rows = (outputs < N)[:, None], outputs.to(tl.int64)[:, None]
    factors = tl.program_id(1) * BLOCK_K // group_size * N + outputs
    if KIND == "int4":
        place = depth // (2 * PAIRED) * PAIRED + depth % PAIRED
        pairs = tl.load(codes + rows * (K // 2) + place, mask=live, other=0).to(tl.int32)
        zero = tl.load(zeros + factors, mask=outputs < N, other=0)[:, None]
        numbers = _above(pairs >> depth // PAIRED % 2 * 4 & 15, zero, tl.float32)
    else:
        numbers = _of_bytes(tl.load(codes + rows * K + depth, mask=live, other=0), tl.float32, KIND, False)
    values = numbers * tl.load(scales + factors, mask=outputs < N, other=0.0)[:, None]
    tl.store(out + rows * K + depth, values.to(out.dtype.element_ty), mask=live)


@dataclass(frozen=True, slots=True)
class _Form:
    """What a weight's kernels are compiled for."""

    kind: Kind
    step: int  # inputs that are multiplied at once

    @property
    def constants(self) -> dict[str, Any]:
        return {"KIND": self.kind, "PAIRED": _PAIRED, "BLOCK_K": self.step} | (
            {} if self.kind == "int4" else {"zeros": None}
        )


_FORMS = (
    *(_Form("e4m3", step) for step in STEPS_OF_E4M3),
    *(_Form(kind, step) for kind in ("int8", "int4") for step in STEPS),
)


def pack_quantised(
    weight: QuantisedWeight,
    bias: Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
    *,
    batch_invariant: bool,
    expands: bool,
) -> QuantisedLinear | None:
    """None: there is no kernel for such weights, whose groups are of another size, or whose minimums are no multiples
    of their scales."""
    kind: Kind = "e4m3" if weight.lowest == LOWEST_E4M3 else "int8" if weight.bits == 8 else "int4"
    step = CodeFormat.of([weight]).inputs_at_once
    zeros = _zeros(weight)
    if step is None or zeros is None:
        return None
    form = _Form(kind, step)
    codes = weight.codes.to(device)
    if kind == "int4":
        pairs = (codes - weight.lowest).view(torch.uint8).view(len(codes), -1, 2, _PAIRED)
        codes = (pairs[:, :, 0] | pairs[:, :, 1] << 4).flatten(1)
    elif kind == "e4m3" and bool(((codes.view(torch.uint8) & 0x7F) == 0x7F).any()):
        return None  # NaN, of which the kernels would make 480
    return QuantisedLinear(
        codes=codes.view(torch.uint8).contiguous(),
        scales=weight.scales.to(device).t().contiguous(),
        zeros=zeros.to(device).t().contiguous() if kind == "int4" else None,
        form=form,
        dtype=dtype,
        bias=bias,
        batch_invariant=batch_invariant,
        expands=expands,
    )


def _zeros(weight: QuantisedWeight) -> Tensor | None:
    """Of 4 bits, how far above the lowest code zero lies, `[N, G]` of uint8; of 8 bits zeros. None: at no
    code."""
    zeros = torch.zeros_like(weight.scales)
    if weight.minimums is not None:
        zeros = torch.where(weight.scales == 0, 0.0, -weight.minimums / weight.scales).round()
        if not torch.equal(-zeros * weight.scales, weight.minimums):
            return None
    zeros -= weight.lowest if weight.bits == 4 else 0
    return zeros.to(torch.uint8) if bool((zeros >= 0).all() and (zeros <= 15).all()) else None


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedLinear:
    """`kernels.interface.Linear` by the kernels above."""

    codes: Tensor  # [N, K] bytes; [N, K / 2] of 4 bits
    scales: Tensor  # [G, N]
    zeros: Tensor | None  # [G, N]
    form: _Form
    dtype: torch.dtype  # of activations
    bias: Tensor | None
    batch_invariant: bool
    expands: bool  # of many rows it multiplies by its values

    @property
    def num_inputs(self) -> int:
        return self.codes.shape[1] * (2 if self.form.kind == "int4" else 1)

    @property
    def _operands(self) -> dict[str, Any]:
        """What kernels are told of the weight."""
        num_inputs = self.num_inputs
        sizes = {"N": len(self.codes), "K": num_inputs, "group_size": num_inputs // len(self.scales)}
        return {"codes": self.codes, "scales": self.scales, "zeros": self.zeros, **sizes}

    @property
    def weight(self) -> Tensor:
        """The values, `[N, K]`, each rounded once: in memory of their own."""
        num_outputs, num_inputs = len(self.codes), self.num_inputs
        out = torch.empty(num_outputs, num_inputs, dtype=self.dtype, device=self.codes.device)
        shipped = _dequantising(self.dtype, self.form)
        tile = shipped.constants
        shipped.launch(
            (triton.cdiv(num_outputs, tile["BLOCK_N"]), num_inputs // tile["BLOCK_K"]),
            out=out,
            **self._operands,
        )
        return out

    def __call__(self, x: Tensor) -> Tensor:
        return self._product(x, None if self.bias is None else self.bias.expand(len(x), -1))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self._product(x, residual if self.bias is None else residual + self.bias)

    def _product(self, x: Tensor, added: Tensor | None) -> Tensor:
        """`[M, N]`: `x [M, K]` by the values, and `added [M, N]`."""
        (num_rows, num_inputs), num_outputs = x.shape, len(self.codes)
        assert x.stride(1) == 1 and num_inputs == self.num_inputs and x.dtype == self.dtype
        assert added is None or added.stride(-1) == 1
        if num_rows >= VALUES_FROM_ROWS and self.expands:
            values = self.weight.t()
            return x @ values if added is None else torch.addmm(added, x, values)
        out = torch.empty(num_rows, num_outputs, dtype=x.dtype, device=x.device)
        if not num_rows:
            return out
        rows = _rows(num_rows, num_outputs, self.dtype, self.form.kind, batch_invariant=self.batch_invariant)
        tile = _tile(self.dtype, rows)
        tiles = triton.cdiv(num_outputs, tile.n), triton.cdiv(num_rows, tile.m)
        num_steps = num_inputs // self.form.step
        wished = _PROGRAMS_OF_4_BITS if self.form.kind == "int4" and rows == "few-wide" else _PROGRAMS[rows]
        num_parts = 1 if self.batch_invariant else triton.cdiv(wished, tiles[0] * tiles[1])
        part_size = triton.cdiv(num_steps, min(num_parts, _MOST_PARTS, num_steps)) * self.form.step
        num_parts = triton.cdiv(num_inputs, part_size)
        whole = num_parts == 1
        into = out if whole else torch.empty(num_parts, *out.shape, dtype=torch.float32, device=x.device)
        addend = {"added": added, "added_stride": 0 if added is None else added.stride(0)}
        end: End = "parts" if not whole else "alone" if added is None else "added"
        _multiplying(self.dtype, self.form, rows, end).launch(
            (*tiles, num_parts),
            x=x,
            out=into,
            M=num_rows,
            part_size=part_size,
            x_stride=x.stride(0),
            **self._operands,
            **(addend if whole else {"added": None, "added_stride": 0}),
        )
        if not whole:
            _summing(self.dtype, added is not None).launch(
                (num_rows, triton.cdiv(num_outputs, _BLOCK)),
                parts=into,
                out=out,
                M=num_rows,
                N=num_outputs,
                num_parts=num_parts,
                **addend,
            )
        return out


@dataclass(frozen=True, slots=True)
class _Tile:
    m: int
    n: int
    num_warps: int
    num_stages: int


def _rows(count: int, num_outputs: int, dtype: torch.dtype, kind: Kind, *, batch_invariant: bool) -> Rows:
    """Tiles may be multiplied by other instructions of a tensor core, whose sums may differ."""
    if dtype == torch.float32:
        return "few"
    if batch_invariant:
        return "some"
    if count <= _FEW:
        return "few-wide" if kind == "int4" or num_outputs >= _WIDE_OUTPUTS else "few"
    return "some" if count <= _SOME or kind == "int4" else "many"  # in 4 bits no registers are left for more rows


def _tile(dtype: torch.dtype, rows: Rows) -> _Tile:
    if dtype == torch.float32:
        return _Tile(16, 32, 4, 3)
    return {
        "few": _Tile(16, 32, 4, 4),
        "few-wide": _Tile(16, 64, 4, 4),
        "some": _Tile(64, 64, 4, 3),
        "many": _Tile(128, 64, 8, 3),
    }[rows]


@functools.cache
def _multiplying(dtype: torch.dtype, form: _Form, rows: Rows, end: End) -> Shipped:
    if dtype == torch.float32 and end == "parts":
        end = "alone"
    element, tile = TYPE_NAMES[dtype], _tile(dtype, rows)
    pointers = {"x": f"*{element}", "codes": "*u8", "scales": "*fp32"}
    pointers |= {"out": "*fp32" if end == "parts" else f"*{element}"}
    pointers |= {"zeros": "*u8"} if form.kind == "int4" else {}
    pointers |= {"added": f"*{element}"} if end == "added" else {}
    integers = ("M", "N", "K", "group_size", "part_size", "x_stride", "added_stride")
    # Triton's interpreter takes no instructions of a GPU.
    by_four = form.kind == "e4m3" and dtype == torch.bfloat16 and not triton.knobs.runtime.interpret
    return Shipped(
        name=f"quantised_matmul-{form.kind}-{form.step}-{element}-{rows}-{end}",
        kernel=quantised_matmul_kernel,
        types=pointers | dict.fromkeys(integers, "i32"),
        constants=form.constants
        | {"BLOCK_M": tile.m, "BLOCK_N": tile.n, "BY_FOUR": by_four}
        | ({} if end == "added" else {"added": None}),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        aligned=frozenset(integers) - {"M"},
    )


@functools.cache
def _summing(dtype: torch.dtype, adds: bool) -> Shipped:
    element = TYPE_NAMES[dtype]
    return Shipped(
        name=f"sum_parts-{element}{'-added' * adds}",
        kernel=sum_parts_kernel,
        types={"parts": "*fp32", "out": f"*{element}"}
        | ({"added": f"*{element}"} if adds else {})
        | dict.fromkeys(("M", "N", "num_parts", "added_stride"), "i32"),
        constants={"BLOCK": _BLOCK} | ({} if adds else {"added": None}),
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"N", "added_stride"}),
    )


@functools.cache
def _dequantising(dtype: torch.dtype, form: _Form) -> Shipped:
    element = TYPE_NAMES[dtype]
    return Shipped(
        name=f"dequantise-{form.kind}-{form.step}-{element}",
        kernel=dequantise_kernel,
        types={"codes": "*u8", "scales": "*fp32", "out": f"*{element}"}
        | ({"zeros": "*u8"} if form.kind == "int4" else {})
        | dict.fromkeys(("N", "K", "group_size"), "i32"),
        constants=form.constants | {"BLOCK_N": 32},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"N", "K", "group_size"}),
    )


def shipped() -> list[Shipped]:
    return [
        *(
            _multiplying(dtype, form, rows, end)
            for dtype in TYPE_NAMES
            for form in _FORMS
            for rows in get_args(Rows)
            for end in get_args(End)
            if dtype != torch.float32 or (rows == "few" and end != "parts")
            if rows != "many" or end != "parts"
            if rows in ("few-wide", "some") or form.kind != "int4" or dtype == torch.float32
        ),
        *(_summing(dtype, adds) for dtype in TYPE_NAMES for adds in (False, True)),
        *(_dequantising(dtype, form) for dtype in TYPE_NAMES for form in _FORMS),
    ]
