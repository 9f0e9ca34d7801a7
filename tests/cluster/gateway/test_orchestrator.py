"""A gateway between real connections to workers that do what a test says, without a scheduler."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import Final

import pytest

from cluster.gateway.orchestrator import Orchestrator, OrchestratorConfig
from cluster.gateway.quarantine import Quarantine
from cluster.gateway.request_state import AttemptFailedError, RequestRun, RequestState
from engine.sampling.params import SamplingParams
from kv_transfer.connections.connection import Connection, ConnectionConfig, Server
from kv_transfer.messages import Message
from kv_transfer.messages.requests import (
    Cancel,
    Endpoint,
    FailureEvent,
    Fence,
    RequestSpec,
    Reserve,
    Reserved,
    RoomAwaited,
    Start,
    StepFrame,
    Ticket,
    TokenEvent,
)
from kv_transfer.messages.scheduling import Place, Placement
from kv_transfer.transports.base import Identity
from tests.support.clusters.worker_reports import NOWHERE, worker_info, worker_snapshot
from tests.support.token_streams import one_by_one
from tests.support.waiting import HANGS_S, eventually

LONG: Final = 3_000  # tokens: such prompts are sent one after the other
LONGEST: Final = 2_500_000  # tokens: more bytes than two sockets hold


def identity(name: str) -> Identity:
    return Identity(worker_id=name, node_id="node", secret=b"secret of the test", compatibility={})


def asked(request_id: str, num_tokens: int) -> RequestSpec:
    tokens = [70_000] * num_tokens
    return RequestSpec(
        request_id=request_id, attempt=0, prompt_token_ids=tokens, params=SamplingParams(max_tokens=1, seed=0)
    )


def ticket_of(request: RequestSpec) -> Ticket:
    return Ticket(
        request_id=request.request_id,
        fence=Fence(epoch=1, lease=1, generation=request.attempt),
        endpoint=NOWHERE,
        worker_id="d1",
        num_tokens=request.num_tokens,
        ttl_s=9.0,
    )


async def answer(gateway: Connection) -> None:
    """A worker that answers each request with one token."""
    async for message in gateway:
        if isinstance(message, Start):
            request = message.request
            last = TokenEvent(
                request_id=request.request_id, attempt=request.attempt, index=0, token_id=7, finish_reason="length"
            )
            gateway.post(StepFrame(tokens=[last]))


async def read_nothing(gateway: Connection) -> None:
    """A worker that is alive, and takes no more than its connection takes for it."""
    await gateway.wait_closed()


@asynccontextmanager
async def gateway_of(
    config: OrchestratorConfig | None = None, /, **workers: Callable[[Connection], Awaitable[None]]
) -> AsyncIterator[Orchestrator]:
    """Decode workers by name. The first is idle, the others are busy, so that it is the first to be asked."""

    async def nowhere() -> Endpoint:
        raise OSError("there is no scheduler")

    orchestrator = Orchestrator(identity("gateway"), config or OrchestratorConfig(), nowhere)
    narrow = ConnectionConfig(inbox_bytes=1024)
    servers = {name: Server("127.0.0.1", identity(name), work, config=narrow) for name, work in workers.items()}
    infos = [worker_info(name, endpoint=server.endpoint, max_model_len=2 * LONGEST) for name, server in servers.items()]
    for number, info in enumerate(infos):
        snapshot = worker_snapshot(info.worker_id, queued_prefill_tokens=number)
        orchestrator.scheduler.workers[info.worker_id] = info, snapshot
    orchestrator.start()
    orchestrator.connections.update(infos)
    try:
        await eventually(lambda: all(orchestrator.connections.is_up(name) for name in servers))
        yield orchestrator
    finally:
        await orchestrator.stop()
        for server in servers.values():
            await server.close()


async def test_who_waits_to_be_sent_leaves_a_worker_that_is_suspected() -> None:
    """Else it would wait until that connection is given up: not a moment as others do, but 15 s."""
    async with gateway_of(d1=read_nothing, d2=answer) as orchestrator, asyncio.timeout(HANGS_S):
        connections = orchestrator.connections
        assert await connections.post_large("d1", Start(request=asked("the last that it takes", LONG), ticket=None))
        before = asyncio.create_task(connections.post_large("d1", Start(request=asked("before", LONGEST), ticket=None)))
        waiting = asyncio.create_task(anext(one_by_one(orchestrator.generate(asked("r", LONG)))))
        await eventually(lambda: (run := orchestrator.runs.get("r")) is not None and run.is_started)
        assert not before.done() and not waiting.done()
        connections.step_overdue("d1", True)
        found = await waiting
        assert (found.token_id, found.attempt) == (7, 1)
        before.cancel()
        await asyncio.gather(before, return_exceptions=True)


async def test_who_has_taken_over_is_told_that_its_attempt_is_over() -> None:
    """The first token was lost with prefill. The next attempt may be placed elsewhere, and this one would go on."""
    heard: list[Message] = []

    async def decode(gateway: Connection) -> None:
        async for message in gateway:
            heard.append(message)

    async with gateway_of(d1=decode, p1=read_nothing) as orchestrator, asyncio.timeout(HANGS_S):
        run = RequestRun(asked("r", 10), deadline=time.monotonic() + HANGS_S)
        run.placed(Placement(request_id="r", attempt=0, prefill="p1", decode="d1"))
        run.merge("d1", TokenEvent(request_id="r", attempt=0, index=1, token_id=7))
        await orchestrator._prepare_retry(run, AttemptFailedError("the worker is gone", "p1"))
        orchestrator.connections.post("d1", Cancel(request_id="the last", attempt=0))
        await eventually(lambda: any(isinstance(m, Cancel) and m.request_id == "the last" for m in heard))
        assert Cancel(request_id="r", attempt=0) in heard


async def test_a_reservation_is_given_back_where_the_next_attempt_is_placed_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody would hand KV over to it any more, and its blocks were kept until it lapsed. The other worker answers once
    that is so."""
    given_back = asyncio.Event()

    async def reserve(gateway: Connection) -> None:
        async for message in gateway:
            if isinstance(message, Reserve):
                gateway.post(Reserved(attempt=message.request.attempt, ticket=ticket_of(message.request)))
            elif message == Cancel(request_id="r", attempt=0):
                given_back.set()

    async def fail(gateway: Connection) -> None:
        async for message in gateway:
            if isinstance(message, Start):
                failure = FailureEvent(request_id="r", attempt=0, reason="it cannot", retryable=True)
                gateway.post(StepFrame(tokens=[], failures=[failure]))

    async def answer_then(gateway: Connection) -> None:
        await given_back.wait()
        await answer(gateway)

    async def place(place: Place) -> Placement:
        prefill, decode = ("p1", "d1") if place.attempt == 0 else (None, "d2")
        return Placement(request_id="r", attempt=place.attempt, prefill=prefill, decode=decode)

    async with gateway_of(d1=reserve, d2=answer_then, p1=fail) as orchestrator, asyncio.timeout(HANGS_S):
        monkeypatch.setattr(orchestrator.scheduler, "place", place)
        found = await anext(one_by_one(orchestrator.generate(asked("r", 10))))
        assert (found.token_id, found.attempt) == (7, 1)


@pytest.mark.parametrize(("computing", "begins_early"), [("p2", True), ("d2", False)])
async def test_only_who_prefills_begins_without_a_ticket(
    computing: str, begins_early: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A decode worker that computes for another one would take the request for its own. Which it is was known when the
    request was placed, though it is off the scheduler's list for a moment."""
    tickets: list[Ticket | None] = []

    async def reserve(gateway: Connection) -> None:
        async for message in gateway:
            if isinstance(message, Reserve):
                known.pop(computing)
                gateway.post(RoomAwaited(request_id="r", attempt=0))
                gateway.post(Reserved(attempt=0, ticket=ticket_of(message.request)))

    async def compute(gateway: Connection) -> None:
        async for message in gateway:
            if isinstance(message, Start):
                tickets.append(message.ticket)
                if message.ticket is not None:
                    last = TokenEvent(request_id="r", attempt=0, index=0, token_id=7, finish_reason="length")
                    gateway.post(StepFrame(tokens=[last]))

    async def place(query: Place) -> Placement:
        return Placement(request_id="r", attempt=query.attempt, prefill=computing, decode="d1")

    async with gateway_of(d1=reserve, **{computing: compute}) as orchestrator, asyncio.timeout(HANGS_S):
        known = orchestrator.scheduler.workers
        monkeypatch.setattr(orchestrator.scheduler, "place", place)
        found = [event async for event in one_by_one(orchestrator.generate(asked("r", 10)))]
        assert [event.token_id for event in found] == [7]
        assert [ticket is None for ticket in tickets] == [True] * begins_early + [False]


async def test_a_silent_worker_is_counted_once_for_all_whom_it_kept_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of them ends its attempt for it. Were all that run looked at for each, the loop would stand for seconds."""
    asked_for: list[str] = []
    recall = Quarantine.recall

    def counted(book: Quarantine, run: RequestRun, workers: Collection[str]) -> bool:
        asked_for.append(run.request_id)
        return recall(book, run, workers)

    monkeypatch.setattr(Quarantine, "recall", counted)
    async with gateway_of(d1=read_nothing, d2=read_nothing) as orchestrator, asyncio.timeout(HANGS_S):
        for number in range(8):
            run = RequestRun(asked(f"r{number}", 10 + number), deadline=time.monotonic() + HANGS_S)
            run.placed(Placement(request_id=run.request_id, attempt=0, prefill=None, decode=f"d{1 + number % 2}"))
            run.state = RequestState.PREFILLING
            orchestrator.runs[run.request_id] = run
            orchestrator._note_computing(f"d{1 + number % 2}", [(run.request_id, 0)], alone=False)
        for run in list(orchestrator.runs.values())[::2]:
            await orchestrator._prepare_retry(run, AttemptFailedError("the worker is silent", "d1", "silent"))
        assert sorted(asked_for) == sorted(orchestrator.runs)
        assert len(orchestrator._quarantine) == 4


async def test_who_only_waits_at_a_worker_that_is_lost_is_not_suspected() -> None:
    async with gateway_of(d1=read_nothing, d2=read_nothing) as orchestrator, asyncio.timeout(HANGS_S):
        begun, waiting = (RequestRun(asked(name, len(name)), deadline=math.inf) for name in ("begun", "waiting"))
        for run in (begun, waiting):
            run.placed(Placement(request_id=run.request_id, attempt=0, prefill=None, decode="d1"))
            run.state = RequestState.PREFILLING
            orchestrator.runs[run.request_id] = run
        orchestrator._note_computing("d1", [("begun", 0)], alone=False)
        await orchestrator._prepare_retry(begun, AttemptFailedError("the worker is silent", "d1", "silent"))
        assert not orchestrator._quarantine.allows(begun) and orchestrator._quarantine.allows(waiting)


async def test_the_second_attempt_begins_at_once_and_the_third_one_does_not() -> None:
    unhurried = OrchestratorConfig(retry_delay_s=10 * HANGS_S)
    async with gateway_of(unhurried, d1=read_nothing) as orchestrator, asyncio.timeout(HANGS_S):
        run = RequestRun(asked("r", 10), deadline=math.inf)
        await orchestrator._prepare_retry(run, AttemptFailedError("the worker is gone", "d1"))
        third = asyncio.create_task(orchestrator._prepare_retry(run, AttemptFailedError("so is this one", "d1")))
        await eventually(lambda: run.attempt == 2)
        await asyncio.sleep(0)
        assert not third.done()
        third.cancel()
        await asyncio.gather(third, return_exceptions=True)


@pytest.mark.parametrize("num_tokens", [10, LONG])
async def test_any_prompt_is_sent_and_answered(num_tokens: int) -> None:
    async with gateway_of(d1=answer, d2=read_nothing) as orchestrator, asyncio.timeout(HANGS_S):
        found = [event async for event in one_by_one(orchestrator.generate(asked("r", num_tokens)))]
        assert [(event.token_id, event.attempt) for event in found] == [(7, 0)]
        assert not orchestrator.runs
