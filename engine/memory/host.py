"""The host's memory: how much processes here may take, what the C allocator keeps, and mappings for KV.

A mapping that a GPU copies to or from is pinned once, and unpinned before it is unmapped.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
from pathlib import Path

import psutil
import torch

from engine.memory.control_groups import memory_limits
from engine.memory.devices import Pin, Unpin


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or the lowest limit of this process's control groups, of either version. Linux only."""
    return min([psutil.virtual_memory().total, *memory_limits(root)])


_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3
_NEVER = 2**31 - 1
_LARGEST_KEPT_BYTES = 1 << 30


def keep_freed_memory() -> None:
    """Have the allocator keep what is freed, for the whole process; does nothing without glibc.

    Activations of a prefill chunk are larger than glibc's threshold for mapping memory anew, and the page faults of
    each new mapping cost more than the operator that fills it: normalising 512 rows of 576 takes 1.4 ms, not 0.17.
    """
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        libc.mallopt(_M_MMAP_THRESHOLD, _LARGEST_KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _NEVER)


def give_back_freed(device: torch.device) -> None:
    """Have this process's allocator for a device give back what it keeps for tensors to come: who asks how much memory
    is free would count it as taken. On a CPU, does nothing without glibc."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)


logger = logging.getLogger(__name__)


class _PinnedMapping(mmap.mmap):
    """A mapping whose last view's end unpins it: `mmap` unmaps after `__del__`, and only then.

    Nobody needs to know who still holds a part of it: a copy that runs on holds a view, and with it the mapping.
    """

    unpin: Unpin | None = None

    def __del__(self) -> None:
        unpin, self.unpin = self.unpin, None
        if unpin is not None:
            unpin()


def map_memory(
    fd: int,
    num_bytes: int,
    pin: Pin | None,
    *,
    flags: int = mmap.MAP_SHARED,
    prot: int = mmap.PROT_READ | mmap.PROT_WRITE,
) -> memoryview:
    """A mapping, unmapped with the last view of it. Raises as `mmap.mmap` does.

    Memory that cannot be pinned is as good but slower, so that is told in the log and nothing more.
    """
    if pin is None:
        return memoryview(mmap.mmap(fd, num_bytes, flags=flags, prot=prot))
    mapping = _PinnedMapping(fd, num_bytes, flags=flags, prot=prot)
    view = memoryview(mapping)
    try:
        mapping.unpin = pin(view)
    except RuntimeError as error:
        kind = "read-only" if view.readonly else "writable"
        logger.warning("%d bytes of %s memory are not pinned, copies go through the driver: %s", num_bytes, kind, error)
    return view


def map_private_memory(num_bytes: int, pin: Pin | None) -> memoryview:
    """Zeros of this process alone, unmapped with the last view of them."""
    return map_memory(-1, num_bytes, pin, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
