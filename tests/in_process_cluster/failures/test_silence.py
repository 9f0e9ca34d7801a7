"""Workers that neither answer nor die: stopped, unplugged, or at a step that does not end. Whoever has another worker
goes there; whoever has none waits."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack, aclosing
from dataclasses import replace

import pytest

from cluster.gateway.orchestrator import LOOK_S, Orchestrator, OrchestratorConfig
from engine.cost_model.step_cost import StepCost
from kv_transfer.handoff.actions import ReceiverState
from kv_transfer.messages import Message
from kv_transfer.messages.requests import Endpoint, RequestSpec, TokenEvent
from kv_transfer.transports import choose
from kv_transfer.transports.choose import TransferConfig
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of
from tests.support.clusters.mini_requests import PROMPT, is_long, prefills_braked, tokens_of
from tests.support.clusters.worker_processes import goes_on, hang_beyond, hangs, tell_to_go_on, worker_processes
from tests.support.small_models import SmallModel, greedy
from tests.support.token_streams import one_by_one
from tests.support.waiting import HANGS_S, eventually

KNOWN = StepCost(base_s=0.01, prefill_token_s=1e-4, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=0.0)


# --- steps that do not end ---


async def test_a_hung_prefill_s_requests_go_elsewhere(llama: SmallModel) -> None:
    """Its event loop answers, its device does not."""
    chunked = PrefillWorkerConfig(chunk_tokens=64)
    async with cluster_of(llama, num_prefill=2, prefill=chunked, overdue_s=0.75) as cluster:
        with prefills_braked(cluster) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            hung = next(w for w, one in zip(cluster.prefills, held, strict=True) if one.holding.is_set())
            hung.steps.costs.seed(KNOWN)  # of no other worker: on a busy machine it might be late as well
            next(one for one in held if not one.holding.is_set()).release()
            found = await asyncio.wait_for(request, HANGS_S)
        assert tokens_of(found) == llama.local(PROMPT, greedy()).tokens
        assert found[0].attempt == 1


async def test_whoever_has_nowhere_else_to_go_waits_for_a_late_step(llama: SmallModel) -> None:
    async with cluster_of(llama, overdue_s=0.3) as cluster:
        decode = cluster.decodes[0]
        decode.steps.costs.seed(KNOWN)  # and not prefill's, who could be left for decode
        with brake(decode.model.runner, is_long(len(PROMPT) + 3)) as held:
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy(90)))
            await held.reached()
            connections = cluster.orchestrator.connections
            await eventually(lambda: decode.info.worker_id in connections.unresponsive())
            await asyncio.sleep(2 * LOOK_S)
        found = await request
        assert tokens_of(found) == llama.local(PROMPT, greedy(90)).tokens
        assert found[-1].attempt == 0
        await eventually(lambda: not connections.unresponsive())


async def test_a_gateway_that_comes_later_hears_of_a_late_step_too(llama: SmallModel) -> None:
    async with cluster_of(llama, num_decode=2, overdue_s=0.3) as cluster:
        expected = llama.local(PROMPT, greedy()).tokens
        with ExitStack() as stack:
            held = [stack.enter_context(brake(worker.model.runner)) for worker in cluster.decodes]
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await eventually(lambda: any(one.holding.is_set() for one in held))
            hung = next(w for w, one in zip(cluster.decodes, held, strict=True) if one.holding.is_set())
            hung.steps.costs.seed(KNOWN)
            next(one for one in held if not one.holding.is_set()).release()
            assert tokens_of(await asyncio.wait_for(request, HANGS_S)) == expected
            other = cluster.new_orchestrator()
            other.start()
            await eventually(lambda: other.connections.unresponsive() == {hung.info.worker_id})
            await other.stop()


# --- networks that swallow what is sent ---


class Cable:
    """A TCP port in front of another one, which can be cut: nothing comes through then, and nobody is told."""

    def __init__(self, endpoint: Endpoint) -> None:
        self._behind = endpoint
        self._is_cut = False
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> Endpoint:
        self._server = await asyncio.start_server(self._join, "127.0.0.1")
        return replace(self._behind, port=self._server.sockets[0].getsockname()[1])

    def cut(self) -> None:
        self._is_cut = True

    async def stop(self) -> None:
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._behind.host, self._behind.port)
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            self._tasks.append(asyncio.create_task(self._carry(source, sink)))

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            if not self._is_cut:
                sink.write(data)
                await sink.drain()
        sink.close()


async def test_a_hand_off_whose_peers_hear_nothing_of_each_other_is_begun_again(
    llama: SmallModel, caplog: pytest.LogCaptureFixture
) -> None:
    """Gateway and scheduler see both. It is given up because of that silence, and not when the reservation lapses."""
    caplog.set_level("INFO", logger="kv_transfer.handoff.sender")
    transfer, chunked = TransferConfig(transport="tcp"), PrefillWorkerConfig(chunk_tokens=64)
    async with cluster_of(
        llama, num_decode=2, transfer=transfer, prefill=chunked, kv_silence_s=choose.SILENCE_S
    ) as cluster:
        cables = []
        machines = [decode.reservations.receiver.machine for decode in cluster.decodes]
        for machine in machines:
            cables.append(Cable(machine.endpoint))
            machine.endpoint = await cables[-1].start()
        with prefills_braked(cluster) as (held,):
            request = asyncio.create_task(cluster.generate("r", PROMPT, greedy()))
            await held.reached()
            await eventually(lambda: any(machine.state("r") is ReceiverState.RECEIVING for machine in machines))
            for cable in cables:
                cable.cut()
        found = await asyncio.wait_for(request, HANGS_S)
        assert tokens_of(found) == llama.local(PROMPT, greedy()).tokens
        assert f"for {choose.SILENCE_S:g} s" in caplog.text
        for cable in cables:
            await cable.stop()


async def test_a_silent_scheduler_is_not_asked(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(message: Message) -> None:
        raise AssertionError("the scheduler is asked")

    async with cluster_of(llama) as cluster:
        cable = Cable(cluster.scheduler.endpoint)
        endpoint = await cable.start()

        async def locate() -> Endpoint:
            return endpoint

        gateway = Orchestrator(cluster.identity("cut off"), OrchestratorConfig(silence_s=1.0), locate)
        gateway.start()
        try:
            await eventually(lambda: (limits := gateway.limits()) is not None and limits.ready)
            cable.cut()
            connection = gateway.scheduler.connection
            assert connection is not None
            await eventually(lambda: connection.silent_s >= 1.0)
            assert gateway.scheduler.connection is connection
            monkeypatch.setattr(connection, "post_large", never)
            request = RequestSpec(request_id="r", attempt=0, prompt_token_ids=PROMPT, params=greedy())

            async def answer() -> list[TokenEvent]:
                return [event async for event in one_by_one(gateway.generate(request))]

            found = await asyncio.wait_for(answer(), HANGS_S)
            assert tokens_of(found) == llama.local(PROMPT, greedy()).tokens
        finally:
            await gateway.stop()
            await cable.stop()


# --- processes that are stopped ---


@pytest.fixture(scope="module")
def roomy(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("roomy"), max_position_embeddings=4096)


def is_back(cluster: MiniCluster, worker_id: str) -> bool:
    workers = cluster.orchestrator.scheduler.describe_workers()
    told = next((worker for worker in workers if worker["worker_id"] == worker_id), None)
    if told is None:  # it was away for so long that it has to register again
        return False
    return not (told["suspect"] or told["num_running"] or told["num_leases"]) and bool(told["connected"])


async def test_streams_of_a_stopped_worker_go_on_elsewhere(roomy: SmallModel, caplog: pytest.LogCaptureFixture) -> None:
    """First of the one that decodes, which is held in a step until it is stopped, then of the one that is to compute
    the prompt. They are left because they are silent, long before they would be taken for dead."""
    params = greedy(200)
    async with worker_processes(roomy, "prefill", "decode", "decode") as (cluster, workers):
        expected = tokens_of(await cluster.generate("undisturbed", PROMPT, params))
        decodes = {name: process for name, process in workers.items() if name.startswith("decode")}
        for process in decodes.values():
            await hang_beyond(process, len(PROMPT) + 100)
        gap_s, last_at, found, stopped, attempt = 0.0, time.monotonic(), list[TokenEvent](), "", 0
        async with aclosing(cluster.stream("r", PROMPT, params)) as events:
            while not found or found[-1].finish_reason is None:
                found.append(await asyncio.wait_for(anext(events), HANGS_S))
                gap_s, last_at = max(gap_s, time.monotonic() - last_at), time.monotonic()
                if len(found) == 50:
                    placement = cluster.orchestrator.runs["r"].placement
                    assert placement is not None
                    stopped, attempt = placement.decode, found[-1].attempt
                    await hangs(decodes.pop(stopped))
                    (other,) = decodes.values()
                    tell_to_go_on(other)
                    await goes_on(other)
                    os.kill(workers[stopped].pid, signal.SIGSTOP)
        assert tokens_of(found) == expected
        assert found[-1].attempt > attempt and f"the worker is silent ({stopped})" in caplog.text
        tell_to_go_on(workers[stopped])
        os.kill(workers[stopped].pid, signal.SIGCONT)
        await eventually(lambda: is_back(cluster, stopped), what="it did not let go of what had gone elsewhere")
        await cluster.scheduler.stop()  # without it every prompt is for a prefill worker, if there is one
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        prefill = next(name for name in workers if name.startswith("prefill"))
        os.kill(workers[prefill].pid, signal.SIGSTOP)
        began = time.monotonic()
        again = await asyncio.wait_for(cluster.generate("again", PROMPT, greedy(10)), HANGS_S)
        assert tokens_of(again) == expected[:10]
        assert again[0].attempt > 0 and f"the worker is silent ({prefill})" in caplog.text
        print(f"gaps: {gap_s:.2f} s without decode, {time.monotonic() - began:.2f} s without prefill")
