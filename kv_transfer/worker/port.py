"""Where a worker meets gateways and the global scheduler.

Gateways connect and send requests; the worker answers with at most one `StepFrame` per step and gateway, and one for
each hand-off that decode verified. The worker itself connects to the scheduler, tells how far its model is loaded,
registers, reports its snapshot and what its memory tiers hold, and receives the scheduler's orders.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

from engine.sequence import SequenceKey, StepPlan
from engine.steps.loading import LoadedModel
from kv_transfer.connections.connection import Connection, Server, stay_connected
from kv_transfer.connections.handshake import describe
from kv_transfer.messages import Message
from kv_transfer.messages.blocks import BlockIndexRequest
from kv_transfer.messages.requests import (
    Computing,
    Endpoint,
    FailureCause,
    FailureEvent,
    HandedOver,
    Refused,
    RequestSpec,
    StepFrame,
    StepOverdue,
    TokenEvent,
)
from kv_transfer.messages.workers import Heartbeat, Loading, LoadingReport, Register, WorkerInfo, WorkerSnapshot
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)

LOADING_PERIOD_S = 0.5

_MANY_BYTES = 2**20  # of embeddings, of the 16 MiB that a frame may have

GatewayId = int


def warn_of_order(message: Message) -> None:
    """Log an order that came to a worker to which nobody can give orders."""
    logger.warning("the scheduler sent %s, which this worker has no use for", type(message).__name__)


def worker_identity(model: LoadedModel, *, worker_id: str, node_id: str, secret: bytes) -> Identity:
    """What a worker tells its peers of itself; KV moves only between workers whose models and layouts agree."""
    return Identity(
        worker_id=worker_id,
        node_id=node_id,
        secret=secret,
        compatibility=describe(model.fingerprint, model.layout),
    )


class GatewayPort:
    """Listens for gateways and keeps what a step brought until `flush()` sends it, one frame per gateway.

    `on_message(gateway, message)` gets what gateways send, `on_lost(gateway)` is called once when one is gone: its
    requests have no reader any more.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        on_message: Callable[[GatewayId, Message], None],
        on_lost: Callable[[GatewayId], None],
    ) -> None:
        self._identity = identity
        self._on_message = on_message
        self._on_lost = on_lost
        self._connections: dict[GatewayId, Connection] = {}
        self._next_id = 1
        self._frames: defaultdict[GatewayId, StepFrame] = defaultdict(lambda: StepFrame(tokens=[]))
        self._is_overdue = False
        self._warned_alone: set[GatewayId] = set()  # that the step is one sequence's
        self._server: Server | None = None

    @property
    def connections(self) -> dict[GatewayId, Connection]:
        """The connections to the gateways that are here now."""
        return dict(self._connections)

    async def start(self, host: str) -> Endpoint:
        self._server = Server(host, self._identity, self._serve_gateway)
        return self._server.endpoint

    def post(self, gateway: GatewayId, message: Message) -> None:
        """Send at once. A gateway that is gone has no use for it."""
        connection = self._connections.get(gateway)
        if connection is not None:
            connection.post(message)

    def step_overdue(self, is_overdue: bool) -> None:
        """Tell all gateways, those that are yet to come included."""
        self._is_overdue = is_overdue
        for connection in self._connections.values():
            connection.post(StepOverdue(is_overdue=is_overdue))

    def refuse(
        self, gateway: GatewayId, request: RequestSpec | SequenceKey, reason: str, retry_after_s: float | None
    ) -> None:
        """Nothing was or will be done for this attempt. `retry_after_s` None: it never could be."""
        self.post(
            gateway,
            Refused(request_id=request.request_id, attempt=request.attempt, reason=reason, retry_after_s=retry_after_s),
        )

    def computing(self, plan: StepPlan, gateway_of: Mapping[SequenceKey, GatewayId]) -> None:
        """Tell gateways, before a step, which of their requests are in it: one of them may be what takes this process
        down."""
        seqs = [item.seq for item in plan.items if item.seq.num_alone or item.seq.began_at is None]
        alone = any(seq.num_alone for seq in seqs)
        if not (seqs or self._warned_alone):
            return
        newcomers: dict[GatewayId, list[tuple[str, int]]] = {}
        for seq in seqs:
            if seq.key in gateway_of:
                newcomers.setdefault(gateway_of[seq.key], []).append(seq.key)
        for gateway in set(gateway_of.values()) if alone else newcomers.keys() | self._warned_alone:
            self.post(gateway, Computing(sequences=newcomers.get(gateway, []), alone=alone))
        self._warned_alone = set(gateway_of.values()) if alone else set()

    def fail(
        self,
        gateway: GatewayId,
        key: SequenceKey,
        reason: str,
        *,
        retryable: bool,
        cause: FailureCause = "fault",
        flush: bool = True,
    ) -> None:
        """Tell the gateway that an attempt ends here. It goes out at once, unless `flush` follows, after what the last
        step brought."""
        event = FailureEvent(
            request_id=key.request_id, attempt=key.attempt, reason=reason, retryable=retryable, cause=cause
        )
        self._frames[gateway].failures.append(event)
        if flush:
            self.flush()

    def handed_over(self, gateway: GatewayId, key: SequenceKey, exposed_s: float) -> None:
        """Decode has the attempt's KV, and waited `exposed_s` for it after the first token. Goes out at once."""
        event = HandedOver(request_id=key.request_id, attempt=key.attempt, exposed_s=exposed_s)
        self.post(gateway, StepFrame(tokens=[], handoffs=[event]))

    def emit(self, gateway: GatewayId, event: TokenEvent) -> None:
        """Goes out with `flush`. Of embeddings, of which a step may bring more than a frame holds, some go at once."""
        tokens = self._frames[gateway].tokens
        tokens.append(event)
        if event.embedding is not None and len(tokens) * len(event.embedding) >= _MANY_BYTES:
            self.post(gateway, self._frames.pop(gateway))

    def flush(self) -> None:
        for gateway in list(self._frames):
            self.post(gateway, self._frames.pop(gateway))

    async def close(self, reason: str) -> None:
        if self._server is not None:
            await self._server.close(reason)

    async def _serve_gateway(self, connection: Connection) -> None:
        gateway = self._next_id
        self._next_id += 1
        self._connections[gateway] = connection
        if self._is_overdue:
            connection.post(StepOverdue(is_overdue=True))
        try:
            while True:
                message = await connection.receive()
                self._on_message(gateway, message)
        except TransportError as error:
            logger.info("gateway %s left: %s", connection.peer.worker_id, error)
        finally:
            del self._connections[gateway]
            self._frames.pop(gateway, None)
            self._on_lost(gateway)


@contextlib.asynccontextmanager
async def telling_of_loading(
    identity: Identity,
    report: Callable[[], LoadingReport],
    locate_scheduler: Callable[[], Awaitable[Endpoint]],
) -> AsyncIterator[None]:
    """While a worker loads its model, before its `Registration`: the scheduler is told how far it is. Without a
    scheduler, or in spite of what goes wrong there, it loads all the same."""

    async def tell(connection: Connection) -> None:
        while True:
            await connection.send(Loading(report=report()))
            await asyncio.sleep(LOADING_PERIOD_S)

    connected = stay_connected(
        identity,
        purpose="worker",
        locate_scheduler=locate_scheduler,
        talk=tell,
        goodbye="the worker has loaded its model",
    )
    telling = asyncio.create_task(connected, name="loading")
    try:
        yield
    finally:
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)


class Registration:
    """Keeps a worker known to the global scheduler: connects, registers, reports; again whenever that breaks.

    With `events` it also reports what the worker's tiers hold: all of it at first and when asked, then the changes,
    every `period_s` and at once when they are many. `on_order(message)` gets what else the scheduler sends.
    """

    def __init__(
        self,
        identity: Identity,
        info: WorkerInfo,
        *,
        locate_scheduler: Callable[[], Awaitable[Endpoint]],
        snapshot: Callable[[], WorkerSnapshot],
        period_s: float,
        events: BlockEventLog | None = None,
        on_order: Callable[[Message], None] = warn_of_order,
    ) -> None:
        self._identity = identity
        self._info = info
        self._events = events
        self._on_order = on_order
        self._locate_scheduler = locate_scheduler
        self._snapshot = snapshot
        self._period_s = period_s
        self._due = asyncio.Event()  # there is a reason to report before the time is up
        self._are_all_blocks_wanted = True
        self._is_changing = False
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        connected = stay_connected(
            self._identity,
            purpose="worker",
            locate_scheduler=self._locate_scheduler,
            talk=self._report,
            goodbye="the worker stops reporting",
        )
        self._task = asyncio.create_task(connected, name="registration")

    async def stop(self, *, changes: bool = False) -> None:
        """`changes`: the worker goes as it was ordered to take on another role or model, which the scheduler tells from
        all other ways to go."""
        self._is_changing = changes
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    async def _report(self, connection: Connection) -> None:
        """Register, and report until the connection ends."""
        self._due.clear()
        self._are_all_blocks_wanted = True
        if self._events is not None:
            loop = asyncio.get_running_loop()
            self._events.on_many = lambda: loop.call_soon_threadsafe(self._due.set)
        listening = asyncio.create_task(self._listen(connection), name="scheduler-orders")
        try:
            await connection.send(Register(info=self._info, snapshot=self._snapshot()))
            while True:
                await self._report_blocks(connection)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._period_s):
                        await self._due.wait()
                await connection.send(Heartbeat(snapshot=self._snapshot()))
        finally:
            if self._events is not None:
                self._events.on_many = lambda: None
            if self._is_changing:
                connection.close("the worker changes its role or model", in_order=True)
            listening.cancel()
            await asyncio.gather(listening, return_exceptions=True)

    async def _report_blocks(self, connection: Connection) -> None:
        """What the scheduler does not know yet of what the worker's tiers hold."""
        self._due.clear()
        if self._events is None:
            return
        if self._are_all_blocks_wanted:
            self._are_all_blocks_wanted = False
            for part in self._events.snapshot():
                await connection.send(part)
        for events in self._events.take():
            await connection.send(events)

    async def _listen(self, connection: Connection) -> None:
        async for message in connection:
            if isinstance(message, BlockIndexRequest):
                self._are_all_blocks_wanted = True
                self._due.set()
            else:
                self._on_order(message)
        self._due.set()  # the connection is gone, which the next report finds out
