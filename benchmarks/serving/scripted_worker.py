"""A decode worker without a model: at a fixed beat, one more token for each request, in one frame for all of them.

Registers with the scheduler and serves gateways over the connections that real workers use. Where its KV is bounded,
the youngest requests give theirs up while the older ones need it, as on a real one.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Awaitable, Callable

from benchmarks.common.workload import MODEL
from kv_transfer.connections.connection import Connection, Server
from kv_transfer.messages.connections import Ping
from kv_transfer.messages.requests import Cancel, Endpoint, Preempted, RequestSpec, Start, StepFrame, TokenEvent
from kv_transfer.messages.workers import WorkerInfo, WorkerSnapshot
from kv_transfer.transports.base import Identity
from kv_transfer.worker.port import Registration

MAX_MODEL_LEN = 8_192
# Words and pieces of words, so that detokenising costs what it does on text.
_TOKEN_IDS = range(1_000, 1_997)


class ScriptedWorker:
    """Emits from `beat()`; between beats nothing happens. `kv_tokens`: those that its KV has room for, of all requests;
    the oldest go first."""

    def __init__(
        self,
        identity: Identity,
        locate_scheduler: Callable[[], Awaitable[Endpoint]],
        kv_tokens: int | None = None,
    ) -> None:
        self._identity = identity
        self._locate_scheduler = locate_scheduler
        self._kv_tokens = kv_tokens
        self._paused: set[str] = set()
        self._active: dict[str, tuple[Connection, RequestSpec, int]] = {}
        self.num_started = 0  # requests that ever came
        self._num_snapshots = 0
        self._started = asyncio.Event()

    async def start(self) -> None:
        self._server = Server("127.0.0.1", self._identity, self._serve_gateway)
        info = WorkerInfo(
            worker_id=self._identity.worker_id,
            role="decode",
            endpoint=self.endpoint,
            pid=os.getpid(),
            model=MODEL,
            compatibility="scripted",
            max_model_len=MAX_MODEL_LEN,
            num_blocks=1_000_000,
            block_size=16,
            layer_groups=1,
        )
        self._registration = Registration(
            self._identity, info, locate_scheduler=self._locate_scheduler, snapshot=self._snapshot, period_s=0.5
        )
        self._registration.start()

    async def stop(self) -> None:
        await self._registration.stop()
        await self._server.close("the benchmark is over")

    @property
    def endpoint(self) -> Endpoint:
        return self._server.endpoint

    @property
    def num_active(self) -> int:
        return len(self._active)

    async def until_active(self, num_requests: int) -> None:
        """Wait until so many requests are here. While beats go on, use `until_started`: a beat may end a request."""
        while len(self._active) < num_requests:
            await self._next_start()

    async def until_started(self, num_requests: int) -> None:
        """Wait until so many requests have ever come."""
        while self.num_started < num_requests:
            await self._next_start()

    async def _next_start(self) -> None:
        self._started.clear()
        await self._started.wait()

    async def taken(self) -> None:
        """Wait until the kernel has what was emitted: gateways that are slower keep the worker waiting."""
        for gateway in {gateway for gateway, _, _ in self._active.values()}:
            await gateway.send(Ping())

    def beat(self) -> None:
        """Make one step: send a frame to each gateway."""
        tokens: defaultdict[Connection, list[TokenEvent]] = defaultdict(list)
        num_kv_tokens = 0
        for request_id, (gateway, request, index) in list(self._active.items()):
            num_kv_tokens += len(request.prompt_token_ids) + index + 1
            if self._kv_tokens is not None and num_kv_tokens > self._kv_tokens:
                self._preempt(request_id)
                continue
            self._paused.discard(request_id)
            finished = index + 1 == request.params.max_tokens
            event = TokenEvent(
                request_id=request_id,
                attempt=request.attempt,
                index=index,
                token_id=_TOKEN_IDS[(index * 31) % len(_TOKEN_IDS)],
                finish_reason="length" if finished else None,
                num_cached_tokens=0 if index == 0 else None,
            )
            tokens[gateway].append(event)
            if finished:
                del self._active[request_id]
            else:
                self._active[request_id] = (gateway, request, index + 1)
        for gateway, events in tokens.items():
            gateway.post(StepFrame(tokens=events))

    def _preempt(self, request_id: str) -> None:
        gateway, request, index = self._active[request_id]
        if index > len(request.output_token_ids) and request_id not in self._paused:
            self._paused.add(request_id)
            gateway.post(Preempted(request_id=request_id, attempt=request.attempt, index=index))

    async def _serve_gateway(self, gateway: Connection) -> None:
        try:
            async for message in gateway:
                match message:
                    case Start(request=request):
                        self._active[request.request_id] = (gateway, request, len(request.output_token_ids))
                        self.num_started += 1
                        self._started.set()
                    case Cancel(request_id=request_id):
                        self._active.pop(request_id, None)
                        self._paused.discard(request_id)
        finally:
            self._active = {name: entry for name, entry in self._active.items() if entry[0] is not gateway}

    def _snapshot(self) -> WorkerSnapshot:
        self._num_snapshots += 1
        return WorkerSnapshot(
            worker_id=self._identity.worker_id,
            sequence_number=self._num_snapshots,
            draining=False,
            num_running=len(self._active),
            num_waiting=0,
            queued_prefill_tokens=0,
            blocks_available=1_000_000,
            num_leases=len(self._active),
        )


async def keep_beat(worker: ScriptedWorker, period_s: float) -> None:
    """Beats at fixed times; one that is late is not made up for."""
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    while True:
        at_s = max(at_s + period_s, loop.time())
        await asyncio.sleep(at_s - loop.time())
        worker.beat()


async def keep_pace(worker: ScriptedWorker) -> None:
    """Beats as fast as gateways take what comes, until nothing is left to do."""
    while worker.num_active:
        worker.beat()
        await worker.taken()
