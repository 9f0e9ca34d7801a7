"""Tiers over a small device and host, and a slow sink below them, for tests of what moves between them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from kv_transfer.tiers.base import ColumnSink, ColumnSource, ColumnViews
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from tests.kv_transfer.tiers.tier_bench import tier
from tests.support.waiting import HANGS_S, eventually


class Tiers:
    """A device of 8 columns, a host of 12."""

    def __init__(
        self,
        *sources: ColumnSource,
        sink: ColumnSink | None = None,
        host_columns: int = 12,
        load_timeout_s: float = HANGS_S,
        max_queued_blocks: int = 4096,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.device, self.host = tier(8), tier(host_columns)
        self.tiers = PrefixTiers(
            self.device,
            self.host,
            sources=sources,
            sink=sink,
            load_timeout_s=load_timeout_s,
            max_queued_blocks=max_queued_blocks,
            clock=clock,
        )

    async def promote(self, digests: Sequence[bytes]) -> int:
        done: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        self.tiers.promote(digests, done.set_result)
        return await asyncio.wait_for(done, HANGS_S)

    async def settled(self) -> None:
        await eventually(
            lambda: self.device.pool.num_leases == self.host.pool.num_leases == 0, what="blocks are leased"
        )


@asynccontextmanager
async def opened(bench: Tiers) -> AsyncIterator[Tiers]:
    """Nothing may be held when it is over, not even for work that was dropped."""
    try:
        yield bench
    finally:
        await bench.tiers.close()
        await bench.settled()
        bench.device.pool.check_idle()
        bench.host.pool.check_idle()


class SlowSink:
    """Takes `room` columns, is done with them when told."""

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.written: dict[bytes, ColumnViews] = {}
        self.done: list[Callable[[], None]] = []
        self.used: list[tuple[Sequence[bytes], int]] = []  # with how many columns had been taken by then

    def touch(self, hashes: Sequence[bytes]) -> None:
        self.used.append((hashes, len(self.written)))

    def holds(self, digest: bytes) -> bool:
        return digest in self.written

    def store(self, digest: bytes, column: ColumnViews, on_done: Callable[[], None]) -> bool:
        if len(self.written) >= self.room:
            return False
        self.written[digest] = column
        self.done.append(on_done)
        return True
