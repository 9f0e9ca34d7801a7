"""Two models in one cluster: each one's tokens from its own workers, whatever happens to either."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import openai
import pytest

from cluster.errors import ConflictError, UnavailableError
from cluster.http.app import create_app
from cluster.http.served_model import ServedModel
from engine.checkpoint.pooling import CheckpointPooling
from engine.sequence import StepPlan
from engine.text.tokenizer import Tokenizer
from prefill_workers.worker import PrefillWorkerConfig
from tests.support.http_server import MODEL, scripted_api
from tests.support.mini_cluster import MiniCluster, brake, cluster_of
from tests.support.mini_requests import PROMPT, tokens_of
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


def has_generated(num_tokens: int) -> Callable[[StepPlan], bool]:
    return lambda plan: any(item.seq.num_output_tokens > num_tokens for item in plan.items)


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
    async with cluster_with(models, num_decode=2) as cluster:
        request = asyncio.create_task(cluster.generate("r", PROMPT, greedy(NUM_TOKENS), model=OTHER))
        async with asyncio.timeout(HANGS_S):
            await eventually(lambda: any(worker.scheduler.num_running for worker in cluster.decodes))
            at = next(worker for worker in cluster.decodes if worker.scheduler.num_running)
            assert at.info.model == OTHER
            with brake(at.model.runner, has_generated(3)) as held:
                await held.reached()
                held.release()
                await cluster.remove(at)
            events = await request
        assert events[-1].attempt == 1 and tokens_of(events) == expected(models, OTHER, PROMPT)


async def test_a_model_whose_workers_are_gone_is_not_served_by_anothers(models: Models) -> None:
    """Nor without a scheduler, where gateways choose by themselves."""
    async with cluster_with(models) as cluster:
        for worker in [worker for worker in cluster.workers if worker.info.model == OTHER]:
            await cluster.remove(worker)
        await eventually(lambda: cluster.orchestrator.limits(OTHER) is None)
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
        transport = httpx.ASGITransport(create_app(api))
        http = httpx.AsyncClient(transport=transport, base_url="http://gateway")
        inside: Any = httpx.AsyncClient(transport=transport)  # openai's own is of a newer httpx
        url = "http://gateway/v1"
        async with http, openai.AsyncOpenAI(base_url=url, api_key="-", max_retries=0, http_client=inside) as client:
            yield client, http


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
            await client.completions.create(model=model, prompt="hello", max_tokens=2)
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
