"""The machine's own speed, measured beside everything else: what no engine can exceed."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

_BYTES = 512 * 2**20
_MATRIX = 2048


def memory_read_bytes_per_s(repeats: int = 5) -> float:
    """Best of some passes over memory far larger than any cache, by torch's threads."""
    numbers = torch.ones(_BYTES // 8, dtype=torch.int64)
    return _BYTES / min(_seconds(numbers.max) for _ in range(repeats))


def matmul_flops_per_s(dtype: torch.dtype, repeats: int = 5) -> float:
    """Best of some square products that fit the caches, by torch's threads."""
    a, b = (torch.randn(_MATRIX, _MATRIX).to(dtype) for _ in range(2))
    return 2 * _MATRIX**3 / min(_seconds(lambda: a @ b) for _ in range(repeats))


def _seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started
