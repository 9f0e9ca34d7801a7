"""Adapters as clients see them, by OpenAI's own client: named as a model, listed, put there and taken away."""

from __future__ import annotations

import errno
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from cluster.gateway.adapter_folder import AdapterFolder
from cluster.http.api import Api
from engine.text.tokenizer import Tokenizer
from tests.support.adapters import merged_tokens, write_adapter
from tests.support.http_server import MODEL, clients_of, scripted_api
from tests.support.mini_cluster import cluster_of
from tests.support.scripted_generator import ScriptedGenerator
from tests.support.small_models import SmallModel

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
    async with cluster_of(model, **(ADAPTERS if folder else {})) as cluster:
        adapters = None if folder is None else AdapterFolder.of(str(folder), model.folder, "auto", max_rank=8)
        api = scripted_api(cluster.orchestrator, Tokenizer(model.folder), adapters=adapters)
        async with clients_of(api) as clients:
            yield clients


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
    ids: list[int] = answer.choices[0].model_extra["token_ids"]  # type: ignore[index]
    return ids


def expected(model: SmallModel, adapter: Path | None) -> list[int]:
    return merged_tokens(model.folder, adapter, Tokenizer(model.folder).encode(PROMPT, True), NUM_TOKENS)


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


def test_a_thousand_cost_nothing_until_they_are_named(model: SmallModel, tmp_path: Path) -> None:
    """No file of weights is read to list them, and each once to name it however often."""
    first = write_adapter(tmp_path / "served" / "adapter 0", model.folder, seed=1)
    for number in range(1, 1_000):
        (tmp_path / "served" / f"adapter {number}").symlink_to(first)
    adapters = AdapterFolder.of(str(tmp_path / "served"), model.folder, "auto", max_rank=8)
    assert len(adapters.listed()) == 1_000
    found = {adapters.find(f"adapter {number}") for number in range(1_000)}
    assert len({ref.digest for ref in found if ref is not None}) == 1
    config = json.loads((first / "adapter_config.json").read_text())
    (first / "adapter_config.json").write_text(json.dumps(config | {"lora_alpha": 1}))
    renewed = adapters.find("adapter 7")
    assert renewed is not None and renewed not in found
