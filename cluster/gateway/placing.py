"""From a request to workers that can be reached: asks the scheduler, again where a request may not be turned away.

Names the blocks of its prompt first, as workers name theirs, so that the scheduler can tell who holds its beginning.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Final

from cluster.errors import DeadlineError, OverloadedError, UnavailableError
from cluster.gateway.request_state import AttemptFailedError, RequestRun
from cluster.gateway.scheduler_client import SchedulerClient
from cluster.gateway.worker_connections import WorkerConnections
from cluster.scheduler.placement.retry_after import MIN_RETRY_AFTER_S
from engine.kv.prefix import HASH_BYTES, block_hashes
from kv_transfer.messages.fields import MAX_HASHES, Role
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import Placement
from kv_transfer.messages.workers import WorkerInfo

_AT_ONCE: Final = 8192  # tokens, of which the names take about half a millisecond; more are named in a thread
HELD_S: Final = 60.0  # how long a request waits for the first worker, at most: as long as others wait for room
_ASK_AGAIN_S: Final = 1.0  # where there is no worker


class Placer:
    """Asks the scheduler where an attempt of a request should run, and waits until its workers are connected.

    Its owner calls `workers_changed` when the list of workers changes, so that whoever waits for workers looks again.
    """

    def __init__(
        self, scheduler: SchedulerClient, connections: WorkerConnections, *, link_timeout_s: float, retry_delay_s: float
    ) -> None:
        self._scheduler = scheduler
        self._connections = connections
        self._link_timeout_s = link_timeout_s
        self._retry_delay_s = retry_delay_s
        self._workers_changed = asyncio.Event()

    def workers_changed(self) -> None:
        self._workers_changed.set()

    def is_decode(self, worker_id: str) -> bool:
        return self._role_of(worker_id) == "decode"

    def is_prefill(self, worker_id: str) -> bool:
        return self._role_of(worker_id) == "prefill"

    def _role_of(self, worker_id: str) -> Role | None:
        """None: it is not known at present, though it may be connected."""
        worker = self._scheduler.workers.get(worker_id)
        return None if worker is None else worker[0].role

    async def place(self, run: RequestRun) -> Placement:
        """Ask where the next attempt should run, and wait until its workers are connected.

        Only the first attempt is turned away, and where no worker is there but the scheduler expects one, only if that
        would be too late; later ones ask again until the deadline, then raise DeadlineError.
        Raises AttemptFailedError if a worker cannot be reached."""
        run.timeline.asked(run.attempt)
        if run.attempt == run.request.attempt:
            infos = (info for info, _ in self._scheduler.workers.values() if info.serves(run.request.model))
            # A mean is taken over the whole prompt, so no cached prefix helps it.
            block_size = None if run.request.pooling == "mean" else naming_block_size(infos)
            if block_size is not None:
                run.timeline.prefix_hashes = await name_prompt(run.request, block_size)
                run.timeline.prompt_hash = hash_prompt(run.request, block_size, run.timeline.prefix_hashes)
        placement = await self._ask(run)
        run.placed(placement)
        needed = {placement.decode} | ({placement.prefill} if placement.prefill else set())
        await self._connections.wait_up(needed, self._link_timeout_s)
        for worker_id in needed:
            if not self._connections.is_up(worker_id):
                raise AttemptFailedError("the worker cannot be reached", worker_id, "full")
        return placement

    async def has_room(self, run: RequestRun, worker_id: str) -> bool | None:
        """Whether another worker has room now for a request that this one holds up; see `SchedulerClient`."""
        avoided = {worker_id} | self._connections.unresponsive()
        query = run.place_query(prefer_decode=None, avoid=avoided)
        return await self._scheduler.has_room(replace(query, stays=True))

    async def _ask(self, run: RequestRun) -> Placement:
        held_until: float | None = None
        while True:
            avoided = run.excluded | self._connections.unresponsive()
            held = next((w for w in run.touched - avoided if self.is_decode(w) and self._connections.is_up(w)), None)
            try:
                async with asyncio.timeout(run.deadline - time.monotonic()):
                    return await self._scheduler.place(run.place_query(prefer_decode=held, avoid=avoided))
            except TimeoutError:
                raise DeadlineError("No worker had room for the request before its deadline.") from None
            except (UnavailableError, OverloadedError) as error:
                delay_s = self._retry_delay_s
                if run.attempt == run.request.attempt:
                    if held_until is None:
                        held_until = _held_until(run, error)
                    delay_s = min(_ASK_AGAIN_S, held_until - time.monotonic())
                    if isinstance(error, OverloadedError) or delay_s <= 0.0:
                        raise
                self._workers_changed.clear()
                await sleep_within(run, delay_s, self._workers_changed)


def _held_until(run: RequestRun, error: UnavailableError | OverloadedError) -> float:
    """Until when a request that was told that no worker is there may wait for one; no longer than its first token may
    take, nor than half of its time: at its deadline it would not hear when to come back. In the past where none is
    expected by then."""
    now, ttft_s = time.monotonic(), run.terms.slo.ttft_s
    longest_s = min(HELD_S, (run.deadline - now) / 2)
    if ttft_s is not None:
        longest_s = min(longest_s, ttft_s - (now - run.terms.arrived_at))
    is_expected = error.retry_after_s is not None and MIN_RETRY_AFTER_S < error.retry_after_s <= longest_s
    return now + longest_s if is_expected else -math.inf


async def sleep_within(run: RequestRun, seconds: float, early: asyncio.Event | None = None) -> None:
    """Wait `seconds`, or until `early` is set.
    Raises DeadlineError at once if they end after the request's deadline."""
    if time.monotonic() + seconds >= run.deadline:
        raise DeadlineError("No worker could take the request over before its deadline.")
    if early is None:
        await asyncio.sleep(seconds)
        return
    try:
        async with asyncio.timeout(seconds):
            await early.wait()
    except TimeoutError:
        return


def naming_block_size(workers: Iterable[WorkerInfo]) -> int | None:
    """The block size to name prompts' blocks by: that of the prefill workers, or of the decode workers without any.
    Where they differ, the size that most of them have. None: there are no workers."""
    sizes = [(info.role == "prefill", info.block_size) for info in workers]
    return max(set(sizes), key=lambda size: (size[0], sizes.count(size), size[1]))[1] if sizes else None


async def name_prompt(request: RequestSpec, block_size: int) -> bytes:
    """The hashes that name the prompt's full blocks, joined. A block with the prompt's last token is left out: that
    token is computed even where the whole prompt is cached."""
    tokens = request.prompt_token_ids[: len(request.prompt_token_ids) - 1][: MAX_HASHES * block_size]
    if len(tokens) <= _AT_ONCE:
        return b"".join(block_hashes(tokens, block_size, request.prefix_salt))
    return b"".join(await asyncio.to_thread(block_hashes, tokens, block_size, request.prefix_salt))


def hash_prompt(request: RequestSpec, block_size: int, prefix_hashes: bytes) -> bytes:
    """The hash of the whole prompt, whose full blocks have these `prefix_hashes`: of what is behind them, too, else all
    who ask something short behind the same text would be one client."""
    last = request.prompt_token_ids[-block_size:]
    salt = f"{request.prefix_salt} {prefix_hashes[-HASH_BYTES:].hex()}"
    return b"".join(block_hashes(last, max(1, len(last)), salt))
