"""What a gateway does when it first sees an adapter."""

from __future__ import annotations

import asyncio
import queue
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

import cluster.gateway.adapter_folder
from cluster.gateway.adapter_folder import AdapterFolder
from cluster.http.served_model import ServedModel
from engine.checkpoint.adapters import CONFIG_NAME, adapter_digest
from tests.engine.checkpoint.test_adapter_folders import LAYER, MODEL, write
from tests.support.waiting import HANGS_S


def test_what_it_knows_of_a_recipe_it_finds_out_once(tmp_path: Path) -> None:
    """A header has hundreds of tensors: those of an adapter that lie as another one's do are not looked at again."""
    model = replace(MODEL, layers=(LAYER,) * 200)
    folder = AdapterFolder(tmp_path, model, max_rank=64)
    modules = {f"model.layers.{index}.self_attn.q_proj": (8, 8) for index in range(200)}
    paths = [write(tmp_path / name, modules=modules) for name in ("first", "second")]
    first, second = (calls(partial(folder.find, path.name)) for path in paths)
    assert second < 400 < first
    refs = [folder.find(path.name) for path in paths]
    assert [ref and ref.digest for ref in refs] == list(map(adapter_digest, paths))
    other = write(tmp_path / "other", modules=modules, lora_alpha=3)
    assert calls(partial(folder.find, other.name)) > 400, "its scales are its own"


def test_what_is_put_into_a_watched_folder_is_known_before_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster.gateway.adapter_folder, "_WATCHED_EVERY_S", 0.01)
    digested: queue.Queue[Path] = queue.Queue()

    def digest(path: Path) -> str:
        found = adapter_digest(path)
        digested.put(path)
        return found

    monkeypatch.setattr(cluster.gateway.adapter_folder, "adapter_digest", digest)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / CONFIG_NAME).write_text("{}")
    folder = AdapterFolder(tmp_path, MODEL, max_rank=64)
    folder.watch()
    write(tmp_path / "first")
    assert digested.get(timeout=HANGS_S) == tmp_path / "first"
    folder.find("first")
    write(tmp_path / "second")
    assert digested.get(timeout=HANGS_S) == tmp_path / "second", "the first one's was known"


async def test_a_folder_that_does_not_answer_takes_no_thread_from_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests that name no adapter need threads, too: for long prompts, files and batches."""
    folder, answers = AdapterFolder(tmp_path, MODEL, max_rank=64), threading.Event()
    monkeypatch.setattr(folder, "find", lambda name: answers.wait())
    served = cast(ServedModel, SimpleNamespace(adapters=folder))
    hanging = [asyncio.create_task(ServedModel.adapter(served, "any")) for _ in range(100)]
    await asyncio.sleep(0)  # all have asked
    try:
        async with asyncio.timeout(HANGS_S):
            await asyncio.to_thread(lambda: None)
        assert not any(task.done() for task in hanging)
    finally:
        answers.set()
        await asyncio.gather(*hanging)


def calls(function: Callable[[], object]) -> int:
    """The number of calls of Python's functions that it takes."""
    number = 0

    def count(frame: object, event: str, argument: object) -> None:
        nonlocal number
        number += event == "call"

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return number
