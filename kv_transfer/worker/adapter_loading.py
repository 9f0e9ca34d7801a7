"""What a worker does with the adapters of its model: brings those that its sequences are computed with.

The pool decides which; here one at a time is read in a thread. Both roles' workers have one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from engine.model.adapters import AdapterPool, AdapterSlot, Need
from engine.sequence import Sequence
from kv_transfer.messages.requests import AdapterRef

logger = logging.getLogger(__name__)


class AdapterLoading:
    """`users()`: all sequences that are to be computed, and how much each needs its adapter. `on_loaded()`: those of
    one can be computed. `on_failed(slot, reason)`: those of that one cannot be.

    Belongs to the main loop. Without a `pool` no request may name an adapter.
    """

    def __init__(
        self,
        pool: AdapterPool | None,
        *,
        users: Callable[[], Iterable[tuple[Sequence, Need]]],
        on_loaded: Callable[[], None],
        on_failed: Callable[[AdapterSlot, str], None],
    ) -> None:
        self._pool = pool
        self._users = users
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._task: asyncio.Task[None] | None = None
        self.load_s = 0.0  # that the last one took

    @property
    def is_possible(self) -> bool:
        return self._pool is not None

    @property
    def loaded(self) -> list[str]:
        """The digests of the adapters that are loaded."""
        return [] if self._pool is None else self._pool.loaded

    def want(self, adapter: AdapterRef) -> AdapterSlot:
        """The slot of this adapter, for a sequence that is among the users when this turn of the loop is over."""
        assert self._pool is not None, "who asks for an adapter here is refused"
        asyncio.get_running_loop().call_soon(self.retry)
        return self._pool.want(adapter.digest, Path(adapter.folder))

    def retry(self) -> None:
        """Load the next adapter that is needed, if there is room for it."""
        if self._pool is None or self._task is not None:
            return
        slot = self._pool.next_load(self._users())
        if slot is not None:
            self._task = asyncio.create_task(self._load(self._pool, slot), name="adapter")

    async def close(self) -> None:
        """Close: nobody is called back any more, and nothing else is loaded."""
        self._on_loaded, self._on_failed = lambda: None, lambda slot, reason: None
        self._pool = None
        if self._task is not None:
            await self._task

    async def _load(self, pool: AdapterPool, slot: AdapterSlot) -> None:
        began = time.monotonic()
        try:
            adapter = await asyncio.to_thread(pool.load, slot.digest, slot.folder)
        except Exception as error:  # the boundary of the thread: one bad adapter must not keep others from loading
            reason = str(error) or type(error).__name__
            logger.warning("An adapter was not loaded: %s", reason)
            pool.has_failed(slot)
            self._task = None
            self._on_failed(slot, reason)
        else:
            pool.has_loaded(slot, adapter)
            self._task = None
            self.load_s = time.monotonic() - began
            self._on_loaded()
        self.retry()
