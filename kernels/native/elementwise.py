"""Norms, rotary embeddings and gated activations by the C++ kernels: see `src/elementwise.cpp`.

Each takes the types that it is declared for; `takes` says whether it does.
"""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import torch
from torch import Tensor

from kernels.interface import Activation, KVSlots
from kernels.native.library import TYPE_NAMES, Float, Pointer, Size, declare

_PARAMETERS: dict[str, list[Any]] = {
    "rms_norm": [Pointer, Size, Size, Size, Size, Pointer, Float, Pointer],
    "add_rms_norm": [Pointer, Pointer, Size, Size, Pointer, Float, Pointer, Pointer],
    "rotate_and_store": [Pointer, Size, Pointer, Size, Pointer, Pointer, *[Size] * 4, *[Pointer] * 5],
    "gated_silu": [Pointer, Size, Size, Pointer],
    "gated_gelu_tanh": [Pointer, Size, Size, Pointer],
}


def takes(*tensors: Tensor) -> bool:
    return all(tensor.dtype in TYPE_NAMES for tensor in tensors)


class NativeElementwise:
    """Functions of `kernels.interface.Kernels`, for float32 and bfloat16."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._functions = {
            (kind, *types): declare(library, _name(kind, types), parameters)
            for kind, parameters in _PARAMETERS.items()
            for types in itertools.product(TYPE_NAMES, repeat=2 if "norm" in kind else 1)
        }

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        rows, row_stride, heads = _norm_layout(x, weight)
        out = x.new_empty(x.shape)
        normalise = self._functions["rms_norm", x.dtype, weight.dtype]
        width = x.shape[-1]
        normalise(x.data_ptr(), rows, row_stride, heads, width, weight.data_ptr(), eps, out.data_ptr())
        return out

    def add_rms_norm(self, residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        assert residual.is_contiguous() and y.is_contiguous() and weight.is_contiguous()
        normed, total = torch.empty_like(y), torch.empty_like(y)
        self._functions["add_rms_norm", y.dtype, weight.dtype](
            residual.data_ptr(),
            y.data_ptr(),
            y.shape[0],
            y.shape[1],
            weight.data_ptr(),
            eps,
            normed.data_ptr(),
            total.data_ptr(),
        )
        return normed, total

    def rotate_and_store(
        self, qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots
    ) -> tuple[Tensor, Tensor]:
        num_tokens, num_kv_heads, head_dim = v.shape
        num_heads = qk.shape[1] - num_kv_heads
        assert _has_packed_heads(qk) and _has_packed_heads(v) and cos.is_contiguous() and signed_sin.is_contiguous()
        assert into.keys.is_contiguous() and into.values.is_contiguous() and into.slots.is_contiguous()
        assert v.dtype == cos.dtype == signed_sin.dtype == into.keys.dtype == into.values.dtype == qk.dtype
        q, k = qk.new_empty((num_tokens, num_heads, head_dim)), qk.new_empty(v.shape)
        self._functions["rotate_and_store", qk.dtype](
            qk.data_ptr(),
            qk.stride(0),
            v.data_ptr(),
            v.stride(0),
            cos.data_ptr(),
            signed_sin.data_ptr(),
            num_tokens,
            num_heads,
            num_kv_heads,
            head_dim,
            into.slots.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            into.keys.data_ptr(),
            into.values.data_ptr(),
        )
        return q, k

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        assert gate_up.is_contiguous()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, width))
        self._functions[f"gated_{activation}", gate_up.dtype](gate_up.data_ptr(), num_rows, width, out.data_ptr())
        return out


def _name(kind: str, types: tuple[torch.dtype, ...]) -> str:
    return f"{kind}_{'_by_'.join(TYPE_NAMES[dtype] for dtype in types)}"


def _norm_layout(x: Tensor, weight: Tensor) -> tuple[int, int, int]:
    """Rows, numbers from one to the next, and heads in each: those of the weight's last but one dimension."""
    assert weight.is_contiguous() and x.shape[-weight.dim() :] == weight.shape
    if weight.dim() == 1:
        assert x.is_contiguous()
        return x.numel() // x.shape[-1], x.shape[-1], 1
    assert x.dim() == 3 and _has_packed_heads(x)
    return x.shape[0], x.stride(0), x.shape[1]


def _has_packed_heads(x: Tensor) -> bool:
    """Whether the heads of a token lie side by side, `[T, H, D]`."""
    return x.stride(2) == 1 and x.stride(1) == x.shape[2]
