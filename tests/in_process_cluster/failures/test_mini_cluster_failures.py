"""Deaths, failures and drains in a mini cluster, which its requests survive."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from contextlib import AsyncExitStack, aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cluster.errors import DeadlineError, FailedError, PoisonRequestError
from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.gateway.placing import Placer
from cluster.gateway.request_state import RequestRun
from cluster.slo.classes import RequestTerms
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.sampling.params import SamplingParams
from kv_transfer.handoff import sender
from kv_transfer.messages import Message
from kv_transfer.messages.requests import StepFrame
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import Brake, brake, cluster_of
from tests.support.clusters.mini_requests import (
    PROMPT,
    broken,
    busy,
    fail_once,
    interrupted,
    is_long,
    prefills_braked,
    sampled,
    sees_draining,
    tokens,
    tokens_of,
)
from tests.support.clusters.placed_clusters import run
from tests.support.small_models import SmallModel, greedy
from tests.support.thoroughness import in_test_long
from tests.support.waiting import HANGS_S, eventually

# --- deaths and failures ---


@pytest.mark.parametrize("params", [greedy(), sampled(9)], ids=["greedy", "drawn by a grammar"])
@pytest.mark.parametrize("num_prefill", [1, 2])
async def test_a_prefill_s_death_in_the_middle_of_a_hand_off_is_not_noticed(
    llama: SmallModel, num_prefill: int, params: SamplingParams
) -> None:
    """Another one computes the prompt under the same reservation; or decode itself, if there is none."""
    async with cluster_of(llama, num_prefill=num_prefill, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        dying = cluster.prefills[0]
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, params))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            dying = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            death = asyncio.create_task(cluster.remove(dying))
            await asyncio.sleep(0)
            for one in held:
                one.release()
            await death
            assert tokens_of(await request) == llama.local(PROMPT, params).tokens


async def test_a_first_token_that_was_lost_on_its_way_comes_of_another_attempt(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The connection to its prefill worker breaks when the KV has been handed over and decode's tokens are there."""
    async with cluster_of(llama) as cluster:
        gateway, prefill = cluster.orchestrator, cluster.prefills[0]
        take_in = gateway.connections._on_message

        def cut(worker_id: str, message: Message) -> None:
            if worker_id == prefill.info.worker_id and isinstance(message, StepFrame):
                return  # it is lost with the connection
            take_in(worker_id, message)
            if any(run._early for run in gateway.runs.values()):
                for connection in prefill.connections:
                    connection.abort()

        monkeypatch.setattr(gateway.connections, "_on_message", cut)
        found = await asyncio.wait_for(cluster.generate("r", PROMPT, greedy(40)), HANGS_S)
        assert tokens_of(found) == llama.local(PROMPT, greedy(40)).tokens
        assert found[0].attempt > 0 and not len(gateway._quarantine)


@pytest.mark.parametrize("after", [1, 2, 12])
async def test_a_decode_s_death_is_not_noticed(llama: SmallModel, after: int) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        found = await interrupted(cluster, greedy(40), after, lambda: cluster.remove(busy(cluster)))
        assert found == llama.local(PROMPT, greedy(40)).tokens


@pytest.mark.parametrize(
    "family",
    [
        *("gpt-oss", "gemma3n_text", "deepseek-v3", "phi-3-long", "glm-4", "glm-4-moe", "olmoe"),
        *in_test_long("deepseek-v2", "qwen2-moe", "olmo-3"),
    ],
)
async def test_a_decode_s_death_is_not_noticed_of_other_kinds_of_models(family: str, tmp_path: Path) -> None:
    """Those that transformers computes, and those with sinks, with a latent for KV, with an MLP beside experts, or
    whose heads turn in part or are normalised together."""
    model = SmallModel(family, tmp_path)
    async with cluster_of(model, num_decode=2) as cluster:
        found = await interrupted(cluster, greedy(40), 12, lambda: cluster.remove(busy(cluster)))
        assert found == model.hugging_face(PROMPT, 40, guess=found)


async def test_a_request_waits_for_the_successor_of_the_only_decode_worker(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:

        async def replace() -> None:
            await cluster.remove(cluster.decodes[0])
            asyncio.get_running_loop().call_later(0.4, lambda: asyncio.ensure_future(cluster.add_decode()))

        assert await interrupted(cluster, greedy(40), 5, replace) == llama.local(PROMPT, greedy(40)).tokens
        assert len(cluster.decodes) == 1


async def test_requests_are_placed_without_a_scheduler_and_by_its_successor(llama: SmallModel) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        found = await interrupted(cluster, greedy(), 4, cluster.scheduler.stop)
        assert found == expected
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        alone = await asyncio.gather(*(tokens(cluster, f"alone{n}", PROMPT, greedy()) for n in range(8)))
        assert alone == [expected] * 8
        await cluster.start_scheduler()
        for n in range(20):  # across the moment when the new scheduler knows the gateway and no worker yet
            assert await tokens(cluster, f"again{n}", PROMPT, greedy()) == expected
            assert cluster.orchestrator.limits() is not None
        await eventually(lambda: len(cluster.scheduler.scheduler.snapshot().workers) == 4)


async def test_without_a_scheduler_dead_workers_are_not_waited_for(llama: SmallModel) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    patient = OrchestratorConfig(link_timeout_s=2 * HANGS_S)
    async with cluster_of(llama, num_prefill=2, num_decode=2, orchestrator=patient) as cluster:
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        assert await interrupted(cluster, greedy(), 4, lambda: cluster.remove(busy(cluster))) == expected
        await cluster.remove(cluster.prefills[0])
        for n in range(8):
            assert await asyncio.wait_for(tokens(cluster, f"r{n}", PROMPT, greedy()), HANGS_S) == expected


async def test_who_gets_no_token_from_a_lively_worker_goes_on_elsewhere(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its event loop answers and tells of no step that is overdue, so the sequence may as well wait for blocks: that is
    no fault, and nobody is suspected."""
    next_attempt = RequestRun.next_attempt
    a_token_each = DecodeWorkerConfig(speculation=None)  # else the ballast may be over before the request is placed
    async with cluster_of(llama, num_decode=2, decode=a_token_each) as cluster, AsyncExitStack() as stack:
        gateway = cluster.orchestrator
        patient = gateway._config
        suspected: list[int] = []
        faults: list[int] = []
        ballast = await stack.enter_async_context(aclosing(cluster.stream("ballast", PROMPT[:9], greedy(200))))
        await anext(ballast)
        await anext(ballast)
        chosen = next(worker for worker in cluster.decodes if not worker.gateway_of)

        async def hang() -> None:
            assert chosen.gateway_of, "it was placed where there was less to do, and would be again"
            stack.enter_context(brake(chosen.model.runner))
            gateway._config = replace(patient, stall_s=0.3)

        def elsewhere(run: RequestRun, *attempt: Any) -> None:
            gateway._config = patient  # whoever goes on with it may be slow
            suspected.append(len(gateway._quarantine))
            next_attempt(run, *attempt)
            faults.append(run.num_faults)

        monkeypatch.setattr(RequestRun, "next_attempt", elsewhere)
        found = await asyncio.wait_for(interrupted(cluster, greedy(40), 5, hang), HANGS_S)
        assert found == llama.local(PROMPT, greedy(40)).tokens
        assert suspected and not any(suspected) and not any(faults)


async def test_who_gets_no_token_stays_where_nobody_else_has_room(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until somebody has: it asks again whenever it has waited as long."""
    next_attempt, has_room = RequestRun.next_attempt, Placer.has_room
    answers: list[bool | None] = []
    later: list[asyncio.Task[None]] = []

    async def asked(placer: Placer, run: RequestRun, worker_id: str) -> bool | None:
        if not answers:  # both workers have reported what they hold
            reports = cluster.scheduler.scheduler.ledger.workers
            await eventually(lambda: all(snapshot.blocks_available <= 8 for _, snapshot in reports()))
        answer = await has_room(placer, run, worker_id)
        if run.request_id == "interrupted":
            answers.append(answer)
        return answer

    monkeypatch.setattr(Placer, "has_room", asked)
    a_token_each = DecodeWorkerConfig(speculation=None)
    async with (
        cluster_of(llama, num_prefill=0, num_decode=2, decode=a_token_each, decode_engine={"kv_blocks": 18}) as cluster,
        AsyncExitStack() as stack,
    ):
        gateway = cluster.orchestrator
        patient = gateway._config
        ballast = await stack.enter_async_context(aclosing(cluster.stream("ballast", PROMPT, greedy(100))))
        await anext(ballast)
        await anext(ballast)

        async def hang() -> None:
            held = [stack.enter_context(brake(worker.model.runner)) for worker in cluster.decodes]
            gateway._config = replace(patient, stall_s=0.05)
            later.append(asyncio.create_task(make_room(held)))

        async def make_room(held: list[Brake]) -> None:
            await eventually(lambda: any(answers) or len(answers) >= 3)
            assert not any(answers) and gateway.runs["interrupted"].attempt == 0
            full = next(n for n, worker in enumerate(cluster.decodes) if worker is not home())
            held[full].release()
            await ballast.aclose()

        def home() -> DecodeWorker:
            placement = gateway.runs["interrupted"].placement
            assert placement is not None
            return next(w for w in cluster.decodes if w.info.worker_id == placement.decode)

        def elsewhere(run: RequestRun, *attempt: Any) -> None:
            gateway._config = patient  # whoever goes on with it may be slow
            next_attempt(run, *attempt)

        monkeypatch.setattr(RequestRun, "next_attempt", elsewhere)
        found = await asyncio.wait_for(interrupted(cluster, greedy(40), 5, hang), 2 * HANGS_S)
        assert found == llama.local(PROMPT, greedy(40)).tokens
        await asyncio.gather(*later)
        assert answers.count(True) == 1


@pytest.mark.parametrize("comes", ["too late", "with a token"])
async def test_who_was_to_go_elsewhere_and_stays_is_counted_where_it_is(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch, comes: str
) -> None:
    """The scheduler counts it where it has room as soon as it says so; but the answer comes too late, or a token does
    before it."""
    has_room = Placer.has_room
    elsewhere: list[set[str]] = []
    going_on: list[asyncio.Task[None]] = []
    async with (
        cluster_of(llama, num_prefill=0, num_decode=2, decode=DecodeWorkerConfig(speculation=None)) as cluster,
        AsyncExitStack() as stack,
    ):
        gateway, ledger = cluster.orchestrator, cluster.scheduler.scheduler.ledger
        patient = gateway._config
        names = {worker.info.worker_id for worker in cluster.decodes}
        held: list[Brake] = []

        async def asked(placer: Placer, run: RequestRun, worker_id: str) -> bool | None:
            gateway._config = patient
            assert await has_room(placer, run, worker_id)
            elsewhere.append({name for name in names - {worker_id} if ledger.booked_on(name)})
            going_on.append(asyncio.create_task(go_on(worker_id)))
            if comes == "too late":
                return None
            num_emitted = len(run.emitted)
            held[0].release()
            await eventually(lambda: len(run.emitted) > num_emitted)
            return True

        async def go_on(worker_id: str) -> None:
            await eventually(lambda: {name for name in names if ledger.booked_on(name)} == {worker_id})
            assert gateway.runs["interrupted"].attempt == 0
            for one in held:
                one.release()

        async def hang() -> None:
            runner = busy(cluster).model.runner
            held.append(stack.enter_context(brake(runner)))
            held.append(stack.enter_context(brake(runner, is_long(len(PROMPT) + 10))))
            gateway._config = replace(patient, stall_s=0.05)

        monkeypatch.setattr(Placer, "has_room", asked)
        found = await asyncio.wait_for(interrupted(cluster, greedy(40), 5, hang), 2 * HANGS_S)
        await asyncio.gather(*going_on)
        assert found == llama.local(PROMPT, greedy(40)).tokens
        assert [len(others) for others in elsewhere] == [1]


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_step_that_fails_costs_another_attempt_and_no_token(llama: SmallModel, role: str) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        for worker in cluster.prefills if role == "prefill" else cluster.decodes:
            fail_once(worker.model.runner)
        found = await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT[n:], greedy()) for n in range(4)))
        assert found == [llama.local(PROMPT[n:], greedy()).tokens for n in range(4)]
        assert all(worker.is_healthy for worker in cluster.workers)


async def test_a_reservation_whose_prefill_falls_silent_lapses_and_the_request_goes_on(llama: SmallModel) -> None:
    # Long enough that the other worker's own keep-alives come in time on a busy machine.
    config = DecodeWorkerConfig(lease_ttl_s=1.5)
    async with cluster_of(llama, num_prefill=2, decode=config, prefill=PrefillWorkerConfig(chunk_tokens=64)) as cluster:
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            silent = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            silent.sender.stop()  # its keep-alives
            next(one for one in held if not one.holding.is_set()).release()
            await eventually(lambda: request.done() or cluster.orchestrator.runs["r"].attempt > 0)
            for one in held:  # the next attempt may be the silent one's again
                one.release()
            found = await asyncio.wait_for(request, HANGS_S)
            assert tokens_of(found) == llama.local(PROMPT, greedy()).tokens


async def test_a_decode_that_nobody_can_hand_kv_to_fails_no_request(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its gateways hear it, so the scheduler sends it requests until prefill workers have told that they try in vain;
    then another decode worker has the request. Without another one it computes the prompt itself."""
    monkeypatch.setattr(sender, "UNREACHABLE_S", 10 * HANGS_S)
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        with socket.socket() as nobody:
            nobody.bind(("127.0.0.1", 0))
            cut_off, other = cluster.decodes
            machine = cut_off.reservations.receiver.machine
            machine.endpoint = replace(machine.endpoint, port=nobody.getsockname()[1])
            requests = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy())) for n in range(4)]
            found = [await asyncio.wait_for(request, HANGS_S) for request in requests]
            assert cut_off.model.block_pool.num_leases == 0, "reservations are left that nobody needs"
            assert max(events[0].attempt for events in found) > 0, "nobody was sent there"
            unreachable = cluster.scheduler.scheduler.ledger.table.unreachable
            told = {prefill.info.worker_id: {cut_off.info.worker_id} for prefill in cluster.prefills}
            await eventually(lambda: unreachable == told)
            for number in range(4):
                found.append(await asyncio.wait_for(cluster.generate(f"later{number}", PROMPT, greedy()), HANGS_S))
                assert found[-1][0].attempt == 0, "it was sent there in vain"
            await cluster.retire(other)
            found.append(await asyncio.wait_for(cluster.generate("alone", PROMPT, greedy()), HANGS_S))
            assert {tuple(tokens_of(events)) for events in found} == {tuple(llama.local(PROMPT, greedy()).tokens)}


async def test_a_reservation_outlives_every_prefill_that_dies(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each has computed the prompt, and is handing it over. None has said that decode takes nothing."""
    copies_in = threading.Event()
    config = DecodeWorkerConfig(lease_ttl_s=HANGS_S)
    async with cluster_of(llama, num_prefill=3, num_decode=2, decode=config) as cluster, AsyncExitStack() as stack:
        stack.callback(copies_in.set)
        for worker in cluster.decodes:
            monkeypatch.setattr(worker.reservations.receiver, "_mark_queued", lambda: copies_in)
        request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
        await eventually(lambda: "r" in cluster.orchestrator.runs)
        going = cluster.orchestrator.runs["r"]
        reserved_on: list[str] = []
        while len(reserved_on) < 3:
            await eventually(lambda: len(going.emitted) > len(reserved_on))
            assert going.attempt == len(reserved_on) and going.placement is not None
            reserved_on.append(going.placement.decode)
            if len(reserved_on) < 3:
                prefill = going.placement.prefill
                await cluster.remove(next(w for w in cluster.prefills if w.info.worker_id == prefill))
        assert len(set(reserved_on)) == 1, "its blocks were given up"
        copies_in.set()
        assert tokens_of(await asyncio.wait_for(request, HANGS_S)) == llama.local(PROMPT, greedy()).tokens


async def test_a_request_ends_at_its_deadline(llama: SmallModel) -> None:
    async with cluster_of(llama, orchestrator=OrchestratorConfig(request_deadline_s=0.3)) as cluster:
        told = "within 0.3 s|before its deadline"  # which on a busy machine may come while it is placed
        with brake(cluster.prefills[0].model.runner), pytest.raises(DeadlineError, match=told):
            await cluster.generate("r", PROMPT, greedy())


async def test_a_request_may_bring_a_deadline_of_its_own(llama: SmallModel) -> None:
    async with cluster_of(llama, orchestrator=OrchestratorConfig(request_deadline_s=1e-9)) as cluster:
        with pytest.raises(DeadlineError):
            await run(cluster, "r", RequestTerms())
        terms = RequestTerms(deadline=time.monotonic() + HANGS_S)
        assert await run(cluster, "s", terms) == llama.local(PROMPT, greedy(8)).tokens


async def test_a_request_that_fails_everywhere_fails(llama: SmallModel) -> None:
    config = OrchestratorConfig(max_attempts=3, retry_delay_s=0.01)
    silent = DecodeWorkerConfig(heartbeat_s=HANGS_S)  # else nobody is sent to a worker that has failed so often
    async with cluster_of(llama, orchestrator=config, decode=silent) as cluster:
        runner = cluster.decodes[0].model.runner
        with broken(runner), pytest.raises(FailedError, match="3 times"):
            await cluster.generate("r", PROMPT, greedy())
        assert await tokens(cluster, "next", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_a_grammar_that_fails_on_its_way_ends_its_request_alone(llama: SmallModel) -> None:
    """No gateway would send it."""
    config = OrchestratorConfig(max_attempts=3, retry_delay_s=0.01)
    async with cluster_of(llama, num_decode=2, orchestrator=config) as cluster:
        beside = asyncio.create_task(tokens(cluster, "beside", PROMPT, greedy(40)))
        with pytest.raises((FailedError, PoisonRequestError)):  # by where it was tried
            await cluster.generate("r", PROMPT[:20], greedy(grammar="start: /[/"))
        assert await beside == llama.local(PROMPT, greedy(40)).tokens


# --- drain ---


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(llama: SmallModel, role: str) -> None:
    expected = llama.local(PROMPT, greedy()).tokens
    async with cluster_of(llama, num_prefill=2, num_decode=2) as cluster:
        worker = cluster.prefills[0] if role == "prefill" else cluster.decodes[0]
        with brake(worker.model.runner) as held:
            before = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy())) for n in range(4)]
            await held.reached()
            drain = asyncio.create_task(worker.drain(HANGS_S))
            await eventually(lambda: sees_draining(cluster))
            num_held = len(worker.gateway_of)
            during = [asyncio.create_task(cluster.generate(f"d{n}", PROMPT, greedy())) for n in range(4)]
            assert [tokens_of(await request) for request in during] == [expected] * 4
            assert len(worker.gateway_of) == num_held and not drain.done()
        await asyncio.wait_for(drain, HANGS_S)
        assert [tokens_of(await request) for request in before] == [expected] * 4
        assert not worker.gateway_of


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_request_placed_on_a_worker_that_begins_to_drain_goes_elsewhere(llama: SmallModel, role: str) -> None:
    """Before the scheduler hears of it: no client is turned away because a worker is being replaced."""
    expected = llama.local(PROMPT, greedy()).tokens
    prefill, decode = PrefillWorkerConfig(heartbeat_s=HANGS_S), DecodeWorkerConfig(heartbeat_s=HANGS_S)
    async with cluster_of(llama, num_prefill=2, num_decode=2, prefill=prefill, decode=decode) as cluster:
        worker = cluster.prefills[0] if role == "prefill" else cluster.decodes[0]
        await worker.drain(0.0)
        assert not sees_draining(cluster)
        assert await asyncio.gather(*(tokens(cluster, f"r{n}", PROMPT, greedy()) for n in range(4))) == [expected] * 4
        assert not worker.gateway_of


async def test_a_worker_whose_last_sequence_fails_is_drained(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2) as cluster:
        for worker in cluster.decodes:
            fail_once(worker.model.runner)
        with brake(cluster.prefills[0].model.runner) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            worker = busy(cluster)
            drain = asyncio.create_task(worker.drain(HANGS_S))
            await asyncio.sleep(0)
        await asyncio.wait_for(drain, HANGS_S)
        assert tokens_of(await request) == llama.local(PROMPT, greedy()).tokens
