"""The kernels on a CPU that has AVX2 or more and a C++ compiler; what they leave out, torch does."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kernels.adapters import StoredLayer
from kernels.cpu import kernels as cpu
from kernels.cpu.huge_pages import PackingMemory, private_memory
from kernels.interface import (
    Activation,
    CacheGeometry,
    ExpertChoice,
    GatedMlp,
    HeadwiseLinear,
    KVSlots,
    Layer,
    LayersForm,
    Linear,
    PagedAttention,
    Segment,
)
from kernels.native import attention as native_attention
from kernels.native import experts as native_experts
from kernels.native import layers as native_layers
from kernels.native.adapters import NativeAdapterForm, can_pack_adapter
from kernels.native.library import (
    AMX,
    TYPE_NAMES,
    Float,
    Pointer,
    Size,
    activation_number,
    declare,
    processor_instructions,
)
from kernels.native.linear import (
    can_pack,
    can_pack_linear,
    can_pack_quantised,
    pack_heads,
    pack_linear,
    pack_quantised,
    packed_bytes,
)
from kernels.quantised_weight import ActivationBits, QuantisedWeight

# Norms, rotary embeddings and gated activations: see `src/elementwise.cpp`. There is one of each for each of the types.
_PARAMETERS: dict[str, list[Any]] = {
    "rms_norm": [Pointer, Size, Size, Size, Size, Pointer, Float, Pointer],
    "add_rms_norm": [Pointer, Pointer, Size, Size, Pointer, Float, Pointer, Pointer],
    "rotate_and_store": [Pointer, Size, Pointer, Size, Pointer, Pointer, *[Size] * 5, *[Pointer] * 5, Size],
    "gated_activation": [Size, Pointer, Size, Size, Pointer],
}

# While memory brings a core a weight, the core multiplies some 20 rows by it with registers, and 150 with tiles. One of
# 8 or 4 bits comes sooner, and takes longer: with tiles it is some 14 rows, and 6 to 11.
_FEW_ROWS, _FEW_ROWS_BY_TILES = 16, 128


class NativeCpuKernels:
    """See `kernels.interface.Kernels`. `activation_bits`: of what is multiplied by quantised weights."""

    def __init__(
        self, library: ctypes.CDLL, activation_bits: ActivationBits = 8, memory: PackingMemory = private_memory
    ) -> None:
        self._library = library
        self._activation_bits = activation_bits
        self._memory = memory
        self._functions = {
            (kind, *types): declare(library, _name(kind, types), parameters)
            for kind, parameters in _PARAMETERS.items()
            for types in itertools.product(TYPE_NAMES, repeat=2 if "norm" in kind else 1)
        }

    @property
    def packing(self) -> str:
        """Equal where equal weights are packed into equal bytes by the same code."""
        return Path(self._library._name).name  # a digest of all sources and of the compiler

    def packing_into(self, memory: PackingMemory) -> NativeCpuKernels:
        """These operators, packing weights into this memory."""
        return NativeCpuKernels(self._library, self._activation_bits, memory)

    def few_rows(self, dtype: torch.dtype, *, are_quantised: bool = False) -> int:
        """Up to so many rows of this type, memory brings their weights, of the same type or quantised, later than a
        core has multiplied them."""
        by_tiles = dtype is torch.bfloat16 and not are_quantised and processor_instructions() is AMX
        return _FEW_ROWS_BY_TILES if by_tiles else _FEW_ROWS

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if can_pack_linear(weight):
            return pack_linear(self._library, weight, bias, self._memory)
        return cpu.pack_linear(weight, bias)

    def adapter_form(self, layers: Sequence[StoredLayer], dtype: torch.dtype) -> NativeAdapterForm | None:
        """How adapters that lie so in their files are packed for a model of this type; None: weight by weight."""
        if dtype not in TYPE_NAMES or not can_pack_adapter(layers, dtype):
            return None
        return NativeAdapterForm(self._library, layers, dtype)

    def packed_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        by_form: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
        for shape in shapes:
            by_form[can_pack(shape[1], dtype)].append(shape)
        return packed_bytes(by_form[True], dtype) + cpu.packed_bytes(by_form[False], dtype)

    def pack_quantised(
        self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype, *, is_output_layer: bool = False
    ) -> Linear:
        del is_output_layer
        if can_pack_quantised(weight, dtype):
            return pack_quantised(self._library, weight, bias, self._activation_bits, self._memory)
        return self.pack_linear(weight.dequantise(dtype), bias)

    def pack_heads(self, weight: Tensor) -> HeadwiseLinear:
        if can_pack_linear(weight[0]):
            return pack_heads(self._library, weight, self._memory)
        return cpu.pack_heads(weight)

    def pack_experts(self, router: Linear, experts: Sequence[GatedMlp | None], choice: ExpertChoice) -> Linear:
        packed = native_experts.pack_experts(self._library, router, experts, choice)
        return cpu.pack_experts(router, experts, choice) if packed is None else packed

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        normalise = self._functions.get(("rms_norm", x.dtype, weight.dtype))
        if normalise is None:
            return cpu.rms_norm(x, weight, eps)
        rows, row_stride, heads = _norm_layout(x, weight)
        out = x.new_empty(x.shape)
        width = x.shape[-1]
        normalise(x.data_ptr(), rows, row_stride, heads, width, weight.data_ptr(), eps, out.data_ptr())
        return out

    def add_rms_norm(self, residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        normalise = self._functions.get(("add_rms_norm", y.dtype, weight.dtype))
        if normalise is None:
            return cpu.add_rms_norm(residual, y, weight, eps)
        assert residual.is_contiguous() and y.is_contiguous() and weight.is_contiguous()
        normed, total = torch.empty_like(y), torch.empty_like(y)
        normalise(
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
        rotate = self._functions.get(("rotate_and_store", qk.dtype))
        if rotate is None:
            return cpu.rotate_and_store(qk, v, cos, signed_sin, into)
        num_tokens, num_rotated, head_dim = qk.shape
        num_kv_heads = v.shape[1]
        num_heads = num_rotated - num_kv_heads
        assert _has_packed_heads(qk) and _has_packed_heads(v) and cos.is_contiguous() and signed_sin.is_contiguous()
        assert _has_packed_heads(into.keys) and _has_packed_heads(into.values) and into.slots.is_contiguous()
        assert into.keys.stride(0) == into.values.stride(0)
        assert v.dtype == cos.dtype == signed_sin.dtype == into.keys.dtype == into.values.dtype == qk.dtype
        q, k = (qk.new_empty((num_tokens, heads, head_dim)) for heads in (num_heads, num_kv_heads))
        rotate(
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
            num_kv_heads * v.shape[2],
            into.slots.data_ptr(),
            q.data_ptr(),
            k.data_ptr(),
            into.keys.data_ptr(),
            into.values.data_ptr(),
            into.keys.stride(0),
        )
        return q, k

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        compute = self._functions.get(("gated_activation", gate_up.dtype))
        if compute is None:
            return cpu.gated_activation(gate_up, activation)
        assert gate_up.is_contiguous()
        num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = gate_up.new_empty((num_rows, width))
        compute(activation_number(activation), gate_up.data_ptr(), num_rows, width, out.data_ptr())
        return out

    def plan_attention(
        self, segments: Sequence[Segment], geometry: CacheGeometry, *, window: int | None, dtype: torch.dtype
    ) -> PagedAttention:
        if native_attention.can_attend(geometry, dtype):
            return native_attention.plan_attention(self._library, segments, geometry, window=window, dtype=dtype)
        return cpu.plan_attention(segments, geometry, window=window, dtype=dtype)

    def fuse_layers(
        self, layers: Sequence[Layer], final_norm: Tensor, form: LayersForm
    ) -> native_layers.NativeLayers | None:
        """All layers of a model in one call, after which comes the `final_norm [E]`: between separate calls lies time.

        None where these layers hold something that can only be called separately.
        """
        return native_layers.fuse_layers(self._library, layers, final_norm, form)


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
    return x.stride(2) == 1 and (x.shape[1] == 1 or x.stride(1) == x.shape[2])
