"""Memory for what is read in every step, in pages of 2 MiB where the kernel gives them, and where packed weights lie.

With pages of 4 KiB two threads read packed weights at 22 GB/s, with these at 34. Packed weights lie in this process's
own memory, unless whoever loads a model has something better (`engine.checkpoint.shared_weights`).
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_SHARED_BYTES = 64 << 20  # of one mapping for small tensors: by itself each would fall short of a page
_LINE_BYTES = 64


class _Shared:
    """Mappings of so many bytes that tensors of at most `largest` bytes share, each until it is full."""

    def __init__(self, mapping_bytes: int, largest: int) -> None:
        self._mapping_bytes, self._largest = mapping_bytes, largest
        self._lock = threading.Lock()
        self._rest = memoryview(b"")  # of the newest one; guarded by the lock

    def allocate(self, num_bytes: int) -> memoryview:
        """A part of a mapping, or one of its own. Starts a cache line."""
        if num_bytes > self._largest:
            return _mapped(num_bytes)
        with self._lock:
            if num_bytes > len(self._rest):
                self._rest = _mapped(self._mapping_bytes)
            rest = self._rest
            taken, self._rest = rest[:num_bytes], rest[-(-num_bytes // _LINE_BYTES) * _LINE_BYTES :]
        return taken


_everybodys = _Shared(_SHARED_BYTES, _SHARED_BYTES // 4)


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, at least one, in 2 MiB pages where Linux grants them.

    The memory goes back to the machine with the last tensor that lies in the same mapping.
    """
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    return torch.frombuffer(_everybodys.allocate(num_bytes), dtype=dtype, count=count).view(*shape)


def whole_pages(num_bytes: int) -> int:
    """Bytes of a mapping for so many."""
    return -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES


def _mapped(num_bytes: int) -> memoryview:
    """A mapping of so many bytes, in whole pages."""
    # Python would share it with children otherwise, and shared memory gets large pages on few machines.
    mapping = mmap.mmap(-1, whole_pages(num_bytes), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


PackingMemory = Callable[[int, torch.dtype, Callable[[Tensor], None]], Tensor]
"""Where packed weights lie: (elements, type, fill) -> `[elements]`, only to be read, from the start of a cache line.

They hold what `fill` makes of zeros, or made of them before. For one model it is always asked in the same order.
"""


def private_memory(num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
    """A `PackingMemory`: large pages of this process."""
    return _filled(_everybodys, num_elements, dtype, fill)


def memory_apart(num_bytes: int) -> PackingMemory:
    """Large pages for what comes and goes as one, of so many bytes in all, each tensor's in whole cache lines: one
    mapping, which goes back with the last tensor that was packed there."""
    return partial(_filled, _Shared(num_bytes, num_bytes))


def _filled(shared: _Shared, num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
    memory = shared.allocate(num_elements * dtype.itemsize)
    packed = torch.frombuffer(memory, dtype=dtype, count=num_elements)
    fill(packed)
    return packed
