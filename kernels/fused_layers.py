"""An ability that some devices' kernels have beside those of `kernels.interface`: whole layers in one call.

Shape legend: see `kernels.interface`; E hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from kernels.interface import Activation, Kernels, Linear, PagedAttention


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights, fused and packed. Norms that a family does not have are None."""

    attention_norm: Tensor  # [E]
    qkv: Linear  # E -> (Q + 2H) * D
    qk_norm: Tensor | None  # [Q + H, D]
    output: Linear  # Q * D -> E
    attention_output_norm: Tensor | None  # [E]
    mlp_norm: Tensor  # [E]
    gate_up: Linear  # E -> 2 * intermediate
    down: Linear  # intermediate -> E
    mlp_output_norm: Tensor | None  # [E]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersForm:
    """What a model's layers have in common, and by what they differ beside their weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    scale: float
    softcap: float | None
    activation: Activation
    rotations: Sequence[int]  # which of a step's rotations each layer turns by
    attentions: Sequence[int]  # which of a step's attentions is each layer's


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersStep:
    """What the layers of one step read beside activations."""

    cache: Tensor  # [blocks, layers per group, 2, block_size, H, D]
    slots: Tensor  # [G, T] int64: see `KVSlots`
    rotations: Sequence[tuple[Tensor, Tensor]]  # cosines and signed sines, [T, 1, D] each
    attentions: Sequence[PagedAttention]


class FusedLayers(Protocol):
    """The layers of one model. Not for two threads at once."""

    def takes(self, attentions: Sequence[PagedAttention]) -> bool:
        """Whether steps with such attention can be run."""
        ...

    def run(self, x: Tensor, normed: Tensor, step: LayersStep, num_layers: int) -> None:
        """The first `num_layers`, with results that are the same to the bit as those of separate calls.

        `x [T, E]`, the residual stream, and `normed [T, E]`, its norm by the first layer's weight, become those after
        these layers, the norm being by the weight of what follows them.
        """
        ...


@runtime_checkable
class FusingKernels(Kernels, Protocol):
    """The operators of a device where what lies between calls takes time of its own."""

    def fuse_layers(self, layers: Sequence[Layer], final_norm: Tensor, form: LayersForm) -> FusedLayers | None:
        """All layers of a model, after which comes the `final_norm [E]`.

        None where these layers hold something that can only be called separately.
        """
        ...
