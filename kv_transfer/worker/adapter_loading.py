"""What a worker does with the adapters of its model: brings those that its sequences are computed with.

The pool decides which; here one at a time is read in a thread, and who has waited too long for a place is told so. Both
roles' workers have one.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from engine.model.adapters import AdapterPool, AdapterSlot, Need
from engine.sequence import Sequence
from kv_transfer.connections.event_loops import DeadlineTimer
from kv_transfer.messages.requests import AdapterRef

logger = logging.getLogger(__name__)

LOAD_ENDS_S: Final = 2.0
"""How long a worker that stops waits for the adapter that it reads. Most take a tenth of that; one on a server of files
that does not answer takes for ever, and nobody needs it any more."""


class AdapterLoading:
    """`users()`: all sequences that are to be computed, and how much each needs its adapter. `on_loaded()`: those of
    one can be computed, or others with their blocks, as one takes long to be read. `on_failed(slot, reason)`: those of
    that one cannot be. `on_late(seq, retry_after_s)`: this one has waited for `wait_s`, and has no token yet.

    Belongs to the main loop. Without a `pool` no request may name an adapter.
    """

    def __init__(
        self,
        pool: AdapterPool | None,
        *,
        users: Callable[[], Iterable[tuple[Sequence, Need]]],
        on_loaded: Callable[[], None],
        on_failed: Callable[[AdapterSlot, str], None],
        on_late: Callable[[Sequence, float], None],
        wait_s: float,
    ) -> None:
        self._pool = pool
        self._users = users
        self._on_loaded = on_loaded
        self._on_failed = on_failed
        self._on_late = on_late
        self._wait_s = wait_s
        self._task: asyncio.Task[None] | None = None
        self._timer: DeadlineTimer | None = None
        self._last_load_s = 0.0
        self._load_began = 0.0
        self._turns_away = False
        if pool is not None:
            pool.on_open = on_loaded

    @property
    def is_possible(self) -> bool:
        return self._pool is not None

    @property
    def loaded(self) -> list[str]:
        """The digests of the adapters that are loaded, and take on every sequence that names them."""
        return [] if self._pool is None else self._pool.open

    @property
    def load_s(self) -> float:
        """What one that is not loaded takes: what the last one took, and what there is to wait for a place. 0: nothing
        was loaded yet."""
        if self._pool is None or not self._last_load_s:
            return 0.0
        return self._last_load_s + self._pool.oldest_wait_s(time.monotonic())

    def want(self, adapter: AdapterRef) -> AdapterSlot:
        """The slot of this adapter, for a sequence that is among the users when this turn of the loop is over."""
        assert self._pool is not None, "who asks for an adapter here is refused"
        asyncio.get_running_loop().call_soon(self.retry)
        return self._pool.want(adapter.digest, Path(adapter.folder))

    def retry(self) -> None:
        """Load the next adapter that is needed, if there is room for it, and turn away who has waited too long."""
        if self._pool is None or self._turns_away:  # each that leaves brings another call, and hundreds leave at once
            return
        users = list(self._users()) if self._pool.is_contended else []
        was_stalled = self._pool.is_stalled
        slot = self._pool.next_load(users, time.monotonic())
        if self._pool.is_stalled and not was_stalled:
            self._on_loaded()  # not they can be computed, but others with their blocks
        if slot is not None:
            self._load_began = time.monotonic()
            self._task = asyncio.create_task(self._load(self._pool, slot), name="adapter")
        self._turn_away(self._pool, users)

    def _turn_away(self, pool: AdapterPool, users: Iterable[tuple[Sequence, Need]]) -> None:
        """Turn away those that have waited too long, and look again when the next one will have. Those that wait for KV
        have a deadline of their own. Who has had a token here stays with its blocks: its gateway looks for a worker
        that has room for it, and knows whether there is one."""
        now = time.monotonic()
        deadlines: dict[Sequence, float] = {}
        for seq, need in users:
            slot = seq.adapter
            if slot is None or seq.has_adapter or slot.waits_at is None:
                continue
            is_awaited = seq.lease is not None and need is Need.LATER
            has_begun = seq.lease is not None and len(seq.output_token_ids) > seq.num_prior_output
            if not (is_awaited or has_begun):
                begins_at = self._load_began if pool.is_loading(slot) else slot.waits_at  # a file may never be read
                deadlines[seq] = max(begins_at, seq.accepted_at) + self._wait_s
        late = [seq for seq, deadline in deadlines.items() if deadline <= now]
        if late:
            place_in_s = pool.place_in_s(now)  # as if they asked again now, behind the others
            self._turns_away = True
            try:
                for seq in late:
                    del deadlines[seq]
                    self._on_late(seq, self._wait_s if place_in_s is None else min(place_in_s, self._wait_s))
            finally:
                self._turns_away = False
            asyncio.get_running_loop().call_soon(self.retry)  # what drained for them need not
        if self._timer is None:
            self._timer = DeadlineTimer(self.retry)
        looks_at = [*deadlines.values(), *([] if pool.stalls_at is None else [pool.stalls_at])]
        self._timer.arm(min(looks_at, default=None))

    async def close(self, within_s: float | None = None) -> None:
        """Close: nobody is called back any more, and nothing else is loaded. Returns when nothing is being read any
        more, or after `within_s`: then that thread ends with the process."""
        self._on_loaded, self._on_failed = lambda: None, lambda slot, reason: None
        if self._pool is not None:
            self._pool.on_open = lambda: None
        self._pool = None
        if self._timer is not None:
            self._timer.stop()
        if self._task is not None:
            _, unread = await asyncio.wait([self._task], timeout=within_s)
            if unread:
                logger.warning("An adapter is being read for %.0f s: left", time.monotonic() - self._load_began)

    async def _load(self, pool: AdapterPool, slot: AdapterSlot) -> None:
        try:
            adapter = await asyncio.to_thread(pool.load, slot.digest, slot.folder)
        except Exception as error:  # the boundary of the thread: one bad adapter must not keep others from loading
            reason = str(error) or type(error).__name__
            logger.warning("An adapter was not loaded: %s", reason)
            pool.has_failed(slot)
            self._task = None
            self._on_failed(slot, reason)
        else:
            pool.has_loaded(slot, adapter, time.monotonic())
            self._task = None
            self._last_load_s = time.monotonic() - self._load_began
            self._on_loaded()
        self.retry()
