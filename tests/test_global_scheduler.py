"""The global scheduler: who gets a request, who is turned away, and what is forgotten when; then its server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.errors import OverloadedError, RequestTooLargeError, UnavailableError
from cluster.scheduler import GlobalScheduler, SchedulerPolicy
from cluster.scheduler_client import SchedulerClient
from cluster.scheduler_server import SchedulerServer
from kv_transfer.connection import connect
from kv_transfer.messages import (
    Endpoint,
    Heartbeat,
    Place,
    Placement,
    Register,
    Replicas,
    Unplaceable,
    WorkerInfo,
    WorkerSnapshot,
)
from kv_transfer.transports.base import Identity, LinkClosedError, TransportError
from tests.waiting import HANGS_S, eventually
from tests.worker_reports import worker_info, worker_snapshot

_info = partial(worker_info, max_model_len=1000, num_blocks=100)
_snapshot = partial(worker_snapshot, blocks_available=100)


def _scheduler(*worker_ids: str, **policy: object) -> GlobalScheduler:
    scheduler = GlobalScheduler(SchedulerPolicy(**policy))  # type: ignore[arg-type]
    for worker_id in worker_ids:
        scheduler.register(_info(worker_id), _snapshot(worker_id), 0.0)
    return scheduler


def _place(request_id: str = "r", **changes: object) -> Place:
    query = Place(request_id=request_id, attempt=0, num_tokens=100, max_new_tokens=20)
    return replace(query, **changes)  # type: ignore[arg-type]


def _placed(scheduler: GlobalScheduler, request_id: str = "r", now: float = 0.0, **changes: object) -> Placement:
    answer = scheduler.place(_place(request_id, **changes), now)
    assert isinstance(answer, Placement), answer
    return answer


def _refused(scheduler: GlobalScheduler, request_id: str = "r", **changes: object) -> Unplaceable:
    answer = scheduler.place(_place(request_id, **changes), 0.0)
    assert isinstance(answer, Unplaceable), answer
    return answer


# --- who gets it ---


def test_placements_count_at_once() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    one, two = _placed(scheduler, "r1"), _placed(scheduler, "r2")
    assert {one.prefill, two.prefill} == {"p1", "p2"}
    assert {one.decode, two.decode} == {"d1", "d2"}


def test_a_long_prompt_weighs_more_than_several_short_ones() -> None:
    scheduler = _scheduler("p1", "p2", "d1")
    busy = _placed(scheduler, "long", num_tokens=500).prefill
    assert all(_placed(scheduler, f"r{n}").prefill != busy for n in range(4))


def test_what_a_worker_reports_counts_once() -> None:
    """As soon as a snapshot must include a placement, the placement itself is no longer added."""
    scheduler = _scheduler("p1", "p2", "d1")
    busy = _placed(scheduler, "r1", now=1.0, num_tokens=300).prefill
    assert busy is not None
    other = "p2" if busy == "p1" else "p1"
    scheduler.heartbeat(_snapshot(busy, 2, queued_prefill_tokens=300), 2.0)
    scheduler.heartbeat(_snapshot(busy, 3, queued_prefill_tokens=50), 3.0)
    scheduler.heartbeat(_snapshot(other, 2, queued_prefill_tokens=120), 3.0)
    assert _placed(scheduler, "r2", now=3.0).prefill == busy


def test_older_snapshots_are_ignored() -> None:
    scheduler = _scheduler("p1", "p2", "d1")
    assert scheduler.heartbeat(_snapshot("p1", 5, queued_prefill_tokens=900), 1.0)
    assert scheduler.heartbeat(_snapshot("p1", 4, queued_prefill_tokens=0), 2.0)
    assert scheduler.heartbeat(_snapshot("p1", 5, queued_prefill_tokens=0), 2.0)
    assert _placed(scheduler).prefill == "p2"


def test_a_worker_that_is_not_known_has_to_register() -> None:
    scheduler = _scheduler("d1")
    assert not scheduler.heartbeat(_snapshot("p1", 7), 1.0)
    assert _placed(scheduler).prefill is None


def test_a_silent_worker_is_dropped_and_can_come_back() -> None:
    scheduler = _scheduler("p1", "d1", stale_after_s=5.0)
    scheduler.heartbeat(_snapshot("d1", 2), 4.0)
    assert scheduler.expire(5.0) == []
    assert scheduler.expire(5.5) == ["p1"]
    assert _placed(scheduler).prefill is None
    assert not scheduler.heartbeat(_snapshot("p1", 9), 6.0)
    scheduler.register(_info("p1"), _snapshot("p1", 10), 6.0)
    assert _placed(scheduler).prefill == "p1"


def test_a_lost_worker_gets_nothing() -> None:
    scheduler = _scheduler("p1", "p2", "d1")
    assert scheduler.lost("p1")
    assert not scheduler.lost("p1")
    assert all(_placed(scheduler, f"r{n}").prefill == "p2" for n in range(3))


def test_draining_workers_get_nothing() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    for worker_id in ("p1", "d1"):
        scheduler.heartbeat(_snapshot(worker_id, 2, draining=True), 1.0)
    for n in range(3):
        answer = _placed(scheduler, f"r{n}")
        assert (answer.prefill, answer.decode) == ("p2", "d2")
    assert _placed(scheduler, "held", attempt=1, prefer_decode="d1").decode == "d2"
    scheduler.heartbeat(_snapshot("d2", 2, draining=True), 1.0)
    assert _refused(scheduler, "late").retry_after_s is not None


def test_workers_that_just_failed_the_request_are_avoided() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    answer = _placed(scheduler, attempt=1, exclude=["p1", "d1"])
    assert (answer.prefill, answer.decode) == ("p2", "d2")


def test_an_excluded_decode_is_better_than_none_and_an_excluded_prefill_is_not() -> None:
    scheduler = _scheduler("p1", "d1")
    answer = _placed(scheduler, attempt=1, exclude=["p1", "d1"])
    assert (answer.prefill, answer.decode) == (None, "d1")


def test_the_decode_that_holds_a_reservation_is_kept() -> None:
    scheduler = _scheduler("p1", "d1", "d2")
    for n in range(4):
        _placed(scheduler, f"r{n}")
    assert _placed(scheduler, attempt=1, prefer_decode="d2").decode == "d2"
    assert _placed(scheduler, attempt=2, prefer_decode="d1").decode == "d1"
    assert _placed(scheduler, attempt=3, prefer_decode="gone").decode in ("d1", "d2")


def test_what_does_not_fit_together_is_not_paired() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (_info("p1", compatibility="other"), _info("d1")):
        scheduler.register(info, _snapshot(info.worker_id), 0.0)
    assert _placed(scheduler).prefill is None
    scheduler.register(_info("p2"), _snapshot("p2", queued_prefill_tokens=5000), 0.0)
    assert _placed(scheduler).prefill == "p2"


def test_a_prefill_worker_must_hold_the_prompt() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (_info("p1", max_model_len=99), _info("d1")):
        scheduler.register(info, _snapshot(info.worker_id), 0.0)
    assert _placed(scheduler, num_tokens=100).prefill is None
    assert _placed(scheduler, num_tokens=99, max_new_tokens=800).prefill == "p1"


def test_short_prompts_are_computed_by_decode_where_the_policy_says_so() -> None:
    scheduler = _scheduler("p1", "d1", local_prefill_below=50)
    assert _placed(scheduler, num_tokens=49).prefill is None
    assert _placed(scheduler, num_tokens=50).prefill == "p1"


def test_the_larger_memory_gets_more() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (_info("small", num_blocks=100), _info("large", num_blocks=400, layer_groups=1)):
        scheduler.register(info, _snapshot(info.worker_id), 0.0)
    decodes = [_placed(scheduler, f"r{n}").decode for n in range(10)]
    assert decodes.count("large") == 8


# --- who is turned away ---


def test_without_a_decode_worker_there_is_a_time_to_come_back() -> None:
    assert (_refused(_scheduler("p1")).retry_after_s or 0.0) > 0.0


def test_what_no_worker_can_hold_never_comes_back() -> None:
    scheduler = _scheduler("p1", "d1")
    answer = _refused(scheduler, num_tokens=990, max_new_tokens=11)
    assert answer.retry_after_s is None
    assert "1000" in answer.reason
    scheduler.register(_info("big", max_model_len=2000), _snapshot("big"), 0.0)
    assert _placed(scheduler, num_tokens=990, max_new_tokens=11).decode == "big"


def test_too_long_a_queue_turns_away_and_says_for_how_long() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=1000)
    waits = []
    for number, queued in enumerate((1500, 3000, 9000), 2):
        scheduler.heartbeat(
            _snapshot("p1", number, queued_prefill_tokens=queued, prefill_tokens_per_s=100.0), float(number)
        )
        waits.append(_refused(scheduler).retry_after_s)
    assert waits == [5.0, 20.0, 80.0]
    scheduler.heartbeat(_snapshot("p1", 9, queued_prefill_tokens=1000), 9.0)
    assert _placed(scheduler).prefill == "p1"


def test_a_worker_whose_speed_is_unknown_does_not_send_clients_away_for_hours() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=1000)
    scheduler.heartbeat(_snapshot("p1", 2, queued_prefill_tokens=20_000), 1.0)
    assert 1.0 <= (_refused(scheduler).retry_after_s or 0.0) <= 60.0


def test_unreported_placements_make_the_queue_too_long_as_well() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=250)
    for n in range(3):
        _placed(scheduler, f"r{n}")
    assert "300 prompt tokens" in _refused(scheduler, "r3").reason


def test_what_has_begun_is_never_turned_away_for_load() -> None:
    scheduler = _scheduler("p1", "d1", max_queued_tokens=10)
    scheduler.heartbeat(_snapshot("p1", 2, queued_prefill_tokens=9000), 1.0)
    assert _refused(scheduler)
    assert _placed(scheduler, attempt=1).decode == "d1"


# --- what is forgotten ---


def test_an_ended_request_weighs_nothing() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    first = _placed(scheduler, "r1")
    scheduler.ended("r1")
    scheduler.ended("never heard of")
    assert _placed(scheduler, "r2") == replace(first, request_id="r2")


def test_a_request_that_is_placed_again_weighs_once() -> None:
    scheduler = _scheduler("p1", "p2", "d1", "d2")
    for attempt in range(4):
        _placed(scheduler, "r1", attempt=attempt)
    counted = sum(len(r.assignments) for r in scheduler._replicas.values())
    assert counted == 2


class Bookkeeping(RuleBasedStateMachine):
    """Workers and requests come and go in any order; what is counted is what is placed."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = GlobalScheduler(SchedulerPolicy(max_queued_tokens=400, stale_after_s=3.0))
        self.now = 0.0
        self.number = 0
        self.placements: dict[str, Placement] = {}
        self.alive: set[str] = set()

    @rule(worker_id=st.sampled_from(["p1", "p2", "d1", "d2"]))
    def register(self, worker_id: str) -> None:
        self.number += 1
        self.scheduler.register(_info(worker_id), _snapshot(worker_id, self.number), self.now)
        self.alive.add(worker_id)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9), queued=st.integers(0, 500), draining=st.booleans())
    def report(self, which: int, queued: int, draining: bool) -> None:
        self.number += 1
        worker_id = sorted(self.alive)[which % len(self.alive)]
        self.scheduler.heartbeat(
            _snapshot(worker_id, self.number, queued_prefill_tokens=queued, draining=draining), self.now
        )

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 9))
    def lose(self, which: int) -> None:
        worker_id = sorted(self.alive)[which % len(self.alive)]
        assert self.scheduler.lost(worker_id)
        self.alive.discard(worker_id)

    @rule(seconds=st.floats(0.0, 4.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        for worker_id in self.scheduler.expire(self.now):
            self.alive.remove(worker_id)

    @rule(
        request_id=st.sampled_from(["a", "b", "c", "d", "e"]),
        num_tokens=st.integers(1, 1200),
        exclude=st.lists(st.sampled_from(["p1", "d1"]), unique=True),
        prefer=st.sampled_from([None, "d1", "d2"]),
    )
    def place(self, request_id: str, num_tokens: int, exclude: list[str], prefer: str | None) -> None:
        attempt = 1 if request_id in self.placements else 0
        query = _place(request_id, attempt=attempt, num_tokens=num_tokens, exclude=exclude, prefer_decode=prefer)
        answer = self.scheduler.place(query, self.now)
        if isinstance(answer, Placement):
            assert {answer.decode} <= self.alive and (answer.prefill is None or answer.prefill in self.alive)
            self.placements[request_id] = answer

    @rule(request_id=st.sampled_from(["a", "b", "c", "d", "e"]))
    def end(self, request_id: str) -> None:
        self.scheduler.ended(request_id)
        self.placements.pop(request_id, None)

    @invariant()
    def every_assignment_is_of_a_placed_request(self) -> None:
        counted = {(w, request) for w, r in self.scheduler._replicas.items() for request in r.assignments}
        placed = {
            (worker_id, request_id)
            for request_id, placement in self.placements.items()
            for worker_id in (placement.prefill, placement.decode)
            if worker_id is not None
        }
        assert counted <= placed
        assert {w for w, _ in counted} <= self.alive == self.scheduler._replicas.keys()

    def teardown(self) -> None:
        for request_id in ("a", "b", "c", "d", "e"):
            self.end(request_id)
        assert not any(r.assignments for r in self.scheduler._replicas.values())


TestBookkeeping = Bookkeeping.TestCase
TestBookkeeping.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


# --- over real connections ---


def _identity(worker_id: str) -> Identity:
    return Identity(worker_id=worker_id, node_id="node", secret=b"secret of the test", compatibility={})


@asynccontextmanager
async def _server(**policy: object) -> AsyncIterator[SchedulerServer]:
    server = SchedulerServer(
        SchedulerPolicy(**policy),  # type: ignore[arg-type]
        _identity("scheduler"),
        broadcast_period_s=0.05,
    )
    await server.start("127.0.0.1")
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def _client(server: SchedulerServer) -> AsyncIterator[SchedulerClient]:
    async def locate() -> Endpoint:
        return server.endpoint

    client = SchedulerClient(_identity("gateway"), locate, lambda workers: None)
    client.start()
    try:
        await eventually(lambda: client._connection is not None)
        yield client
    finally:
        await client.stop()


async def test_a_worker_that_was_silent_too_long_is_told_to_register_again() -> None:
    """A worker stalls, counts as gone, and goes on reporting: it must not be lost for ever."""
    async with _server(stale_after_s=0.1) as server:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=_info("d1"), snapshot=_snapshot("d1")))
        await eventually(lambda: "d1" in server._workers)
        await eventually(lambda: not server._scheduler.replicas().workers)
        await worker.send(Heartbeat(snapshot=_snapshot("d1", 2)))
        with pytest.raises(LinkClosedError, match="register again"):
            await asyncio.wait_for(worker.receive(), HANGS_S)


async def test_the_end_of_an_old_connection_does_not_take_the_worker_away() -> None:
    async with _server() as server:
        old = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await old.send(Register(info=_info("d1"), snapshot=_snapshot("d1")))
        await eventually(lambda: "d1" in server._workers)
        first = server._workers["d1"]
        new = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await new.send(Register(info=_info("d1"), snapshot=_snapshot("d1", 2)))
        await eventually(lambda: server._workers["d1"] is not first)
        old.close("its network is back")
        await eventually(lambda: first.closed is not None)
        await asyncio.sleep(0.05)
        assert [info.worker_id for info, _ in server._scheduler.replicas().workers] == ["d1"]
        new.close("the end")
        await eventually(lambda: not server._scheduler.replicas().workers)


async def test_a_worker_cannot_speak_for_another() -> None:
    async with _server() as server:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=_info("d2"), snapshot=_snapshot("d2")))
        with pytest.raises(LinkClosedError, match="not for d1"):
            await asyncio.wait_for(worker.receive(), HANGS_S)
        assert not server._scheduler.replicas().workers


async def test_a_gateway_s_death_ends_its_requests() -> None:
    async with _server() as server:
        server._scheduler.register(_info("d1"), _snapshot("d1"), float("inf"))
        async with _client(server) as client:
            await client.place(_place("r"))
            assert server._scheduler._replicas["d1"].assignments
        await eventually(lambda: not server._scheduler._replicas["d1"].assignments)


async def test_a_scheduler_that_stops_takes_nobody_s_workers_away() -> None:
    """What gateways know last is what they place by until its successor is there."""
    for _ in range(4):
        async with _server() as server:
            for name in ("d1", "d2"):
                worker = await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
                await worker.send(Register(info=_info(name), snapshot=_snapshot(name)))
            async with _client(server) as client:
                await eventually(lambda: len(client.workers) == 2)
                await server.stop()
                await eventually(lambda: client._connection is None)
                assert len(client.workers) == 2


async def test_answers_become_the_errors_that_clients_are_told() -> None:
    async with _server(max_queued_tokens=10) as server, _client(server) as client:
        with pytest.raises(UnavailableError):
            await client.place(_place())
        server._scheduler.register(_info("d1"), _snapshot("d1", queued_prefill_tokens=5000), float("inf"))
        await eventually(lambda: "d1" in client.workers)
        with pytest.raises(RequestTooLargeError):
            await client.place(_place(num_tokens=2000))
        with pytest.raises(OverloadedError) as overloaded:
            await client.place(_place())
        assert overloaded.value.retry_after_s == pytest.approx(4.99)


# --- a gateway without its scheduler ---


async def _nowhere() -> Endpoint:
    raise OSError("the scheduler is down")


def _alone(*workers: tuple[WorkerInfo, WorkerSnapshot]) -> SchedulerClient:
    client = SchedulerClient(_identity("gateway"), _nowhere, lambda workers: None)
    client.workers = {info.worker_id: (info, snapshot) for info, snapshot in workers}
    return client


def _known(worker_id: str, load: int = 0, draining: bool = False, **info: object) -> tuple[WorkerInfo, WorkerSnapshot]:
    return _info(worker_id, **info), _snapshot(worker_id, queued_prefill_tokens=load, draining=draining)


async def test_alone_the_better_of_two_is_taken() -> None:
    client = _alone(_known("p1", 500), _known("p2"), _known("d1"), _known("d2", 500))
    for n in range(8):
        answer = await client.place(_place(f"r{n}"))
        assert (answer.prefill, answer.decode) == ("p2", "d1")


async def test_alone_the_rules_on_who_can_take_it_stay() -> None:
    client = _alone(
        _known("p1", draining=True),
        _known("p2", compatibility="other"),
        _known("p3", max_model_len=99),
        _known("p4", 9000),
        _known("d1", draining=True),
        _known("d2", max_model_len=110),
        _known("d3", 9000),
    )
    for n in range(16):
        answer = await client.place(_place(f"r{n}"))
        assert (answer.prefill, answer.decode) == ("p4", "d3")
        answer = await client.place(_place(f"r{n}", attempt=1, exclude=["p4", "d3"]))
        assert (answer.prefill, answer.decode) == (None, "d3"), "the one that failed is better than none"


async def test_alone_without_any_decode_worker_there_is_none() -> None:
    with pytest.raises(UnavailableError):
        await _alone(_known("p1")).place(_place())


async def test_a_new_scheduler_s_ignorance_does_not_count() -> None:
    """It turns a request away, and in the next moment hears of a worker that the gateway has known all along."""
    client = _alone(_known("d1"))
    answer: asyncio.Future[Placement | Unplaceable] = asyncio.get_running_loop().create_future()
    client._waiting["r", 0] = answer
    client._settles_at = float("inf")
    client._on_message(Replicas(workers=[]))
    client._on_message(Unplaceable(request_id="r", attempt=0, reason="no decode worker is ready", retry_after_s=1.0))
    client._on_message(Replicas(workers=[_known("p1"), _known("d2")]))
    assert isinstance(answer.exception(), TransportError), "the gateway places it itself"
    assert client.workers.keys() == {"p1", "d2"}


async def test_a_late_answer_is_none_to_a_newer_attempt() -> None:
    client = _alone(_known("d1"))
    newer: asyncio.Future[Placement | Unplaceable] = asyncio.get_running_loop().create_future()
    client._waiting["r", 1] = newer
    client._on_message(Placement(request_id="r", attempt=0, prefill=None, decode="dead"))
    assert not newer.done()
    client._on_message(Placement(request_id="r", attempt=1, prefill=None, decode="d1"))
    assert newer.done()
