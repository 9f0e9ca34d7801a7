"""A bounded pool of equal buffers inside one arena, handed out one owner at a time.

Belongs to one event loop; slabs may be given back from any thread. Each link has one for what it sends, whose arena is
private memory or shared with the peer, of the host or of a device.
"""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar, cast

from engine.memory.devices import Pin
from engine.memory.host import map_private_memory
from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.transports.base import LinkClosedError, SlabBytes

MIB: Final = 1 << 20
Arena = TypeVar("Arena", bound=SlabBytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabConfig:
    """Per link and direction. Memory is taken from the system only where slabs have been written.

    With `pin`, each arena is pinned as long as it is mapped, and all of its memory is taken at once.
    """

    slab_bytes: int = 16 * MIB
    num_slabs: int = 8
    pin: Pin | None = None

    def __post_init__(self) -> None:
        if self.slab_bytes < 1 or self.num_slabs < 1:
            raise ValueError(f"slab_bytes={self.slab_bytes} and num_slabs={self.num_slabs} must both be at least 1.")

    @property
    def stride_bytes(self) -> int:
        """Bytes from one slab's start to the next one's: whole pages, so that no page belongs to two."""
        return -(-self.slab_bytes // mmap.PAGESIZE) * mmap.PAGESIZE

    @property
    def arena_bytes(self) -> int:
        return self.stride_bytes * self.num_slabs


def private_arena(config: SlabConfig) -> memoryview:
    """Zeroed memory of this process, unmapped when the last view of it is gone."""
    return map_private_memory(config.arena_bytes, config.pin)


class PooledSlab(Generic[Arena]):
    """Slab `index` of a pool, `view` cut to what was asked for."""

    __slots__ = ("_pool", "index", "view")

    def __init__(self, pool: SlabPool[Arena], index: int, view: Arena) -> None:
        self._pool = pool
        self.index = index
        self.view = view

    def belongs_to(self, pool: object) -> bool:
        return self._pool is pool

    def discard(self) -> None:
        """Give the buffer back, from any thread; exactly once."""
        self._pool.give_back(self)


class SlabPool(Generic[Arena]):
    """Owns the slabs of one arena, of the host or of a device. `on_free` is called on the loop when one comes back."""

    def __init__(self, arena: Arena, config: SlabConfig, on_free: Callable[[], None] | None = None) -> None:
        self._arena: SlabBytes | None = arena
        self._config = config
        self._on_free = on_free
        self._home = HomeLoop()
        # The last one given back is the next one handed out: its memory is in the cache, and mapped.
        self._free = list(range(config.num_slabs))[::-1]
        self._held: set[PooledSlab[Arena]] = set()
        self._wakeup = asyncio.Event()
        self._closed_because: str | None = None

    def try_acquire(self, num_bytes: int) -> PooledSlab[Arena] | None:
        """A slab if one is free and the pool open."""
        self._check(num_bytes)
        if self._arena is None or not self._free:
            return None
        index = self._free.pop()
        start = index * self._config.stride_bytes
        slab = PooledSlab(self, index, cast(Arena, self._arena[start : start + num_bytes]))
        self._held.add(slab)
        return slab

    async def acquire(self, num_bytes: int) -> PooledSlab[Arena]:
        """A slab once one is free. ValueError for a size that no slab has, LinkClosedError once closed."""
        self._check(num_bytes)
        while True:
            self.check_open()
            slab = self.try_acquire(num_bytes)
            if slab is not None:
                return slab
            self._wakeup.clear()
            await self._wakeup.wait()

    def give_back(self, slab: PooledSlab[Arena]) -> None:
        self._home.run(self._take_back, slab)

    def check_open(self) -> None:
        """Raises LinkClosedError with the reason once closed."""
        if self._closed_because is not None:
            raise LinkClosedError(self._closed_because)

    def close(self, reason: str) -> None:
        """Give out no more slabs; those who wait are told why. Slabs that are out keep their memory."""
        self._closed_because = self._closed_because or reason
        self._arena = None
        self._wakeup.set()

    def _take_back(self, slab: PooledSlab[Arena]) -> None:
        assert slab in self._held, f"slab {slab.index} was given back twice"
        self._held.remove(slab)
        self._free.append(slab.index)
        self._wakeup.set()
        if self._on_free is not None:
            self._on_free()

    def _check(self, num_bytes: int) -> None:
        if not 1 <= num_bytes <= self._config.slab_bytes:
            raise ValueError(
                f"A slab holds 1 to {self._config.slab_bytes} bytes, not {num_bytes}: "
                "split the tensor or raise the slab size."
            )
