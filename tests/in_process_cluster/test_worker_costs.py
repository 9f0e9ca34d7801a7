"""What workers tell of their steps' cost and of who waits, as gateways hear it. Whole clusters in one process."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from cluster.config.build import CALIBRATION_S, decode_worker, prefill_worker
from cluster.config.load import load_config
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.sequence import StepPlan
from engine.steps.calibration import TRIALS, calibrate
from engine.steps.loop import StepLoop
from kv_transfer.messages.workers import KnownWorker, WorkerSnapshot
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import eventually

PROMPT = random_prompts([150], seed=7)[0]


def told(cluster: MiniCluster, worker: PrefillWorker | DecodeWorker) -> KnownWorker:
    """The worker as the gateway knows it."""
    reports = cluster.orchestrator.scheduler.reports()
    return next(report for report in reports if report[0].worker_id == worker.info.worker_id)


async def told_that(
    cluster: MiniCluster, worker: PrefillWorker | DecodeWorker, holds: Callable[[WorkerSnapshot], bool]
) -> WorkerSnapshot:
    """The worker's snapshot, as soon as the gateway has one of which this holds."""
    await eventually(lambda: holds(told(cluster, worker)[1]), what="the gateway is not told")
    return told(cluster, worker)[1]


async def test_workers_tell_their_limits(llama: SmallModel) -> None:
    async with cluster_of(
        llama,
        prefill=PrefillWorkerConfig(chunk_tokens=96),
        decode=DecodeWorkerConfig(token_budget=70, max_num_seqs=6),
    ) as cluster:
        prefill, _ = told(cluster, cluster.prefills[0])
        decode, _ = told(cluster, cluster.decodes[0])
        assert (prefill.chunk_tokens, prefill.max_num_seqs) == (96, 0)
        assert (decode.chunk_tokens, decode.max_num_seqs) == (70, 6)


async def test_with_layerkv_more_sequences_are_held_than_a_step_has(llama: SmallModel) -> None:
    async with cluster_of(
        llama,
        num_prefill=0,
        decode_engine={"layers_per_group": 1, "host_bytes": 2**22, "staging_bytes": 2**20},
        decode=DecodeWorkerConfig(max_num_seqs=6, layerkv=LayerKvConfig(max_in_flight=30)),
    ) as cluster:
        assert told(cluster, cluster.decodes[0])[0].max_num_seqs == 30


async def test_without_a_calibration_costs_are_told_from_the_first_steps_on(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        prefill, decode = cluster.prefills[0], cluster.decodes[0]
        assert told(cluster, prefill)[1].step_cost is None
        assert told(cluster, decode)[1].step_cost is None
        for n in range(3):
            await cluster.generate(f"r{n}", random_prompts([150], seed=n)[0], greedy(24))
        for worker in (prefill, decode):
            known = worker.steps.costs.cost()
            assert known is not None
            snapshot = await told_that(cluster, worker, lambda snapshot: snapshot.step_cost is not None)
            cost = snapshot.step_cost
            assert cost is not None
            assert min(cost.base_s, cost.prefill_token_s, cost.decode_s, cost.context_token_s) > 0
            assert cost.prefill_pair_s >= 0
            assert min(cost.prefill_error, cost.decode_error) > 0


async def test_calibrated_workers_tell_costs_before_the_first_request_and_are_exact(llama: SmallModel) -> None:
    """Trials leave nothing behind: no block is held or cached, and the tokens are the same."""
    async with cluster_of(
        llama,
        prefill=PrefillWorkerConfig(calibration_s=0.3),
        decode=DecodeWorkerConfig(calibration_s=0.3),
    ) as cluster:
        for worker, model in zip(cluster.workers, cluster.models, strict=True):
            cost = told(cluster, worker)[1].step_cost
            assert cost is not None, "not even the first report says it"
            assert cost.base_s > 0
            model.block_pool.check_idle()
            assert model.block_pool.num_cached == 0
            assert model.block_pool.num_available == model.block_pool.num_blocks
        for n, prompt in enumerate(random_prompts([5, 40, 150])):
            events = await cluster.generate(f"r{n}", prompt, greedy())
            assert [event.token_id for event in events] == llama.local(prompt, greedy()).tokens


async def test_a_calibration_keeps_to_blocks_that_a_small_device_has(llama: SmallModel) -> None:
    columns = 4
    assert any(trial.num_columns(16) > columns for trial in TRIALS)
    async with cluster_of(
        llama, num_prefill=0, decode_engine={"kv_blocks": columns}, decode=DecodeWorkerConfig(calibration_s=0.1)
    ) as cluster:
        assert told(cluster, cluster.decodes[0])[1].step_cost is not None
        events = await cluster.generate("r", PROMPT[:30], greedy(10))
        assert [event.token_id for event in events] == llama.local(PROMPT[:30], greedy(10)).tokens


async def test_a_decode_worker_tells_what_it_decodes_and_who_waits_for_room(llama: SmallModel) -> None:
    """Room for one of two."""
    async with cluster_of(llama, decode_engine={"kv_blocks": 16}) as cluster:
        decode = cluster.decodes[0]
        with brake(cluster.models[1].runner) as held:
            first = asyncio.create_task(cluster.generate("first", PROMPT, greedy(20)))
            await held.reached()
            snapshot = await told_that(cluster, decode, lambda snapshot: snapshot.context_tokens > 0)
            assert snapshot.context_tokens == len(PROMPT) + 1, "the prompt, and the token that came with it"
            assert (snapshot.num_running, snapshot.num_pending, snapshot.num_waiting) == (1, 0, 0)
            second = asyncio.create_task(cluster.generate("second", PROMPT[:120], greedy(20)))
            snapshot = await told_that(cluster, decode, lambda snapshot: snapshot.num_pending > 0)
            assert (snapshot.num_pending, snapshot.num_waiting, snapshot.num_local_waiting) == (1, 1, 0)
        await asyncio.gather(first, second)
        snapshot = await told_that(cluster, decode, lambda snapshot: snapshot.num_running == 0)
        assert (snapshot.context_tokens, snapshot.num_pending) == (0, 0)


async def test_a_decode_worker_tells_which_prompts_it_has_yet_to_compute(llama: SmallModel) -> None:
    """One in chunks, two behind it without blocks."""
    async with cluster_of(
        llama, num_prefill=0, decode_engine={"kv_blocks": 16}, decode=DecodeWorkerConfig(token_budget=40)
    ) as cluster:
        decode = cluster.decodes[0]
        with brake(cluster.models[0].runner) as held:
            asking = [asyncio.create_task(cluster.generate(f"r{n}", PROMPT, greedy(4))) for n in range(3)]
            await held.reached()
            snapshot = await told_that(cluster, decode, lambda snapshot: snapshot.num_local_waiting == 3)
            assert snapshot.queued_prefill_tokens == 3 * len(PROMPT)
            assert (snapshot.context_tokens, snapshot.num_pending) == (0, 0)
        await asyncio.gather(*asking)
        await told_that(cluster, decode, lambda snapshot: snapshot.num_local_waiting == 0)


async def test_a_prefill_worker_decodes_nothing(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        with brake(cluster.models[0].runner) as held:
            asking = asyncio.create_task(cluster.generate("r", PROMPT, greedy(4)))
            await held.reached()
            snapshot = await told_that(cluster, cluster.prefills[0], lambda snapshot: snapshot.num_running == 1)
            assert (snapshot.context_tokens, snapshot.num_local_waiting, snapshot.num_pending) == (0, 0, 0)
        await asking


def test_the_settings_say_how_long_workers_calibrate() -> None:
    config = load_config({"tuning": {"PrefillWorkerConfig": {"calibration_s": 0.5}}})
    assert prefill_worker(config).calibration_s == 0.5
    assert decode_worker(config).calibration_s == CALIBRATION_S == 2.0


async def test_cluster_shows_the_cost_model(llama: SmallModel) -> None:
    async with cluster_of(llama, decode=DecodeWorkerConfig(calibration_s=0.1)) as cluster:
        shown = {worker["role"]: worker["step_cost"] for worker in cluster.orchestrator.scheduler.describe_workers()}
        assert shown["prefill"] is None
        decode = shown["decode"]
        assert isinstance(decode, dict)
        assert decode["base_s"] > 0
        assert {"prefill_error", "decode_error"} <= decode.keys()


async def test_the_next_worker_of_a_model_knows_what_was_learnt(llama: SmallModel) -> None:
    """Whoever takes over a model that is loaded already begins with its cost, and does not calibrate it again."""
    async with cluster_of(llama, num_prefill=0) as cluster:
        await cluster.generate("r", PROMPT, greedy())
        model = cluster.models[0]
        assert model.costs.is_seeded
        learnt = model.costs.cost()
        with brake(model.runner) as held:
            steps = StepLoop(
                model.runner,
                costs=model.costs,
                plan=lambda: StepPlan(()),
                finish=lambda plan, output: None,
                failed=lambda plan, error: None,
            )
            await steps.calibrate(lambda: calibrate(model))
            assert not held.holding.is_set(), "a step was made"
            await steps.stop()
        assert model.costs.cost() == learnt
