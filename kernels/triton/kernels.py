"""The kernels on an NVIDIA GPU: Triton's, and cuBLAS for projections where the batch may change the last bit.

Runs on a CPU too where Triton interprets: that is how it is tested without a GPU.

Shape legend: see `kernels.interface`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels.interface import (
    CacheGeometry,
    ExpertChoice,
    GatedMlp,
    GraphAttention,
    GraphAttentionLimits,
    HeadwiseLinear,
    Linear,
    PagedAttention,
    Segment,
    held_experts,
)
from kernels.quantised_weight import QuantisedWeight
from kernels.reference import PlainHeads, packed_bytes
from kernels.triton import elementwise
from kernels.triton.attention.paged import SHARE_FROM_BYTES, DecodeBuffers, GpuAttention
from kernels.triton.attention.tiles import Operands
from kernels.triton.attention.work_lists import AttentionShape
from kernels.triton.experts import Stacked, grouped_matmul, pack_experts
from kernels.triton.gemv import gemv, takes
from kernels.triton.matmul import InvariantLinear
from kernels.triton.quantised import QuantisedLinear, pack_quantised
from kernels.triton.shipped import architecture


@dataclass(frozen=True, slots=True)
class CublasLinear:
    """A weight as it lies in the checkpoint. cuBLAS chooses how it sums by the number of rows; one row is `gemv`'s."""

    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        if takes(x, self.weight):
            return gemv(x, self.weight, self.bias)
        return functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        if takes(x, self.weight):
            return gemv(x, self.weight, self.bias, residual)
        # In place: out of place, torch copies the residual before cuBLAS adds to it.
        total = residual.addmm_(x, self.weight.t())
        return total if self.bias is None else total.add_(self.bias)


@dataclass(frozen=True, slots=True)
class InvariantHeads:
    """Each head's rows are those of a group in the product that experts have."""

    weight: Tensor  # [Q, out, in]

    def __call__(self, x: Tensor) -> Tensor:
        num_rows, num_heads, num_inputs = x.shape
        by_head = torch.arange(num_rows * num_heads, device=x.device).view(num_rows, num_heads).t().flatten()
        starts = torch.arange(num_heads + 1, device=x.device) * num_rows
        rows = x.transpose(0, 1).reshape(-1, num_inputs)
        out = grouped_matmul(
            rows,
            Stacked(self.weight, None),
            order=by_head,
            starts=starts,
            per_row=1,
            num_experts=num_heads,
            gathers=False,
        )
        return out.view(num_rows, num_heads, -1)


def _stacked(linears: Sequence[Linear]) -> Stacked:
    """By their values: there is no product by the stored weights of experts."""
    plain = [linear for linear in linears if isinstance(linear, CublasLinear | InvariantLinear | QuantisedLinear)]
    assert len(plain) == len(linears)
    return Stacked.of([(linear.weight, linear.bias) for linear in plain])


@dataclass(frozen=True, slots=True)
class GpuKernels:
    """The kernels of one device.

    `batch_invariant`: a sequence's results are the same to the bit alone, in any batch and in any chunking.
    """

    device: torch.device
    batch_invariant: bool

    packed_bytes = staticmethod(packed_bytes)
    rms_norm = staticmethod(elementwise.rms_norm)
    add_rms_norm = staticmethod(elementwise.add_rms_norm)
    rotate_and_store = staticmethod(elementwise.rotate_and_store)
    gated_activation = staticmethod(elementwise.gated_activation)

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        weight = weight.contiguous()
        return InvariantLinear(weight, bias) if self.batch_invariant else CublasLinear(weight, bias)

    def pack_quantised(
        self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype, *, is_output_layer: bool = False
    ) -> Linear:
        packed = pack_quantised(
            weight,
            bias,
            dtype,
            self.device,
            batch_invariant=self.batch_invariant,
            expands=not is_output_layer and not self.batch_invariant,
        )
        return self.pack_linear(weight.dequantise(dtype).to(self.device), bias) if packed is None else packed

    def pack_heads(self, weight: Tensor) -> HeadwiseLinear:
        weight = weight.contiguous()
        return InvariantHeads(weight) if self.batch_invariant else PlainHeads(weight)

    def pack_experts(self, router: Linear, experts: Sequence[GatedMlp | None], choice: ExpertChoice) -> Linear:
        first, held = held_experts(experts)
        gate_up, down = (_stacked([getattr(expert, name) for expert in held]) for name in ("gate_up", "down"))
        return pack_experts(router, gate_up, down, held[0].activation, choice, num_experts=len(experts), first=first)

    def plan_attention(
        self, segments: Sequence[Segment], geometry: CacheGeometry, *, window: int | None, dtype: torch.dtype
    ) -> PagedAttention:
        del dtype  # the queries tell
        return GpuAttention(segments, geometry, window=window, device=self.device, batch_invariant=self.batch_invariant)

    def graph_attention(
        self,
        geometry: CacheGeometry,
        limits: GraphAttentionLimits,
        *,
        num_heads: int,
        window: int | None,
        softcapped: bool,
        dtype: torch.dtype,
    ) -> GraphAttention:
        operands = Operands(
            dtype=dtype,
            geometry=geometry,
            softcapped=softcapped,
            windowed=window is not None,
            architecture=architecture(self.device),
        )
        shape = AttentionShape(
            operands=operands,
            num_heads=num_heads,
            window=window,
            batch_invariant=self.batch_invariant,
            share_from_bytes=SHARE_FROM_BYTES,
        )
        return DecodeBuffers(shape, limits, self.device)
