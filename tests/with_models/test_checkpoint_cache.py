"""What is kept of a checkpoint's small files: the same as a first reading, never of other files, and soon there."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.checkpoint import cache as checkpoint_cache
from engine.checkpoint.cache import Json, remembered

SECOND_START = """
import sys
from pathlib import Path
from engine.model.config import ModelConfig
from engine.text.tokenizer import Tokenizer
folder = Path(sys.argv[1])
print(ModelConfig.from_folder(folder))
print("transformers" in sys.modules)
tokenizer = Tokenizer(folder)
print(tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}]), tokenizer.vocab_size, tokenizer.eos_token_ids)
print("transformers.models.auto" in sys.modules, "torch._dynamo" in sys.modules)
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "checkpoints"


@pytest.fixture
def sources(tmp_path: Path) -> list[Path]:
    named = [tmp_path / "config.json", tmp_path / "absent.json"]
    named[0].write_text("{}")
    return named


def counted() -> tuple[list[int], Callable[[], Json]]:
    calls: list[int] = []

    def make() -> Json:
        calls.append(1)
        return {"made": len(calls), "pair": (1, 2.5)}

    return calls, make


def test_a_second_start_reads_what_the_first_made_without_transformers_compilers(
    smollm2_folder: Path, tmp_path: Path
) -> None:
    environment = {**os.environ, "LEGATO_CACHE": str(tmp_path / "cache")}
    command = [sys.executable, "-c", SECOND_START, str(smollm2_folder)]
    first, second = (
        subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(2)
    )
    assert first[0] == second[0] and first[2] == second[2]
    assert (first[1], second[1]) == ("True", "False")
    assert second[3] == "False False"


def test_it_is_made_once_and_comes_back_as_json_has_it(sources: list[Path]) -> None:
    calls, make = counted()
    assert remembered("kind", sources, make) == remembered("kind", sources, make) == {"made": 1, "pair": [1, 2.5]}
    assert len(calls) == 1


@pytest.mark.parametrize("name", ["config.json", "absent.json"])
def test_a_file_that_changed_or_came_into_being_makes_it_new(sources: list[Path], name: str) -> None:
    _, make = counted()
    remembered("kind", sources, make)
    (sources[0].parent / name).write_text('{"other": 1}')
    assert remembered("kind", sources, make)["made"] == 2
    assert remembered("other kind", sources, make)["made"] == 3


def test_a_damaged_entry_is_made_again(sources: list[Path], cache: Path) -> None:
    _, make = counted()
    remembered("kind", sources, make)
    (entry,) = cache.iterdir()
    entry.write_text(entry.read_text()[:-5])
    assert remembered("kind", sources, make)["made"] == 2
    assert remembered("kind", sources, make)["made"] == 2


def test_what_cannot_be_made_is_not_remembered(sources: list[Path], cache: Path) -> None:
    def refuse() -> Json:
        raise ValueError("not supported")

    for _ in range(2):
        with pytest.raises(ValueError, match="not supported"):
            remembered("kind", sources, refuse)
    assert not cache.exists()


def test_without_a_cache_folder_it_is_made_each_time(sources: list[Path], cache: Path) -> None:
    cache.parent.write_text("a file where the folder should be")
    _, make = counted()
    assert [remembered("kind", sources, make)["made"] for _ in range(2)] == [1, 2]


def test_the_oldest_entries_go(sources: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint_cache, "MAX_ENTRIES", 2)
    _, make = counted()
    for number in range(4):
        remembered(f"kind{number}", sources, make)
        for entry in cache.glob(f"kind{number}-*"):
            os.utime(entry, (number, number))
    assert sorted(entry.name.split("-")[0] for entry in cache.iterdir()) == ["kind2", "kind3"]


def test_what_is_asked_for_stays(sources: list[Path], cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many others come: who tries hundreds of small models starts a large one no slower."""
    monkeypatch.setattr(checkpoint_cache, "MAX_ENTRIES", 2)
    calls, make = counted()
    remembered("asked", sources, make)
    for number in range(4):
        for entry in cache.iterdir():
            is_old = entry.name.startswith("asked")
            os.utime(entry, (0, 0) if is_old else (1, 1))
        remembered("asked", sources, make)
        remembered(f"kind{number}", sources, dict)
    assert len(calls) == 1
