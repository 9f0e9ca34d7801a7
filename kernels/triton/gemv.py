"""One row times a weight, as in a decode step of one sequence: as fast as memory gives the weight.

Matrix units would multiply zeros, so each program sums a few outputs over the whole of K in ordinary registers, in
float32. Many small programs keep memory busy; no split of K needs merging.

Shape legend: K inputs, N outputs.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.triton.shipped import TYPE_NAMES, Shipped

# Outputs of a program, inputs of each that it loads at once, and how many loads are on their way. Of twenty
# configurations measured on an H200, this one and another are fastest over the projections of Llama-3.1-8B.
_OUTPUTS = 16
_BLOCK_K = 256
_STAGES = 4


@triton.jit
def gemv_kernel(
    x, weight, bias, residual, out, K,
    HAS_BIAS: tl.constexpr, ADDS: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Grid: (N / OUTPUTS,). `x [K]`, `weight [N, K]`, `bias`, `residual`, `out [N]`; BLOCK_K divides K.

    `out` may be `residual`.
    """
    outputs = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    depth = tl.arange(0, BLOCK_K)
    places = weight + outputs.to(tl.int64)[:, None] * K + depth[None, :]
    total = tl.zeros((OUTPUTS, BLOCK_K), dtype=tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        numbers = tl.load(x + start + depth).to(tl.float32)
        total += tl.load(places + start).to(tl.float32) * numbers[None, :]
    result = tl.sum(total, 1)
    if HAS_BIAS:
        result += tl.load(bias + outputs).to(tl.float32)
    if ADDS:
        result += tl.load(residual + outputs).to(tl.float32)
    tl.store(out + outputs, result.to(out.dtype.element_ty))


def takes(x: Tensor, weight: Tensor) -> bool:
    """Whether `gemv` computes `x [M, K]` times `weight [N, K]`: one row, of 16 bits, of suitable sizes."""
    outputs, inputs = weight.shape
    suitable = x.itemsize == 2 and inputs % _BLOCK_K == 0 and outputs % _OUTPUTS == 0
    return suitable and len(x) == 1 and x.dim() == 2 and x.stride(1) == 1 and weight.is_contiguous()


def gemv(x: Tensor, weight: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias`: `x [1, K]`, `weight [N, K]` contiguous, `bias [N]`; returns `[1, N]`, or `residual
    [1, N]`, to which it was added then. See `takes`."""
    assert takes(x, weight)
    assert residual is None or residual.stride(1) == 1
    out = torch.empty(1, len(weight), dtype=x.dtype, device=x.device) if residual is None else residual
    _configuration(x.dtype, bias is not None, residual is not None).launch(
        (len(weight) // _OUTPUTS,),
        x=x,
        weight=weight,
        bias=out if bias is None else bias,
        residual=out,
        out=out,
        K=weight.shape[1],
    )
    return out


@functools.cache
def _configuration(dtype: torch.dtype, has_bias: bool, adds: bool) -> Shipped:
    element = TYPE_NAMES[dtype]
    details = [name for name, given in (("bias", has_bias), ("residual", adds)) if given]
    return Shipped(
        name="-".join(("gemv", element, *details)),
        kernel=gemv_kernel,
        types=dict.fromkeys(("x", "weight", "bias", "residual", "out"), f"*{element}") | {"K": "i32"},
        constants={"HAS_BIAS": has_bias, "ADDS": adds, "OUTPUTS": _OUTPUTS, "BLOCK_K": _BLOCK_K} | {"STAGES": _STAGES},
        num_warps=4,
        num_stages=_STAGES,
        aligned=frozenset({"K"}),
    )


def shipped() -> list[Shipped]:
    return [
        _configuration(dtype, has_bias, adds)
        for dtype in TYPE_NAMES
        if dtype.itemsize == 2
        for has_bias in (False, True)
        for adds in (False, True)
    ]
