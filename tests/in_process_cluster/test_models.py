"""Two models in one cluster: each one's tokens from its own workers, whatever happens to either."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import ConflictError, UnavailableError
from cluster.gateway.request_log import LoggedCluster, RequestRecorder, log_of_model, logged_cluster, logs_of, read_logs
from cluster.http.served_model import ServedModel
from cluster.simulation.whatif import what_if_models
from cluster.slo.classes import RequestTerms, SloClass, SloConfig
from decode_workers.worker import DecodeWorkerConfig
from engine.checkpoint.pooling import CheckpointPooling
from engine.steps.runner import ModelRunner
from engine.text.tokenizer import Tokenizer
from kv_transfer.messages.workers import WorkerInfo
from kv_transfer.worker.replica import WorkerReplica
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of, has_generated
from tests.support.clusters.mini_requests import PROMPT, tokens_of
from tests.support.clusters.placed_clusters import run
from tests.support.clusters.replica_cluster import ReplicaCluster, replica_cluster
from tests.support.http_server import MODEL, clients_of, scripted_api
from tests.support.scripted_generator import EMBEDDING_SIZE
from tests.support.small_models import SmallModel, greedy, random_prompts
from tests.support.waiting import HANGS_S, eventually

OTHER = "another/model"
NUM_TOKENS = 24
SHAPES = {"one worker": {"num_prefill": 0}, "1 + 1": {}, "2 + 2": {"num_prefill": 2, "num_decode": 2}}
Models = dict[str, SmallModel]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    """Of the same vocabulary and the same number of layers and heads: what is taken for the other's is no error."""
    return {
        MODEL: SmallModel("llama", tmp_path_factory.mktemp("llama")),
        OTHER: SmallModel("llama", tmp_path_factory.mktemp("other"), initializer_range=0.2),
    }


def cluster_with(models: Models, **config: Any) -> Any:
    return cluster_of(models[MODEL], others={OTHER: str(models[OTHER].folder)}, **config)


async def generated(cluster: MiniCluster, name: str, model: str, prompt: list[int]) -> list[int]:
    return tokens_of(await cluster.generate(name, prompt, greedy(NUM_TOKENS), model=model))


def expected(models: Models, model: str, prompt: list[int]) -> list[int]:
    return models[model].local(prompt, greedy(NUM_TOKENS)).tokens


def test_the_models_say_different_things(models: Models) -> None:
    assert expected(models, MODEL, PROMPT) != expected(models, OTHER, PROMPT)


@pytest.mark.parametrize("shape", SHAPES)
async def test_each_models_tokens_are_its_own(models: Models, shape: str) -> None:
    prompts = random_prompts([1, 15, 40, 129, 33, 100])
    asked = [(model, prompt) for prompt in prompts for model in models]
    chunks: dict[str, Any] = {"prefill": PrefillWorkerConfig(chunk_tokens=32)}
    async with cluster_with(models, **chunks, **SHAPES[shape]) as cluster:
        found = await asyncio.gather(*(generated(cluster, f"r{n}", *request) for n, request in enumerate(asked)))
        assert found == [expected(models, *request) for request in asked]


async def test_prefixes_are_found_by_their_own_model_alone(models: Models) -> None:
    async with cluster_with(models) as cluster:
        for number, (model, num_cached) in enumerate(((MODEL, 0), (OTHER, 0), (MODEL, 144), (OTHER, 144))):
            events = await cluster.generate(f"r{number}", PROMPT, greedy(NUM_TOKENS), model=model)
            assert events[0].num_cached_tokens == num_cached
            assert tokens_of(events) == expected(models, model, PROMPT)


async def test_after_a_kill_a_request_goes_on_with_its_own_model(models: Models) -> None:
    async with cluster_with(models, num_decode=2) as cluster, AsyncExitStack() as stack:
        held = [stack.enter_context(brake(worker.model.runner, has_generated(3))) for worker in cluster.decodes]
        request = asyncio.create_task(cluster.generate("r", PROMPT, greedy(NUM_TOKENS), model=OTHER))
        await eventually(lambda: any(one.holding.is_set() for one in held), what="no such step was made")
        at = next(w for w, one in zip(cluster.decodes, held, strict=True) if one.holding.is_set())
        assert at.info.model == OTHER
        for one in held:
            one.release()
        await cluster.remove(at)
        events = await asyncio.wait_for(request, HANGS_S)
        assert events[-1].attempt == 1 and tokens_of(events) == expected(models, OTHER, PROMPT)


async def test_a_model_whose_workers_are_gone_is_not_served_by_anothers(models: Models) -> None:
    """Nor without a scheduler, where gateways choose by themselves."""
    async with cluster_with(models) as cluster:
        for worker in [worker for worker in cluster.workers if worker.info.model == OTHER]:
            await cluster.remove(worker)
        limits_of = cluster.orchestrator.limits
        await eventually(lambda: (found := limits_of(OTHER)) is not None and "are gone" in found.reason)
        gone = limits_of(OTHER)
        assert gone is not None and not gone.ready
        limits = cluster.orchestrator.limits(MODEL)
        assert limits is not None and limits.ready
        with pytest.raises(UnavailableError):
            await generated(cluster, "r1", OTHER, PROMPT)
        assert await generated(cluster, "r2", MODEL, PROMPT) == expected(models, MODEL, PROMPT)
        await cluster.scheduler.stop()
        await eventually(lambda: cluster.orchestrator.scheduler.connection is None)
        with pytest.raises(UnavailableError):
            await generated(cluster, "r3", OTHER, PROMPT)
        assert await generated(cluster, "r4", MODEL, PROMPT) == expected(models, MODEL, PROMPT)
        await cluster.start_scheduler()


async def test_the_last_prefill_worker_of_a_model_keeps_its_role(models: Models) -> None:
    """Others there may be, but of another model."""
    async with cluster_with(models) as cluster:
        alone = next(worker for worker in cluster.prefills if worker.info.model == OTHER)
        with pytest.raises(ConflictError, match="is the only prefill worker"):
            await cluster.orchestrator.scheduler.change_role(alone.info.worker_id, "decode", 1.0)


# --- workers that change their model ---


@asynccontextmanager
async def replicas_of(models: Models, **config: Any) -> AsyncIterator[ReplicaCluster]:
    async with replica_cluster(models[MODEL], others={OTHER: str(models[OTHER].folder)}, **config) as cluster:
        yield cluster


def of_model(cluster: ReplicaCluster, model: str) -> list[WorkerReplica]:
    return [replica for replica in cluster.replicas if replica.model_name == model]


def info_of(replica: WorkerReplica) -> WorkerInfo:
    assert replica.worker is not None
    return replica.worker.info


def is_gone(runner: weakref.ref[ModelRunner]) -> bool:
    """A thread that has done its last work for it may have to let go yet."""
    gc.collect()
    return runner() is None


async def test_a_worker_goes_on_with_the_other_model_and_comes_back(models: Models) -> None:
    """Among requests of both; none of them notices, and nothing of the model that it had is left."""
    async with replicas_of(models, num_prefill=0, num_decode=2) as cluster:
        moving = of_model(cluster, MODEL)[0]
        for n, (model, sizes) in enumerate([(OTHER, (1, 3)), (MODEL, (2, 2))]):
            before = weakref.ref(moving.model.runner)
            asked = [(name, prompt) for prompt in random_prompts([33, 70, 150]) for name in models]
            asking = [asyncio.create_task(generated(cluster, f"r{n}-{m}", *one)) for m, one in enumerate(asked)]
            await cluster.change(moving, "decode", model=model)
            assert [await request for request in asking] == [expected(models, *one) for one in asked]
            assert (len(of_model(cluster, MODEL)), len(of_model(cluster, OTHER))) == sizes
            await eventually(partial(is_gone, before), what="the other model's memory is still there")
            info = info_of(moving)
            assert (info.model, info.home_model) == (model, MODEL)
            assert info.models == [name for name in models if name != model]
            found = await asyncio.gather(*(generated(cluster, f"s{n}-{m}", *one) for m, one in enumerate(asked)))
            assert found == [expected(models, *one) for one in asked]


async def test_streams_go_on_where_their_own_model_is(models: Models) -> None:
    a_token_each = DecodeWorkerConfig(speculation=None)  # else the last ones may have come by then
    async with replicas_of(models, num_prefill=0, num_decode=2, decode=a_token_each) as cluster:
        events = cluster.stream("r", PROMPT, greedy(60), model=MODEL)
        found = [await anext(events) for _ in range(5)]
        at = next(replica for replica in of_model(cluster, MODEL) if replica.worker and replica.worker.gateway_of)
        await cluster.change(at, "decode", drain_s=0.0, model=OTHER)
        found += [event async for event in events]
        assert tokens_of(found) == models[MODEL].local(PROMPT, greedy(60)).tokens
        assert found[-1].attempt == 1


async def test_an_operator_may_order_another_model_but_not_the_last_worker_of_one(models: Models) -> None:
    async with replicas_of(models, num_prefill=0, num_decode=2) as cluster:
        scheduler, moving = cluster.orchestrator.scheduler, of_model(cluster, MODEL)[0]
        await scheduler.change_role(info_of(moving).worker_id, "decode", 5.0, OTHER)
        await eventually(lambda: moving.model_name == OTHER)
        await cluster.changed(moving)
        (last,) = of_model(cluster, MODEL)
        last_id = info_of(last).worker_id
        with pytest.raises(ConflictError, match="is the only decode worker"):
            await scheduler.change_role(last_id, "decode", 5.0, OTHER)
        with pytest.raises(ConflictError, match="cannot become a worker of none"):
            await scheduler.change_role(last_id, "decode", 5.0, "none")
        with pytest.raises(ConflictError, match="is a decode worker already"):
            await scheduler.change_role(last_id, "decode", 5.0, MODEL)


async def test_steps_are_tried_out_where_nobody_knows_what_they_cost(
    models: Models, caplog: pytest.LogCaptureFixture
) -> None:
    """A worker that had the model before knows, and one that is ordered to take it is told by the scheduler."""
    caplog.set_level("INFO", logger="engine.steps.calibration")
    config = DecodeWorkerConfig(calibration_s=0.01)

    def num_calibrations() -> int:
        """And nothing that others warn of."""
        return sum(record.name == "engine.steps.calibration" for record in caplog.records)

    async with replicas_of(models, num_prefill=0, num_decode=2, decode=config) as cluster:
        first, second = of_model(cluster, MODEL)
        assert num_calibrations() == 4
        await cluster.change(first, "decode", model=OTHER)
        assert num_calibrations() == 5, "of nobody's order: it is told nothing"
        costs = first.model.costs
        await cluster.change(first, "decode", model=MODEL)
        await cluster.change(first, "decode", model=OTHER)
        assert first.model.costs is costs and costs.is_seeded
        await cluster.change(first, "decode", model=MODEL)
        await cluster.orchestrator.scheduler.change_role(info_of(second).worker_id, "decode", 5.0, OTHER)
        await eventually(lambda: second.model_name == OTHER)
        await cluster.changed(second)
        assert num_calibrations() == 5
        assert second.worker is not None and second.worker.snapshot().step_cost is not None
        assert info_of(second).load_s > 0.0
        assert await generated(cluster, "r", OTHER, PROMPT) == expected(models, OTHER, PROMPT)


async def test_what_models_were_asked_while_a_worker_changed_is_replayed_together(
    models: Models, tmp_path: Path
) -> None:
    """Each worker is in one model's log, wherever it is when that is begun."""
    without_targets = SloClass(name="default")
    slo = SloConfig(classes=(without_targets,), default="default")
    async with replicas_of(
        models, num_prefill=0, num_decode=2, decode=DecodeWorkerConfig(calibration_s=0.01)
    ) as cluster:
        await cluster.change(of_model(cluster, MODEL)[0], "decode", model=OTHER)
        workers = cluster.orchestrator.scheduler.reports
        here = {info_of(replica).worker_id for replica in cluster.replicas}
        await eventually(lambda: {info.worker_id for info, _ in workers()} == here)

        def known(name: str) -> LoggedCluster | None:
            return logged_cluster(workers(), slo, model=name, model_flips=True)

        for name in models:
            recorder = RequestRecorder(
                log_of_model(f"{tmp_path}/log", name), slo, workers, model=name, secret=b"a secret", model_flips=True
            )
            await eventually(partial(known, name))
            for number in range(3):
                await run(cluster, f"r{number}", RequestTerms(slo=without_targets, model=name), on_ended=recorder.ended)
            recorder.stop(HANGS_S)
    logs = read_logs(logs_of(tmp_path / "log"))
    assert {name: (found.num_decode, len(requests)) for name, (found, requests) in logs.items()} == {
        MODEL: (2, 3),
        OTHER: (2, 3),
    }
    assert all((found.change_s or 0.0) > 0.0 for found, _ in logs.values())
    told = what_if_models(logs, {name: found for name, (found, _) in logs.items()})
    assert told.overall.measured.in_time == told.overall.supposed.in_time == 1.0


# --- over HTTP ---


@asynccontextmanager
async def served(models: Models) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    """OpenAI's client, and one for what that has no words for. The other model has another tokenizer and template."""
    for n, model in enumerate(models.values()):
        marks = "[]" if n else "<>"
        text = "{% for message in messages %}" + marks[0] + "{{ message.content }}" + marks[1] + "{% endfor %}"
        (model.folder / "chat_template.jinja").write_text(text)
    async with cluster_with(models) as cluster:
        other = ServedModel(
            name=OTHER,
            tokenizer=Tokenizer(models[OTHER].folder),
            pooling=CheckpointPooling(size=EMBEDDING_SIZE),
            limits=partial(cluster.orchestrator.limits, OTHER),
        )
        api = scripted_api(cluster.orchestrator, Tokenizer(models[MODEL].folder), others=[other])
        async with clients_of(api) as clients:
            yield clients


async def test_clients_name_the_model_that_they_mean(models: Models) -> None:
    async with served(models) as (client, _):
        cards = [card async for card in client.models.list()]
        assert [card.id for card in cards] == [MODEL, OTHER]
        assert (await client.models.retrieve(OTHER)).id == OTHER
        for model, small in models.items():
            answer = await client.chat.completions.create(
                model=model,
                messages=[{"role": "user", "content": "hello"}],
                max_tokens=NUM_TOKENS,
                temperature=0,
                extra_body={"return_token_ids": True, "ignore_eos": True},
            )
            told: Any = answer
            text = {MODEL: "<hello>", OTHER: "[hello]"}[model]
            assert told.prompt_token_ids == Tokenizer(small.folder).encode(text, False)
            assert answer.model == model
            assert told.choices[0].token_ids == expected(models, model, told.prompt_token_ids)
        with pytest.raises(openai.NotFoundError) as missing:
            await client.completions.create(model="none", prompt="x")
        assert missing.value.code == "model_not_found"
        assert MODEL in missing.value.message and OTHER in missing.value.message


async def test_what_is_asked_of_no_model_is_asked_of_which(models: Models) -> None:
    async with served(models) as (_, http):
        answer = await http.post("/tokenize", json={"prompt": "x"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "model"
        counted = await http.post("/tokenize", json={"prompt": "hello", "model": OTHER})
        assert counted.json()["tokens"] == Tokenizer(models[OTHER].folder).encode("hello", True)


async def test_operators_see_whose_a_request_was(models: Models) -> None:
    async with served(models) as (client, http):
        for model in models:
            both: Any = {"max_tokens": 2, "temperature": 0, "extra_body": {"ignore_eos": True}}
            await client.completions.create(model=model, prompt="hello", **both)
        rows = (await http.get("/cluster/requests")).json()["requests"]
        assert [row["model"] for row in rows] == [OTHER, MODEL]
        series = (await http.get("/slo")).json()["classes"]
        counts = {found["model"]: found["counts"]["tokens"] for found in series}
        assert counts == {MODEL: 2, OTHER: 2}
        decisions = (await http.get("/cluster/decisions")).json()["decisions"]
        assert {(row["model"], row["request_id"].partition("-")[0]) for row in decisions} == {
            (MODEL, "cmpl"),
            (OTHER, "cmpl"),
        }
        assert (await http.get("/health")).json() == {"status": "ready"}
