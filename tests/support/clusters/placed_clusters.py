"""Mini clusters whose scheduler knows what steps cost, and requests with targets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from cluster.gateway.timeline import RequestTimeline
from cluster.slo.classes import RequestTerms, SloClass
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.requests import RequestSpec
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig, mini_cluster
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.token_streams import one_by_one
from tests.support.waiting import eventually

PROMPT = random_prompts([150], seed=7)[0]
# A prompt takes 15 s; a decode step 1 s and another one for each sequence.
COST = StepCost(base_s=1.0, prefill_token_s=0.1, prefill_pair_s=0.0, decode_s=1.0, context_token_s=0.0)


@asynccontextmanager
async def cluster_of(model: SmallModel, **config: Any) -> AsyncIterator[MiniCluster]:
    """A cluster whose workers hold nothing when the test is over, and whose scheduler has nothing booked."""
    async with mini_cluster(MiniClusterConfig(model_ref=str(model.folder), **config)) as cluster:
        for loaded in cluster.models:
            loaded.costs.cost = lambda: COST  # type: ignore[method-assign]
            loaded.costs.error = lambda kind: 0.05  # type: ignore[method-assign]
        await eventually(lambda: knows_costs(cluster))
        yield cluster
        await cluster.idle()
        scheduler = cluster.scheduler.scheduler
        await eventually(lambda: not len(scheduler.ledger), what="the scheduler still counts requests")
        await eventually(lambda: not (scheduler.num_waiting or cluster.scheduler.num_asked), what="somebody waits")
        assert scheduler.next_at() is None


def knows_costs(cluster: MiniCluster) -> bool:
    """Whether the scheduler has heard of them."""
    return all(snapshot.step_cost is not None for _, snapshot in cluster.scheduler.scheduler.snapshot().workers)


def terms(ttft_s: float | None, tpot_s: float | None = None) -> RequestTerms:
    return RequestTerms(slo=SloClass(name="interactive", ttft_s=ttft_s, tpot_s=tpot_s))


async def run(
    cluster: MiniCluster,
    name: str,
    given: RequestTerms | None,
    num_tokens: int = 8,
    on_ended: Callable[[RequestTimeline], None] = lambda timeline: None,
    cache_salt: str = "",
) -> list[int]:
    """The tokens of `PROMPT`'s continuation; `on_ended` is told of the request as the HTTP side would tell it. Requests
    with the same `cache_salt` find each other's prefix."""
    terms = given or RequestTerms()
    params = greedy(num_tokens)
    request = RequestSpec(
        request_id=name,
        attempt=0,
        prompt_token_ids=PROMPT,
        params=params,
        model=terms.model,
        cache_salt=cache_salt,
    )
    timeline = RequestTimeline(endpoint="", terms=terms)
    timeline.parsed([request], len(PROMPT))
    tokens = []
    try:
        async for event in one_by_one(cluster.orchestrator.generate(request, timeline.sequences[0])):
            tokens.append(event.token_id)
            timeline.sent([0])
    finally:
        timeline.ended()
        on_ended(timeline)
    return tokens
