"""The kernels on a CPU: torch's fused operators, weights packed once for oneDNN.

The numbers in the comments were taken on Zen 4 (AVX-512 BF16) with torch 2.13, one thread, SmolLM2's shapes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import reference
from kernels.cpu.attention import plan_attention
from kernels.interface import Activation, KVSlots, Linear
from kernels.quantised_weight import QuantisedWeight
from kernels.reference import PlainLinear, pack_experts, pack_heads

__all__ = [
    "add_rms_norm",
    "gated_activation",
    "pack_experts",
    "pack_heads",
    "pack_linear",
    "pack_quantised",
    "packed_bytes",
    "plan_attention",
    "rms_norm",
    "rotate_and_store",
]

# The number of rows for which oneDNN chooses the layout. The layouts it chooses for 1, 32 and 256 are equally fast.
_PACKED_FOR_ROWS = 32


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in oneDNN's blocked layout: 2.4x `linear` at one bf16 row, 1.4x at 32, equal at 512."""

    weight: Tensor  # opaque
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self.weight, self.bias, "none", [], "")
        return out

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        out: Tensor = torch.ops.mkldnn._linear_pointwise.binary(x, residual, self.weight, self.bias, "add")
        return out


def pack_linear(weight: Tensor, bias: Tensor | None) -> Linear:
    if not _can_pack(weight.dtype):
        return PlainLinear(weight, bias)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), _PACKED_FOR_ROWS)
    return PackedLinear(packed, bias)


def packed_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    return sum(_packed_bytes(*shape, dtype) for shape in shapes)


@functools.cache
def _packed_bytes(num_outputs: int, num_inputs: int, dtype: torch.dtype) -> int:
    """By what oneDNN makes of it: its blocks' sizes, up to 64 outputs, depend on the processor."""
    weight = torch.zeros(num_outputs, num_inputs, dtype=dtype)
    packed = pack_linear(weight, None)
    return int(torch.ops.mkldnn._nbytes(packed.weight)) if isinstance(packed, PackedLinear) else weight.nbytes


def pack_quantised(
    weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype, *, is_output_layer: bool = False
) -> Linear:
    del is_output_layer
    # torch's own kernels know no groups (8 bits) or round the scales (4 bits), and are slower from 8 rows on.
    return pack_linear(weight.dequantise(dtype), bias)


def _can_pack(dtype: torch.dtype) -> bool:
    if not (torch._C._has_mkldnn and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")):
        return False
    if dtype == torch.bfloat16:
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return dtype == torch.float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    if weight.dtype.itemsize <= x.dtype.itemsize:
        return functional.rms_norm(x, x.shape[-1:], None, eps).mul_(weight)
    normed = functional.rms_norm(x.to(weight.dtype), x.shape[-1:], None, eps)
    return normed.mul_(weight).to(x.dtype)


def add_rms_norm(residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + y
    return rms_norm(total, weight, eps), total


def rotate_and_store(qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots) -> tuple[Tensor, Tensor]:
    rotated = rotate(qk, cos, signed_sin)
    num_heads = qk.shape[1] - v.shape[1]
    q, k = rotated[:, :num_heads], rotated[:, num_heads:]
    into.keys.index_copy_(0, into.slots, k)
    into.values.index_copy_(0, into.slots, v)
    return q, k


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    # Swapping the halves by `roll` takes three operators; slicing them apart takes five (6 against 12 us at one row).
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), signed_sin)


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    if activation == "swigluoai":
        return reference.gated_activation(gate_up, activation)
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "silu":
        return functional.silu(gate).mul_(up)
    return functional.gelu(gate, approximate="tanh").mul_(up)
