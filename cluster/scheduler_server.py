"""The global scheduler at work: workers report to it, gateways ask it, over authenticated connections."""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import replace

from cluster.block_index import BlockIndex
from cluster.scheduler import GlobalScheduler, SchedulerPolicy
from cluster.slo import NO_TARGETS, SloConfig
from cluster.slo_report import SloReport
from cluster.slo_tracker import SloTracker
from kv_transfer.connection import Connection, Server, serve
from kv_transfer.messages import (
    BlockEvents,
    BlockIndexSnapshot,
    Ended,
    Endpoint,
    Heartbeat,
    Place,
    Register,
    Replicas,
    SloUpdate,
)
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)


class SchedulerServer:
    """Drives one `GlobalScheduler` and one `BlockIndex`; a connection's purpose tells a worker from a gateway."""

    def __init__(
        self,
        policy: SchedulerPolicy,
        identity: Identity,
        *,
        broadcast_period_s: float = 1.0,
        slo_classes: SloConfig = NO_TARGETS,
    ) -> None:
        self._scheduler = GlobalScheduler(policy)
        self.block_index = BlockIndex()
        self.slo = SloTracker(slo_classes, now_s=time.monotonic())  # of what all gateways have told since the start
        self._identity = identity
        self._broadcast_period_s = broadcast_period_s
        self._gateways: set[Connection] = set()
        self._workers: dict[str, Connection] = {}  # each worker's newest connection
        self._server: Server | None = None
        self._housekeeping: asyncio.Task[None] | None = None

    async def start(self, host: str) -> Endpoint:
        self._server = await serve(host, self._identity, self._serve_peer)
        self._housekeeping = asyncio.create_task(self._keep_house(), name="scheduler-housekeeping")
        return self._server.endpoint

    @property
    def endpoint(self) -> Endpoint:
        assert self._server is not None, "the scheduler has not been started"
        return self._server.endpoint

    @property
    def healthy(self) -> bool:
        return self._housekeeping is not None and not self._housekeeping.done()

    async def stop(self) -> None:
        if self._housekeeping is not None:
            self._housekeeping.cancel()
            await asyncio.gather(self._housekeeping, return_exceptions=True)
        # Workers are about to lose their scheduler, not gateways their workers: what those know last must stay.
        self._gateways.clear()
        if self._server is not None:
            await self._server.close("the scheduler stops")

    async def _serve_peer(self, connection: Connection) -> None:
        try:
            if connection.peer.purpose == "worker":
                await self._serve_worker(connection)
            else:
                await self._serve_gateway(connection)
        except TransportError as error:
            logger.info("%s %s left: %s", connection.peer.purpose, connection.peer.worker_id, error)

    async def _serve_worker(self, connection: Connection) -> None:
        worker_id = connection.peer.worker_id
        try:
            while True:
                message, _ = await connection.receive()
                match message:
                    case Register(info=info, snapshot=snapshot) if info.worker_id == worker_id:
                        self._workers[worker_id] = connection
                        self.block_index.forget(worker_id)
                        self._scheduler.register(info, snapshot, time.monotonic())
                        logger.info("%s worker %s registered (pid %d)", info.role, worker_id, info.pid)
                        self._broadcast()
                    case Heartbeat(snapshot=snapshot) if snapshot.worker_id == worker_id:
                        if not self._scheduler.heartbeat(snapshot, time.monotonic()):
                            connection.close(f"{worker_id} counts as gone: it has to register again")
                    case BlockEvents() | BlockIndexSnapshot() if message.worker_id == worker_id:
                        self._on_blocks(connection, message)
                    case _:
                        connection.close(f"{type(message).__name__} is not for {worker_id} to send")
        finally:
            self._on_worker_disconnected(worker_id, connection)

    def _on_blocks(self, connection: Connection, message: BlockEvents | BlockIndexSnapshot) -> None:
        if self._workers.get(message.worker_id) is not connection:
            return  # the last words of a connection that the worker has replaced
        now = time.monotonic()
        if isinstance(message, BlockEvents):
            request = self.block_index.on_events(message, now)
        else:
            request = self.block_index.on_snapshot(message, now)
        if request is not None:
            connection.post(request)

    def _on_worker_disconnected(self, worker_id: str, connection: Connection) -> None:
        if self._workers.get(worker_id) is not connection:
            return  # it has come back on another one since
        del self._workers[worker_id]
        self.block_index.forget(worker_id)
        if self._scheduler.lost(worker_id):
            logger.info("worker %s is gone", worker_id)
            self._broadcast()

    async def _serve_gateway(self, connection: Connection) -> None:
        self._gateways.add(connection)
        unfinished: set[str] = set()
        try:
            connection.post(self._replicas())
            while True:
                message, _ = await connection.receive()
                match message:
                    case Place(request_id=request_id):
                        unfinished.add(request_id)
                        connection.post(self._scheduler.place(message, time.monotonic()))
                    case SloUpdate():
                        self._on_slo(connection, message)
                    case Ended(request_id=request_id):
                        unfinished.discard(request_id)
                        self._scheduler.ended(request_id)
                    case _:
                        connection.close(f"{type(message).__name__} is not for a gateway to send")
        finally:
            self._gateways.discard(connection)
            for request_id in unfinished:
                self._scheduler.ended(request_id)

    def _on_slo(self, gateway: Connection, message: SloUpdate) -> None:
        """Count it here, and pass it on to the other gateways. One with other classes, while settings roll out, is no
        reason to lose it."""
        for other in self._gateways - {gateway}:
            other.post(message)
        try:
            self.slo.absorb(time.monotonic(), SloReport.from_bytes(message.report))
        except ValueError as error:
            logger.warning("how requests fared at %s is not counted: %s", gateway.peer.worker_id, error)

    def _replicas(self) -> Replicas:
        return replace(self._scheduler.replicas(), indexes=self.block_index.report())

    def _broadcast(self) -> None:
        replicas = self._replicas()
        for gateway in self._gateways:
            gateway.post(replicas)

    async def _keep_house(self) -> None:
        while True:
            await asyncio.sleep(self._broadcast_period_s)
            for worker_id in self._scheduler.expire(time.monotonic()):
                logger.warning("worker %s has been silent too long and counts as gone", worker_id)
                self.block_index.forget(worker_id)
            self._broadcast()
