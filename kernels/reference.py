"""Plain-torch twins of every kernel: the definition that the fast ones are tested against. Slow and obvious on purpose.

Shape legend: see `kernels.interface`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.block_digest import GAMMA, MIX_1, MIX_2, ROW_WORDS, SHIFT
from kernels.interface import (
    SWIGLUOAI_ALPHA,
    SWIGLUOAI_LIMIT,
    Activation,
    CacheGeometry,
    ExpertChoice,
    GatedMlp,
    KVSlots,
    Linear,
    Segment,
)
from kernels.quantised_weight import QuantisedWeight


@dataclass(frozen=True, slots=True)
class PlainLinear:
    weight: Tensor  # [out, in]
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.nn.functional.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return residual + self(x)


def pack_linear(weight: Tensor, bias: Tensor | None) -> PlainLinear:
    return PlainLinear(weight, bias)


def packed_bytes(shapes: Iterable[tuple[int, int]], dtype: torch.dtype) -> int:
    return sum(map(math.prod, shapes)) * dtype.itemsize


def pack_quantised(
    weight: QuantisedWeight, bias: Tensor | None, dtype: torch.dtype, *, is_output_layer: bool = False
) -> PlainLinear:
    del is_output_layer
    return PlainLinear(weight.dequantise(dtype), bias)


@dataclass(frozen=True, slots=True)
class PlainHeads:
    weight: Tensor  # [Q, out, in]

    def __call__(self, x: Tensor) -> Tensor:
        return torch.einsum("tqi,qoi->tqo", x, self.weight)


def pack_heads(weight: Tensor) -> PlainHeads:
    return PlainHeads(weight)


@dataclass(frozen=True, slots=True)
class PlainExperts:
    """Expert after expert, each of the rows that chose it. Their outputs are added up in float32, by their rank."""

    router: Linear
    experts: Sequence[GatedMlp | None]
    choice: ExpertChoice

    def __call__(self, x: Tensor) -> Tensor:
        return self._sum(x).to(x.dtype)

    def add_to(self, residual: Tensor, x: Tensor) -> Tensor:
        return (residual + self._sum(x)).to(residual.dtype)

    def _sum(self, x: Tensor) -> Tensor:
        """`[T, E]` float32"""
        numbers, shares = choose_experts(self.router(x), self.choice)
        outputs = torch.zeros(*numbers.shape, x.shape[1], dtype=x.dtype, device=x.device)
        for number in set(numbers.flatten().tolist()):
            if (expert := self.experts[number]) is not None:
                rows, ranks = torch.where(numbers == number)
                outputs[rows, ranks] = expert(x[rows])
        total = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        for rank in range(self.choice.per_row):
            total += shares[:, rank, None] * outputs[:, rank].float()
        return total


def choose_experts(logits: Tensor, choice: ExpertChoice) -> tuple[Tensor, Tensor]:
    """Choose the experts of each row of `logits [T, experts]`: their numbers `[T, per_row]` and how much each counts,
    likewise."""
    logits = logits.float()
    if choice.correction is None:
        scores, ranking = logits.softmax(-1), logits
    else:
        scores = logits.sigmoid()
        ranking = scores + choice.correction
    if choice.groups > 1:
        groups = torch.unflatten(ranking, -1, (choice.groups, -1))
        best = groups.topk(1 if choice.correction is None else 2).values.sum(-1)
        kept = torch.zeros_like(best, dtype=torch.bool).scatter_(1, _largest(best, choice.groups_per_row), True)
        ranking = groups.masked_fill(~kept.unsqueeze(-1), -torch.inf).flatten(1)
    order = _largest(ranking, choice.per_row)
    shares = scores.gather(1, order)
    return order, shares / (shares.sum(-1, keepdim=True) if choice.normalised else 1) * choice.scale


def _largest(values: Tensor, count: int) -> Tensor:
    """Where the largest values of each row are; of equal ones the first."""
    return values.sort(dim=-1, descending=True, stable=True).indices[:, :count]


def pack_experts(router: Linear, experts: Sequence[GatedMlp | None], choice: ExpertChoice) -> Linear:
    return PlainExperts(router, experts, choice)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (normed * weight.float()).to(x.dtype)


def add_rms_norm(residual: Tensor, y: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = residual + y
    return rms_norm(total, weight, eps), total


def rotate(x: Tensor, cos: Tensor, signed_sin: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    first, second = x[..., :half], x[..., half:]
    c, s = cos[..., :half], signed_sin[..., half:]
    return torch.cat((first * c - second * s, second * c + first * s), dim=-1)


def rotate_and_store(qk: Tensor, v: Tensor, cos: Tensor, signed_sin: Tensor, into: KVSlots) -> tuple[Tensor, Tensor]:
    rotated = rotate(qk, cos, signed_sin)
    num_heads = qk.shape[1] - v.shape[1]
    stored = into.slots >= 0
    into.keys[into.slots[stored]] = rotated[stored, num_heads:]
    into.values[into.slots[stored]] = v[stored]
    return rotated[:, :num_heads], rotated[:, num_heads:]


def gated_activation(gate_up: Tensor, activation: Activation) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    if activation == "swigluoai":
        gate, up = gate.clamp(max=SWIGLUOAI_LIMIT), up.clamp(-SWIGLUOAI_LIMIT, SWIGLUOAI_LIMIT)
        return gate * torch.sigmoid(SWIGLUOAI_ALPHA * gate) * (up + 1)
    if activation == "silu":
        return gate * torch.sigmoid(gate) * up
    return torch.nn.functional.gelu(gate, approximate="tanh") * up


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`q [.., Q, T, D]` over `k`, `v [.., H, S, D]` with `bias [.., T, S]` added to the (capped) scores, in float32.

    Soft-capping squeezes scores into (-cap, cap): `cap * tanh(score / cap)` (Gemma 2, arXiv:2408.00118, section 2).
    `sinks`, which broadcast to `[.., Q, T, 1]`, are scores of one more key, whose value is zero.
    """
    repeats = q.shape[-3] // k.shape[-3]
    wide_k, wide_v = (t.float().repeat_interleave(repeats, dim=-3) for t in (k, v))
    scores = q.float() @ wide_k.transpose(-1, -2) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    if bias is not None:
        scores = scores + bias.float()
    if sinks is None:
        return (torch.softmax(scores, dim=-1) @ wide_v).to(q.dtype)
    with_sinks = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    return (torch.softmax(with_sinks, dim=-1)[..., :-1] @ wide_v).to(q.dtype)


def causal_bias(num_queries: int, first_query: int, num_keys: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """0 where a query may look, else -inf, `[num_queries, num_keys]`; query i stands at key `first_query + i`."""
    distance = (torch.arange(num_queries) + first_query).unsqueeze(1) - torch.arange(num_keys)
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    return torch.zeros(num_queries, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


@dataclass(frozen=True, slots=True)
class ReferenceAttention:
    """Each segment by itself, its context looked up token by token in the cache."""

    segments: tuple[Segment, ...]
    geometry: CacheGeometry
    window: int | None

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
        out = q.new_empty(*q.shape[:-1], self.geometry.value_dim)
        head_sinks = None if sinks is None else sinks.view(-1, 1, 1)
        for segment in self.segments:
            rows = slice(segment.first_row, segment.first_row + segment.num_queries)
            keys, values = (t.transpose(0, 1) for t in self._context(segment, cache_rows, group))
            first_query = segment.context_len - segment.num_queries
            bias = causal_bias(segment.num_queries, first_query, segment.context_len, self.window, torch.float32)
            queries = q[rows].transpose(0, 1)
            attended = dense_attention(queries, keys, values, bias.to(q.device), scale, softcap, head_sinks)
            out[rows] = attended.transpose(0, 1)
        return out

    def _context(self, segment: Segment, cache_rows: Tensor, group: int) -> tuple[Tensor, Tensor]:
        """Keys `[S, H, D]` and values `[S, H, Dv]` of the segment's whole context."""
        g = self.geometry
        slots = cache_rows.view(-1, g.block_size, g.num_kv_heads, g.head_dim)
        positions = torch.arange(segment.context_len, device=cache_rows.device)
        table = torch.from_numpy(segment.block_table[group].astype("int64")).to(cache_rows.device)
        key_rows = table[positions // g.block_size] * g.block_stride
        keys, values = (slots[key_rows + plane, positions % g.block_size] for plane in (0, g.num_planes - 1))
        return keys, values[..., : g.value_dim]


def plan_attention(
    segments: Sequence[Segment], geometry: CacheGeometry, *, window: int | None, dtype: torch.dtype
) -> ReferenceAttention:
    del dtype  # all is computed in float32
    return ReferenceAttention(tuple(segments), geometry, window)


def gather_slab(cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, start: int, out: Tensor) -> int:
    """Fill `out [planes, n, H, D]` with tokens [start, start + n), token by token, and digest it."""
    for token in range(out.shape[1]):
        for plane in range(len(out)):
            out[plane, token] = _slot(cache_rows, geometry, table, start + token, plane)
    return row_sum_digest(out.cpu().view(torch.uint8).numpy().tobytes())


def scatter_slab(slab: Tensor, cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, start: int) -> int:
    """Write `slab` to the blocks, at tokens [start, start + n). Returns the digest of what is then read from them."""
    for token in range(slab.shape[1]):
        for plane in range(len(slab)):
            _slot(cache_rows, geometry, table, start + token, plane).copy_(slab[plane, token])
    return gather_slab(cache_rows, geometry, table, start, torch.empty_like(slab))


def copy_blocks(source: Tensor, sources: Tensor, target: Tensor, targets: Tensor) -> None:
    """Copy blocks `sources [n]` of `source [., W]` to `targets [n]` of `target [., W]`, pairwise."""
    for one, other in zip(sources.tolist(), targets.tolist(), strict=True):
        target[other] = source[one]


def _slot(cache_rows: Tensor, geometry: CacheGeometry, table: Tensor, position: int, plane: int) -> Tensor:
    """K or V of one token, `[H, D]`, in place."""
    row = cache_rows[int(table[position // geometry.block_size]) * geometry.block_stride + plane]
    return row.view(geometry.block_size, geometry.num_kv_heads, geometry.head_dim)[position % geometry.block_size]


def row_sum_digest(content: bytes) -> int:
    """The digest that `kernels.cpu.block_digest` defines, word by word."""
    padded = content + bytes(-len(content) % 8)
    total = _mixed(len(content))
    for row, first in enumerate(range(0, len(padded), 8 * ROW_WORDS)):
        row_sum = 0
        for column, at in enumerate(range(first, min(first + 8 * ROW_WORDS, len(padded)), 8)):
            word = int.from_bytes(padded[at : at + 8], "little")
            row_sum += (_mixed((column + 1) * GAMMA) | 1) * (word ^ word >> SHIFT)
        total += _mixed(row_sum + (row + 1) * GAMMA)
    return total % 2**64


def _mixed(word: int) -> int:
    word %= 2**64
    word = (word ^ word >> 30) * MIX_1 % 2**64
    word = (word ^ word >> 27) * MIX_2 % 2**64
    return word ^ word >> 31
