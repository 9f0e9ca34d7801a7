"""`python -m benchmarks.engine.cpu_attention [THREADS]`: attention on a CPU by the C++ kernel and by torch, turn by
turn.

One layer after the other, as a step takes them, with more KV than the caches hold. Ends in one line of JSON.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from benchmarks.common.part import GateError, Json, note, run_part
from engine.kv.cache import KVCache, KVLayout
from kernels.cpu import kernels as cpu
from kernels.interface import Kernels, Segment
from kernels.native.kernels import NativeCpuKernels
from kernels.native.library import native_library

ROUNDS = 7
MAX_LAYERS = 30
KV_BYTES = 256 << 20  # of all layers
TOLERANCE = 2e-2


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """`segments` of (queries, context); heads are SmolLM2-135M's where nothing else is said."""

    segments: tuple[tuple[int, int], ...]
    num_heads: int = 9
    num_kv_heads: int = 3
    head_dim: int = 64

    @property
    def kv_bytes(self) -> int:
        """The bytes of a layer's KV in bfloat16."""
        return sum(4 * self.num_kv_heads * self.head_dim * context for _, context in self.segments)

    @property
    def flops(self) -> int:
        """The arithmetic of a layer: two products for each pair of a query and a token that it sees."""
        pairs = sum(queries * (2 * context - queries + 1) // 2 for queries, context in self.segments)
        return 4 * self.num_heads * self.head_dim * pairs

    @property
    def num_layers(self) -> int:
        """Prompts need no more than one: their keys are read many times."""
        decodes = all(queries == 1 for queries, _ in self.segments)
        return max(1, min(MAX_LAYERS, KV_BYTES // self.kv_bytes)) if decodes else 1


LOADS = {
    **{f"decode, {rows} x {n}": Load(segments=((1, n),) * rows) for rows in (1, 8, 32) for n in (256, 512, 2048)},
    **{f"prefill, {n}": Load(segments=((n, n),)) for n in (512, 2048, 8000)},
    "prefill, 512 after 7,488": Load(segments=((512, 8000),)),
    "prefill, 2,048, heads of 128": Load(segments=((2048, 2048),), num_heads=32, num_kv_heads=8, head_dim=128),
}


def prepared(load: Load, kernels: Kernels) -> Callable[[], Tensor]:
    """All layers' attention of a step; its plan is made each time, as a step does."""
    torch.manual_seed(0)
    columns = [-(-context // 16) for _, context in load.segments]
    layout = KVLayout(
        num_layers=load.num_layers,
        layers_per_group=load.num_layers,
        num_kv_heads=load.num_kv_heads,
        head_dim=load.head_dim,
        block_size=16,
        dtype=torch.bfloat16,
    )
    cache = KVCache(layout, sum(columns))
    cache.tensor.normal_()
    blocks = np.random.default_rng(0).permutation(sum(columns)).astype(np.int32)[None]
    tables = np.split(blocks, np.cumsum(columns)[:-1], axis=1)
    segments, row = [], 0
    for (queries, context), table in zip(load.segments, tables, strict=True):
        segments.append(Segment(first_row=row, num_queries=queries, context_len=context, block_table=table))
        row += queries
    q = torch.randn(row, load.num_heads, load.head_dim).bfloat16()
    # What torch's kernels take from the step itself where a prompt begins with it.
    kv = torch.randn(2, row, load.num_kv_heads, load.head_dim).bfloat16()
    for layer in range(load.num_layers):
        for segment in segments:
            rows = slice(segment.first_row, segment.first_row + segment.num_queries)
            start = segment.context_len - segment.num_queries
            cache.write_layer(layer, segment.block_table[0], start, kv[:, rows].contiguous())

    def step() -> Tensor:
        plan = kernels.plan_attention(segments, layout.geometry, window=None, dtype=layout.dtype)
        scale = load.head_dim**-0.5
        for layer in range(load.num_layers):
            out = plan.attend(q, kv[0], kv[1], cache.layer_rows(layer), group=0, scale=scale, softcap=None)
        return out

    return step


def compare(name: str, load: Load, native: Kernels) -> Json:
    """Per layer. Raises GateError where the two do not compute the same."""
    ours, theirs = prepared(load, native), prepared(load, cpu)
    difference = float((ours().float() - theirs().float()).abs().max())
    if not difference < TOLERANCE:
        raise GateError(f"{name}: the C++ kernel and torch differ by {difference}")
    pairs = [(_seconds(ours), _seconds(theirs)) for _ in range(ROUNDS)]
    ours_s, theirs_s = (statistics.median(times) / load.num_layers for times in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    rates = f"{load.kv_bytes / ours_s / 1e9:5.1f} GB/s, {load.flops / ours_s / 1e9:5.0f} GFLOP/s"
    note(f"{name:30} {ours_s * 1e6:9.0f} us, torch {theirs_s * 1e6:9.0f}: {ratio:.2f} times as fast; {rates}")
    return {"native_us": ours_s * 1e6, "torch_us": theirs_s * 1e6, "torch_over_native": ratio}


def _seconds(step: Callable[[], Tensor]) -> float:
    """CPU time of this thread, which neighbours disturb least; of several threads it is wall time that counts."""
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    start = clock()
    step()
    return clock() - start


def measure() -> Json:
    library = native_library()
    if library is None:
        raise GateError("this machine has no C++ kernels: the log says why")
    native = NativeCpuKernels(library)
    return {name: compare(name, load, native) for name, load in LOADS.items()}


if __name__ == "__main__":
    torch.set_num_threads(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    run_part("cpu_attention", measure)
