"""Memory that is mapped for KV: pinned once where a GPU copies to or from it, and unpinned before it is unmapped.

Does not know what pins memory, nor what lies in it.
"""

from __future__ import annotations

import logging
import mmap

from engine.memory.devices import Pin, Unpin

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
