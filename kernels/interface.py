"""What every device's kernels offer, and how a packed batch and a paged KV cache are described to them.

Knows shapes only: no models, no sequences.

Shape legend: T packed tokens, B rows of one token, S tokens of context, H key/value heads, Q query heads, D head size,
Dv that of a value (D, but for latent attention), G layer groups, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from kernels.quantised_weight import QuantisedWeight

Activation = Literal["silu", "gelu_tanh", "swigluoai"]
"""What `Kernels.gated_activation` makes of gates and ups: `act(gate) * up`, but for gpt-oss's `swigluoai`."""

SWIGLUOAI_ALPHA, SWIGLUOAI_LIMIT = 1.702, 7.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheGeometry:
    """How one layer's KV lies in its rows `[num_rows, block_size * H * D]`.

    The keys of block b are row `b * block_stride`, its values the row after. With a latent, a value is the first
    `latent_dim` numbers of its key, and there is no row of values.
    """

    block_size: int
    block_stride: int
    num_kv_heads: int
    head_dim: int
    latent_dim: int | None = None

    @property
    def num_planes(self) -> int:
        """Rows of a block in one layer."""
        return 2 if self.latent_dim is None else 1

    @property
    def value_dim(self) -> int:
        return self.head_dim if self.latent_dim is None else self.latent_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive tokens of one sequence in a packed batch, and where its KV lies."""

    first_row: int  # in the packed batch
    num_queries: int
    context_len: int  # tokens of the sequence up to and including the last query
    block_table: npt.NDArray[np.int32]  # [G, at least ceil(context_len / block_size)]


@dataclass(frozen=True, slots=True)
class KVSlots:
    """The slots in which a step's keys and values of one layer go: token t to slot `slots[t]` of each.

    Only where a batch is padded, to the size of a CUDA graph, are there tokens with negative slots: they go nowhere.
    """

    keys: Tensor  # [num_slots, H, D]: with a latent, the numbers behind it, which are rotated
    values: Tensor  # [num_slots, H, Dv]: with a latent, the latent
    slots: Tensor  # [T] int64


class Linear(Protocol):
    """A projection, or several with what lies between them, whose weights are laid out for the device once."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, in] -> [T, out]`"""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        """`residual + self(x)`, `[T, out]`, which may lie where `residual` lay."""
        ...


@dataclass(frozen=True, slots=True)
class InFloat32:
    """A projection whose weights are float32, of whatever type comes in: that of a router whose close choices bfloat16
    would decide otherwise."""

    linear: Linear

    def __call__(self, x: Tensor) -> Tensor:
        return self.linear(x.float())

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.linear.add_to(residual.float(), x.float())


class HeadwiseLinear(Protocol):
    """A projection of each head by a weight of its own."""

    def __call__(self, x: Tensor) -> Tensor:
        """`[T, Q, in] -> [T, Q, out]`, of any strides."""
        ...


class PagedAttention(Protocol):
    """Causal attention of one step's segments, with all that does not change from layer to layer built once."""

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cache_rows: Tensor,
        *,
        group: int,
        scale: float,
        softcap: float | None,
        sinks: Tensor | None = None,
    ) -> Tensor:
        """`q [T, Q, D]` over the context in `cache_rows`, which already hold this step's `k [T, H, D]` and
        `v [T, H, Dv]`.

        Returns `[T, Q, Dv]`, contiguous. Query head i reads key/value head `i // (Q / H)`. `cache_rows`: of one layer,
        as `CacheGeometry` says; `group`: that layer's, whose line of each block table is read.
        `sinks [Q]`, float32, contiguous: a logit of each head that takes part in its softmax, and of which nothing
        comes (arXiv:2309.17453, section 3.3).
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedMlp:
    """The weights of a gated MLP: that of all rows of a layer, or one of its experts."""

    gate_up: Linear  # E -> 2 * width
    down: Linear  # width -> E
    activation: Activation
    activate: Callable[[Tensor, Activation], Tensor]  # the device's `gated_activation`

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activate(self.gate_up(x), self.activation))

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return self.down.add_to(residual, self.activate(self.gate_up(x), self.activation))


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertChoice:
    """How a router's logits become a row's experts: those of the largest, of equal ones the first, and by how much each
    counts: `scale` times its softmax among all, or where `normalised` among those chosen, in float32.

    With several groups, of equal size side by side, a row's experts are all of the `groups_per_row` best ones: of those
    with the largest expert. With a `correction` (DeepSeek-V3's, arXiv:2412.19437, section 2.1.2) a sigmoid takes the
    place of the softmax, experts are ranked by it and the correction together, and groups by their two best.
    """

    per_row: int
    normalised: bool
    scale: float = 1.0
    groups: int = 1
    groups_per_row: int = 1
    correction: Tensor | None = None  # [experts] float32


def held_experts(experts: Sequence[GatedMlp | None]) -> tuple[int, list[GatedMlp]]:
    """The number of the first one that is here, and those that are, which lie side by side."""
    held = [expert for expert in experts if expert is not None]
    first = next(number for number, expert in enumerate(experts) if expert is not None)
    assert None not in experts[first : first + len(held)], "a process has experts side by side"
    return first, held


PackedBytes = Callable[[Iterable[tuple[int, int]], torch.dtype], int]
"""As `Kernels.packed_bytes`."""


class Kernels(Protocol):
    """The operators of one device. A module with these functions satisfies it."""

    def pack_linear(self, weight: Tensor, bias: Tensor | None) -> Linear:
        """Pack a projection: `weight [out, in]`, `bias [out]`. The caller should drop its reference to `weight`."""
        ...

    def packed_bytes(self, shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
        """How much memory `pack_linear` takes in all for weights `[out, in]` of these shapes and this type, without
        biases, that lie in memory of their own."""
        ...

    def pack_quantised(
        self, weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype, *, is_output_layer: bool = False
    ) -> Linear:
        """Pack a quantised projection of activations of `dtype`. Where a device has no kernel for such weights, their
        values in that type. An output layer, the largest, never takes memory for its values in a step, however many
        rows of one have logits."""
        ...

    def pack_heads(self, weight: Tensor) -> HeadwiseLinear:
        """Pack a projection of each head, from `weight [Q, out, in]`."""
        ...

    def pack_experts(self, router: Linear, experts: Sequence[GatedMlp | None], choice: ExpertChoice) -> Linear:
        """A layer's mixture, E -> E, of MLPs whose projections these kernels have packed, as they have the `router`'s,
        E -> as many as there are experts, which may be in float32. A row is computed by those that the router chooses
        for it, and by no other. None: another process has that expert, and what it makes of a row is left out."""
        ...

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """`x / sqrt(mean(x²) + eps) * weight` over the last dimension, in the wider of the two types, as `x`'s type."""
        ...

    def add_rms_norm(self, residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """The norm of `residual + y`, and that sum, as new tensors; all `[T, N]`."""
        ...

    def rotate_and_store(
        self, qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots
    ) -> tuple[Tensor, Tensor]:
        """Rotary embedding of `qk [T, Q + H, D]`, queries before keys; the keys and `v [T, H, Dv]` go to their slots.

        `cos`, `signed_sin [T, 1, D]`: element i of a half turns with that of the other half; the sine's first half is
        negated. Returns `q [T, Q, D]` and `k [T, H, D]`, which may lie where `qk` lay.
        """
        ...

    def gated_activation(self, gate_up: Tensor, activation: Activation, /) -> Tensor:
        """`act(gate) * up` of `[T, 2 * width]`, gate before up; returns `[T, width]`.

        `swigluoai` cuts gates off above its limit, ups above and below it, and is
        `gate * sigmoid(alpha * gate) * (up + 1)`.
        """
        ...

    def plan_attention(
        self, segments: Sequence[Segment], geometry: CacheGeometry, *, window: int | None, dtype: torch.dtype
    ) -> PagedAttention:
        """Prepare a step. Segments lie in packed order; those of one query come first, by growing `context_len`.

        With a `window`, a token sees itself and the `window - 1` before it.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphAttentionLimits:
    """The largest step of one query per segment that graph attention takes; of up to n queries, an n-th of it."""

    num_segments: int
    context_tokens: int  # of all segments together
    num_layer_groups: int


class GraphAttention(Protocol):
    """Attention of steps of few queries per segment, read from where it always lies: a CUDA graph can hold it."""

    @property
    def most_queries(self) -> int:
        """How many queries a segment may have."""
        ...

    def fill(self, segments: Sequence[Segment], num_queries: int) -> None:
        """What is launched from now on, on this stream, is for these, by what `of` gave for so many queries. Raises
        ValueError beyond the limits."""
        ...

    def of(self, num_segments: int, num_queries: int) -> PagedAttention:
        """Attention for steps of up to so many segments of up to so many queries: it looks at what was filled in last,
        whenever it is replayed."""
        ...


@runtime_checkable
class GraphKernels(Kernels, Protocol):
    """The operators of a device that replays what was launched before."""

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
        """See `plan_attention`."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentProjections:
    """Between a layer's first projection and its attention, where that is by a latent: see `engine.model.latent`."""

    query_norm: Tensor | None  # [1, rank of queries]; None: the first projection gives queries
    query: Linear | None
    latent_norm: Tensor  # [1, Dv]
    keys: HeadwiseLinear  # of a head's query, what is not rotated, into the latent's space


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One layer's weights, fused and packed. What a family does not have is None."""

    attention_norm: Tensor | None  # [E]
    qkv: Linear  # E -> (Q + 2H) * D
    qk_norm: Tensor | None  # [Q + H, D]: of a rank with all ranks' heads where these are normalised together
    sinks: Tensor | None = None  # [Q] float32
    latent: LatentProjections | None = None
    output: Linear  # Q * Dv -> E
    attention_output_norm: Tensor | None  # [E]
    mlp_norm: Tensor | None  # [E]
    mlp: Linear  # E -> E: a `GatedMlp`, or what `Kernels.pack_experts` made
    mlp_output_norm: Tensor | None  # [E]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayersForm:
    """What a model's layers have in common, and by what they differ beside their weights."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    joint_qk_norm: bool  # queries are normalised over all heads, and so are keys
    eps: float
    scale: float
    softcap: float | None
    activation: Activation
    rotations: Sequence[int]  # which of a step's rotations each layer turns by
    attentions: Sequence[int]  # which of a step's attentions is each layer's
