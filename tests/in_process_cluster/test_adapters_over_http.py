"""Adapters as clients see them, by OpenAI's own client: named as a model, listed, put there and taken away."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import random
import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.gateway.adapter_folder import AdapterFolder
from cluster.gateway.orchestrator import OrchestratorConfig
from cluster.http.api import Api
from cluster.http.served_model import ServedModel
from engine.checkpoint.pooling import CheckpointPooling
from engine.text.tokenizer import Tokenizer
from kernels.adapters import Adapter
from tests.support.adapters import merged_tokens, write_adapter
from tests.support.clusters.mini_cluster import MiniCluster, brake, cluster_of
from tests.support.clusters.mini_requests import busy, is_long
from tests.support.http_server import MODEL, clients_of, running_server, scripted_api
from tests.support.processor_time import Stepped, turn_s
from tests.support.scripted_generator import EMBEDDING_SIZE, ScriptedGenerator
from tests.support.small_models import SmallModel
from tests.support.waiting import eventually

PROMPT = "the lamp was lit before the boats came in"
ADAPTERS: dict[str, Any] = {"prefill_engine": {"max_adapters": 2}, "decode_engine": {"max_adapters": 2}}
NUM_TOKENS = 12


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SmallModel:
    made = SmallModel("llama", tmp_path_factory.mktemp("llama"))
    (made.folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    return made


@asynccontextmanager
async def served(model: SmallModel, folder: Path | None) -> AsyncIterator[tuple[openai.AsyncOpenAI, httpx.AsyncClient]]:
    """OpenAI's client, and one for what that has no words for."""
    async with serving(model, folder, **(ADAPTERS if folder else {})) as (_, client, http):
        yield client, http


@asynccontextmanager
async def serving(
    model: SmallModel, folder: Path | None, **config: Any
) -> AsyncIterator[tuple[MiniCluster, openai.AsyncOpenAI, httpx.AsyncClient]]:
    """With the cluster."""
    async with cluster_of(model, **config) as cluster:
        adapters = None if folder is None else AdapterFolder.of(str(folder), model.folder, "auto", max_rank=8)
        api = scripted_api(cluster.orchestrator, Tokenizer(model.folder), adapters=adapters)
        async with clients_of(api) as (client, http):
            yield cluster, client, http


async def completed(client: openai.AsyncOpenAI, name: str, **fields: Any) -> list[int]:
    """Token ids, and that the answer is by that model."""
    answer = await client.completions.create(
        model=name,
        prompt=PROMPT,
        max_tokens=NUM_TOKENS,
        temperature=0,
        extra_body={"return_token_ids": True, "ignore_eos": True, **fields},
    )
    assert answer.model == name
    ids: list[int] = answer.choices[0].model_extra["token_ids"]
    return ids


def prompt_of(model: SmallModel) -> list[int]:
    return Tokenizer(model.folder).encode(PROMPT, True)


def expected(model: SmallModel, adapter: Path | None) -> list[int]:
    return merged_tokens(model.folder, adapter, prompt_of(model), NUM_TOKENS)


async def test_what_is_in_the_folder_is_a_model(model: SmallModel, tmp_path: Path) -> None:
    """From the moment that it is there; and what is written over it is another one."""
    first = write_adapter(tmp_path / "first", model.folder, seed=1)
    async with served(model, tmp_path) as (client, _):
        assert await completed(client, MODEL) == expected(model, None)
        assert await completed(client, "first") == expected(model, first)
        second = write_adapter(tmp_path / "second", model.folder, seed=2)
        assert await completed(client, "second") == expected(model, second)
        listed = [card.model_dump() async for card in client.models.list()]
        assert [(card["id"], card["parent"]) for card in listed] == [(MODEL, None), ("first", MODEL), ("second", MODEL)]
        assert (await client.models.retrieve("first")).model_dump()["root"] == str(first)
        write_adapter(second, model.folder, seed=3)
        assert await completed(client, "second") == expected(model, second)
        streamed = await client.chat.completions.create(
            model="second", messages=[{"role": "user", "content": "hello"}], max_tokens=4, stream=True
        )
        assert {chunk.model async for chunk in streamed} == {"second"}
        answered = await client.responses.create(model="first", input="hello", max_output_tokens=4, store=False)
        assert answered.model == "first"


async def test_one_elsewhere_is_loaded_and_unloaded_as_with_vllm(model: SmallModel, tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "served", write_adapter(tmp_path / "elsewhere", model.folder, seed=4)
    other = write_adapter(tmp_path / "other", model.folder, seed=5)
    async with served(model, folder) as (client, http):
        told = {"lora_name": "mine", "lora_path": str(elsewhere)}
        answer = await http.post("/v1/load_lora_adapter", json=told)
        assert (answer.status_code, answer.text) == (200, "Success: LoRA adapter 'mine' added successfully.")
        assert await completed(client, "mine") == expected(model, elsewhere)

        again = await http.post("/v1/load_lora_adapter", json=told | {"lora_path": str(other)})
        assert again.status_code == 400 and "already" in again.json()["error"]["message"]
        inplace = await http.post("/v1/load_lora_adapter", json=told | {"lora_path": str(other), "load_inplace": True})
        assert inplace.status_code == 200
        assert await completed(client, "mine") == expected(model, other)

        gone = await http.post("/v1/unload_lora_adapter", json={"lora_name": "mine"})
        assert (gone.status_code, gone.text) == (200, "Success: LoRA adapter 'mine' removed successfully.")
        with pytest.raises(openai.NotFoundError) as missing:
            await completed(client, "mine")
        assert missing.value.code == "model_not_found"
        assert (await http.delete("/v1/load_lora_adapter", params={"lora_name": "mine"})).status_code == 404
        assert (await http.post("/v1/load_lora_adapter", json=told)).status_code == 200
        assert (await http.delete("/v1/load_lora_adapter", params={"lora_name": "mine"})).status_code == 200
        assert (elsewhere / "adapter_config.json").exists(), "what was registered is not ours to delete"
        assert [card.id async for card in client.models.list()] == [MODEL]


@pytest.mark.parametrize(
    ("body", "param", "sentence"),
    [
        ({"lora_name": "a/b"}, "lora_path", "no name for an adapter"),
        ({"lora_name": "..", "lora_path": "/"}, "lora_path", "no name for an adapter"),
        ({"lora_name": MODEL}, "lora_name", "is the model itself"),
        ({"lora_path": "relative"}, "lora_path", "is no folder"),
        ({"lora_path": "/"}, "lora_path", "holds no adapter_config.json"),
        ({"lora_path": 3}, "lora_path", "lora_path"),
        ({"lora_name": ""}, "lora_name", "lora_name"),
        ({"made_up": 3}, "made_up", "made_up"),
    ],
)
async def test_what_cannot_be_loaded_is_told_by_field(
    model: SmallModel, tmp_path: Path, body: dict[str, Any], param: str, sentence: str
) -> None:
    good = write_adapter(tmp_path / "good", model.folder, seed=6)
    api = scripted_api_of(model, tmp_path / "served")
    async with clients_of(api) as (_, http):
        answer = await http.post("/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(good)} | body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and sentence in error["message"]
    assert list((tmp_path / "served").iterdir()) == []


def scripted_api_of(model: SmallModel, folder: Path) -> Api:
    tokenizer = Tokenizer(model.folder)
    adapters = AdapterFolder.of(str(folder), model.folder, "auto", max_rank=8)
    return scripted_api(ScriptedGenerator(tokenizer), tokenizer, adapters=adapters)


def test_of_several_models_adapters_of_one_name_the_one_that_is_said_goes(model: SmallModel, tmp_path: Path) -> None:
    other, tokenizer = "another/model", Tokenizer(model.folder)
    good = write_adapter(tmp_path / "good", model.folder, seed=6)
    first, second = (tmp_path / name for name in ("first", "second"))
    folders = [AdapterFolder.of(str(folder), model.folder, "auto", max_rank=8) for folder in (first, second)]
    for link in (first / "both", second / "both", second / "one's"):
        link.symlink_to(good)
    generator = ScriptedGenerator(tokenizer)
    beside = ServedModel(
        name=other,
        tokenizer=tokenizer,
        pooling=CheckpointPooling(size=EMBEDDING_SIZE),
        limits=generator.limits,
        adapters=folders[1],
    )

    with running_server(generator, tokenizer, adapters=folders[0], others=[beside]) as target:

        def unload(**told: str) -> httpx.Response:
            return target.http.post("/v1/unload_lora_adapter", json=told)

        def delete(**told: str) -> httpx.Response:
            return target.http.delete("/v1/load_lora_adapter", params=told)

        for ask in (unload, delete):
            for told in ({}, {"base_model_name": "a third"}):
                refused = ask(lora_name="both", **told)
                assert refused.status_code == 400
                error = refused.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", "base_model_name")
                assert repr(MODEL) in error["message"] and repr(other) in error["message"]
            missing = ask(lora_name="one's", base_model_name=MODEL)
            assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")
        assert all(link.is_symlink() for link in (first / "both", second / "both", second / "one's"))

        assert delete(lora_name="both", base_model_name=other).status_code == 200
        assert {path.name for path in second.iterdir()} == {"one's"} and (first / "both").is_symlink()
        assert unload(lora_name="both").status_code == 200, "only one is left"
        assert delete(lora_name="one's").status_code == 200
        assert [*first.iterdir(), *second.iterdir()] == []


def test_what_fails_leaves_nothing_in_the_folder(model: SmallModel, tmp_path: Path) -> None:
    """Whether another gateway was faster, a folder lies there, or the disk takes no more."""
    folder, good = tmp_path / "served", write_adapter(tmp_path / "good", model.folder, seed=6)
    other = write_adapter(tmp_path / "other", model.folder, seed=7)
    adapters = AdapterFolder.of(str(folder), model.folder, "auto", max_rank=8)
    adapters.register("x", good, replace=False)
    shutil.copytree(good, folder / "by hand")
    for name in ("x", "by hand"):
        with pytest.raises(ValueError, match=f"there is an adapter '{name}' already"):
            adapters.register(name, other, replace=False)
    with pytest.raises(ValueError, match="put there by hand"):
        adapters.register("by hand", other, replace=True)
    with pytest.MonkeyPatch.context() as patch:

        def full(path: Path, target: Path) -> Path:
            raise OSError(errno.ENOSPC, "No space left on device", str(target))

        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space left"):
            adapters.register("x", other, replace=True)
    assert {path.name for path in folder.iterdir()} == {"x", "by hand"}
    assert (folder / "x").readlink() == good


async def test_one_that_cannot_be_computed_is_refused_where_it_is_named(model: SmallModel, tmp_path: Path) -> None:
    write_adapter(tmp_path / "dora", model.folder, seed=7, use_dora=True)
    write_adapter(tmp_path / "wide", model.folder, seed=7, rank=9)
    write_adapter(tmp_path / "pickled", model.folder, seed=7)
    (tmp_path / "pickled" / "adapter_model.safetensors").rename(tmp_path / "pickled" / "adapter_model.bin")
    (write_adapter(tmp_path / "torn", model.folder, seed=7) / "adapter_config.json").write_text("[]")
    by_hand = write_adapter(tmp_path / "by hand", model.folder, seed=7)
    api = scripted_api_of(model, tmp_path)
    async with clients_of(api) as (_, http):
        for name, sentence in {
            "dora": "sets use_dora",
            "wide": "the rank 9, more than the 8",
            "pickled": "is a pickle",
            "torn": "only LORA is computed",
        }.items():
            answer = await http.post("/v1/completions", json={"model": name, "prompt": "x", "max_tokens": 1})
            assert answer.status_code == 400
            assert sentence in answer.json()["error"]["message"] and answer.json()["error"]["param"] == "model"
        assert (await http.post("/tokenize", json={"model": "by hand", "prompt": "x"})).status_code == 200
        stays = await http.delete("/v1/load_lora_adapter", params={"lora_name": "by hand"})
        assert stays.status_code == 409 and by_hand.is_dir()
        assert stays.json()["error"]["code"] == "adapter_not_unloaded"


async def test_names_that_no_file_can_have_and_folders_that_nobody_can_read_are_no_fault_of_ours(
    model: SmallModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, good = tmp_path / "served", write_adapter(tmp_path / "good", model.folder, seed=6)
    api = scripted_api_of(model, folder)
    (folder / "good").symlink_to(good)
    (folder / "in circles").symlink_to(folder / "in circles")
    locked = folder / "locked"
    locked.mkdir()
    is_dir, is_file = Path.is_dir, Path.is_file

    def refused(look: Callable[[Path], bool]) -> Callable[[Path], bool]:
        """Looks as a user without rights in that folder would: a test may run as root."""

        def looked(path: Path) -> bool:
            if locked in path.parents or path == locked:
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return look(path)

        return looked

    monkeypatch.setattr(Path, "is_dir", refused(is_dir))
    monkeypatch.setattr(Path, "is_file", refused(is_file))
    async with clients_of(api) as (_, http):
        listed = await http.get("/v1/models")
        assert [card["id"] for card in listed.json()["data"]] == [MODEL, "good"]
        for name, status in {"灯" * 100: 404, "in circles": 404, "locked": 400}.items():
            body = {"model": name, "prompt": "x", "max_tokens": 1}
            assert (await http.post("/v1/completions", json=body)).status_code == status, name
            assert (await http.get(f"/v1/models/{name}")).status_code == status, name
        told = {"lora_name": "灯" * 100, "lora_path": str(good)}
        answer = await http.post("/v1/load_lora_adapter", json=told)
        assert answer.status_code == 400 and "no name for an adapter" in answer.json()["error"]["message"]
    assert {entry.name for entry in folder.iterdir()} == {"good", "in circles", "locked"}


async def test_a_folder_that_is_gone_takes_no_model_with_it(model: SmallModel, tmp_path: Path) -> None:
    """As where it is a mount of another machine's."""
    api = scripted_api_of(model, tmp_path / "served")
    (tmp_path / "served").rmdir()
    async with clients_of(api) as (client, _):
        assert [card.id async for card in client.models.list()] == [MODEL]
        with pytest.raises(openai.NotFoundError):
            await completed(client, "x")


async def test_without_a_folder_there_are_no_adapters(model: SmallModel) -> None:
    async with served(model, None) as (client, http):
        told = {"lora_name": "x", "lora_path": "/tmp"}
        answer = await http.post("/v1/load_lora_adapter", json=told)
        assert answer.status_code == 400 and "adapters.folder" in answer.json()["error"]["message"]
        with pytest.raises(openai.NotFoundError):
            await completed(client, "x")


def test_a_folder_of_another_models_adapters_names_what_is_wrong(model: SmallModel, tmp_path: Path) -> None:
    other = SmallModel("qwen3", tmp_path / "other")
    write_adapter(tmp_path / "served" / "x", other.folder, seed=1)
    adapters = AdapterFolder.of(str(tmp_path / "served"), model.folder, "auto", max_rank=8)
    with pytest.raises(ValueError, match="it is for another one"):
        adapters.find("x")


async def test_a_thousand_cost_nothing_until_they_are_named(model: SmallModel, tmp_path: Path) -> None:
    """No file of weights is read to list them, nor is the loop kept; and each is read once to name it however often."""
    first = write_adapter(tmp_path / "served" / "adapter 0", model.folder, seed=1)
    for number in range(1, 1_000):
        (tmp_path / "served" / f"adapter {number}").symlink_to(first)
    adapters = AdapterFolder.of(str(tmp_path / "served"), model.folder, "auto", max_rank=8)
    assert len(adapters.listed()) == 1_000
    async with clients_of(scripted_api_of(model, tmp_path / "served")) as (_, http):

        async def look() -> None:
            await http.get("/v1/models")

        listing = [Stepped(look()) for _ in range(5)]
        for one in listing:
            await one
        assert len((await http.get("/v1/models")).json()["data"]) == 1 + 1_000
    longest = min(max(one.steps_s) for one in listing)
    assert longest / turn_s() < 200_000, "to make the list on the loop takes twice as long, and more"
    found = {adapters.find(f"adapter {number}") for number in range(1_000)}
    assert len({ref.digest for ref in found if ref is not None}) == 1
    config = json.loads((first / "adapter_config.json").read_text())
    (first / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    renewed = adapters.find("adapter 7")
    assert renewed is not None and renewed not in found


def num_in_memory() -> int:
    gc.collect()
    return sum(type(thing) is Adapter for thing in gc.get_objects())


def open_below(folder: Path) -> list[str]:
    """Files below it that this process holds open or has mapped."""
    found = Path("/proc/self/maps").read_text().splitlines()
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):  # it was the listing's own
            found.append(str(descriptor.readlink()))
    return [line for line in found if str(folder) in line]


async def test_of_a_thousand_each_answers_as_itself_and_nothing_is_left(model: SmallModel, tmp_path: Path) -> None:
    """Sixteen have room on a worker, twice as many are asked for, by clients that do not wait for each other; and one
    of the workers dies meanwhile."""
    served_folder = tmp_path / "served"
    names = [f"adapter-{number:03}" for number in range(1_000)]
    for number, name in enumerate(names):
        write_adapter(served_folder / name, model.folder, seed=number, rank=2, layers=(1,))
    asked = names[::32]
    wanted = {name: expected(model, served_folder / name) for name in asked}
    assert len(set(map(tuple, wanted.values()))) > 0.9 * len(asked), "adapters that say the same show nothing"
    room = {"max_adapters": 16}
    shape: dict[str, Any] = {"num_decode": 2, "prefill_engine": room, "decode_engine": room}
    async with serving(model, served_folder, **shape) as (cluster, client, _):
        found: list[tuple[str, list[int]]] = []

        async def ask_for_all(seed: int) -> None:
            for name in random.Random(seed).sample(asked, len(asked) // 2):
                found.append((name, await completed(client, name)))

        async def kill_one() -> None:
            await eventually(lambda: len(found) > 40 and any(worker.gateway_of for worker in cluster.decodes))
            await cluster.remove(busy(cluster))
            await cluster.add_decode()

        await asyncio.gather(kill_one(), *map(ask_for_all, range(6)))
        assert len(found) == 6 * len(asked) // 2
        assert [name for name, tokens in found if tokens != wanted[name]] == []

        await cluster.idle()
        for loaded in cluster.models:
            assert loaded.adapters is not None
            loaded.adapters.check()
            assert loaded.adapters.num_waiting == 0
        assert sum(len(loaded.adapters.loaded) for loaded in cluster.models if loaded.adapters) > 16
        num_loaded = sum(len(loaded.adapters.loaded) for loaded in cluster.models if loaded.adapters)
        # A thread that has loaded one may have to let go yet.
        await eventually(lambda: num_in_memory() == num_loaded, what="adapters are kept that no worker has")
        assert open_below(served_folder) == []
        ledger = cluster.scheduler.scheduler.ledger
        await eventually(lambda: not len(ledger), what="the scheduler still counts requests")
        assert set(ledger.table.adapters) == {worker.info.worker_id for worker in cluster.workers}
        assert not cluster.orchestrator.runs


async def test_a_broken_one_hides_no_other_models_adapter_of_its_name(model: SmallModel, tmp_path: Path) -> None:
    other = "another/model"
    write_adapter(tmp_path / "first" / "x", model.folder, seed=1, use_dora=True)
    good = write_adapter(tmp_path / "second" / "x", model.folder, seed=2)
    write_adapter(tmp_path / "first" / "both broken", model.folder, seed=1, use_dora=True)
    write_adapter(tmp_path / "second" / "both broken", model.folder, seed=1, rank=9)
    folders = [AdapterFolder.of(str(tmp_path / n), model.folder, "auto", max_rank=8) for n in ("first", "second")]
    engine = {"max_adapters": 1}
    async with cluster_of(model, others={other: str(model.folder)}, num_prefill=0, decode_engine=engine) as cluster:
        second = ServedModel(
            name=other,
            tokenizer=Tokenizer(model.folder),
            pooling=CheckpointPooling(size=EMBEDDING_SIZE),
            limits=partial(cluster.orchestrator.limits, other),
            adapters=folders[1],
        )
        api = scripted_api(cluster.orchestrator, Tokenizer(model.folder), adapters=folders[0], others=[second])
        async with clients_of(api) as (client, http):
            assert await completed(client, "x") == expected(model, good)
            assert (await client.models.retrieve("x")).model_dump()["parent"] == other
            body = {"model": "both broken", "prompt": "x", "max_tokens": 1}
            refused = await http.post("/v1/completions", json=body)
            assert refused.status_code == 400 and "sets use_dora" in refused.json()["error"]["message"]
            shutil.rmtree(tmp_path / "second" / "x")
            assert (await client.models.retrieve("x")).model_dump()["parent"] == MODEL
            with pytest.raises(openai.BadRequestError):
                await completed(client, "x")


async def test_one_that_was_replaced_before_it_was_loaded_is_told_so(model: SmallModel, tmp_path: Path) -> None:
    first, second = (write_adapter(tmp_path / name, model.folder, seed=n) for n, name in enumerate(("first", "second")))
    config: dict[str, Any] = {"num_prefill": 0, "orchestrator": OrchestratorConfig(retry_delay_s=0.001)}
    async with serving(model, tmp_path, decode_engine={"max_adapters": 1}, **config) as (cluster, client, _):
        (decode,) = cluster.decodes
        pool = decode.model.adapters
        assert pool is not None
        with brake(decode.model.runner, is_long(len(prompt_of(model)) + 2)) as held:
            running = asyncio.create_task(completed(client, "first"))
            await held.reached()
            waiting = asyncio.create_task(completed(client, "second"))
            await eventually(lambda: pool.num_waiting == 1, what="nobody waits for the second adapter")
            write_adapter(second, model.folder, seed=3)
        assert await running == expected(model, first)
        with pytest.raises(openai.InternalServerError) as told:
            await waiting
        assert told.value.code == "adapter_not_loaded" and "the adapter 'second'" in told.value.message
        assert await completed(client, "second") == expected(model, second)


@pytest.mark.parametrize("killed", [False, True], ids=["it goes on", "but not where nobody has it"])
async def test_a_stream_whose_adapter_is_taken_away(model: SmallModel, tmp_path: Path, killed: bool) -> None:
    folder = write_adapter(tmp_path / "mine", model.folder, seed=4)
    merged = expected(model, folder)
    engines: dict[str, Any] = {**ADAPTERS, "num_decode": 2, "orchestrator": OrchestratorConfig(retry_delay_s=0.001)}
    tokens: list[int] = []
    async with serving(model, tmp_path, **engines) as (cluster, client, _):

        async def read() -> None:
            fields = {"return_token_ids": True, "ignore_eos": True}
            stream = await client.completions.create(
                model="mine", prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0, stream=True, extra_body=fields
            )
            async for chunk in stream:
                tokens.extend((chunk.choices[0].model_extra or {}).get("token_ids", []))

        with ExitStack() as stack:
            fourth = is_long(len(prompt_of(model)) + 4)
            brakes = [stack.enter_context(brake(worker.model.runner, fourth)) for worker in cluster.decodes]
            reading = asyncio.create_task(read())
            await eventually(lambda: any(held.holding.is_set() for held in brakes), what="no such step was made")
            shutil.rmtree(folder)
            for held in brakes:
                held.release()
            if killed:
                await cluster.remove(busy(cluster))
        if killed:
            with pytest.raises(openai.APIError) as told:
                await reading
            assert told.value.code == "adapter_not_loaded" and "the adapter 'mine'" in told.value.message
            assert 0 < len(tokens) < NUM_TOKENS and tokens == merged[: len(tokens)]
        else:
            await reading
            assert tokens == merged
        with pytest.raises(openai.NotFoundError):
            await completed(client, "mine")
