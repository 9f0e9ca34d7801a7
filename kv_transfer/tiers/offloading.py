"""Whole blocks from a worker's device to its host memory, for a thread of their own: it waits, nobody else does.

On a GPU they have a stream of their own as well, so that neither steps nor hand-offs stand behind them. It follows an
event behind all that compute was given when a copy is asked for: a block is copied once the step that filled it was
taken in, and so was queued whole; and compute stands behind whatever was copied to the device for it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from engine.kv.cache import KVCache
from engine.memory.streams import CudaStream, MarkQueued, Stream, queued_on
from engine.offload.block_link import BlockLink
from engine.offload.staging_plan import BlockPairs, Blocks
from kv_transfer.tiers.memory import TierMemory

Offload = Callable[[Blocks, Blocks], None]
"""Copy blocks `[n]` of the device to blocks `[n]` of the host, pairwise; done when it returns or raises."""


class StreamOffload:
    """An `Offload` of a device. `queued()` is an event behind all that compute has queued so far."""

    def __init__(self, link: BlockLink, stream: Stream, queued: MarkQueued) -> None:
        self._link = link
        self._stream = stream
        self._queued = queued

    def __call__(self, blocks: Blocks, into: Blocks) -> None:
        stored = self._queued()
        if stored is not None:
            self._stream.follow(stored)
        try:
            self._stream.queue(partial(self._save, BlockPairs(host=into, device=blocks)))
        finally:
            self._stream.record().wait()

    def _save(self, pairs: BlockPairs) -> None:
        for listed in self._link.listed([pairs]):
            self._link.save(listed)


def offload_between(device: TierMemory, host: TierMemory) -> Offload:
    cache = device.cache
    if cache.device.type == "cuda" and isinstance(cache, KVCache):
        return StreamOffload(BlockLink(cache, host.memory), CudaStream(cache.device), queued_on(cache.device))
    return lambda blocks, into: cache.copy_out(blocks, host.memory, into)
