"""The kernels on a CPU that has AVX-512 with bfloat16 and a C++ compiler; what they leave out, torch does."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kernels.cpu import kernels as cpu
from kernels.cpu.memory import PackingMemory, private_memory
from kernels.fused_layers import FusedLayers, Layer, LayersForm
from kernels.interface import Activation, CacheGeometry, KVSlots, Linear, PagedAttention, Segment
from kernels.native import attention as native_attention
from kernels.native import elementwise as native_elementwise
from kernels.native import layers as native_layers
from kernels.native.elementwise import NativeElementwise
from kernels.native.linear import can_pack_linear, can_pack_quantised, pack_linear, pack_quantised
from kernels.quantised_weight import ActivationBits, QuantisedWeight


class NativeCpuKernels:
    """See `kernels.interface.Kernels`. `activation_bits`: of what is multiplied by quantised weights."""

    def __init__(
        self, library: ctypes.CDLL, activation_bits: ActivationBits = 8, memory: PackingMemory = private_memory
    ) -> None:
        self._library = library
        self._activation_bits = activation_bits
        self._memory = memory
        self._elementwise = NativeElementwise(library)

    @property
    def packing(self) -> str:
        return Path(self._library._name).name  # a digest of all sources and of the compiler

    def packing_into(self, memory: PackingMemory) -> NativeCpuKernels:
        return NativeCpuKernels(self._library, self._activation_bits, memory)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        if can_pack_linear(weight):
            return pack_linear(self._library, weight, bias, self._memory)
        return cpu.pack_linear(weight, bias)

    def pack_quantised(self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype) -> Linear:
        if can_pack_quantised(weight, dtype):
            return pack_quantised(self._library, weight, bias, self._activation_bits, self._memory)
        return self.pack_linear(weight.dequantise(dtype), bias)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        if native_elementwise.takes(x, weight):
            return self._elementwise.rms_norm(x, weight, eps)
        return cpu.rms_norm(x, weight, eps)

    def add_rms_norm(self, residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        if native_elementwise.takes(y, weight):
            return self._elementwise.add_rms_norm(residual, y, weight, eps)
        return cpu.add_rms_norm(residual, y, weight, eps)

    def rotate_and_store(
        self, qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots
    ) -> tuple[Tensor, Tensor]:
        if native_elementwise.takes(qk):
            return self._elementwise.rotate_and_store(qk, v, cos, signed_sin, into)
        return cpu.rotate_and_store(qk, v, cos, signed_sin, into)

    def gated_activation(self, gate_up: Tensor, activation: Activation) -> Tensor:
        if native_elementwise.takes(gate_up):
            return self._elementwise.gated_activation(gate_up, activation)
        return cpu.gated_activation(gate_up, activation)

    def plan_attention(
        self, segments: Sequence[Segment], geometry: CacheGeometry, *, window: int | None, dtype: torch.dtype
    ) -> PagedAttention:
        if native_attention.can_attend(geometry, dtype):
            return native_attention.plan_attention(self._library, segments, geometry, window=window, dtype=dtype)
        return cpu.plan_attention(segments, geometry, window=window, dtype=dtype)

    def fuse_layers(self, layers: Sequence[Layer], final_norm: Tensor, form: LayersForm) -> FusedLayers | None:
        return native_layers.fuse_layers(self._library, layers, final_norm, form)
