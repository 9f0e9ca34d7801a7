"""A worker's prefix cache as one thing: device, host, and what lies beyond.

Lookups go device, host, then the sources in their order. Belongs to the main loop and never blocks it. Does not decide
whether loading is worth it: it predicts how long it takes, and the caller compares.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from kv_transfer.tiers.base import ColumnSink, ColumnSource, TierMemory
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.tiers.promotion import Promoter, Promotion, Wanted
from kv_transfer.tiers.write_through import WriteThrough

CLOSE_S: Final = 60.0  # for what the threads have in hand: a load from a disk that hangs may take for ever


@dataclass(frozen=True, slots=True)
class PrefixPlan:
    """Where each of a prompt's columns comes from, counted from the first."""

    num_ready: int  # on the device or in the own host memory
    num_reachable: int  # with what the sources hold; at least num_ready
    load_s: float  # predicted, for bringing those beyond num_ready here


class PrefixTiers:
    """Write-through of what was computed; lookup and loading of what may be used again."""

    def __init__(
        self,
        device: TierMemory,
        host: TierMemory,
        *,
        sources: Sequence[ColumnSource] = (),
        sink: ColumnSink | None = None,
        load_timeout_s: float,
        max_queued_blocks: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """What does not come within `load_timeout_s` is computed instead. `max_queued_blocks`: on their way down.
        `clock`: by which loads are measured, in seconds; threads read it, too."""
        assert device.cache.layout == host.cache.layout, "tiers of one worker share a layout"
        self._loop = asyncio.get_running_loop()
        self._on_room: Callable[[], None] = lambda: None
        self._room_is_reported = True  # since there was some
        self._device = device
        self._host = host
        self._sources = tuple(sources)
        self.disk = sink if isinstance(sink, DiskTier) else None
        self.write_through = WriteThrough(device, host, sink, max_queued_blocks=max_queued_blocks, on_room=self._room)
        self._up = Promoter(host, self._sources, timeout_s=load_timeout_s, on_room=self._room, clock=clock)
        self.loaded_columns = self._up.loaded_columns
        self.failed_columns = self._up.failed_columns
        for source in self._sources:  # told from the start: what begins with its first load shows no increase by it
            self.loaded_columns[source.name] = self.failed_columns[source.name] = 0

    def stored(self, hashes: Iterable[bytes]) -> None:
        """Write columns that have just been published down the tiers, in the background."""
        self.write_through.stored(hashes)

    def used(self, hashes: Sequence[bytes]) -> None:
        """A prefix, in its order, was used now, and all of it that will be stored has been."""
        self.write_through.used(hashes)

    def missing(self, hashes: Sequence[bytes]) -> PrefixPlan:
        """How much of a prompt, given by the hashes of its full blocks, is here and how much could be."""
        num_ready = self.num_ready(hashes)
        wanted, num_reachable = self._wanted(hashes, num_ready)
        return PrefixPlan(num_ready, num_reachable, self._up.predicted_s(wanted))

    def promote(self, hashes: Sequence[bytes], on_done: Callable[[int], None]) -> Promotion:
        """Bring what is missing of these columns into host memory, as far as some tier holds them without a gap.

        `on_done(n)` is called once, later, on the loop, and within the load timeout: the first n columns are ready.
        """
        num_ready = self.num_ready(hashes)
        wanted, num_reachable = self._wanted(hashes, num_ready)
        keep = [block for prefix_hash in hashes[:num_reachable] for block in self._host.column(prefix_hash) or ()]
        return self._up.start(wanted, keep, lambda: on_done(self.num_ready(hashes)))

    def num_ready(self, hashes: Sequence[bytes]) -> int:
        """Leading columns on the device or in the own host memory."""
        for index, prefix_hash in enumerate(hashes):
            if not self._is_ready(prefix_hash):
                return index
        return len(hashes)

    def call_on_room(self, on_room: Callable[[], None]) -> None:
        """Have `on_room` called on the loop, never from in here, whenever blocks that were held here have become
        free."""
        self._on_room = on_room

    async def close(self) -> None:
        """End the threads after what they have in hand; queued work is dropped. Raises TimeoutError where that takes
        longer than `CLOSE_S`: they may write to the host memory still, so it must stay mapped, and this process's."""
        self._up.close()
        async with asyncio.timeout(CLOSE_S):
            await asyncio.to_thread(self._up.join)
            await asyncio.to_thread(self.write_through.close)
        await asyncio.sleep(0)  # the threads' last reports give the blocks back

    def _room(self) -> None:
        if self._room_is_reported:
            self._room_is_reported = False
            self._loop.call_soon(self._report_room)

    def _report_room(self) -> None:
        self._room_is_reported = True
        self._on_room()

    def _is_ready(self, prefix_hash: bytes) -> bool:
        keys = ((prefix_hash, group) for group in range(self._host.num_groups))
        return all(self._device.pool.find(key) is not None or self._host.pool.find(key) is not None for key in keys)

    def _wanted(self, hashes: Sequence[bytes], num_ready: int) -> tuple[list[Wanted], int]:
        """Columns to load beyond the ready ones, up to the first that nobody has; and how far that reaches."""
        wanted: list[Wanted] = []
        sources = [source for source in self._sources if not self._up.hangs(source)]
        for index in range(num_ready, len(hashes)):
            if self._is_ready(hashes[index]):
                continue
            source = next((source for source in sources if source.holds(hashes[index])), None)
            if source is None:
                return wanted, index
            wanted.append((hashes[index], source))
        return wanted, len(hashes)
