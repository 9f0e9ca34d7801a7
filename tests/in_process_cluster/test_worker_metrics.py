"""What operators see of workers' memory tiers and steps: what Prometheus scrapes, and `/cluster`. Whole clusters."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from cluster.gateway.timeline import RequestTimeline
from cluster.metrics.requests import Metrics, RunMetrics
from cluster.metrics.workers import WorkerMetrics
from cluster.scheduler import block_index
from cluster.slo.classes import RequestTerms, SloClass
from decode_workers.pacing import LayerKvConfig
from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from engine.drafting.speculation import SpeculationConfig
from engine.kv.block_pool import BlockPool
from engine.kv.prefix import block_hashes
from engine.sequence import StepPlan
from kv_transfer.messages.blocks import BlockEvents
from kv_transfer.messages.requests import RequestSpec, TokenEvent
from kv_transfer.messages.workers import LoadingReport, TiersReport
from kv_transfer.tiers.config import Budget, DiskConfig, TiersConfig
from tests.support.clusters.mini_cluster import COMPUTING_IS_SLOW, MiniCluster, MiniClusterConfig, brake, mini_cluster
from tests.support.clusters.worker_reports import worker_info, worker_snapshot
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.token_streams import one_by_one
from tests.support.waiting import HANGS_S, eventually

GROUPS, BLOCK_SIZE = 4, 16
BLOCK_BYTES = BLOCK_SIZE * 256
PROMPT = random_prompts([150], seed=7)[0]
COLUMNS, REST = 9, 6  # of the prompt: full blocks, and tokens after them
HOST_COLUMNS, DEVICE_BLOCKS = 64, 256


class Scraper:
    """Reads the metrics of one worker as Prometheus would."""

    def __init__(self, cluster: MiniCluster, worker_id: str) -> None:
        self._worker_id = worker_id
        self._registry = Metrics().registry
        self._registry.register(WorkerMetrics(cluster.orchestrator.scheduler.reports))

    def __call__(self, name: str, **labels: str) -> float:
        """The sum of all samples with these labels."""
        samples = self._samples(name, labels)
        assert samples, f"{name} is not told with {labels}"
        return sum(samples)

    def tells_nothing_of(self, name: str) -> bool:
        return not self._samples(name, {})

    async def shows(self, value: float, name: str, **labels: str) -> None:
        """Reports take a moment to arrive."""

        def shown() -> bool:
            samples = self._samples(name, labels)
            return bool(samples) and sum(samples) == value

        await eventually(shown, what=f"{name} {labels} is not {value}")

    def _samples(self, name: str, labels: dict[str, str]) -> list[float]:
        wanted = {**labels, "worker": self._worker_id}.items()
        text = generate_latest(self._registry).decode()
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return [sample.value for sample in samples if sample.name == name and wanted <= sample.labels.items()]


@asynccontextmanager
async def cluster_of(model: SmallModel, *, disk: Path | None = None, **config: Any) -> AsyncIterator[MiniCluster]:
    engine: dict[str, object] = {"layers_per_group": 1, "kv_blocks": DEVICE_BLOCKS}
    tiers = TiersConfig(
        host=Budget(num_bytes=HOST_COLUMNS * GROUPS * BLOCK_BYTES),
        disk=None if disk is None else DiskConfig(folder=str(disk), budget=Budget(num_bytes=2**24)),
    )
    async with mini_cluster(
        MiniClusterConfig(
            model_ref=str(model.folder), prefill_engine=engine, decode_engine=engine, tiers=tiers, **config
        )
    ) as cluster:
        yield cluster
        await cluster.idle()


async def ask(cluster: MiniCluster, name: str, prompt: list[int] = PROMPT) -> int:
    """How many of the prompt's tokens were cached. Whatever is copied down has been when this returns."""
    cluster.believe(COMPUTING_IS_SLOW)
    events = await cluster.generate(name, prompt, greedy(8))
    await cluster.copied_down()
    return events[0].num_cached_tokens or 0


def drop(*pools: BlockPool | None) -> None:
    for pool in pools:
        assert pool is not None
        pool.drop_cached()


def damage(folder: Path) -> None:
    for path in folder.rglob("*.kv"):
        path.write_bytes(bytes(path.stat().st_size))


async def test_prefix_tokens_are_told_by_the_tier_that_had_them(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_of(llama, num_prefill=0, disk=tmp_path) as cluster:
        metric = Scraper(cluster, cluster.decodes[0].info.worker_id)
        model = cluster.models[0]
        assert await ask(cluster, "computed") == 0
        await metric.shows(COLUMNS, "legato_worker_kv_stored_columns_total", tier="disk")
        assert metric("legato_worker_kv_stored_columns_total", tier="host") == COLUMNS
        assert metric("legato_worker_prefix_missed_tokens_total") == len(PROMPT)
        hit = COLUMNS * BLOCK_SIZE
        assert await ask(cluster, "on the device") == hit
        await metric.shows(hit, "legato_worker_prefix_hit_tokens_total", source="device")
        drop(model.block_pool)
        assert await ask(cluster, "in host memory") == hit
        await metric.shows(hit, "legato_worker_prefix_hit_tokens_total", source="host")
        drop(model.block_pool, model.host_pool)
        assert await ask(cluster, "on disk") == hit
        await metric.shows(hit, "legato_worker_prefix_hit_tokens_total", source="disk")

        assert metric("legato_worker_prefix_hit_tokens_total") == 3 * hit
        assert metric("legato_worker_prefix_missed_tokens_total") == len(PROMPT) + 3 * REST
        assert metric("legato_worker_kv_loaded_columns_total", source="disk") == COLUMNS
        column_bytes = COLUMNS * GROUPS * BLOCK_BYTES
        assert metric("legato_worker_kv_disk_bytes_total", direction="read") >= column_bytes
        assert metric("legato_worker_kv_disk_bytes_total", direction="written") >= column_bytes
        assert metric("legato_worker_kv_disk_failures_total") == 0
        assert metric("legato_worker_kv_dropped_columns_total") == 0
        assert metric("legato_worker_host_copy_bytes_per_second") > 0


async def test_the_blocks_of_each_tier_are_told_by_state(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_of(llama, num_prefill=0, disk=tmp_path) as cluster:
        metric = Scraper(cluster, cluster.decodes[0].info.worker_id)
        await ask(cluster, "r")
        await metric.shows(COLUMNS, "legato_worker_kv_blocks", tier="disk", state="cached")
        for tier, size in (("device", DEVICE_BLOCKS), ("host", HOST_COLUMNS * GROUPS)):
            await metric.shows(COLUMNS * GROUPS, "legato_worker_kv_blocks", tier=tier, state="cached")
            assert metric("legato_worker_kv_blocks", tier=tier, state="free") == size - COLUMNS * GROUPS
            assert metric("legato_worker_kv_blocks", tier=tier, state="held") == 0
        with brake(cluster.models[0].runner):
            asking = asyncio.create_task(cluster.generate("held", PROMPT, greedy(8)))
            await metric.shows((COLUMNS + 1) * GROUPS, "legato_worker_kv_blocks", tier="device", state="held")
            assert metric("legato_worker_kv_blocks", tier="device") == DEVICE_BLOCKS
        await asking


async def test_tokens_of_a_neighbour_are_told_as_such(llama: SmallModel) -> None:
    """The prefill worker of a conversation's next turn finds the last answer with the decode worker."""
    async with cluster_of(llama) as cluster:
        metric = Scraper(cluster, cluster.prefills[0].info.worker_id)
        prompt = PROMPT[:40]
        answer = [event.token_id for event in await cluster.generate("first", prompt, greedy(40))]
        await cluster.copied_down()
        history = prompt + answer + [1, 2, 3]
        tiers = cluster.prefills[0].prefix.tiers
        assert tiers is not None
        hashes = block_hashes(history, BLOCK_SIZE)[:4]
        await eventually(lambda: tiers.missing(hashes).num_reachable == 4, what="the neighbour is not looked at")
        assert await ask(cluster, "second", history) == 64
        await metric.shows(32, "legato_worker_prefix_hit_tokens_total", source="neighbours")
        assert metric("legato_worker_prefix_hit_tokens_total", source="device") == 32
        assert metric("legato_worker_kv_loaded_columns_total", source="neighbours") == 2


async def test_damaged_files_are_told(llama: SmallModel, tmp_path: Path) -> None:
    async with cluster_of(llama, num_prefill=0, disk=tmp_path) as cluster:
        metric = Scraper(cluster, cluster.decodes[0].info.worker_id)
        await ask(cluster, "first")
        await metric.shows(COLUMNS, "legato_worker_kv_stored_columns_total", tier="disk")
        await cluster.flush_disks()  # the last one is found a moment after it was counted
        damage(tmp_path)
        drop(cluster.models[0].block_pool, cluster.models[0].host_pool)
        assert await ask(cluster, "second") == 0
        await metric.shows(COLUMNS, "legato_worker_kv_disk_failures_total", direction="read")
        assert metric("legato_worker_kv_load_failed_columns_total", source="disk") == COLUMNS


async def test_sequences_that_rest_in_host_memory_are_told(llama: SmallModel) -> None:
    """A device with room for two of eight: some start in host memory, and some come back."""
    engine: dict[str, object] = {"block_size": 8, "layers_per_group": 1, "kv_blocks": 120, "staging_bytes": 2**20}
    config = MiniClusterConfig(
        model_ref=str(llama.folder),
        decode_engine={**engine, "host_bytes": 8 * 2**20},
        decode=DecodeWorkerConfig(layerkv=LayerKvConfig(), heartbeat_s=0.02),
    )
    async with mini_cluster(config) as cluster:
        metric = Scraper(cluster, cluster.decodes[0].info.worker_id)
        prompts = random_prompts([100, 33, 140, 64, 121, 90, 150, 80])
        streams = [cluster.stream(f"r{n}", prompt, greedy(60)) for n, prompt in enumerate(prompts)]
        with brake(cluster.models[1].runner):
            await asyncio.gather(*(anext(stream) for stream in streams))
            await eventually(lambda: metric("legato_worker_host_sequences") > 0, what="none rests in host memory")
        for stream in streams:
            async for _ in stream:
                pass
        scheduler = cluster.decodes[0].scheduler
        await metric.shows(0, "legato_worker_host_sequences")
        await metric.shows(scheduler.num_host_landings, "legato_worker_host_landings_total")
        assert metric("legato_worker_host_landings_total") > 0
        # Whether there are any depends on who ends when.
        await metric.shows(scheduler.tiers.num_restores, "legato_worker_restores_total")
        await metric.shows(scheduler.tiers.num_offloads, "legato_worker_offloads_total")
        for direction, num_blocks in (
            ("out", scheduler.tiers.num_offloaded_blocks),
            ("in", scheduler.tiers.num_restored_blocks),
        ):
            await metric.shows(num_blocks, "legato_worker_moved_blocks_total", direction=direction)
        await metric.shows(scheduler.num_preemptions, "legato_worker_preemptions_total")
        await cluster.idle()


def test_what_moved_between_device_and_host_is_told_as_counted() -> None:
    tiers = TiersReport(
        num_offloads=3, num_restores=5, num_preemptions=7, num_offloaded_blocks=11, num_restored_blocks=13
    )
    registry = CollectorRegistry()
    registry.register(WorkerMetrics(lambda: [(worker_info("d1"), worker_snapshot("d1", tiers=tiers))]))
    labels = {"worker": "d1", "role": "decode", "model": "model"}
    names = ("offloads", "restores", "preemptions")
    assert [registry.get_sample_value(f"legato_worker_{name}_total", labels) for name in names] == [3, 5, 7]
    moved = [
        registry.get_sample_value("legato_worker_moved_blocks_total", {**labels, "direction": direction})
        for direction in ("out", "in")
    ]
    assert moved == [11, 13]


async def test_a_queue_is_told_with_its_oldest(llama: SmallModel) -> None:
    """A step is held; who comes meanwhile waits."""
    async with cluster_of(llama) as cluster:
        metric = Scraper(cluster, cluster.prefills[0].info.worker_id)
        with brake(cluster.models[0].runner):
            first = asyncio.create_task(cluster.generate("first", PROMPT, greedy(8)))
            await metric.shows(1, "legato_worker_running_requests")
            assert metric("legato_worker_waiting_requests") == metric("legato_worker_oldest_wait_seconds") == 0
            second = asyncio.create_task(cluster.generate("second", PROMPT, greedy(8)))
            await metric.shows(1, "legato_worker_waiting_requests")
            assert metric("legato_worker_queued_prompt_tokens") == 2 * len(PROMPT)
            before = metric("legato_worker_oldest_wait_seconds")
            await eventually(lambda: metric("legato_worker_oldest_wait_seconds") > before, what="it does not age")
        await asyncio.gather(first, second)
        await metric.shows(0, "legato_worker_waiting_requests")
        assert metric("legato_worker_oldest_wait_seconds") == 0


async def test_steps_and_handoffs_are_told_as_they_were(llama: SmallModel) -> None:
    """A prompt of one chunk, and eight tokens, of which the first comes from prefill."""
    a_token_each = DecodeWorkerConfig(speculation=None)
    async with cluster_of(llama, decode=a_token_each) as cluster:
        prefill, decode = cluster.prefills[0].info.worker_id, cluster.decodes[0].info.worker_id
        sender, receiver = Scraper(cluster, prefill), Scraper(cluster, decode)
        assert sender("legato_worker_steps_total") == sender("legato_worker_step_tokens_total") == 0
        assert sender.tells_nothing_of("legato_worker_handoffs_total"), "there is no link yet"
        await ask(cluster, "r")
        await sender.shows(len(PROMPT), "legato_worker_step_tokens_total", kind="prefill")
        assert sender("legato_worker_steps_total", kind="prefill") == 1
        assert sender("legato_worker_steps_total", kind="decode") == 0
        await receiver.shows(7, "legato_worker_steps_total", kind="decode")
        assert receiver("legato_worker_step_tokens_total", kind="decode") == 7
        assert receiver("legato_worker_steps_total", kind="prefill") == 0
        await sender.shows(1, "legato_worker_handoffs_total", peer=decode)
        num_bytes = len(PROMPT) * cluster.models[0].layout.num_layers * cluster.models[0].layout.bytes_per_token_layer
        assert sender("legato_worker_handoff_bytes_total", peer=decode) == num_bytes
        assert 0 <= sender("legato_worker_handoff_hidden_bytes_total", peer=decode) <= num_bytes
        assert sender("legato_worker_handoff_exposed_seconds_total", peer=decode) > 0
        assert sender("legato_worker_handoff_failures_total") == 0


async def test_drafts_are_not_told_as_tokens_of_steps_with_prompts_or_without(llama: SmallModel) -> None:
    """A prompt comes while a stream decodes by drafts that are right, and is computed beside them."""

    def has_drafts(plan: StepPlan) -> bool:
        return any(item.drafts for item in plan.items)

    def has_both(plan: StepPlan) -> bool:
        return has_drafts(plan) and any(item.num_tokens > 1 for item in plan.items)

    async def promised(cluster: MiniCluster, request: RequestSpec) -> list[TokenEvent]:
        """All tokens, with a mean promised that any step keeps: nobody else has drafts beside prompts."""
        terms = RequestTerms(slo=SloClass(name="mean", tpot_s=100.0))
        timeline = RequestTimeline(endpoint="/v1/completions", terms=terms)
        timeline.parsed([request], len(request.prompt_token_ids))
        return [event async for event in one_by_one(cluster.orchestrator.generate(request, timeline.sequences[0]))]

    decode = DecodeWorkerConfig(speculation=SpeculationConfig(drafters=("prediction",), fixed=3))
    async with cluster_of(llama, num_prefill=0, decode=decode) as cluster:
        [worker], runner = cluster.decodes, cluster.models[0].runner
        metric = Scraper(cluster, worker.info.worker_id)
        params = greedy(60)
        expected = llama.local(PROMPT, params).tokens
        with brake(runner, has_drafts) as decoding, brake(runner, has_both) as mixed:
            stream = RequestSpec(
                request_id="stream",
                attempt=0,
                prompt_token_ids=PROMPT,
                params=params,
                prediction_token_ids=expected,
            )
            streaming = asyncio.create_task(promised(cluster, stream))
            await decoding.reached()
            beside = RequestSpec(request_id="beside", attempt=0, prompt_token_ids=PROMPT[::-1], params=greedy(8))
            asking = asyncio.create_task(promised(cluster, beside))
            await eventually(lambda: worker.scheduler.num_uncomputed > 0, what="the prompt has not come")
            decoding.release()
            await mixed.reached()
        assert [event.token_id for event in await streaming] == expected
        assert len(await asking) == 8
        accepted = worker.snapshot().drafts["prediction"].num_accepted
        assert accepted > 0
        # The first token of either comes with its prompt, and each other one with a step of its own or as a draft.
        await metric.shows(2 * len(PROMPT) + 59 + 7 - accepted, "legato_worker_step_tokens_total")


async def test_why_a_stream_went_on_elsewhere_is_told(llama: SmallModel) -> None:
    """A worker dies behind some of its tokens."""
    a_token_each = DecodeWorkerConfig(speculation=None)  # else the last ones may have come by then
    async with cluster_of(llama, num_prefill=0, num_decode=2, decode=a_token_each) as cluster:
        metrics = Metrics()
        gateway = cluster.orchestrator
        metrics.registry.register(RunMetrics(gateway.runs.values, ["m", "other"], gateway.retries))

        def told(name: str, **labels: str) -> float | None:
            return metrics.registry.get_sample_value(name, labels)

        def on_their_way(model: str, state: str) -> float | None:
            return told("legato_sequences", model=model, state=state)

        timeline = RequestTimeline(endpoint="/v1/completions", terms=RequestTerms(model="m"))
        request = RequestSpec(request_id="r", attempt=0, prompt_token_ids=PROMPT, params=greedy(60))
        timeline.parsed([request], len(PROMPT))
        (sequence,) = timeline.sequences
        tokens = one_by_one(cluster.orchestrator.generate(request, sequence))
        for _ in range(5):
            await anext(tokens)
        assert on_their_way("m", "decoding") == 1
        assert on_their_way("m", "placing") == on_their_way("other", "decoding") == 0
        oldest_s = told("legato_sequences_oldest_seconds", model="m", state="decoding")
        assert oldest_s is not None and oldest_s > 0
        (on,) = (worker for worker in cluster.decodes if worker.info.worker_id == sequence.attempts[0].decode)
        await cluster.remove(on)
        num_tokens = 6
        while (await anext(tokens)).attempt == 0:
            num_tokens += 1
        assert told("legato_retries_total", cause="fault") == 1, "its end may be long after"
        assert num_tokens + len([token async for token in tokens]) == 60
        timeline.ended()
        timeline.outcome = "finished"
        metrics.record(timeline)
        assert told("legato_retries_total", cause="fault") == 1 and told("legato_retries_total", cause="moved") == 0
        assert told("legato_migrations_total") == 1
        assert on_their_way("m", "decoding") == 0


def test_pools_are_told_with_what_they_should_have() -> None:
    """By where workers were started, whatever their role."""
    workers = [
        (worker_info("d1"), worker_snapshot("d1")),
        (worker_info("d2", home="prefill"), worker_snapshot("d2", draining=True)),
    ]
    registry = CollectorRegistry()
    # One that was a decode worker of the model, and has yet to load another one.
    loading = [LoadingReport(worker_id="p3.1", role="prefill", model="model", home="decode", home_model="model", pid=1)]
    registry.register(WorkerMetrics(lambda: workers, dict, {"model": {"prefill": 2, "decode": 1}}, lambda: loading))

    def number(pool: str, state: str) -> float | None:
        return registry.get_sample_value("legato_pool_workers", {"model": "model", "pool": pool, "state": state})

    assert [number("decode", state) for state in ("loading", "serving", "draining")] == [1, 1, 0]
    assert [number("prefill", state) for state in ("loading", "serving", "draining")] == [0, 0, 1]
    assert registry.get_sample_value("legato_pool_least_workers", {"model": "model", "pool": "prefill"}) == 2


async def test_what_steps_cost_is_told_with_its_error(llama: SmallModel) -> None:
    async with cluster_of(llama) as cluster:
        worker = cluster.decodes[0]
        metric = Scraper(cluster, worker.info.worker_id)
        assert metric.tells_nothing_of("legato_worker_step_cost_error"), "it has computed nothing"
        await ask(cluster, "r")
        cost = worker.steps.costs.cost()
        assert cost is not None
        await metric.shows(cost.base_s, "legato_worker_step_cost_seconds", unit="step")
        await metric.shows(cost.prefill_token_s, "legato_worker_step_cost_seconds", unit="prefill_token")
        assert metric("legato_worker_step_cost_seconds", unit="prefill_pair") == cost.prefill_pair_s
        assert metric("legato_worker_step_cost_seconds", unit="decode") == cost.decode_s
        assert metric("legato_worker_step_cost_seconds", unit="context_token") == cost.context_token_s
        assert metric("legato_worker_step_cost_error", kind="decode") == worker.steps.costs.error("decode")
        assert metric("legato_worker_step_cost_error", kind="prefill") == worker.steps.costs.error("prefill")


def index_of(cluster: MiniCluster, worker: DecodeWorker) -> dict[str, Any]:
    """As `/cluster` shows it."""
    workers = cluster.orchestrator.scheduler.describe_workers()
    shown = next(shown for shown in workers if shown["worker_id"] == worker.info.worker_id)
    index = shown["index"]
    return index if isinstance(index, dict) else {}


async def test_cluster_shows_what_the_block_index_knows(
    llama: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(block_index, "RETRY_S", HANGS_S)  # no worker is asked twice because this machine is busy
    async with cluster_of(llama, num_prefill=0, disk=tmp_path) as cluster:
        worker = cluster.decodes[0]
        await ask(cluster, "r")
        whole = {"device": COLUMNS, "host": COLUMNS, "disk": COLUMNS}
        await eventually(lambda: index_of(cluster, worker).get("columns") == whole, what="the index lacks columns")
        before = index_of(cluster, worker)
        assert before["in_step"] is True
        assert before["num_gaps"] == 0
        assert before["num_snapshots_asked"] == 0

        assert worker.parts.events is not None
        drop(cluster.models[0].block_pool)
        lost = worker.parts.events.take()  # a report that never arrives
        assert isinstance(lost[0], BlockEvents)
        await eventually(lambda: index_of(cluster, worker)["num_gaps"] == 1, what="the gap is not seen")
        await eventually(lambda: index_of(cluster, worker)["in_step"], what="the index stays out of step")
        after = index_of(cluster, worker)
        assert after["columns"] == {**whole, "device": 0}
        assert after["num_snapshots_asked"] == 1
        assert after["num_snapshots_taken"] == before["num_snapshots_taken"] + 1


async def test_without_a_scheduler_nothing_is_claimed_of_its_index(llama: SmallModel) -> None:
    async with cluster_of(llama, num_prefill=0) as cluster:
        worker = cluster.decodes[0]
        await eventually(lambda: index_of(cluster, worker).get("in_step") is True, what="the index is not told")
        await cluster.scheduler.stop()
        await eventually(lambda: index_of(cluster, worker) == {}, what="an index is claimed")
        await cluster.start_scheduler()
        await eventually(lambda: index_of(cluster, worker).get("in_step") is True, what="the index does not come back")


def test_every_metric_of_the_workers_is_documented() -> None:
    text = (Path(__file__).parents[2] / "docs" / "guide" / "metrics.md").read_text(encoding="utf-8")
    told = {family.name + ("_total" if family.type == "counter" else "") for family in WorkerMetrics(list).collect()}
    assert told == set(re.findall(r"`(legato_(?:worker|pool)_\w+)(?:\{[\w,]+\})?`", text))
