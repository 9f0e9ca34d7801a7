"""A draft model on decode workers, behind hand-offs and deaths: it finds what it lacks, and changes no token."""

from __future__ import annotations

from typing import Any

import pytest

from decode_workers.worker import DecodeWorkerConfig
from engine.drafting.speculation import SpeculationConfig
from tests.in_process_cluster.test_worker_metrics import Scraper
from tests.support.mini_cluster import cluster_of
from tests.support.mini_requests import tokens
from tests.support.small_models import SmallModel, greedy, random_prompts, shallower
from tests.support.waiting import eventually

PARAMS = [greedy(40), greedy(40, temperature=0.8, seed=11), greedy(40, temperature=1.0, top_p=0.9, seed=5)]
PROMPTS = random_prompts([4, 37, 130], seed=9)


def guessing(**changes: Any) -> DecodeWorkerConfig:
    return DecodeWorkerConfig(speculation=SpeculationConfig(drafters=("model",), fixed=3), heartbeat_s=0.02, **changes)


@pytest.fixture(scope="module")
def draft(llama: SmallModel, tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    return {"draft_ref": str(shallower(llama, tmp_path_factory.mktemp("draft")))}


@pytest.mark.parametrize("overlap", [False, True])
async def test_as_often_right_behind_a_hand_off_as_on_one_worker(
    llama: SmallModel, draft: dict[str, object], overlap: bool
) -> None:
    """One after the other, so that both have the same steps."""
    accepted: dict[int, float] = {}
    for num_prefill in (0, 1):
        async with cluster_of(
            llama, num_prefill=num_prefill, decode=guessing(overlap_steps=overlap), decode_engine=draft
        ) as cluster:
            for number, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
                found = await tokens(cluster, f"r{number}", prompt, params)
                assert found == llama.local(prompt, params).tokens
            [worker] = cluster.decodes
            report = worker.snapshot().drafts["model"]
            assert report.num_drafted > (5 if overlap else 60)
            accepted[num_prefill] = report.num_accepted / report.num_drafted
            assert worker.model.draft_model is not None
            worker.model.draft_model.check_idle()
            metric = Scraper(cluster, worker.info.worker_id)
            await metric.shows(
                report.num_accepted, "legato_worker_draft_tokens_total", drafter="model", outcome="accepted"
            )
    assert accepted[1] == pytest.approx(accepted[0], abs=0.02)
    assert accepted[0] > 0.25


async def test_a_stream_goes_on_elsewhere_and_is_drafted_for_there(llama: SmallModel, draft: dict[str, object]) -> None:
    async with cluster_of(llama, num_decode=2, decode=guessing(), decode_engine=draft) as cluster:
        await eventually(lambda: len(cluster.orchestrator.scheduler.workers) == 3)
        prompt, params = PROMPTS[1], PARAMS[1]
        stream = cluster.stream("r", prompt, params)
        events = [await anext(stream) for _ in range(10)]
        timeline = cluster.orchestrator.runs["r"].timeline
        before = timeline.drafts["model"]
        (on,) = (worker for worker in cluster.decodes if worker.gateway_of)
        await cluster.remove(on)
        events += [event async for event in stream]
        assert [event.token_id for event in events] == llama.local(prompt, params).tokens
        assert timeline.drafts["model"].drafted > before.drafted > 0
        assert cluster.decodes[0].snapshot().drafts["model"].num_drafted > 0
