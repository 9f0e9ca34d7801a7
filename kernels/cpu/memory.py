"""Memory for what is read in every step, in pages of 2 MiB where the kernel gives them, and where packed weights lie.

With pages of 4 KiB two threads read packed weights at 22 GB/s, with these at 34. Packed weights lie in this process's
own memory, unless whoever loads a model has something better (`engine.checkpoint.packed_weights`).
"""

from __future__ import annotations

import math
import mmap
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from kernels.interface import Kernels

_PAGE_BYTES = 2 << 20
_ARENA_BYTES = 64 << 20
_LINE_BYTES = 64


class _Arena:
    """One mapping that small tensors share: by itself each would fall short of a page."""

    def __init__(self, num_bytes: int) -> None:
        # Python would share it with children otherwise, and shared memory gets large pages on few machines.
        self._mapping = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self._mapping.madvise(mmap.MADV_HUGEPAGE)
        self._used = 0

    def take(self, num_bytes: int) -> memoryview | None:
        start = -(-self._used // _LINE_BYTES) * _LINE_BYTES
        if start + num_bytes > len(self._mapping):
            return None
        self._used = start + num_bytes
        return memoryview(self._mapping)[start : self._used]


_lock = threading.Lock()
_arena: _Arena | None = None


def huge_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """On the CPU, with at least one element.

    The memory goes back to the machine with the last tensor that lies in the same mapping.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    memory = _own(num_bytes) if num_bytes > _ARENA_BYTES // 4 else _shared(num_bytes)
    return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(*shape)


def _own(num_bytes: int) -> memoryview:
    memory = _Arena(-(-num_bytes // _PAGE_BYTES) * _PAGE_BYTES).take(num_bytes)
    assert memory is not None
    return memory


def _shared(num_bytes: int) -> memoryview:
    global _arena
    with _lock:
        memory = None if _arena is None else _arena.take(num_bytes)
        if memory is None:
            _arena = _Arena(_ARENA_BYTES)
            memory = _arena.take(num_bytes)
    assert memory is not None
    return memory


class PackingMemory(Protocol):
    def lay_out(self, num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        """`[num_elements]`, only to be read: what `fill` makes of zeros, or made of them before. Starts a cache line.

        For one model, always asked in the same order.
        """
        ...


class PrivateMemory:
    """In large pages of the process."""

    def lay_out(self, num_elements: int, dtype: torch.dtype, fill: Callable[[Tensor], None]) -> Tensor:
        packed = huge_zeros([num_elements], dtype)
        fill(packed)
        return packed


PRIVATE = PrivateMemory()


@runtime_checkable
class PackingKernels(Kernels, Protocol):
    """The operators of a device whose packed weights can lie anywhere in the host's memory."""

    @property
    def packing(self) -> str:
        """Equal where equal weights are packed into equal bytes by the same code."""
        ...

    def packing_into(self, memory: PackingMemory) -> Kernels:
        """The same operators, whose weights lie there."""
        ...
