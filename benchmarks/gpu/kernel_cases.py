"""What is timed of each kernel: a call at the shapes of one layer of a model, and what it has to move and to compute.

Bytes are those that must pass through the device's memory at least once; operations are multiplications and additions
that the result needs (half of the square for causal attention). So what is achieved is never flattered.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from engine.kv.cache import KVCache, KVLayout
from kernels.interface import Segment
from kernels.triton.kernels import GpuKernels
from kernels.triton.matmul import matmul
from kernels.triton.sampling.rows import RowOptions, no_edits, pack_rows
from kernels.triton.sampling.sample import sample
from kernels.triton.slabs import begun_digest, gather_slab, scatter_slab


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerShape:
    """One layer of a model, and the batches that it is timed with. The default: Llama-3.1-8B."""

    hidden: int = 4096
    intermediate: int = 14336
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    dtype: torch.dtype = torch.bfloat16
    prompt_tokens: int = 8192
    decode_rows: int = 32
    decode_context: int = 8192
    few_rows: tuple[int, ...] = (1, 64)  # of projections and of sampling in a decode step
    vocab_size: int = 128_256

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize

    @property
    def qkv_width(self) -> int:
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`against` names another case, timed in the same run, that does the same by torch's own means.

    Aims: shares of both ceilings, and times as fast as `against`.
    """

    name: str
    run: Callable[[], object]
    num_bytes: int
    flops: int = 0
    against: str | None = None
    of_copy_rate: float | None = None
    of_matmul_rate: float | None = None
    times_as_fast: float | None = None


def cases(shape: LayerShape, device: torch.device) -> Iterator[Case]:
    """Yields one case after the other, so that the memory of each can be given back before the next."""
    yield from _row_wise(shape, device)
    for rows in (*shape.few_rows, shape.prompt_tokens):
        yield from _projections(shape, device, rows)
    yield from _prefill_attention(shape, device)
    yield from _decode_attention(shape, device)
    yield from _slabs(shape, device)
    for rows in shape.few_rows:
        yield from _sampling(shape, device, rows)


def _random(shape: LayerShape, device: torch.device, *sizes: int) -> Tensor:
    return torch.randn(*sizes, dtype=shape.dtype, device=device)


def _row_wise(shape: LayerShape, device: torch.device) -> Iterator[Case]:
    kernels, rows, wide = GpuKernels(device, False), shape.prompt_tokens, shape.itemsize
    x, y = (_random(shape, device, rows, shape.hidden) for _ in range(2))
    weight = _random(shape, device, shape.hidden)
    yield Case(name="rms_norm", run=lambda: kernels.rms_norm(x, weight, 1e-5), num_bytes=2 * x.nbytes)
    yield Case(name="add_rms_norm", run=lambda: kernels.add_rms_norm(x, y, weight, 1e-5), num_bytes=4 * x.nbytes)
    gate_up = _random(shape, device, rows, 2 * shape.intermediate)
    yield Case(
        name="swiglu",
        run=lambda: kernels.gated_activation(gate_up, "silu"),
        num_bytes=3 * rows * shape.intermediate * wide,
    )
    qkv = _random(shape, device, rows, shape.qkv_width).view(rows, -1, shape.head_dim)
    qk, v = qkv[:, : -shape.num_kv_heads], qkv[:, -shape.num_kv_heads :]
    cos = _random(shape, device, rows, 1, shape.head_dim)
    cache = _cache(shape, device, rows)
    into = cache.slots(0, torch.arange(rows, device=device))  # any slots, as long as no two are the same
    yield Case(
        name="rotate_and_store",
        run=lambda: kernels.rotate_and_store(qk, v, cos, cos, into),
        # Everything is read and queries and keys are written where they lay; keys and values go to the cache.
        num_bytes=2 * qk.numel() * wide + v.numel() * wide + 2 * v.numel() * wide,
    )


def _projections(shape: LayerShape, device: torch.device, rows: int) -> Iterator[Case]:
    """The projections of the MLP, by cuBLAS and by our own batch-invariant kernel."""
    for name, inputs, outputs in (
        ("gate_up", shape.hidden, 2 * shape.intermediate),
        ("down", shape.intermediate, shape.hidden),
    ):
        x, weight = _random(shape, device, rows, inputs), _random(shape, device, outputs, inputs)
        num_bytes = (rows * inputs + inputs * outputs + rows * outputs) * shape.itemsize
        flops = 2 * rows * inputs * outputs
        theirs = f"{name}, {rows} rows, cuBLAS"
        yield Case(
            name=theirs,
            run=lambda x=x, weight=weight: functional.linear(x, weight),  # type: ignore[misc]
            num_bytes=num_bytes,
            flops=flops,
        )
        yield Case(
            name=f"{name}, {rows} rows, batch-invariant",
            run=lambda x=x, weight=weight: matmul(x, weight),  # type: ignore[misc]
            num_bytes=num_bytes,
            flops=flops,
            against=theirs,
        )


def _prefill_attention(shape: LayerShape, device: torch.device) -> Iterator[Case]:
    tokens = shape.prompt_tokens
    q = _random(shape, device, tokens, shape.num_heads, shape.head_dim)
    kv = _random(shape, device, tokens, 2, shape.num_kv_heads, shape.head_dim)
    cache, table = filled_cache(shape, device, 1, tokens)
    segment = Segment(first_row=0, num_queries=tokens, context_len=tokens, block_table=table)
    flops = 2 * tokens * tokens * shape.num_heads * shape.head_dim
    num_bytes = 2 * q.nbytes + kv.nbytes
    queries, keys, values = (tensor.transpose(0, 1).unsqueeze(0) for tensor in (q, kv[:, 0], kv[:, 1]))
    theirs = f"prefill attention, {tokens} tokens, torch's SDPA"
    yield Case(
        name=theirs,
        run=lambda: functional.scaled_dot_product_attention(queries, keys, values, is_causal=True, enable_gqa=True),
        num_bytes=num_bytes,
        flops=flops,
    )
    for mode in (False, True):
        attend = _attention(shape, device, [segment], q, cache, batch_invariant=mode)
        yield Case(
            name=f"prefill attention, {tokens} tokens{', batch-invariant' if mode else ''}",
            run=attend,
            num_bytes=num_bytes,
            flops=flops,
            against=theirs,
            of_matmul_rate=None if mode else 0.75,
            times_as_fast=None if mode else 1.0,
        )


def _decode_attention(shape: LayerShape, device: torch.device) -> Iterator[Case]:
    rows, context = shape.decode_rows, shape.decode_context
    q = _random(shape, device, rows, shape.num_heads, shape.head_dim)
    cache, tables = filled_cache(shape, device, rows, context)
    segments = [
        Segment(first_row=row, num_queries=1, context_len=context, block_table=table)
        for row, table in enumerate(np.split(tables, rows, axis=1))
    ]
    num_bytes = 2 * rows * context * shape.num_kv_heads * shape.head_dim * shape.itemsize + 2 * q.nbytes
    for mode in (False, True):
        yield Case(
            name=f"decode attention, {rows} x {context} tokens{', batch-invariant' if mode else ''}",
            run=_attention(shape, device, segments, q, cache, batch_invariant=mode),
            num_bytes=num_bytes,
            flops=4 * rows * context * shape.num_heads * shape.head_dim,
            of_copy_rate=None if mode else 0.85,
        )


def _attention(
    shape: LayerShape,
    device: torch.device,
    segments: list[Segment],
    q: Tensor,
    cache: KVCache,
    *,
    batch_invariant: bool,
) -> Callable[[], object]:
    """Attention of one layer, its plan made beforehand as it is for all layers but the first."""
    kernels = GpuKernels(device, batch_invariant)
    plan = kernels.plan_attention(segments, cache.layout.geometry, window=None, dtype=shape.dtype)
    nothing, rows = q[:0], cache.layer_rows(0)
    scale = 1 / math.sqrt(shape.head_dim)
    return lambda: plan.attend(q, nothing, nothing, rows, group=0, scale=scale, softcap=None)


def _slabs(shape: LayerShape, device: torch.device) -> Iterator[Case]:
    tokens = shape.prompt_tokens
    cache, table = filled_cache(shape, device, 1, tokens)
    blocks = torch.from_numpy(table[0]).to(device)
    slab = _random(shape, device, 2, tokens, shape.num_kv_heads, shape.head_dim)
    rows, geometry = cache.layer_rows(0), cache.layout.geometry
    twin, digest = torch.empty_like(slab), begun_digest(slab.nbytes, device)  # begun, as it comes with a block table
    theirs = f"slab of {tokens} tokens, torch's copy"  # a few dozen us: its end weighs more than a large copy's
    yield Case(name=theirs, run=lambda: twin.copy_(slab), num_bytes=2 * slab.nbytes)
    yield Case(
        name=f"slab of {tokens} tokens, gathered and digested",
        run=lambda: gather_slab(rows, geometry, blocks, 0, slab, digest=digest),
        num_bytes=2 * slab.nbytes,
        against=theirs,
        of_copy_rate=0.8,
    )
    yield Case(
        name=f"slab of {tokens} tokens, scattered and digested",
        run=lambda: scatter_slab(slab, rows, geometry, blocks, 0, digest=digest),
        num_bytes=2 * slab.nbytes,
        against=theirs,
    )


def _sampling(shape: LayerShape, device: torch.device, rows: int) -> Iterator[Case]:
    """Sampling with parameters that are already there. Logits have to be read once; noise and thresholds are computed
    on top."""
    logits = 3 * torch.randn(rows, shape.vocab_size, device=device)
    wishes: dict[str, dict[str, Any]] = {
        "greedy": {"temperature": 0.0},
        "drawn": {},
        "top-k 50 and top-p 0.95": {"top_k": 50, "top_p": 0.95},
        "drawn, 5 logprobs": {"num_top": 5},
    }
    for name, wish in wishes.items():
        fields = {"temperature": 1.0, "edits": no_edits(), "position": 1000, **wish}
        packed = pack_rows([RowOptions(seed=row, **fields) for row in range(rows)], shape.vocab_size)
        words = torch.from_numpy(packed.words).to(device)
        yield Case(
            name=f"sampling of {rows}, {name}",
            run=lambda packed=packed, words=words: sample(logits, packed, words),  # type: ignore[misc]
            num_bytes=logits.nbytes,
        )


def _cache(shape: LayerShape, device: torch.device, num_tokens: int) -> KVCache:
    """A KV cache of one layer."""
    layout = KVLayout(
        num_layers=1,
        layers_per_group=1,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        block_size=shape.block_size,
        dtype=shape.dtype,
    )
    return KVCache(layout, -(-num_tokens // shape.block_size) + 1, device)


def filled_cache(
    shape: LayerShape, device: torch.device, num_seqs: int, num_tokens: int
) -> tuple[KVCache, np.ndarray[tuple[int, ...], np.dtype[np.int32]]]:
    """Random KV, and the block tables of the sequences side by side, `[1, blocks]`: in an order without a pattern."""
    per_seq = -(-num_tokens // shape.block_size)
    cache = _cache(shape, device, num_seqs * per_seq * shape.block_size)
    cache.tensor.normal_()
    shuffled = np.random.default_rng(0).permutation(num_seqs * per_seq).astype(np.int32)
    return cache, shuffled.reshape(1, -1)
