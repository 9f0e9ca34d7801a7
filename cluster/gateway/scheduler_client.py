"""A gateway's line to the global scheduler, and what it does when that line is cut.

While the scheduler cannot be reached, placement falls back to the better of two random workers by the last snapshots
known ("the power of two choices", Mitzenmacher 2001): good enough, and never a reason to turn a request away. That
holds for requests, too, that waited for room when the line was cut.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import random
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cluster.errors import OverloadedError, RequestTooLargeError, UnavailableError
from cluster.gateway.generator import AnswerGateway, ConnectionState
from cluster.gateway.worker_connections import WorkerConnections
from cluster.scheduler.role_changes import require_ordered
from cluster.slo.report import SloReport
from kv_transfer.connections.connection import Connection, stay_connected
from kv_transfer.messages import Message
from kv_transfer.messages.blocks import IndexReport
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.scheduling import (
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
    Placement,
    Queued,
    RoleAnswer,
    RoleRequest,
    SloUpdate,
    Standing,
    StandingRequest,
    Unplaceable,
)
from kv_transfer.messages.workers import KnownWorker, LoadingReport, WorkerInfo, WorkerSnapshot
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)

PLACE_TIMEOUT_S = 2.0
RETRY_S = 0.5
SETTLE_S = 3.0
STANDING_AT_ONCE = 1000  # requests in one `Standing`
GATEWAYS_TIMEOUT_S = 1.0  # for all other gateways to answer
MAX_ANSWERS = 64  # questions of other gateways that are being answered; more are left unanswered


@dataclass(slots=True)
class _Question:
    """A question to the scheduler where to run an attempt. `patience`: until when its answer is waited for; longer once
    the scheduler says that it will take a while."""

    answer: asyncio.Future[Placement | Unplaceable]
    patience: asyncio.Timeout


@dataclass(slots=True)
class _Gathering:
    """The answers of other gateways to one question. `news` is set with each of them."""

    waiting: set[str] | None = None  # gateways that were asked and have not answered; None: it is not known who was
    told: dict[str, bytes] = field(default_factory=dict)
    news: asyncio.Event = field(default_factory=asyncio.Event)
    error: TransportError | None = None


class SchedulerClient:
    """Places requests, keeps the newest list of workers, and is the `ClusterView` of the routes for operators.

    `on_workers` is called with each new list of workers, `on_slo` with how requests fared at other gateways. With each
    new connection the scheduler is told what `standing()` returns: the requests that are on workers, whoever placed
    them. `worker_connections` tell which workers can be reached.
    """

    def __init__(
        self,
        identity: Identity,
        locate_scheduler: Callable[[], Awaitable[Endpoint]],
        worker_connections: WorkerConnections,
        on_workers: Callable[[list[WorkerInfo]], None],
        on_slo: Callable[[bytes], None] = lambda report: None,
        standing: Callable[[], list[StandingRequest]] = list,
    ) -> None:
        self._identity = identity
        self._locate_scheduler = locate_scheduler
        self._worker_connections = worker_connections
        self._on_workers = on_workers
        self._on_slo = on_slo
        self._standing = standing
        self.connection: Connection | None = None  # None: the scheduler cannot be reached
        # Keyed by request and attempt: an answer that is late for one attempt must not be taken for the next one's.
        self._awaiting_placement: dict[tuple[str, int], _Question] = {}
        self._asked: dict[int, asyncio.Future[Decisions | RoleAnswer]] = {}  # by `ask_id`
        self._gathering: dict[int, _Gathering] = {}  # by `ask_id`
        self._ask_ids = itertools.count()
        self._answers: dict[str, AnswerGateway] = {}  # what answers other gateways' questions, by topic
        self._answering: set[asyncio.Task[None]] = set()
        self._task: asyncio.Task[None] | None = None
        self.workers: dict[str, KnownWorker] = {}
        self.indexes: dict[str, IndexReport] = {}  # what the scheduler knows of a worker's blocks
        self.pools: dict[str, dict[Role, int]] = {}  # by model: workers that each pool should have, where it is sized
        self.loading: list[LoadingReport] = []  # the progress of workers that are starting
        self._settles_at = 0.0

    def start(self) -> None:
        connected = stay_connected(
            self._identity,
            purpose="gateway",
            locate_scheduler=self._locate_scheduler,
            talk=self._listen,
            goodbye="the gateway reconnects",
        )
        self._task = asyncio.create_task(connected, name="scheduler-client")

    async def stop(self) -> None:
        tasks = [*self._answering, *([] if self._task is None else [self._task])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def place(self, request: Place) -> Placement:
        """Ask the scheduler where to run this attempt, or choose without it. Raises OverloadedError,
        RequestTooLargeError or UnavailableError."""
        answer = await self._ask_where(request)
        if isinstance(answer, Placement):
            return answer
        if answer.retry_after_s is None:
            raise RequestTooLargeError(
                f"This request cannot be served: {answer.reason}. Shorten the prompt or max_tokens."
            )
        if not self._able_to_decode(request):
            raise UnavailableError(f"Not ready: {answer.reason}.", retry_after_s=answer.retry_after_s)
        raise OverloadedError(f"Overloaded: {answer.reason}. Try again later.", retry_after_s=answer.retry_after_s)

    async def has_room(self, request: Place) -> bool | None:
        """Whether a worker that is not excluded has room now for a request which `stays` where it is otherwise. It is
        counted there already, so that as many are told so as there is room for: where it stays all the same, `stands`
        takes that back. False where nobody can be asked. None: the answer is late, and may be either."""
        try:
            return isinstance(await self._asked_where(request), Placement)
        except TransportError:
            return False
        except TimeoutError:
            return None

    def stands(self, request: StandingRequest) -> None:
        """Have the scheduler count a request where it is, wherever it counted it."""
        self.post(Standing(requests=[request]))

    def first_token(self, request_id: str) -> None:
        self.post(FirstToken(request_id=request_id))

    def part_computed(self, request_id: str) -> None:
        self.post(PartComputed(request_id=request_id))

    def ended(self, request_id: str, num_output_tokens: int | None = None) -> None:
        """Tell the scheduler that a request is over. `num_output_tokens`: all that it had; None: it did not finish."""
        self.post(Ended(request_id=request_id, num_output_tokens=num_output_tokens))

    async def decisions(self, limit: int, *, as_text: bool = False) -> list[str]:
        """The scheduler's newest `limit` decisions, newest first. Raises UnavailableError while it cannot be asked."""
        told = await self._ask(AskDecisions(ask_id=next(self._ask_ids), limit=limit, as_text=as_text))
        assert isinstance(told, Decisions)
        return told.decisions

    async def change_role(self, worker_id: str, role: Role, drain_s: float, model: str = "") -> None:
        """Have the scheduler tell a worker to change its role, or its model. Raises NotFoundError or ConflictError if
        it refuses, and UnavailableError while it cannot be asked."""
        question = RoleRequest(ask_id=next(self._ask_ids), worker_id=worker_id, role=role, drain_s=drain_s, model=model)
        answer = await self._ask(question)
        assert isinstance(answer, RoleAnswer)
        require_ordered(answer)

    @property
    def gateway(self) -> str:
        return self._identity.worker_id

    def answer_gateways(self, about: str, answer: AnswerGateway) -> None:
        """Answer other gateways' questions about the topic `about` by `answer` from now on."""
        self._answers[about] = answer

    async def ask_gateways(
        self, about: str, question: bytes, *, one_is_enough: bool = False
    ) -> dict[str, bytes | None]:
        """Ask all other gateways by way of the scheduler, and return their answers by name; see `ClusterView`."""
        asked = AskGateways(ask_id=next(self._ask_ids), about=about, question=question)
        gathering = self._gathering[asked.ask_id] = _Gathering()
        try:
            if self.connection is None:
                raise TransportError("the scheduler is not there")
            self.connection.post(asked)
            async with asyncio.timeout(GATEWAYS_TIMEOUT_S):
                while gathering.waiting is None or gathering.waiting - gathering.told.keys():
                    if one_is_enough and any(gathering.told.values()):
                        break
                    gathering.news.clear()
                    await gathering.news.wait()
                    if gathering.error is not None:
                        raise gathering.error
        except (TransportError, TimeoutError) as error:
            if gathering.waiting is None:
                raise UnavailableError(
                    "Other gateways cannot be asked now. Try again.", retry_after_s=RETRY_S
                ) from error
        finally:
            del self._gathering[asked.ask_id]
        return {**dict.fromkeys(sorted(gathering.waiting or ())), **gathering.told}

    def reports(self) -> list[KnownWorker]:
        """Each live worker's registration and newest snapshot."""
        return list(self.workers.values())

    def describe_workers(self) -> list[dict[str, object]]:
        """Each live worker by its registration, its newest snapshot, the gateway's connection to it, and what the
        scheduler's block index knows."""
        unresponsive = self._worker_connections.unresponsive()
        return [
            {
                **asdict(info),
                **asdict(snapshot),
                "connected": self._worker_connections.is_up(info.worker_id),
                "suspect": info.worker_id in unresponsive,
                "index": self._index_of(info.worker_id),
            }
            for info, snapshot in self.workers.values()
        ]

    def connection_states(self) -> dict[str, ConnectionState]:
        """The state of this gateway's connection to each live worker."""
        unresponsive, is_up = self._worker_connections.unresponsive(), self._worker_connections.is_up
        return {name: "silent" if name in unresponsive else "up" if is_up(name) else "down" for name in self.workers}

    def publish_slo(self, report: SloReport) -> None:
        """Send a report to the scheduler, which adds up what all gateways saw."""
        self.post(SloUpdate(report=report.to_bytes()))

    def _index_of(self, worker_id: str) -> dict[str, object] | None:
        """What the scheduler knows of a worker's blocks; None if it has not told."""
        report = self.indexes.get(worker_id)
        if report is None:
            return None
        return {name: value for name, value in asdict(report).items() if name != "worker_id"}

    def post(self, message: Message) -> None:
        """Send a message that needs no answer. While the scheduler cannot be reached it is lost, which does no harm."""
        if self.connection is not None:
            self.connection.post(message)

    def worker_lost(self, worker_id: str) -> None:
        """Note that the connection to a worker broke. While there is no scheduler to tell whether the worker lives on,
        it counts as dead."""
        if self.connection is None:
            self.workers.pop(worker_id, None)

    async def _ask(self, question: AskDecisions | RoleRequest) -> Decisions | RoleAnswer:
        """Send the scheduler a question and wait for its answer. Raises UnavailableError while it cannot be asked."""
        answer: asyncio.Future[Decisions | RoleAnswer] = asyncio.get_running_loop().create_future()
        self._asked[question.ask_id] = answer
        try:
            if self.connection is not None:
                self.connection.post(question)
                async with asyncio.timeout(PLACE_TIMEOUT_S):
                    return await answer
        except (TransportError, TimeoutError) as error:
            logger.info("the scheduler does not answer %s: %s", type(question).__name__, error)
        finally:
            del self._asked[question.ask_id]
        raise UnavailableError("The global scheduler cannot be asked now. Try again.", retry_after_s=RETRY_S)

    async def _ask_where(self, request: Place) -> Placement | Unplaceable:
        """Ask the scheduler where to run an attempt; place it without where the scheduler is away, silent or late."""
        try:
            return await self._asked_where(request)
        except TransportError:
            return self._place_without_scheduler(request)
        except TimeoutError:
            self.ended(request.request_id)  # the scheduler must not count a placement that nobody waits for
            return self._place_without_scheduler(request)

    async def _asked_where(self, request: Place) -> Placement | Unplaceable:
        """The scheduler's answer. Raises TransportError where it is away or silent, TimeoutError where it is late."""
        connection = self.connection
        if connection is None or connection.silent_s >= self._worker_connections.silence_s:
            raise TransportError("the scheduler cannot be asked")
        answer: asyncio.Future[Placement | Unplaceable] = asyncio.get_running_loop().create_future()
        key = (request.request_id, request.attempt)
        try:
            async with asyncio.timeout(PLACE_TIMEOUT_S) as patience:
                self._awaiting_placement[key] = _Question(answer, patience)
                await connection.post_large(request)  # it names every block of the prompt
                return await answer
        finally:
            self._awaiting_placement.pop(key, None)

    def _place_without_scheduler(self, request: Place) -> Placement | Unplaceable:
        """Choose workers here, among those that could take the request by the scheduler's rules (`filter.eligible`).
        Without a prefill worker the decode worker computes the prompt."""
        decode = self._pick_decode(request)
        if decode is None:
            num_tokens = request.num_tokens + request.max_new_tokens
            return Unplaceable(
                request_id=request.request_id,
                attempt=request.attempt,
                reason=f"no decode worker for {num_tokens} tokens is known and the scheduler cannot be reached",
                retry_after_s=RETRY_S,
            )
        prefill = None if request.is_pooled else self._pick_prefill(request, decode)
        prefill_id = None if prefill is None else prefill.worker_id
        asked = replace(request, exclude=[], prefix_hashes=b"")
        # The scheduler may live all the same, only late or without its workers: tell it what was chosen.
        self.stands(StandingRequest(place=asked, prefill=prefill_id, decode=decode.worker_id))
        return Placement(
            request_id=request.request_id, attempt=request.attempt, prefill=prefill_id, decode=decode.worker_id
        )

    def _pick_decode(self, request: Place) -> WorkerInfo | None:
        """Who decodes; of what is pooled, who computes it, which a prefill worker can as well. None: nobody can.

        Whoever holds a reservation for it; else a prefill worker, as decode workers have others to answer; else anyone;
        and one that should be avoided only where there is nobody else."""
        able = self._able_to_decode(request)
        reserved = [info for info in able if info.worker_id == request.prefer_decode]
        welcome = [info for info in able if info.worker_id not in request.exclude]
        prefills = [info for info in welcome if info.role == "prefill"]
        return self._better_of_two(reserved or prefills or welcome or able)

    def _able_to_decode(self, request: Place) -> list[WorkerInfo]:
        """The live workers that are long enough to decode it, or where it is pooled, to compute it."""
        live = self._live("decode", request.model)
        if request.is_pooled:
            live += self._live("prefill", request.model)
        return [info for info in live if info.max_model_len >= request.num_tokens + request.max_new_tokens]

    def _pick_prefill(self, request: Place, decode: WorkerInfo) -> WorkerInfo | None:
        """Who computes the prompt and hands it over to `decode`. None: nobody can."""
        able = [
            info
            for info in self._live("prefill", request.model)
            if info.compatibility == decode.compatibility and info.max_model_len >= request.num_tokens
        ]
        return self._better_of_two([info for info in able if info.worker_id not in request.exclude])

    def _better_of_two(self, workers: list[WorkerInfo]) -> WorkerInfo | None:
        """The less busy one of two random workers (the power of two choices). None: there is none."""
        two = random.sample(workers, min(2, len(workers)))
        return min(two, key=lambda info: _busyness(self.workers[info.worker_id][1]), default=None)

    @property
    def _is_settling(self) -> bool:
        """Whether the scheduler is new and knows no decode worker yet of a model that had some. Until it does, or for
        `SETTLE_S`, the workers that this gateway knows count: they will soon have found the new scheduler, too."""
        return time.monotonic() < self._settles_at

    def _live(self, role: Role, model: str) -> list[WorkerInfo]:
        """The workers of that role and model that take requests."""
        taking = [info for info, snapshot in self.workers.values() if not snapshot.draining]
        return [info for info in taking if info.role == role and info.serves(model)]

    async def _listen(self, connection: Connection) -> None:
        """Tell the scheduler which requests stand, and take in its messages until the connection ends. Raises
        TransportError then, and so gets whoever waits for an answer."""
        standing = self._standing()
        for at in range(0, len(standing), STANDING_AT_ONCE):
            connection.post(Standing(requests=standing[at : at + STANDING_AT_ONCE]))
        self.connection = connection
        self._settles_at = time.monotonic() + SETTLE_S if self.workers else 0.0
        try:
            while True:
                message = await connection.receive()
                self._on_message(message)
        finally:
            self.connection = None
            self.indexes, self.pools, self.loading = {}, {}, []
            lost: list[asyncio.Future[Any]] = [
                *(question.answer for question in self._awaiting_placement.values()),
                *self._asked.values(),
            ]
            gone = TransportError("the scheduler is gone")
            for answer in lost:
                if not answer.done():
                    answer.set_exception(gone)
            for gathering in self._gathering.values():
                gathering.error = gone
                gathering.news.set()

    def _on_message(self, message: Message) -> None:
        match message:
            case ClusterSnapshot(workers=workers, indexes=indexes, pools=pools, loading=loading):
                self.indexes, self.pools = {report.worker_id: report for report in indexes}, pools
                self.loading = loading
                served = {info.model for info, _ in workers if info.role == "decode"}
                if served and served >= {info.model for info, _ in self.workers.values() if info.role == "decode"}:
                    self._settles_at = 0.0
                if self._is_settling:
                    return
                self.workers = {info.worker_id: (info, snapshot) for info, snapshot in workers}
                self._on_workers([info for info, _ in workers])
            case Placement() | Unplaceable() | Queued():
                question = self._awaiting_placement.get((message.request_id, message.attempt))
                if question is not None and not question.answer.done():
                    self._on_answer(question, message)
            case Decisions() | RoleAnswer():
                if (asked := self._asked.get(message.ask_id)) is not None and not asked.done():
                    asked.set_result(message)
            case GatewaysAsked(gateways=gateways):
                if (gathering := self._gathering.get(message.ask_id)) is not None:
                    gathering.waiting = set(gateways)
                    gathering.news.set()
            case GatewayAnswer(gateway=gateway, answer=told):
                if (gathering := self._gathering.get(message.ask_id)) is not None:
                    gathering.told[gateway] = told
                    gathering.news.set()
            case AskGateways(about=about):
                if about in self._answers and len(self._answering) < MAX_ANSWERS:
                    task = asyncio.create_task(self._answer(self._answers[about], message))
                    self._answering.add(task)
                    task.add_done_callback(self._answering.discard)
            case SloUpdate(report=report):
                self._on_slo(report)
            case _:
                logger.warning("the scheduler sent %s, which a gateway has no use for", type(message).__name__)

    async def _answer(self, answer: AnswerGateway, asked: AskGateways) -> None:
        try:
            told = await answer(asked.question)
        except Exception:
            logger.exception("another gateway's question about %s cannot be answered", asked.about)
        else:
            self.post(GatewayAnswer(ask_id=asked.ask_id, asker=asked.asker, answer=told))

    def _on_answer(self, question: _Question, message: Placement | Unplaceable | Queued) -> None:
        if isinstance(message, Queued):
            now = asyncio.get_running_loop().time()
            question.patience.reschedule(now + message.within_s + PLACE_TIMEOUT_S)
        elif isinstance(message, Unplaceable) and self._is_settling:
            question.answer.set_exception(TransportError("the scheduler does not know its workers yet"))
        else:
            question.answer.set_result(message)


def _busyness(snapshot: WorkerSnapshot) -> tuple[int, int]:
    return snapshot.queued_prefill_tokens, snapshot.num_running + snapshot.num_waiting
