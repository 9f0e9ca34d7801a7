"""The scheduler's server over real connections, and a gateway with and without it."""

from __future__ import annotations

import asyncio
import json
import math
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.autoscaling.controller import ModelExchange, Order
from cluster.autoscaling.sizing import PoolRules, PoolsPlan
from cluster.errors import ConflictError, OverloadedError, RequestTooLargeError, UnavailableError
from cluster.gateway import scheduler_client
from cluster.gateway.line_log import LineLog
from cluster.gateway.placing import Placer
from cluster.gateway.request_state import RequestRun
from cluster.gateway.scheduler_client import SchedulerClient
from cluster.gateway.worker_connections import WorkerConnections
from cluster.scheduler.placement import ledger
from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.scheduler.placement.retry_after import MIN_RETRY_AFTER_S
from cluster.scheduler.scheduler import SchedulerPolicy
from cluster.scheduler.server import ModelRules, SchedulerServer
from engine.sampling.params import SamplingParams
from kv_transfer.connections.connection import Connection, Server, connect
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint, RequestSpec
from kv_transfer.messages.scheduling import ClusterSnapshot, Place, Placement, StandingRequest, Unplaceable
from kv_transfer.messages.workers import (
    ChangeRole,
    Heartbeat,
    KnownWorker,
    Loading,
    LoadingReport,
    Register,
    WorkerInfo,
    WorkerSnapshot,
)
from kv_transfer.transports.base import Identity, LinkClosedError
from kv_transfer.worker.port import telling_of_loading
from tests.cluster.scheduler.scheduler_world import place, small_info, small_snapshot
from tests.support.clusters.worker_reports import REPORT
from tests.support.waiting import HANGS_S, eventually


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway places nothing itself because this machine is busy."""
    monkeypatch.setattr(scheduler_client, "PLACE_TIMEOUT_S", HANGS_S)


# --- over real connections ---


def _identity(worker_id: str) -> Identity:
    return Identity(worker_id=worker_id, node_id="node", secret=b"secret of the test", compatibility={})


@asynccontextmanager
async def _server(
    models: Sequence[str] = ("model",),
    *,
    period_s: float = 0.05,
    decision_log: LineLog | None = None,
    pools: PoolsPlan | None = None,
    unsized: Collection[str] = (),
    **policy: object,
) -> AsyncIterator[SchedulerServer]:
    """`pools`: of each model but those that are `unsized`."""
    rules = ModelRules(policy=SchedulerPolicy(**{"stale_after_s": HANGS_S, **policy}), pools=pools)  # type: ignore[arg-type]
    of_models = {name: replace(rules, pools=None) if name in unsized else rules for name in models}
    server = SchedulerServer(of_models, _identity("scheduler"), broadcast_period_s=period_s, decision_log=decision_log)
    await server.start("127.0.0.1")
    try:
        yield server
    finally:
        await server.stop()


@asynccontextmanager
async def _scripted(scheduler: Callable[[Connection], Awaitable[None]]) -> AsyncIterator[Server]:
    """What a gateway takes for the scheduler."""
    server = Server("127.0.0.1", _identity("scheduler"), scheduler)
    try:
        yield server
    finally:
        await server.close()


@asynccontextmanager
async def _client(
    server: SchedulerServer | Server, standing: Sequence[StandingRequest] = (), *, knows: Sequence[KnownWorker] = ()
) -> AsyncIterator[SchedulerClient]:
    """Connected; `knows`: the workers that it has heard of from an earlier scheduler."""

    async def locate() -> Endpoint:
        return server.endpoint

    client = SchedulerClient(
        _identity("gateway"), locate, _no_connections(), lambda workers: None, standing=lambda: list(standing)
    )
    client.workers = {info.worker_id: (info, snapshot) for info, snapshot in knows}
    client.start()
    try:
        await eventually(lambda: client.connection is not None)
        yield client
    finally:
        await client.stop()


async def test_workers_whose_sums_have_other_bits_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    sums = {"d1": "tiles (AMX)", "d2": "tiles (AMX)", "d3": "registers"}
    workers = []
    async with _server() as server:
        for name, arithmetic in sums.items():
            worker = await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
            info = replace(small_info(name), arithmetic=arithmetic)
            await worker.send(Register(info=info, snapshot=small_snapshot(name)))
            await eventually(lambda name=name: name in server.scheduler.ledger.table)  # type: ignore[misc]
            workers.append(worker)  # or its link would end with it
        told = [message for message in caplog.messages if "LEGATO_NATIVE" in message]
        assert [message.partition(":")[0] for message in told] == [
            "worker d3 computes by registers and d1 by tiles (AMX)"
        ]


async def test_a_worker_that_was_silent_too_long_is_told_to_register_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker stalls, counts as gone, and goes on reporting: it must not be lost for ever."""
    async with _server(stale_after_s=0.1) as server:
        register, known = server.scheduler.register, list[str]()

        def note(info: WorkerInfo, snapshot: WorkerSnapshot, now: float) -> None:
            register(info, snapshot, now)
            known.append(info.worker_id)

        monkeypatch.setattr(server.scheduler, "register", note)
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=small_info("d1"), snapshot=small_snapshot("d1")))
        await eventually(lambda: known == ["d1"])  # for how long is not ours to see
        await eventually(lambda: not server.scheduler.snapshot().workers)
        await worker.send(Heartbeat(snapshot=small_snapshot("d1", 2)))
        with pytest.raises(LinkClosedError, match="register again"):
            await asyncio.wait_for(worker.receive(), HANGS_S)


async def test_the_end_of_an_old_connection_does_not_take_the_worker_away() -> None:
    async with _server() as server:
        old = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await old.send(Register(info=small_info("d1"), snapshot=small_snapshot("d1")))
        await eventually(lambda: "d1" in server.scheduler.ledger.table)
        first = server.connection_of("d1")
        new = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await new.send(Register(info=small_info("d1"), snapshot=small_snapshot("d1", 2)))
        await eventually(lambda: server.connection_of("d1") is not first)
        old.close("its network is back")
        await eventually(lambda: first.closed is not None)
        await asyncio.sleep(0.05)
        assert [info.worker_id for info, _ in server.scheduler.snapshot().workers] == ["d1"]
        new.close("the end")
        await eventually(lambda: not server.scheduler.snapshot().workers)


async def test_what_runs_on_a_worker_counts_again_when_its_connection_is_back() -> None:
    async with _server() as server, _client(server) as client:
        for number in (1, 2):
            worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
            await worker.send(Register(info=small_info("d1"), snapshot=small_snapshot("d1", number)))
            await eventually(lambda: len(server.scheduler.snapshot().workers) == 1)
            if number == 1:
                await client.place(place("r"))
            assert len(server.scheduler.ledger) == 1
            worker.close("its network is gone")
            await eventually(lambda: not server.scheduler.snapshot().workers)
            assert len(server.scheduler.ledger) == 0
        client.ended("r")
        await eventually(lambda: not server.scheduler.num_unbooked)


async def test_a_worker_cannot_speak_for_another() -> None:
    async with _server() as server:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=small_info("d2"), snapshot=small_snapshot("d2")))
        with pytest.raises(LinkClosedError, match="not for d1"):
            await asyncio.wait_for(worker.receive(), HANGS_S)
        assert not server.scheduler.snapshot().workers


async def test_a_gateway_s_death_ends_its_requests() -> None:
    async with _server() as server:
        server.scheduler.register(small_info("d1"), small_snapshot("d1"), time.monotonic())
        async with _client(server) as client:
            await client.place(place("r"))
            assert len(server.scheduler.ledger) == 1
        await eventually(lambda: not len(server.scheduler.ledger))


async def test_a_gateway_tells_what_stands_when_it_comes_and_takes_it_along_when_it_goes() -> None:
    """However many there are."""
    standing = [
        StandingRequest(place=place(f"r{number}"), prefill=None, decode="d1", num_emitted=1) for number in range(2500)
    ]
    async with _server() as server:
        async with _client(server, standing):
            await eventually(lambda: server.num_asked == 2500)
            assert len(server.scheduler.ledger) == 0, "the worker is not known yet"
            server.scheduler.register(small_info("d1"), small_snapshot("d1"), time.monotonic())
            assert len(server.scheduler.ledger) == 2500
        await eventually(lambda: not server.num_asked)
        assert len(server.scheduler.ledger) == 0


async def test_what_a_gateway_places_itself_is_told_to_a_scheduler_that_was_too_slow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(scheduler_client, "SETTLE_S", HANGS_S)
    async with _server() as server, _client(server, knows=[_known("d1")]) as client:
        assert (await client.place(place("r"))).decode == "d1", "the scheduler knows no worker"
        await eventually(lambda: server.scheduler.num_unbooked == 1)
        server.scheduler.register(small_info("d1"), small_snapshot("d1"), time.monotonic())
        assert len(server.scheduler.ledger) == 1
        client.ended("r")
        await eventually(lambda: not len(server.scheduler.ledger))


async def test_a_scheduler_that_stops_takes_nobody_s_workers_away() -> None:
    """What gateways know last is what they place by until its successor is there."""
    for _ in range(4):
        async with _server() as server:
            for name in ("d1", "d2"):
                worker = await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
                await worker.send(Register(info=small_info(name), snapshot=small_snapshot(name)))
            async with _client(server) as client:
                await eventually(lambda: len(client.workers) == 2)
                await server.stop()
                await eventually(lambda: client.connection is None)
                assert len(client.workers) == 2


async def test_answers_become_the_errors_that_clients_are_told() -> None:
    async with _server(admission=AdmissionPolicy(max_queued_tokens=10)) as server, _client(server) as client:
        with pytest.raises(UnavailableError):
            await client.place(place())
        server.scheduler.register(small_info("d1"), small_snapshot("d1", queued_prefill_tokens=5000), time.monotonic())
        await eventually(lambda: "d1" in client.workers)
        with pytest.raises(RequestTooLargeError):
            await client.place(place(num_tokens=2000))
        with pytest.raises(OverloadedError) as overloaded:
            await client.place(place())
        assert overloaded.value.retry_after_s == pytest.approx(4.99, rel=0.01)
        server.scheduler.register(small_info("big", max_model_len=3000), small_snapshot("big"), time.monotonic())
        server.scheduler.unregister("big", time.monotonic())
        with pytest.raises(UnavailableError):  # the only worker that is long enough is away
            await client.place(place(num_tokens=2000))


async def test_every_decision_is_in_the_decision_log_however_many_come(tmp_path: Path) -> None:
    """At once; the scheduler remembers ten."""
    path, names = tmp_path / "decisions.jsonl", [f"r{n}" for n in range(33)]

    async with _server(period_s=10 * HANGS_S, decision_log=LineLog(path), log_size=10) as server:
        async with _client(server) as client:
            for name in names:
                with pytest.raises(UnavailableError):
                    await client.place(place(name))
        await eventually(lambda: path.exists() and _written(path) == names)


async def test_placements_do_not_wait_for_the_disk_of_the_decision_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.scheduler.server.STOP_S", HANGS_S)
    path, names, may_write = tmp_path / "decisions.jsonl", [f"r{n}" for n in range(33)], threading.Event()

    class Held(LineLog):
        def append(self, lines: Iterable[str] = ()) -> None:
            assert may_write.wait(HANGS_S)
            super().append(lines)

    async with _server(period_s=10 * HANGS_S, decision_log=Held(path), log_size=10) as server:
        async with _client(server) as client:
            for name in names:
                with pytest.raises(UnavailableError):
                    await client.place(place(name))
        assert not path.exists()
        may_write.set()
    assert _written(path) == names


def _written(path: Path) -> list[str]:
    return [json.loads(line)["request_id"] for line in path.read_text().splitlines()]


# --- several models ---


async def test_each_model_is_placed_among_its_own_workers() -> None:
    async with _server(["a", "b"]) as server, _client(server) as client:
        for name in ("d1", "d2"):
            worker = await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
            info = small_info(name, model="a" if name == "d1" else "b")
            await worker.send(Register(info=info, snapshot=small_snapshot(name)))
        await eventually(lambda: len(client.workers) == 2)
        found = [(await client.place(place(f"r{n}", model=model))).decode for n, model in enumerate("abbabb")]
        assert found == ["d1", "d2", "d2", "d1", "d2", "d2"]
        booked = {name: len(of_model.ledger) for name in "ab" if (of_model := server.of_model(name)) is not None}
        assert booked == {"a": 2, "b": 4}
        client.ended("r1")
        client.ended("r3")
        await eventually(lambda: server.num_asked == 4)
        assert [len(scheduler.ledger) for name in "ab" if (scheduler := server.of_model(name))] == [1, 3]
        decisions = await client.decisions(10)
        assert [json.loads(line)["model"] for line in decisions] == list("bbabba")
        worker.close("the worker of b is gone")
        await eventually(lambda: list(client.workers) == ["d1"])
        with pytest.raises(UnavailableError):
            await client.place(place("r9", model="b"))
        assert (await client.place(place("r10", model="a"))).decode == "d1"


async def test_a_new_scheduler_is_believed_once_it_knows_workers_of_each_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then those that the gateway knows count, of the models that it knows none of yet."""
    monkeypatch.setattr(scheduler_client, "SETTLE_S", HANGS_S)
    knows = [_known("d1", model="a"), _known("d2", model="b")]
    async with _server(["a", "b"]) as server, _client(server, knows=knows) as client:
        first = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await first.send(Register(info=small_info("d1", model="a"), snapshot=small_snapshot("d1")))
        await eventually(lambda: len(server.scheduler.snapshot().workers) == 1)
        assert (await client.place(place("r1", model="a"))).decode == "d1"
        assert (await client.place(place("r2", model="b"))).decode == "d2", "it has not found the scheduler yet"
        second = await connect(server.endpoint, _identity("d3"), purpose="worker", timeout_s=HANGS_S)
        await second.send(Register(info=small_info("d3", model="b"), snapshot=small_snapshot("d3")))
        await eventually(lambda: set(client.workers) == {"d1", "d3"})
        assert (await client.place(place("r3", model="b"))).decode == "d3"


async def test_who_is_turned_away_while_a_worker_changes_its_model_is_told_when_it_will_be_there() -> None:
    admission = AdmissionPolicy(max_queued_tokens=10)
    async with _server(["a", "b"], admission=admission) as server, _client(server) as client:
        links: dict[str, Connection] = {}

        async def register(name: str, model: str, **snapshot: Any) -> None:
            links[name] = await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
            info = small_info(name, model=model, models=["a"] if model == "b" else ["b"], load_s=600.0)
            await links[name].send(Register(info=info, snapshot=small_snapshot(name, **snapshot)))

        async def told(request_id: str) -> float:
            with pytest.raises(OverloadedError) as overloaded:
                await client.place(place(request_id, model="a"))
            assert overloaded.value.retry_after_s is not None
            return overloaded.value.retry_after_s

        await register("d1", "a", queued_prefill_tokens=9_000_000, step_cost=REPORT)
        await register("d2", "b")
        await register("d3", "b")
        await eventually(lambda: len(client.workers) == 3)
        assert await told("r1") > 700.0
        await client.change_role("d2", "decode", 90.0, "a")
        order = await links["d2"].receive()
        assert order == ChangeRole(role="decode", drain_s=90.0, model="a", step_cost=REPORT)
        assert 500.0 < await told("r2") <= 600.0, "nothing runs there: it has drained"
        links["d2"].close("it loads the other model", in_order=True)
        await eventually(lambda: len(client.workers) == 2)
        assert 500.0 < await told("r3") <= 600.0
        await register("d2.1", "a")
        await eventually(lambda: len(client.workers) == 3)
        assert (await client.place(place("r4", model="a"))).decode == "d2.1"
        assert server.scheduler.ledger.joins_at == math.inf


async def test_gateways_hear_that_a_worker_takes_nothing_new_before_they_are_refused() -> None:
    """Who is told that no worker is there may be held until one is; who hears that workers are full gets 429."""
    async with _server(period_s=HANGS_S) as server, _client(server) as client:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=small_info("d1"), snapshot=small_snapshot("d1")))
        await eventually(lambda: "d1" in client.workers)
        for number, draining in enumerate((True, False, True), 2):
            await worker.send(Heartbeat(snapshot=small_snapshot("d1", number, draining=draining)))
            await eventually(lambda draining=draining: server.scheduler.leaves("d1") is draining)  # type: ignore[misc]
            if draining:
                with pytest.raises(UnavailableError):
                    await client.place(place(f"r{number}"))
            else:
                assert (await client.place(place(f"r{number}"))).decode == "d1"


async def test_a_new_scheduler_wants_the_workers_that_load_their_model_or_are_about_to_stop() -> None:
    """Else Serve would give those up that it has started, before they are there."""
    plan = PoolsPlan(prefill=PoolRules(max_workers=9), decode=PoolRules(max_workers=9), settle_s=10 * HANGS_S)
    async with _server(["a", "b"], pools=plan) as server:
        links = {
            name: await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
            for name in ("d1", "d2", "d3", "d4")
        }
        for name in ("d1", "d2"):
            snapshot = small_snapshot(name, draining=name == "d2")
            await links[name].send(Register(info=small_info(name, model="a"), snapshot=snapshot))
        for name, model in (("d3", "a"), ("d4", "b")):
            report = LoadingReport(worker_id=name, role="decode", model=model, home="decode", home_model=model, pid=1)
            await links[name].send(Loading(report=report))
        sizer = server._autoscalers["a"]._sizer
        await eventually(lambda: sizer._decode.size == 3, what="three are there, or on their way")
        assert sizer._prefill.size == 1


async def test_who_finds_no_worker_is_told_of_one_that_loads_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "HEARD_S", HANGS_S)
    async with _server(["a", "b"]) as server, _client(server) as client:
        links = {
            name: await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S) for name in "pd"
        }
        loading: tuple[tuple[str, Role, str], ...] = (("p", "prefill", "b"), ("d", "decode", "a"))
        for name, role, model in loading:
            report = LoadingReport(worker_id=name, role=role, model=model, home="decode", home_model="b", pid=1)
            await links[name].send(Loading(report=report))
        await eventually(lambda: len(server._loading) == 2)
        told = {}
        for model in "ab":
            with pytest.raises(UnavailableError) as unavailable:
                await client.place(place(model, model=model))
            told[model] = unavailable.value.retry_after_s
        assert told == {"a": pytest.approx(ledger.SOON_S), "b": MIN_RETRY_AFTER_S}


async def test_a_worker_of_a_pool_that_scales_keeps_its_model() -> None:
    """Serve would go on to count it as one of the pool that it was started in."""
    rules, fixed = PoolRules(max_workers=4), PoolRules(max_workers=4, scales=False)
    plan = PoolsPlan(prefill=fixed, decode=rules)
    async with _server(["a", "b"], pools=plan) as server, _client(server) as client:
        links: list[Connection] = []
        for name, home_model in (("d1", "a"), ("d2", "a"), ("d3", "b"), ("p1", "a"), ("p2", "a")):
            links.append(await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S))
            role = "prefill" if name.startswith("p") else "decode"
            info = small_info(name, role=role, model="a", models=["b"], home_model=home_model)
            await links[-1].send(Register(info=info, snapshot=small_snapshot(name)))
        await eventually(lambda: len(client.workers) == 5)
        with pytest.raises(ConflictError, match="d1 is of a pool with autoscaling"):
            await client.change_role("d1", "decode", 90.0, "b")
        await client.change_role("d1", "prefill", 90.0)
        await client.change_role("d3", "decode", 90.0, "b")
        await client.change_role("p1", "decode", 90.0, "b")


async def test_a_worker_that_is_with_another_model_is_still_of_its_own_ones_pool() -> None:
    plan = PoolsPlan(prefill=PoolRules(max_workers=4), decode=PoolRules(max_workers=4))
    async with _server(["a", "b", "c"], pools=plan, unsized=["a"]) as server, _client(server) as client:
        links: list[Connection] = []
        for name, home_model in (("d1", "a"), ("d2", "a"), ("d3", "b")):
            links.append(await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S))
            info = small_info(name, model="a", models=["b", "c"], home_model=home_model)
            await links[-1].send(Register(info=info, snapshot=small_snapshot(name)))
        await eventually(lambda: len(client.workers) == 3)
        with pytest.raises(ConflictError, match="d3 is of a pool with autoscaling"):
            await client.change_role("d3", "decode", 90.0, "c")
        await client.change_role("d1", "decode", 90.0, "c")


async def test_who_orders_a_worker_to_change_hears_that_it_may_not() -> None:
    """Else nobody else would be told to for ten minutes."""
    async with _server(["a", "b"]) as server:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=small_info("d1", model="a", models=["b"]), snapshot=small_snapshot("d1")))
        asked: list[str] = []

        class Orderer(ModelExchange):
            def orders(self, workers: Collection[KnownWorker], now: float) -> Iterator[Order]:
                if any(info.worker_id == "d1" for info, _ in workers):
                    yield "d1", ChangeRole(role="decode", drain_s=1.0, model="b")

            def refused(self, worker_id: str) -> None:
                asked.append(worker_id)

        server._exchange = Orderer({})
        await eventually(lambda: asked)
        assert asked[0] == "d1", "it is the only one of its model"


@pytest.mark.parametrize("dies", [False, True])
async def test_a_worker_that_changes_its_role_is_not_replaced_unless_it_dies_before(dies: bool) -> None:
    """What only it could hold never comes back, and is told so; and that of one which died when it was to go does."""
    async with _server() as server, _client(server) as client:
        links: dict[str, Connection] = {}
        for name, changes in (("d1", {}), ("d2", {"max_model_len": 3000}), ("p1", {"role": "prefill"})):
            links[name] = await connect(server.endpoint, _identity(name), purpose="worker", timeout_s=HANGS_S)
            await links[name].send(Register(info=small_info(name, **changes), snapshot=small_snapshot(name)))
        await eventually(lambda: len(client.workers) == 3)
        await client.change_role("d2", "prefill", 90.0)
        if dies:
            links["d2"].abort()
        else:
            links["d2"].close("it becomes a prefill worker", in_order=True)
        await eventually(lambda: len(client.workers) == 2)
        with pytest.raises(UnavailableError if dies else RequestTooLargeError):
            await client.place(place(num_tokens=2000))


async def test_a_model_that_is_not_served_is_nobodys() -> None:
    """Of several; of a single one nobody looks at its name."""
    async with _server(["a", "b"]) as server:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=small_info("d1", model="c"), snapshot=small_snapshot("d1")))
        with pytest.raises(LinkClosedError, match="there are a, b"):
            await asyncio.wait_for(worker.receive(), HANGS_S)
        standing = [StandingRequest(place=place("s", model="c"), prefill=None, decode="d1")]
        async with _client(server, standing) as client:
            with pytest.raises(UnavailableError, match="has no model c"):
                await client.place(place("r", model="c"))
            assert not server.num_asked
    async with _server(["a"]) as server, _client(server) as client:
        worker = await connect(server.endpoint, _identity("d1"), purpose="worker", timeout_s=HANGS_S)
        await worker.send(Register(info=small_info("d1", model="c"), snapshot=small_snapshot("d1")))
        await eventually(lambda: len(client.workers) == 1)
        assert (await client.place(place("r", model="c"))).decode == "d1"


# --- a gateway without its scheduler ---


def _no_connections() -> WorkerConnections:
    return WorkerConnections(_identity("gateway"), on_message=lambda *_: None, on_lost=lambda *_: None)


async def _nowhere() -> Endpoint:
    raise OSError("the scheduler is down")


def _alone(*workers: KnownWorker) -> SchedulerClient:
    client = SchedulerClient(_identity("gateway"), _nowhere, _no_connections(), lambda workers: None)
    client.workers = {info.worker_id: (info, snapshot) for info, snapshot in workers}
    return client


def _known(worker_id: str, load: int = 0, draining: bool = False, **info: object) -> KnownWorker:
    return small_info(worker_id, **info), small_snapshot(worker_id, queued_prefill_tokens=load, draining=draining)


async def test_alone_only_the_models_own_workers_are_taken() -> None:
    client = _alone(*(_known(name, model=name[1]) for name in ("pa", "da", "pb", "db")))
    for model in "abab":
        answer = await client.place(place("r", model=model))
        assert (answer.prefill, answer.decode) == (f"p{model}", f"d{model}")
    with pytest.raises(UnavailableError):
        await client.place(place("r", model="c"))


async def test_alone_the_better_of_two_is_taken() -> None:
    client = _alone(_known("p1", 500), _known("p2"), _known("d1"), _known("d2", 500))
    for n in range(8):
        answer = await client.place(place(f"r{n}"))
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
        answer = await client.place(place(f"r{n}"))
        assert (answer.prefill, answer.decode) == ("p4", "d3")
        answer = await client.place(place(f"r{n}", attempt=1, exclude=["p4", "d3"]))
        assert (answer.prefill, answer.decode) == (None, "d3"), "the one that failed is better than none"


async def test_alone_a_reservation_is_kept() -> None:
    """Whoever has failed and however busy it is: that decode worker has kept its blocks for the next attempt."""
    client = _alone(_known("p1"), _known("p2"), _known("d1", 9000), _known("d2"), _known("d3", draining=True))
    for n in range(16):
        answer = await client.place(place(f"r{n}", attempt=1, exclude=["p1"], prefer_decode="d1"))
        assert (answer.prefill, answer.decode) == ("p2", "d1")
        answer = await client.place(place(f"r{n}", attempt=2, prefer_decode="gone"))
        assert answer.decode == "d2"


async def test_alone_what_is_pooled_goes_to_any_worker_that_need_not_be_avoided() -> None:
    client = _alone(_known("p1"), _known("d1", 9000), _known("d2"))
    for n in range(16):
        assert (await client.place(place(f"r{n}", max_new_tokens=0))).decode == "p1"
        answer = await client.place(place(f"r{n}", attempt=1, max_new_tokens=0, exclude=["p1"]))
        assert answer.decode == "d2", "p1 is silent, and would be again"


async def test_alone_without_any_decode_worker_there_is_none() -> None:
    with pytest.raises(UnavailableError):
        await _alone(_known("p1")).place(place())


async def test_a_new_scheduler_s_ignorance_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """It turns a request away, and in the next moment hears of a worker that the gateway has known all along."""
    monkeypatch.setattr(scheduler_client, "SETTLE_S", HANGS_S)

    async def ignorant(gateway: Connection) -> None:
        gateway.post(ClusterSnapshot(workers=[]))
        await gateway.receive()
        gateway.post(Unplaceable(request_id="r", attempt=0, reason="no decode worker is ready", retry_after_s=1.0))
        await gateway.receive()  # where the gateway has placed it
        gateway.post(ClusterSnapshot(workers=[_known("p1"), _known("d2")]))
        async for _ in gateway:
            pass

    async with _scripted(ignorant) as server, _client(server, knows=[_known("d1")]) as client:
        assert (await client.place(place("r"))).decode == "d1", "the gateway places it itself"
        await eventually(lambda: client.workers.keys() == {"p1", "d2"})


async def test_a_late_answer_is_none_to_a_newer_attempt() -> None:
    async def late(gateway: Connection) -> None:
        await gateway.receive()
        gateway.post(Placement(request_id="r", attempt=0, prefill=None, decode="dead"))
        gateway.post(Placement(request_id="r", attempt=1, prefill=None, decode="d1"))
        async for _ in gateway:
            pass

    async with _scripted(late) as server, _client(server) as client:
        assert (await client.place(place("r", attempt=1))).decode == "d1"


async def test_a_late_word_on_whether_there_is_room_elsewhere_places_no_attempt(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(gateway: Connection) -> None:
        for asked, decode in [(await gateway.receive(), "full by now"), (await gateway.receive(), "d1")]:
            assert isinstance(asked, Place)
            gateway.post(Placement(request_id="r", attempt=asked.attempt, prefill=None, decode=decode))
        async for _ in gateway:
            pass

    params = SamplingParams(max_tokens=9, seed=0)
    run = RequestRun(RequestSpec(request_id="r", attempt=0, prompt_token_ids=[1, 2], params=params), deadline=math.inf)
    async with _scripted(late) as server, _client(server) as client:
        placer = Placer(client, _no_connections(), link_timeout_s=HANGS_S, retry_delay_s=HANGS_S)
        monkeypatch.setattr(scheduler_client, "PLACE_TIMEOUT_S", 0.01)
        assert await placer.has_room(run, "d0") is None, "nobody answers"
        monkeypatch.setattr(scheduler_client, "PLACE_TIMEOUT_S", HANGS_S)
        run.next_attempt("d0", "full")
        assert (await client.place(run.place_query(prefer_decode=None))).decode == "d1"


async def test_a_worker_that_has_loaded_stops_telling_even_as_the_scheduler_is_found() -> None:
    found: asyncio.Future[Endpoint] = asyncio.get_running_loop().create_future()

    async def locate() -> Endpoint:
        return await found

    def report() -> LoadingReport:
        return LoadingReport(
            worker_id="prefill", role="prefill", model="model", home="prefill", home_model="model", pid=1
        )

    async with (
        _server() as server,
        asyncio.timeout(HANGS_S),
        telling_of_loading(_identity("prefill"), report, locate),
    ):
        await asyncio.sleep(0.05)
        found.set_result(server.endpoint)
