"""The global scheduler at work: workers report to it, gateways ask it, over authenticated connections.

Each model has a `GlobalScheduler` of its own, which knows its workers and no others: so nothing that is decided of one
model's requests, caches or pools can depend on another's.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Final

from cluster.autoscaling.controller import Autoscaler, ModelExchange, Order
from cluster.autoscaling.sizing import PoolsPlan
from cluster.gateway.line_log import STOP_S, LineLog, LineWriter
from cluster.scheduler.decision_log import DecisionLog, LoggedDecision
from cluster.scheduler.placement.retry_after import MIN_RETRY_AFTER_S
from cluster.scheduler.role_changes import RoleChanges
from cluster.scheduler.scheduler import GlobalScheduler, PlacementAnswer, SchedulerPolicy
from cluster.slo.classes import NO_TARGETS, SloConfig
from cluster.slo.tracker import SloTracker
from kv_transfer.connections.connection import Connection, Server
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import (
    MAX_DECISIONS,
    AskDecisions,
    AskGateways,
    ClusterSnapshot,
    Decisions,
    Ended,
    FirstToken,
    GatewayAnswer,
    GatewaysAsked,
    PartComputed,
    Place,
    Queued,
    RoleAnswer,
    RoleRequest,
    SloUpdate,
    Standing,
    Unplaceable,
)
from kv_transfer.messages.workers import (
    ChangeRole,
    Heartbeat,
    Loading,
    LoadingReport,
    PoolTarget,
    Register,
    WorkerInfo,
    WorkerSnapshot,
)
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)

_MOST_UNWRITTEN: Final = 4_000  # decisions that wait for a disk


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRules:
    """How the workers of one model are used. `pools`: what they may become; None: workers come and go as they will."""

    policy: SchedulerPolicy = field(default_factory=SchedulerPolicy)
    pools: PoolsPlan | None = None


class SchedulerServer:
    """Drives a `GlobalScheduler` for each model (`schedulers`, to read); a connection's purpose tells a worker from a
    gateway.

    `models`: by name. Of a single one nobody looks at its name. `decision_log`: every decision is appended to it, as a
    line of JSON. `model_flips`: workers go from one model to another where that is better, of models whose pools are
    sized.
    """

    def __init__(
        self,
        models: Mapping[str, ModelRules],
        identity: Identity,
        *,
        broadcast_period_s: float = 1.0,
        slo_classes: SloConfig = NO_TARGETS,
        decision_log: LineLog | None = None,
        model_flips: bool = False,
    ) -> None:
        self.slo = SloTracker(slo_classes, now_s=time.monotonic())  # of what all gateways have told since the start
        log_size = max(rules.policy.log_size for rules in models.values())
        self._writer: LineWriter[LoggedDecision] | None = None
        if decision_log is None:
            self._log = DecisionLog(log_size)
        else:
            self._writer = LineWriter(decision_log, "decision log", _lines, _MOST_UNWRITTEN)
            self._log = DecisionLog(log_size, self._writer.put)
        self.schedulers = {name: GlobalScheduler(rules.policy, self._log) for name, rules in models.items()}
        self._autoscalers: dict[str, Autoscaler] = {}
        for name, rules in models.items():
            if rules.pools is not None:
                sized, now = self.schedulers[name], time.monotonic()
                self._autoscalers[name] = Autoscaler(sized.ledger, rules.pools, self.slo, now, model=name)
                sized.on_verdict = self._autoscalers[name].watch.asked
        self._exchange = ModelExchange(self._autoscalers if model_flips else {})
        self._identity = identity
        self._broadcast_period_s = broadcast_period_s
        self._role_changes = RoleChanges(self._keeps_model)
        self._gateways: set[Connection] = set()
        self._asked: dict[str, tuple[Connection, GlobalScheduler]] = {}  # by whom, of every request that has not ended
        self._workers: dict[str, tuple[Connection, GlobalScheduler]] = {}  # each one's newest connection, and its model
        self._told_of: set[frozenset[str]] = set()  # two kinds of arithmetic each
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
        return len(self._asked)

    def connection_of(self, worker_id: str) -> Connection:
        """The worker's newest connection."""
        return self._workers[worker_id][0]

    def of_model(self, name: str) -> GlobalScheduler | None:
        """The scheduler of the workers of that model; None: there is no such model."""
        return self.scheduler if len(self.schedulers) == 1 else self.schedulers.get(name)

    @property
    def scheduler(self) -> GlobalScheduler:
        """The first model's."""
        return next(iter(self.schedulers.values()))

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
        if self._writer is not None:
            await asyncio.to_thread(self._writer.stop, STOP_S)

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
                        if (loads := self.of_model(report.model)) is not None:
                            loads.loading(report, time.monotonic())
                    case Register(info=info, snapshot=snapshot) if info.worker_id == worker_id:
                        self._register(connection, info, snapshot)
                    case Heartbeat(snapshot=snapshot) if snapshot.worker_id == worker_id:
                        if not self._heard(snapshot):
                            connection.close(f"{worker_id} counts as gone: it has to register again")
                    case BlockEvents() | BlockIndexSnapshot() if message.worker_id == worker_id:
                        self._on_blocks(connection, message)
                    case _:
                        connection.close(f"{type(message).__name__} is not for {worker_id} to send")
                self._look_for_answers()
        finally:
            self._loading.pop(connection, None)
            self._on_worker_disconnected(worker_id, connection)

    def _register(self, connection: Connection, info: WorkerInfo, snapshot: WorkerSnapshot) -> None:
        scheduler = self.of_model(info.model)
        if scheduler is None:
            connection.close(f"{info.worker_id} has the model {info.model}; there are {', '.join(self.schedulers)}")
            return
        self._workers[info.worker_id] = connection, scheduler
        self._warn_of_other_bits(info, scheduler)
        scheduler.register(info, snapshot, time.monotonic())
        logger.info("%s worker %s registered (pid %d)", info.role, info.worker_id, info.pid)
        self._broadcast()

    def _heard(self, snapshot: WorkerSnapshot) -> bool:
        """Take a heartbeat in. Returns False if the worker is not known. Whether it takes requests gateways hear before
        the next answer: one that counts on a worker which leaves says 429 where it could hold the request for another.
        """
        _, scheduler = self._workers.get(snapshot.worker_id, (None, None))
        if scheduler is None:
            return False
        was_leaving = scheduler.leaves(snapshot.worker_id)
        is_known = scheduler.heartbeat(snapshot, time.monotonic())
        if scheduler.leaves(snapshot.worker_id) != was_leaving:
            self._broadcast()
        return is_known

    def _warn_of_other_bits(self, info: WorkerInfo, scheduler: GlobalScheduler) -> None:
        """Once for two kinds: a request that goes from one worker to another goes on exactly only where both sum
        alike."""
        known = [other for other, _ in scheduler.ledger.workers() if other.compatibility == info.compatibility]
        other = next((other for other in known if other.arithmetic not in (info.arithmetic, "")), None)
        if other is None or not info.arithmetic:
            return
        kinds = frozenset((info.arithmetic, other.arithmetic))
        if kinds not in self._told_of:
            self._told_of.add(kinds)
            logger.warning(
                "worker %s computes by %s and %s by %s: a request that both have a part in may get another token than"
                " on one of them alone; for the same have one version of Legato on all nodes, and on CPUs set"
                " LEGATO_NATIVE=avx512, or avx2, on all",
                info.worker_id,
                info.arithmetic,
                other.worker_id,
                other.arithmetic,
            )

    def _on_blocks(self, connection: Connection, message: BlockEvents | BlockIndexSnapshot) -> None:
        newest, scheduler = self._workers.get(message.worker_id, (None, self.scheduler))
        if newest is not connection:
            return  # the last words of a connection that the worker has replaced
        request = scheduler.update_blocks(message, time.monotonic())
        if request is not None:
            connection.post(request)

    def _on_worker_disconnected(self, worker_id: str, connection: Connection) -> None:
        newest, scheduler = self._workers.get(worker_id, (None, self.scheduler))
        if newest is not connection:
            return  # it has come back on another one since
        del self._workers[worker_id]
        now = time.monotonic()
        is_changing = self._role_changes.gone(worker_id, now, in_order=connection.peer_left_in_order)
        if scheduler.unregister(worker_id, now, may_be_replaced=not is_changing):
            logger.info("worker %s is gone", worker_id)
            self._broadcast()

    async def _serve_gateway(self, connection: Connection) -> None:
        self._gateways.add(connection)
        try:
            connection.post(self._snapshot())
            while True:
                message = await connection.receive()
                match message:
                    case Place():
                        connection.post(self._place(connection, message))
                    case Standing(requests=requests):
                        for request in requests:
                            if (scheduler := self._noted(connection, request.place)) is not None:
                                scheduler.recovered(request, time.monotonic())
                    case FirstToken(request_id=request_id) if request_id in self._asked:
                        self._asked[request_id][1].first_token(request_id, time.monotonic())
                    case PartComputed(request_id=request_id) if request_id in self._asked:
                        self._asked[request_id][1].part_computed(request_id, time.monotonic())
                    case Ended(request_id=request_id, num_output_tokens=num_output_tokens) if request_id in self._asked:
                        _, scheduler = self._asked.pop(request_id)
                        scheduler.ended(request_id, time.monotonic(), num_output_tokens)
                    case FirstToken() | PartComputed() | Ended():
                        pass  # of a request that this scheduler was not told of
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
        for request_id in [request_id for request_id, (asker, _) in self._asked.items() if asker is connection]:
            _, scheduler = self._asked.pop(request_id)
            scheduler.ended(request_id, time.monotonic())
        self._look_for_answers()

    def _place(self, gateway: Connection, request: Place) -> PlacementAnswer | Queued:
        scheduler = self._noted(gateway, request)
        if scheduler is not None:
            return scheduler.place(request, time.monotonic())
        return Unplaceable(
            request_id=request.request_id,
            attempt=request.attempt,
            reason=f"the scheduler has no model {request.model}",
            retry_after_s=MIN_RETRY_AFTER_S,
        )

    def _noted(self, gateway: Connection, request: Place) -> GlobalScheduler | None:
        """Note who asks for the request. Returns its model's scheduler; None: there is no such model, as while settings
        roll out."""
        scheduler = self.of_model(request.model)
        if scheduler is not None:
            self._asked[request.request_id] = gateway, scheduler
        return scheduler

    def _look_for_answers(self) -> None:
        if any(scheduler.num_waiting for scheduler in self.schedulers.values()):
            self._told.set()

    async def _answer_waiting(self) -> None:
        """Answer the requests that had no answer when they were asked for."""
        while True:
            moments = [at for scheduler in self.schedulers.values() if (at := scheduler.next_at()) is not None]
            patience_s = max(0.0, min(moments) - time.monotonic()) if moments else None
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._told.wait()
            self._told.clear()
            for answer in chain.from_iterable(each.answers(time.monotonic()) for each in self.schedulers.values()):
                self._asked[answer.request_id][0].post(answer)

    def _change_role(self, request: RoleRequest) -> RoleAnswer:
        """Tell the worker, unless it must not go. It counts as draining at once, not only with its next report."""
        worker_id, now = request.worker_id, time.monotonic()
        connection, scheduler = self._workers.get(worker_id, (None, self.scheduler))
        joins = self.of_model(request.model) if request.model else scheduler
        answer = self._role_changes.ask(request, scheduler, joins, now)
        if answer.outcome == "ordered":
            assert connection is not None, "a worker that is known has a connection"
            (snapshot,) = (snapshot for info, snapshot in scheduler.ledger.workers() if info.worker_id == worker_id)
            cost = None if joins is None or joins is scheduler else joins.step_cost(request.role)
            connection.post(ChangeRole(role=request.role, drain_s=request.drain_s, model=request.model, step_cost=cost))
            self._heard(replace(snapshot, draining=True, sequence_number=snapshot.sequence_number + 1))
        return answer

    def _keeps_model(self, worker: WorkerInfo) -> bool:
        pools = self._autoscalers.get(worker.home_model or worker.model)
        return pools is not None and pools.scales(worker.home or worker.role)

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
        newest = self._log.newest(min(question.limit, MAX_DECISIONS))
        offset_s = _clock_offset_s()
        told = [str(one) if question.as_text else one.as_json(offset_s) for one in newest]
        return Decisions(ask_id=question.ask_id, decisions=told)

    def _snapshot(self) -> ClusterSnapshot:
        known = [scheduler.snapshot() for scheduler in self.schedulers.values()]
        return ClusterSnapshot(
            workers=[worker for one in known for worker in one.workers],
            indexes=[report for one in known for report in one.indexes],
            pools={name: pools.targets for name, pools in self._autoscalers.items() if pools.targets},
            loading=self._yet_to_register(),
        )

    def _yet_to_register(self) -> list[LoadingReport]:
        return [report for report in self._loading.values() if report.worker_id not in self._workers]

    def _broadcast(self) -> None:
        snapshot = self._snapshot()
        for gateway in self._gateways:
            gateway.post(snapshot)

    async def _expire_and_broadcast(self) -> None:
        while True:
            await asyncio.sleep(self._broadcast_period_s)
            for worker_id in chain.from_iterable(each.expire(time.monotonic()) for each in self.schedulers.values()):
                logger.warning("worker %s has been silent too long and counts as gone", worker_id)
            self._broadcast()
            self._order_pool_changes()

    def _order_pool_changes(self) -> None:
        now = time.monotonic()
        orders: list[Order] = []
        for name, each in self._autoscalers.items():
            loading = [report.home for report in self._yet_to_register() if report.home_model == name]
            orders += each.orders(now, loading)
        workers = [worker for each in self.schedulers.values() for worker in each.ledger.workers()]
        for worker_id, order in (*orders, *self._exchange.orders(workers, now)):
            if isinstance(order, PoolTarget):
                self._workers[worker_id][0].post(order)
                continue
            request = RoleRequest(
                ask_id=0, worker_id=worker_id, role=order.role, drain_s=order.drain_s, model=order.model
            )
            answer = self._change_role(request)
            logger.info("%s is to become a %s worker: %s %s", worker_id, order.role, answer.outcome, answer.reason)
            if answer.outcome != "ordered":
                self._exchange.refused(worker_id)
                for each in self._autoscalers.values():
                    each.refused(worker_id)


def _lines(decision: LoggedDecision) -> list[str]:
    return [decision.as_json(_clock_offset_s())]


def _clock_offset_s() -> float:
    """Seconds from the scheduler's clock to Unix time."""
    return time.time() - time.monotonic()
