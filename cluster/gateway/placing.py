"""From a request to workers that can be reached: asks the scheduler, again where a request may not be turned away.

Knows nothing of what the workers are told then.
"""

from __future__ import annotations

import asyncio
import time

from cluster.errors import DeadlineError, OverloadedError, UnavailableError
from cluster.gateway.prompt_hashes import name_prompt, naming_block_size
from cluster.gateway.request_state import AttemptFailedError, RequestRun
from cluster.gateway.scheduler_client import SchedulerClient
from cluster.gateway.worker_connections import WorkerLinks
from kv_transfer.messages.scheduling import Placement


class Placer:
    """`replicas_changed` is for the caller to call: whoever waits for workers looks again."""

    def __init__(
        self, scheduler: SchedulerClient, links: WorkerLinks, *, link_timeout_s: float, retry_delay_s: float
    ) -> None:
        self._scheduler = scheduler
        self._links = links
        self._link_timeout_s = link_timeout_s
        self._retry_delay_s = retry_delay_s
        self._replicas_changed = asyncio.Event()

    def replicas_changed(self) -> None:
        self._replicas_changed.set()

    def is_decode(self, worker_id: str) -> bool:
        worker = self._scheduler.workers.get(worker_id)
        return worker is not None and worker[0].role == "decode"

    async def place(self, run: RequestRun) -> Placement:
        """Ask until there is an answer; only a request that has not started yet is turned away."""
        if run.attempt == run.request.attempt:
            block_size = naming_block_size(info for info, _ in self._scheduler.workers.values())
            run.prefix_hashes = b"" if block_size is None else await name_prompt(run.request, block_size)
        placement = await self._ask(run)
        run.placed(placement)
        needed = {placement.decode} | ({placement.prefill} if placement.prefill else set())
        await self._links.wait_up(needed, self._link_timeout_s)
        for worker_id in needed:
            if not self._links.is_up(worker_id):
                raise AttemptFailedError("the worker cannot be reached", worker_id, "full")
        return placement

    async def _ask(self, run: RequestRun) -> Placement:
        while True:
            avoided = run.excluded | self._links.suspects()
            held = next((w for w in run.touched - avoided if self.is_decode(w) and self._links.is_up(w)), None)
            try:
                async with asyncio.timeout(run.deadline - time.monotonic()):
                    return await self._scheduler.place(run.place_query(prefer_decode=held, avoid=avoided))
            except TimeoutError:
                raise DeadlineError("No worker had room for the request before its deadline.") from None
            except (UnavailableError, OverloadedError):
                if run.attempt == run.request.attempt:
                    raise
                self._replicas_changed.clear()
                await sleep_within(run, self._retry_delay_s, self._replicas_changed)


async def sleep_within(run: RequestRun, seconds: float, early: asyncio.Event | None = None) -> None:
    """Wait, or until the event. Raises DeadlineError where that takes longer than the request may."""
    if time.monotonic() + seconds >= run.deadline:
        raise DeadlineError("No worker could take the request over before its deadline.")
    if early is None:
        await asyncio.sleep(seconds)
        return
    try:
        await asyncio.wait_for(early.wait(), seconds)
    except TimeoutError:
        return
