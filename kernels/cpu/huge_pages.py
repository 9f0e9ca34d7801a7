"""Memory for what is read in every step, in pages of 2 MiB where the kernel gives them, and where packed weights lie.

With pages of 4 KiB two threads read packed weights at 22 GB/s, with these at 34. Packed weights lie in this process's
own memory, unless whoever loads a model has something better (`engine.checkpoint.packed_weights`).
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_PAGE_BYTES = 2 << 20
_SHARED_BYTES = 64 << 20  # of one mapping for small tensors: by itself each would fall short of a page
_LINE_BYTES = 64

_lock = threading.Lock()
_rest = memoryview(b"")  # of the newest mapping for small tensors; guarded by the lock


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros on the CPU, at least one, in 2 MiB pages where Linux grants them.

    The memory goes back to the machine with the last tensor that lies in the same mapping.
    """
    count = math.prod(shape)
    num_bytes = count * dtype.itemsize
    memory = _mapped(num_bytes) if num_bytes > _SHARED_BYTES // 4 else _allocate_shared(num_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=count).view(*shape)


def _mapped(num_bytes: int) -> memoryview:
    """A mapping of so many bytes, in whole pages."""
    # Python would share it with children otherwise, and shared memory gets large pages on few machines.
    mapping = mmap.mmap(-1, -(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(mapping)


def _allocate_shared(num_bytes: int) -> memoryview:
    """A part of a mapping that small tensors share. Starts a cache line."""
    global _rest
    with _lock:
        if num_bytes > len(_rest):
            _rest = _mapped(_SHARED_BYTES)
        taken, _rest = _rest[:num_bytes], _rest[-(-num_bytes // _LINE_BYTES) * _LINE_BYTES :]
    return taken


PackingMemory = Callable[[int, torch.dtype, Callable[[Tensor], None]], Tensor]
"""Where packed weights lie: (elements, type, fill) -> `[elements]`, only to be read, from the start of a cache line.

They hold what `fill` makes of zeros, or made of them before. For one model it is always asked in the same order.
"""


def private_memory(num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
    """A `PackingMemory`: large pages of this process."""
    packed = huge_zeros([num_elements], dtype)
    fill(packed)
    return packed
