"""What a gateway does when it first sees an adapter."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from cluster.gateway.adapter_folder import AdapterFolder
from engine.checkpoint.adapters import adapter_digest
from tests.engine.checkpoint.test_adapter_folders import LAYER, MODEL, write


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
