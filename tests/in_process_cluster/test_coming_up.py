"""While workers come up and leave: how far their models are loaded is told, and who could serve is known."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cluster.errors import UnavailableError
from cluster.gateway.timeline import SequenceTimeline
from cluster.scheduler.placement.ledger import START_S
from cluster.slo.classes import RequestTerms, SloClass
from decode_workers.worker import DecodeWorker
from engine.checkpoint import weights
from engine.drafting.draft_model import DraftModel
from engine.steps.loading import LoadedModel
from engine.steps.runner import ModelRunner
from kv_transfer.messages.requests import RequestSpec
from kv_transfer.worker import replica
from kv_transfer.worker.base import WorkerParts
from tests.support.clusters.mini_cluster import cluster_of
from tests.support.clusters.mini_requests import PROMPT, tokens
from tests.support.clusters.replica_cluster import replica_cluster
from tests.support.small_models import SmallModel, greedy, shallower
from tests.support.waiting import HANGS_S, eventually


class Held:
    """A function that, asked for the `number`th time, waits until it is released."""

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self._function = function
        self._left = number
        self.released = threading.Event()

    def __call__(self, *args: Any) -> Any:
        self._left -= 1
        if self._left == 0:
            assert self.released.wait(HANGS_S)
        return self._function(*args)


async def test_a_gateway_hears_how_far_a_model_is_loaded(llama: SmallModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """First of what is read, then of what is placed; and nothing once the worker is there."""
    async with replica_cluster(llama, num_prefill=0, num_decode=1) as cluster:
        gateway = cluster.orchestrator.scheduler
        assert gateway.loading == []
        reading = Held(weights._part_of, 10)
        placing = Held(weights._Counted.placed, 10)
        monkeypatch.setattr(weights, "_part_of", reading)
        monkeypatch.setattr(weights._Counted, "placed", lambda *args: placing(*args))
        coming = asyncio.create_task(cluster.add_replica("prefill", cluster.roles))
        try:
            await eventually(lambda: gateway.loading and gateway.loading[0].read_bytes)
            (report,) = gateway.loading
            size = sum(path.stat().st_size for path in llama.folder.glob("*.safetensors"))
            assert report.role == "prefill" and report.total_bytes == size
            assert 0 < report.read_bytes < size and report.placed_bytes == 0
            reading.released.set()
            await eventually(lambda: gateway.loading[0].placed_bytes)
            (report,) = gateway.loading
            assert report.read_bytes == size and 0 < report.placed_bytes < size
        finally:
            reading.released.set()
            placing.released.set()
        worker = (await coming).worker
        assert worker is not None and worker.info.worker_id == report.worker_id
        await eventually(lambda: report.worker_id in gateway.workers and gateway.loading == [])


async def test_a_worker_s_tokenizer_is_read_before_anybody_knows_the_worker(llama: SmallModel) -> None:
    """While it is read no heartbeat comes: a large one would have the worker count as gone."""
    found: list[bool] = []

    def begun(parts: WorkerParts) -> DecodeWorker:
        masks = parts.model.runner.sampler.masks
        assert masks is not None
        found.append(masks.has_tokenizer)
        return DecodeWorker(parts, cluster.config.decode)

    async with replica_cluster(llama, num_prefill=0, num_decode=1) as cluster:
        await cluster.add_replica("decode", {"decode": begun})
        assert found == [True]


async def test_so_is_that_of_the_model_that_drafts(llama: SmallModel, tmp_path: Path) -> None:
    """It has a tokenizer of its own to follow grammars by."""
    found: list[bool] = []

    def begun(parts: WorkerParts) -> DecodeWorker:
        assert isinstance(parts.model.draft_model, DraftModel)
        masks = parts.model.draft_model.masks
        assert masks is not None and masks is not parts.model.runner.sampler.masks
        found.append(masks.has_tokenizer)
        return DecodeWorker(parts, cluster.config.decode)

    engine = {"draft_ref": str(shallower(llama, tmp_path))}
    async with replica_cluster(llama, num_prefill=0, num_decode=1, decode_engine=engine) as cluster:
        await cluster.add_replica("decode", {"decode": begun})
        assert found == [True]


async def test_what_is_compiled_once_on_a_machine_is_no_part_of_loading(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The worker that comes in its place does not do it again: clients were told to come back in six minutes."""
    clock = compiled = 100.0

    def compile_kernels(model: LoadedModel) -> None:
        nonlocal clock, compiled
        clock, compiled = clock + 300.0 + 7.0, compiled + 300.0

    monkeypatch.setattr(replica, "time", SimpleNamespace(monotonic=lambda: clock))
    monkeypatch.setattr(replica, "compiling_s", lambda: compiled)
    monkeypatch.setattr(replica, "compile_kernels", compile_kernels)
    async with replica_cluster(llama, num_prefill=0, num_decode=1) as cluster:
        (worker,) = cluster.workers
        assert worker.info.load_s == 7.0


async def test_a_model_whose_kernels_do_not_compile_is_closed(
    llama: SmallModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a group's other processes would stay."""
    closed: list[ModelRunner] = []

    def close(runner: ModelRunner, of_runner: Callable[[ModelRunner], None] = ModelRunner.close) -> None:
        of_runner(runner)
        closed.append(runner)

    def fail(model: LoadedModel) -> None:
        raise RuntimeError(f"no compiler for {model.name}")

    async with replica_cluster(llama, num_prefill=0, num_decode=1) as cluster:
        with monkeypatch.context() as broken:
            broken.setattr(replica, "compile_kernels", fail)
            broken.setattr(ModelRunner, "close", close)
            with pytest.raises(RuntimeError, match="no compiler"):
                await cluster.add_replica("decode", cluster.roles)
        assert len(closed) == 1


async def test_ready_is_who_would_be_answered(llama: SmallModel) -> None:
    """A decode worker alone, which computes prompts as well; not one that takes nothing new."""
    async with cluster_of(llama, num_prefill=0, num_decode=1) as cluster:
        limits = cluster.orchestrator.limits
        assert (found := limits()) is not None and found.ready
        assert await tokens(cluster, "alone", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens
        assert await cluster.decodes[0].drain(HANGS_S)
        await eventually(lambda: (found := limits()) is not None and not found.ready)
        assert (found := limits()) is not None and "about to leave" in found.reason
        await cluster.add_decode()
        await eventually(lambda: (found := limits()) is not None and found.ready)
        assert await tokens(cluster, "again", PROMPT, greedy()) == llama.local(PROMPT, greedy()).tokens


async def test_who_comes_when_the_last_worker_has_left_waits_for_the_one_in_its_place(llama: SmallModel) -> None:
    async with replica_cluster(llama, num_prefill=0, num_decode=1) as cluster:
        gateway = cluster.orchestrator.scheduler
        last = cluster.replicas.pop()
        await last.stop(HANGS_S)
        await eventually(lambda: not gateway.workers, what="the worker is still known")
        limits = cluster.orchestrator.limits()
        assert limits is not None and not limits.ready and limits.max_model_len == last.model.max_model_len
        asked = asyncio.create_task(tokens(cluster, "early", PROMPT, greedy()))
        hurried = SequenceTimeline(RequestTerms(slo=SloClass(name="hurried", ttft_s=0.5)))
        request = RequestSpec(request_id="hurried", attempt=0, prompt_token_ids=PROMPT, params=greedy())
        with pytest.raises(UnavailableError) as refused:
            _ = [each async for each in cluster.orchestrator.generate(request, hurried)]
        assert refused.value.retry_after_s is not None and refused.value.retry_after_s > 0.5
        ends_first = SequenceTimeline(RequestTerms(deadline=time.monotonic() + START_S))
        request = replace(request, request_id="ends first")
        with pytest.raises(UnavailableError) as refused:
            _ = [each async for each in cluster.orchestrator.generate(request, ends_first)]
        assert refused.value.retry_after_s is not None and refused.value.retry_after_s > 0.5
        await cluster.add_replica("decode", cluster.roles)
        assert await asked == llama.local(PROMPT, greedy()).tokens
