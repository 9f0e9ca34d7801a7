"""Accounts of promises over real workers: on whom requests were, and what the scheduler learns from all gateways."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from cluster.journey import Journey
from cluster.orchestrator import Orchestrator
from cluster.request_terms import RequestTerms
from cluster.slo import NO_TARGETS, SloClass, SloConfig
from cluster.slo_account import SloAccount
from cluster.slo_report import Counts, Metric, Outcome, SeriesKey
from cluster.slo_tracker import SeriesSnapshot
from kv_transfer.messages import RequestSpec, SloUpdate
from tests.mini_cluster import MiniCluster, MiniClusterConfig, mini_cluster
from tests.small_models import SmallModel, greedy, random_prompts
from tests.waiting import eventually

PROMPT = random_prompts([60], seed=3)[0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    return SmallModel("llama", tmp_path_factory.mktemp("llama"))


class GatewayAccount:
    """A gateway, as far as promises go: an orchestrator and an account that tells the scheduler."""

    def __init__(self, orchestrator: Orchestrator, classes: SloConfig = NO_TARGETS) -> None:
        self._orchestrator = orchestrator
        self.account = SloAccount(classes, model="model", publish=orchestrator.publish_slo)

    async def serve(self, request_id: str, num_tokens: int) -> Journey:
        """One request from its arrival to its last token; where it was served."""
        watch = self.account.watch(RequestTerms(slo=self.account.classes.choose(None, {})), 1)
        (sequence,) = watch.sequences
        request = RequestSpec(request_id=request_id, attempt=0, prompt_token_ids=PROMPT, params=greedy(num_tokens))
        async for _ in self._orchestrator.generate(request, None, sequence.journey):
            sequence.token()
            watch.first_byte()
        watch.ended(Outcome.FINISHED, num_tokens)
        return sequence.journey


def known(cluster: MiniCluster, replica: str = "") -> SeriesSnapshot:
    """What the scheduler knows of the class `default`."""
    return cluster.scheduler.slo.snapshot(time.monotonic(), SeriesKey("default", "model", replica))


@asynccontextmanager
async def gateways(cluster: MiniCluster) -> AsyncIterator[tuple[GatewayAccount, GatewayAccount]]:
    second = cluster.new_orchestrator()
    second.start()
    try:
        assert await second._links.wait_up({worker.info.worker_id for worker in cluster.workers}, 60)
        yield GatewayAccount(cluster.orchestrator), GatewayAccount(second)
    finally:
        await second.stop()


def test_the_scheduler_adds_up_what_all_gateways_saw(llama: SmallModel) -> None:
    async def run() -> None:
        async with mini_cluster(MiniClusterConfig(model_ref=str(llama.folder))) as cluster, gateways(cluster) as pair:
            for number, gateway in enumerate(pair):
                journey = await gateway.serve(f"r{number}", 10 + number)
                assert journey.prefill == cluster.prefills[0].info.worker_id
                assert journey.decode == cluster.decodes[0].info.worker_id
                gateway.account.settle()
            await eventually(lambda: known(cluster).counts.met == 2)
            assert known(cluster).counts == Counts(met=2, tokens=21, met_tokens=21)
            prefill, decode = cluster.prefills[0].info.worker_id, cluster.decodes[0].info.worker_id
            assert known(cluster, decode).latencies[Metric.GAP].count == 9 + 10
            assert known(cluster, prefill).latencies[Metric.QUEUE].count == 2
            latencies = known(cluster).latencies
            assert latencies[Metric.QUEUE].p50_s <= latencies[Metric.TTFT].p50_s * 1.03  # both within 1 %

    asyncio.run(run())


def test_a_gateway_with_other_classes_goes_on_uncounted(llama: SmallModel) -> None:
    async def run() -> None:
        async with mini_cluster(MiniClusterConfig(model_ref=str(llama.folder))) as cluster:
            other = GatewayAccount(cluster.orchestrator, SloConfig(classes=(SloClass(name="gold"),), default="gold"))
            await other.serve("r0", 3)
            other.account.settle()
            cluster.orchestrator._scheduler.tell(SloUpdate(report=b"no report"))
            mine = GatewayAccount(cluster.orchestrator)
            await mine.serve("r1", 4)  # placed by the same connection: it was not lost
            mine.account.settle()
            await eventually(lambda: known(cluster).counts.met == 1)
            assert [snapshot.key.slo_class for snapshot in cluster.scheduler.slo.totals(time.monotonic())] == [
                "default"
            ]

    asyncio.run(run())
