"""The gated activations of an MLP: SwiGLU and GeGLU (tanh form), `act(gate) * up`, computed in float32.

Shape legend: see `kernels.interface`.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.interface import Activation
from kernels.triton.shipped import TYPE_NAMES, Shipped

_BLOCK = 1024


@triton.jit
def gated_activation_kernel(gate_up, out, width, GELU: tl.constexpr, BLOCK: tl.constexpr):
    """Grid: (row, block of columns). `gate_up [T, 2 * width]`, `out [T, width]`, both contiguous."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = columns < width
    start = gate_up + row * width * 2
    gate = tl.load(start + columns, mask=live, other=0.0).to(tl.float32)
    up = tl.load(start + width + columns, mask=live, other=0.0).to(tl.float32)
    if GELU:
        # 0.5 * (1 + tanh(u)) is sigmoid(2u), with u = sqrt(2 / pi) * (x + 0.044715 x³) (arXiv:1606.08415).
        activated = gate * tl.sigmoid(1.5957691216057308 * (gate + 0.044715 * gate * gate * gate))
    else:
        activated = gate * tl.sigmoid(gate)
    tl.store(out + row * width + columns, (activated * up).to(out.dtype.element_ty), mask=live)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    """`act(gate) * up` of `gate_up [T, 2 * width]`, contiguous, gate before up; returns `[T, width]`."""
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(num_rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if num_rows:
        grid = (num_rows, triton.cdiv(width, _BLOCK))
        configuration(gate_up.dtype, activation).launch(grid, gate_up=gate_up.contiguous(), out=out, width=width)
    return out


@functools.cache
def configuration(dtype: torch.dtype, activation: Activation) -> Shipped:
    element = TYPE_NAMES[dtype]
    return Shipped(
        name=f"gated_activation-{activation}-{element}",
        kernel=gated_activation_kernel,
        types={"gate_up": f"*{element}", "out": f"*{element}", "width": "i32"},
        constants={"GELU": activation == "gelu_tanh", "BLOCK": _BLOCK},
        num_warps=4,
        num_stages=1,
        aligned=frozenset({"width"}),
    )


def shipped() -> list[Shipped]:
    activations: tuple[Activation, ...] = ("silu", "gelu_tanh")
    return [configuration(dtype, activation) for dtype in TYPE_NAMES for activation in activations]
