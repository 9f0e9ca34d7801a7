"""A decode worker without a model: at a fixed beat, one more token for each request, in one frame for all of them.

Registers with the scheduler and serves gateways over the connections that real workers use.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable

from kv_transfer.messages import (
    Cancel,
    Endpoint,
    Message,
    RequestSpec,
    Start,
    TokenEvent,
    WorkerInfo,
    WorkerSnapshot,
)
from kv_transfer.transports.base import Identity
from kv_transfer.worker_port import GatewayId, GatewayPort, Registration

MAX_MODEL_LEN = 8_192
# Words and pieces of words, so that detokenising costs what it does on text.
_TOKEN_IDS = range(1_000, 1_997)


class ScriptedWorker:
    """Emits from `beat()`; between beats nothing happens."""

    def __init__(self, identity: Identity, locate_scheduler: Callable[[], Awaitable[Endpoint]]) -> None:
        self._identity = identity
        self._locate_scheduler = locate_scheduler
        self._active: dict[str, tuple[GatewayId, RequestSpec, int]] = {}
        self._num_snapshots = 0
        self._started = asyncio.Event()
        self._port = GatewayPort(identity, on_message=self._on_message, on_lost=self._on_lost)

    async def start(self) -> None:
        endpoint = await self._port.start("127.0.0.1")
        info = WorkerInfo(
            worker_id=self._identity.worker_id,
            role="decode",
            endpoint=endpoint,
            pid=os.getpid(),
            model="scripted",
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
        await self._port.close("the benchmark is over")

    async def until_active(self, num_requests: int) -> None:
        """Until so many requests are here."""
        while len(self._active) < num_requests:
            self._started.clear()
            await self._started.wait()

    def beat(self) -> None:
        """One step."""
        for request_id, (gateway, request, index) in list(self._active.items()):
            finished = index + 1 == request.params.max_tokens
            event = TokenEvent(
                request_id=request_id,
                attempt=request.attempt,
                index=index,
                token_id=_TOKEN_IDS[(index * 31) % len(_TOKEN_IDS)],
                finish_reason="length" if finished else None,
                num_cached_tokens=0 if index == 0 else None,
            )
            self._port.emit(gateway, event)
            if finished:
                del self._active[request_id]
            else:
                self._active[request_id] = (gateway, request, index + 1)
        self._port.flush()

    def _on_message(self, gateway: GatewayId, message: Message) -> None:
        match message:
            case Start(request=request):
                self._active[request.request_id] = (gateway, request, 0)
                self._started.set()
            case Cancel(request_id=request_id):
                self._active.pop(request_id, None)

    def _on_lost(self, gateway: GatewayId) -> None:
        self._active = {name: entry for name, entry in self._active.items() if entry[0] != gateway}

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
            prefill_tokens_per_s=0.0,
            decode_step_s=0.0,
        )


async def keep_beat(worker: ScriptedWorker, period_s: float) -> None:
    """Beats at fixed times; one that is late is not made up for."""
    loop = asyncio.get_running_loop()
    at_s = loop.time()
    while True:
        at_s = max(at_s + period_s, loop.time())
        await asyncio.sleep(at_s - loop.time())
        worker.beat()
