"""The global scheduler at work: workers report to it, gateways ask it, over authenticated connections."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from dataclasses import replace

from cluster.autoscaling.controller import Autoscaler
from cluster.autoscaling.sizing import PoolsPlan
from cluster.gateway.line_log import LineLog
from cluster.scheduler.role_changes import RoleChanges
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from cluster.slo.classes import NO_TARGETS, SloConfig
from cluster.slo.tracker import SloTracker
from kv_transfer.connections.connection import Connection, Server
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import (
    MAX_DECISIONS,
    AskDecisions,
    AskGateways,
    Decisions,
    Ended,
    FirstToken,
    GatewayAnswer,
    GatewaysAsked,
    PartComputed,
    Place,
    Replicas,
    RoleAnswer,
    RoleRequest,
    SloUpdate,
    Standing,
)
from kv_transfer.messages.workers import ChangeRole, Heartbeat, Loading, LoadingReport, PoolTarget, Register
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)


class SchedulerServer:
    """Drives one `GlobalScheduler` (`scheduler`, to read); a connection's purpose tells a worker from a gateway.

    `decision_log`: every decision is appended to it, as a line of JSON. `pools`: what they may become; None:
    workers come and go as they will.
    """

    def __init__(
        self,
        policy: SchedulerPolicy,
        identity: Identity,
        *,
        broadcast_period_s: float = 1.0,
        slo_classes: SloConfig = NO_TARGETS,
        decision_log: LineLog | None = None,
        pools: PoolsPlan | None = None,
    ) -> None:
        self.scheduler = GlobalScheduler(policy)
        self.block_index = self.scheduler.block_index
        self.slo = SloTracker(slo_classes, now_s=time.monotonic())  # of what all gateways have told since the start
        self._pools: Autoscaler | None = None
        if pools is not None:
            self._pools = Autoscaler(self.scheduler.ledger, pools, self.slo, time.monotonic())
            self.scheduler.on_verdict = self._pools.watch.asked
        self._identity = identity
        self._broadcast_period_s = broadcast_period_s
        self._decision_log = decision_log
        self._role_changes = RoleChanges()
        self._gateways: set[Connection] = set()
        self._asked_by: dict[str, Connection] = {}  # of every request that has not ended
        self._workers: dict[str, Connection] = {}  # each worker's newest connection
        self._loading: dict[Connection, LoadingReport] = {}  # workers that are yet to register
        self._server: Server | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._told = asyncio.Event()  # something that may bring an answer to who waits

    async def start(self, host: str) -> Endpoint:
        self._server = Server(host, self._identity, self._serve_peer)
        self._tasks = [
            asyncio.create_task(self._expire_and_broadcast(), name="scheduler-housekeeping"),
            asyncio.create_task(self._answer_waiting(), name="scheduler-late-answers"),
        ]
        return self._server.endpoint

    @property
    def endpoint(self) -> Endpoint:
        assert self._server is not None, "the scheduler has not been started"
        return self._server.endpoint

    @property
    def num_asked(self) -> int:
        """Requests that gateways have asked for and that have not ended."""
        return len(self._asked_by)

    def connection_of(self, worker_id: str) -> Connection:
        """The worker's newest connection."""
        return self._workers[worker_id]

    @property
    def is_healthy(self) -> bool:
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
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
                message = await connection.receive()
                match message:
                    case Loading(report=report) if report.worker_id == worker_id:
                        self._loading[connection] = report
                    case Register(info=info, snapshot=snapshot) if info.worker_id == worker_id:
                        self._workers[worker_id] = connection
                        self.scheduler.register(info, snapshot, time.monotonic())
                        logger.info("%s worker %s registered (pid %d)", info.role, worker_id, info.pid)
                        self._broadcast()
                    case Heartbeat(snapshot=snapshot) if snapshot.worker_id == worker_id:
                        if not self.scheduler.heartbeat(snapshot, time.monotonic()):
                            connection.close(f"{worker_id} counts as gone: it has to register again")
                    case BlockEvents() | BlockIndexSnapshot() if message.worker_id == worker_id:
                        self._on_blocks(connection, message)
                    case _:
                        connection.close(f"{type(message).__name__} is not for {worker_id} to send")
                self._look_for_answers()
        finally:
            self._loading.pop(connection, None)
            self._on_worker_disconnected(worker_id, connection)

    def _on_blocks(self, connection: Connection, message: BlockEvents | BlockIndexSnapshot) -> None:
        if self._workers.get(message.worker_id) is not connection:
            return  # the last words of a connection that the worker has replaced
        request = self.scheduler.update_blocks(message, time.monotonic())
        if request is not None:
            connection.post(request)

    def _on_worker_disconnected(self, worker_id: str, connection: Connection) -> None:
        if self._workers.get(worker_id) is not connection:
            return  # it has come back on another one since
        del self._workers[worker_id]
        self._role_changes.gone(worker_id)
        if self.scheduler.unregister(worker_id, time.monotonic()):
            logger.info("worker %s is gone", worker_id)
            self._broadcast()

    async def _serve_gateway(self, connection: Connection) -> None:
        self._gateways.add(connection)
        try:
            connection.post(self._replicas())
            while True:
                message = await connection.receive()
                match message:
                    case Place(request_id=request_id):
                        self._asked_by[request_id] = connection
                        connection.post(self.scheduler.place(message, time.monotonic()))
                    case Standing(requests=requests):
                        for request in requests:
                            self._asked_by[request.place.request_id] = connection
                            self.scheduler.recovered(request, time.monotonic())
                    case FirstToken(request_id=request_id):
                        self.scheduler.first_token(request_id, time.monotonic())
                    case PartComputed(request_id=request_id):
                        self.scheduler.part_computed(request_id, time.monotonic())
                    case Ended(request_id=request_id, num_output_tokens=num_output_tokens):
                        self._asked_by.pop(request_id, None)
                        self.scheduler.ended(request_id, time.monotonic(), num_output_tokens)
                    case RoleRequest():
                        connection.post(self._change_role(message))
                    case SloUpdate():
                        self._on_slo(connection, message)
                    case AskDecisions():
                        connection.post(self._decisions(message))
                    case AskGateways():
                        connection.post(self._ask_gateways(connection, message))
                    case GatewayAnswer(asker=asker):
                        self._forward_answer(asker, replace(message, gateway=connection.peer.worker_id))
                    case _:
                        connection.close(f"{type(message).__name__} is not for a gateway to send")
                self._look_for_answers()
        finally:
            self._gateways.discard(connection)
            self._on_gateway_disconnected(connection)

    def _on_gateway_disconnected(self, connection: Connection) -> None:
        """Forget the requests of a gateway that is gone: nobody is left to hear of their ends."""
        for request_id in [request_id for request_id, asker in self._asked_by.items() if asker is connection]:
            del self._asked_by[request_id]
            self.scheduler.ended(request_id, time.monotonic())
        self._look_for_answers()

    def _look_for_answers(self) -> None:
        if self.scheduler.num_waiting:
            self._told.set()

    async def _answer_waiting(self) -> None:
        """Answer the requests that had no answer when they were asked for."""
        while True:
            next_at = self.scheduler.next_at()
            patience_s = None if next_at is None else max(0.0, next_at - time.monotonic())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._told.wait()
            self._told.clear()
            for answer in self.scheduler.answers(time.monotonic()):
                self._asked_by[answer.request_id].post(answer)

    def _change_role(self, request: RoleRequest) -> RoleAnswer:
        """Tell the worker, unless it must not go. It counts as draining at once, not only with its next report."""
        workers, now = self.scheduler.replicas().workers, time.monotonic()
        answer = self._role_changes.ask(request, workers, now)
        if answer.outcome == "ordered":
            worker_id = request.worker_id
            self._workers[worker_id].post(ChangeRole(role=request.role, drain_s=request.drain_s))
            (snapshot,) = (snapshot for info, snapshot in workers if info.worker_id == worker_id)
            leaving = replace(snapshot, draining=True, sequence_number=snapshot.sequence_number + 1)
            self.scheduler.heartbeat(leaving, now)
            self._broadcast()
        return answer

    def _on_slo(self, gateway: Connection, message: SloUpdate) -> None:
        """Count it here, and pass it on to the other gateways."""
        for other in self._gateways - {gateway}:
            other.post(message)
        self.slo.on_report(time.monotonic(), message.report, str(gateway.peer.worker_id))

    def _ask_gateways(self, asker: Connection, question: AskGateways) -> GatewaysAsked:
        others = self._gateways - {asker}
        for other in others:
            other.post(replace(question, asker=asker.peer.worker_id))
        return GatewaysAsked(ask_id=question.ask_id, gateways=[other.peer.worker_id for other in others])

    def _forward_answer(self, asker: str, answer: GatewayAnswer) -> None:
        for gateway in self._gateways:
            if gateway.peer.worker_id == asker:
                gateway.post(answer)

    def _decisions(self, question: AskDecisions) -> Decisions:
        newest = self.scheduler.log.newest(min(question.limit, MAX_DECISIONS))
        offset_s = _clock_offset_s()
        told = [str(one) if question.as_text else one.as_json(offset_s) for one in newest]
        return Decisions(ask_id=question.ask_id, decisions=told)

    def _write_decisions(self) -> None:
        new = self.scheduler.log.take_new()
        if self._decision_log is not None:
            offset_s = _clock_offset_s()
            self._decision_log.append(one.as_json(offset_s) for one in new)

    def _replicas(self) -> Replicas:
        pools = {} if self._pools is None else self._pools.targets
        loading = [report for report in self._loading.values() if report.worker_id not in self._workers]
        return replace(self.scheduler.replicas(), pools=pools, loading=loading)

    def _broadcast(self) -> None:
        replicas = self._replicas()
        for gateway in self._gateways:
            gateway.post(replicas)

    async def _expire_and_broadcast(self) -> None:
        while True:
            await asyncio.sleep(self._broadcast_period_s)
            for worker_id in self.scheduler.expire(time.monotonic()):
                logger.warning("worker %s has been silent too long and counts as gone", worker_id)
            self._write_decisions()
            self._broadcast()
            self._order_pool_changes()

    def _order_pool_changes(self) -> None:
        for worker_id, order in () if self._pools is None else self._pools.orders(time.monotonic()):
            if isinstance(order, PoolTarget):
                self._workers[worker_id].post(order)
                continue
            request = RoleRequest(ask_id=0, worker_id=worker_id, role=order.role, drain_s=order.drain_s)
            answer = self._change_role(request)
            logger.info("%s is to become a %s worker: %s %s", worker_id, order.role, answer.outcome, answer.reason)


def _clock_offset_s() -> float:
    """Seconds from the scheduler's clock to Unix time."""
    return time.time() - time.monotonic()
