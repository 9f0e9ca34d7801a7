"""Accounts of promises over real workers: on whom requests were, and what scheduler and gateways tell each other."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.gateway.timeline import Attempt, RequestTimeline
from cluster.slo.account import SloAccount
from cluster.slo.classes import NO_TARGETS, RequestTerms, SloClass, SloConfig
from cluster.slo.report import Counts, Metric, SeriesKey, SloOutcome
from cluster.slo.tracker import SeriesSnapshot
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.messages.scheduling import SloUpdate
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig, brake, mini_cluster
from tests.support.http_server import MODEL
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

PROMPT = random_prompts([60], seed=3)[0]
GOLD = SloConfig(classes=(SloClass(name="gold"),), default="gold")


class Gateway:
    """As far as promises go: an orchestrator and an account."""

    def __init__(self, cluster: MiniCluster, classes: SloConfig) -> None:
        self.account = SloAccount(classes, models=[MODEL])
        self.orchestrator = cluster.new_orchestrator(self.account.on_report)

    async def serve(self, request_id: str, num_tokens: int) -> Attempt:
        """One request from its arrival to its last token; where it was served."""
        terms = RequestTerms(slo=self.account.classes.choose(None, {}), model=MODEL)
        timeline = RequestTimeline(endpoint="", terms=terms, slo_outcome=SloOutcome.FINISHED)
        request = RequestSpec(
            request_id=request_id, attempt=0, prompt_token_ids=PROMPT, params=greedy(num_tokens), cache_salt=request_id
        )
        timeline.parsed([request], len(PROMPT))
        (sequence,) = timeline.sequences
        self.account.follow(timeline)
        async for tokens in self.orchestrator.generate(request, sequence):
            timeline.num_generated_tokens += len(tokens)
            timeline.sent([0])
        timeline.ended()
        self.account.ended(timeline)
        (attempt,) = sequence.attempts
        return attempt

    def counts(self) -> dict[str, Counts]:
        """What it knows of the whole cluster."""
        return {snapshot.key.slo_class: snapshot.counts for snapshot in self.account.totals("cluster")}


@asynccontextmanager
async def gateway(cluster: MiniCluster, classes: SloConfig = NO_TARGETS) -> AsyncIterator[Gateway]:
    started = Gateway(cluster, classes)
    started.orchestrator.start()
    started.account.start(started.orchestrator.scheduler.publish_slo)
    try:
        wanted = {worker.info.worker_id for worker in cluster.workers}
        assert await started.orchestrator.connections.wait_up(wanted, HANGS_S)
        yield started
    finally:
        await started.account.stop()
        await started.orchestrator.stop()


def known(cluster: MiniCluster, replica: str = "") -> SeriesSnapshot:
    """What the scheduler knows of the class `default`."""
    return cluster.scheduler.slo.snapshot(time.monotonic(), SeriesKey("default", MODEL, replica))


async def test_the_scheduler_and_every_gateway_know_what_all_gateways_saw(llama: SmallModel) -> None:
    config = MiniClusterConfig(model_ref=str(llama.folder))
    async with mini_cluster(config) as cluster, gateway(cluster) as one, gateway(cluster) as other:
        prefill, decode = cluster.prefills[0].info.worker_id, cluster.decodes[0].info.worker_id
        for number, each in enumerate((one, other)):
            attempt = await each.serve(f"r{number}", 10 + number)
            assert (attempt.prefill, attempt.decode) == (prefill, decode)
        both = Counts(met=2, tokens=21, met_tokens=21)
        await eventually(lambda: known(cluster).counts == both)
        await eventually(lambda: one.counts() == other.counts() == {"default": both})
        (own,) = one.account.totals("gateway")
        assert own.counts.tokens == 10
        assert known(cluster, decode).latencies[Metric.GAP].count == 9 + 10
        assert known(cluster, prefill).latencies[Metric.QUEUE].count == 2
        latencies = known(cluster).latencies
        assert latencies[Metric.QUEUE].p50_s <= latencies[Metric.TTFT].p50_s * 1.03  # both within 1 %


async def test_a_gateway_with_other_classes_goes_on_uncounted(llama: SmallModel) -> None:
    config = MiniClusterConfig(model_ref=str(llama.folder))
    async with mini_cluster(config) as cluster, gateway(cluster, GOLD) as strange, gateway(cluster) as plain:
        await strange.serve("r0", 3)
        strange.account.publish_news()
        strange.orchestrator.scheduler.post(SloUpdate(report=b"no report"))
        await plain.serve("r1", 4)
        await strange.serve("r2", 5)  # placed over the same connection: it was not lost
        await eventually(lambda: known(cluster).counts.met == 1)
        assert [snapshot.key.slo_class for snapshot in cluster.scheduler.slo.totals(time.monotonic())] == ["default"]
        assert plain.counts() == {"default": Counts(met=1, tokens=4, met_tokens=4)}
        assert strange.counts() == {"gold": Counts(met=2, tokens=8, met_tokens=8)}


@pytest.mark.parametrize("num_prefill", [1, 0], ids=["prefill worker", "decode worker alone"])
async def test_queue_time_reaches_to_the_first_step(llama: SmallModel, num_prefill: int) -> None:
    config = MiniClusterConfig(model_ref=str(llama.folder), num_prefill=num_prefill)
    async with mini_cluster(config) as cluster, gateway(cluster) as one:
        began = time.monotonic()
        with brake(cluster.models[0].runner) as held:
            first = asyncio.create_task(one.serve("r0", 2))
            await held.reached()
            until_first_step_s = time.monotonic() - began
            second = asyncio.create_task(one.serve("r1", 2))
            await eventually(lambda: cluster.workers[0].scheduler.num_waiting == 1)
            waits_since = time.monotonic()
            await asyncio.sleep(0.5)  # which the second one waits, and the first one does not: it is being computed
            held_s = time.monotonic() - waits_since
        waited_s = [attempt.waited_s for attempt in await asyncio.gather(first, second)]
        assert waited_s[0] is not None and waited_s[1] is not None
        assert waited_s[0] < until_first_step_s and waited_s[1] > 0.99 * held_s
        (figures,) = one.account.totals("gateway")
        assert figures.latencies[Metric.QUEUE].count == 2
        assert figures.latencies[Metric.QUEUE].p99_s < figures.latencies[Metric.TTFT].p99_s * 1.03


async def test_the_exposed_handoff_is_in_the_timeline(llama: SmallModel) -> None:
    """The prefill worker tells it while decode holds its first step back, so it is there before the request ends."""
    config = MiniClusterConfig(model_ref=str(llama.folder))
    async with mini_cluster(config) as cluster, gateway(cluster) as one:
        with brake(cluster.models[1].runner):
            serving = asyncio.create_task(one.serve("r", 3))
            await eventually(lambda: "r" in one.orchestrator.runs)
            timeline = one.orchestrator.runs["r"].timeline
            await eventually(lambda: timeline.attempt is not None and timeline.attempt.handoff_s is not None)
        attempt = await serving
    stamps = [attempt.asked_at, attempt.placed_at, attempt.started_at, timeline.first_token_at]
    known = [at for at in stamps if at is not None]
    assert len(known) == 4 and known == sorted(known)
    assert attempt.handoff_s is not None and attempt.started_at is not None
    # From before the gateway hears of the first token, however late it does, until decode's first step.
    assert 0 <= attempt.handoff_s < timeline.token_times[-1] - attempt.started_at
