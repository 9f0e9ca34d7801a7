"""What a device reaches at best: at a large product, at copying its memory, at reading it, measured in the same run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from triton.testing import do_bench

_WARMUP_MS, _REPEAT_MS = 50, 300
_CPU_REPEATS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Ceilings:
    """`bytes_per_s` of a copy counts what is read and what is written; `read_bytes_per_s` is of a sum."""

    flops_per_s: float
    bytes_per_s: float
    read_bytes_per_s: float = 0.0

    @property
    def memory_bytes_per_s(self) -> float:
        """The faster of both: what nothing that reads this memory can be ahead of."""
        return max(self.bytes_per_s, self.read_bytes_per_s)


@dataclass(frozen=True, slots=True)
class Times:
    """How long many calls took, in seconds."""

    median: float
    p10: float
    p90: float


def timed(run: Callable[[], object], device: torch.device) -> Times:
    """Time calls, on a GPU by its own clock, with the L2 cache emptied before each."""
    if device.type == "cuda":
        quantiles = do_bench(run, warmup=_WARMUP_MS, rep=_REPEAT_MS, quantiles=[0.5, 0.1, 0.9])
        return Times(*(milliseconds / 1e3 for milliseconds in quantiles))
    seconds = []
    for _ in range(_CPU_REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return Times(statistics.median(seconds), min(seconds), max(seconds))


def ceilings(device: torch.device, dtype: torch.dtype, *, matrix: int = 8192, copied_bytes: int = 2 << 30) -> Ceilings:
    a, b = (torch.randn(matrix, matrix, dtype=dtype, device=device) for _ in range(2))
    matmul_s = timed(lambda: a @ b, device).median
    source = torch.ones(copied_bytes // 4, dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    copy_s = timed(lambda: target.copy_(source), device).median
    floats = source.view(torch.float32)
    read_s = timed(floats.sum, device).median
    return Ceilings(
        flops_per_s=2 * matrix**3 / matmul_s,
        bytes_per_s=2 * source.nbytes / copy_s,
        read_bytes_per_s=source.nbytes / read_s,
    )
