"""Packed weights that processes share: the private ones to the bit, made once, whole or not there, dropped in time."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

from decode_workers.local_engine import LocalEngine
from engine.checkpoint import shared_weights
from engine.checkpoint.quantisation import Quantisation
from engine.checkpoint.shared_weights import packing_memory
from engine.sequence import Sequence, TokenLogprobs
from engine.steps.loading import EngineConfig, load_model
from kernels.cpu.huge_pages import PackingMemory, private_memory
from kernels.native.library import native_library
from tests.support.model_families import build_oracle
from tests.support.small_models import greedy, random_prompts

ROOT = Path(__file__).parents[3]
START_S = 240.0  # for a process, on a busy machine


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    native_library()  # compiled once for a machine, not for this folder
    monkeypatch.setenv("LEGATO_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "packed"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    return made


def fill_with(number: int) -> Callable[[Tensor], None]:
    def fill(packed: Tensor) -> None:
        packed.fill_(number)

    return fill


def pack_two(memory: PackingMemory) -> list[Tensor]:
    return [memory(5, torch.bfloat16, fill_with(3)), memory(70, torch.uint8, fill_with(4))]


def refuse(memory: PackingMemory) -> None:
    raise AssertionError("it was packed before")


def numbers(memory: PackingMemory) -> list[list[float]]:
    """What lies there, asked for without saying what it is."""
    nothing = fill_with(0)
    first, second = memory(5, torch.bfloat16, nothing), memory(70, torch.uint8, nothing)
    assert first.data_ptr() % 64 == second.data_ptr() % 64 == 0
    return [first.tolist(), second.tolist()]


PACKED = [[3.0] * 5, [4] * 70]


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To another user than root."""
    if os.geteuid() == 0:
        os.chown(path, 4711, -1)
    else:
        stranger = os.geteuid() + 1
        monkeypatch.setattr("kernels.cache_folder.os.geteuid", lambda: stranger)


def test_nobody_else_can_write_what_is_loaded_later(folder: Path, cache: Path) -> None:
    before = os.umask(0)
    try:
        packing_memory(folder, "facts", pack_two, "on")
    finally:
        os.umask(before)
    (made,) = cache.glob("*.weights")
    assert (cache.stat().st_mode & 0o777, made.stat().st_mode & 0o777) == (0o700, 0o600)
    cache.chmod(0o777)  # as an earlier version may have left it
    assert numbers(packing_memory(folder, "facts", refuse, "on")) == PACKED
    assert cache.stat().st_mode & 0o777 == 0o700


def test_what_others_could_have_written_is_packed_anew(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packing_memory(folder, "facts", pack_two, "on")
    (made,) = cache.glob("*.weights")
    calls: list[PackingMemory] = []

    def pack_again(memory: PackingMemory) -> None:
        calls.append(memory)
        pack_two(memory)

    made.chmod(0o666)
    assert numbers(packing_memory(folder, "facts", pack_again, "on")) == PACKED and len(calls) == 1
    elsewhere = folder.parent / "elsewhere"
    made.rename(elsewhere)
    made.symlink_to(elsewhere)
    assert numbers(packing_memory(folder, "facts", pack_again, "on")) == PACKED and len(calls) == 2
    with monkeypatch.context() as patch:
        if os.geteuid() == 0:  # else the folder is the other's as well
            give_away(made, patch)
            assert numbers(packing_memory(folder, "facts", pack_again, "on")) == PACKED and len(calls) == 3


def test_another_users_folder_is_not_used(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for kind in (cache, cache.parent / "native"):
        kind.mkdir(parents=True)
        give_away(kind, monkeypatch)
    assert packing_memory(folder, "facts", pack_two, "on") is private_memory
    assert native_library.__wrapped__() is None, "whatever was loaded before"
    assert "belongs to another user" in caplog.text and "LEGATO_CACHE" in caplog.text


@pytest.mark.parametrize("sharing", ["auto", "on"])
def test_what_was_packed_once_is_there_for_everyone(folder: Path, sharing: shared_weights.Sharing) -> None:
    assert numbers(packing_memory(folder, "facts", pack_two, sharing)) == PACKED
    assert numbers(packing_memory(folder, "facts", refuse, sharing)) == PACKED


def test_other_facts_and_other_files_are_packed_anew(folder: Path, cache: Path) -> None:
    packing_memory(folder, "facts", pack_two, "on")
    packing_memory(folder, "others", pack_two, "on")
    (folder / "model.safetensors").write_bytes(b"another")
    packing_memory(folder, "facts", pack_two, "on")
    assert len(list(cache.glob("*.weights"))) == 3


def test_off_touches_no_file(folder: Path, cache: Path) -> None:
    assert packing_memory(folder, "facts", refuse, "off") is private_memory
    assert not cache.exists()


@pytest.mark.parametrize("damage", [b"", b"short", b"x" * 1000])
def test_a_file_that_is_not_whole_is_made_again(folder: Path, cache: Path, damage: bytes) -> None:
    packing_memory(folder, "facts", pack_two, "on")
    [path] = cache.glob("*.weights")
    path.write_bytes(damage)
    assert numbers(packing_memory(folder, "facts", pack_two, "on")) == PACKED


def test_a_failed_or_killed_writer_leaves_nothing_that_is_used(folder: Path, cache: Path) -> None:
    def fail(memory: PackingMemory) -> None:
        pack_two(memory)
        raise ValueError("the checkpoint is bad")

    with pytest.raises(ValueError, match="bad"):
        packing_memory(folder, "facts", fail, "on")
    assert not list(cache.glob("*.weights")) and not list(cache.glob("*.part"))


def test_what_a_killed_writer_left_is_not_used(folder: Path, cache: Path) -> None:
    done = subprocess.run([sys.executable, "-c", _KILLED, str(folder)], cwd=ROOT, timeout=START_S, check=False)
    assert done.returncode == 9
    assert list(cache.glob("*.part"))
    assert numbers(packing_memory(folder, "facts", pack_two, "on")) == PACKED
    assert not list(cache.glob("*.part"))


_KILLED = """
import os, sys, torch
from pathlib import Path
from engine.checkpoint.shared_weights import packing_memory

def pack(memory):
    memory(5, torch.bfloat16, lambda packed: None)
    os._exit(9)

packing_memory(Path(sys.argv[1]), "facts", pack, "on")
"""


def test_those_who_start_together_pack_once(folder: Path) -> None:
    """Each opens the lock for itself, as processes do."""
    num_packed = []

    def pack(memory: PackingMemory) -> None:
        num_packed.append(1)
        pack_two(memory)

    with ThreadPoolExecutor(4) as pool:
        memories = list(pool.map(lambda _: packing_memory(folder, "facts", pack, "on"), range(4)))
    assert [numbers(memory) for memory in memories] == [PACKED] * 4
    assert len(num_packed) == 1


def test_a_folder_that_cannot_be_written_costs_only_memory(
    folder: Path, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text("a file where the folder should be")
    assert packing_memory(folder, "facts", pack_two, "on") is private_memory
    assert "private to this worker" in caplog.text


@pytest.mark.parametrize("limit", ["MAX_BYTES", "MAX_FILES"])
def test_the_least_recently_used_go_first(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, limit: str
) -> None:
    for number, facts in enumerate(["first", "second"]):
        packing_memory(folder, facts, pack_two, "on")
        [newest] = [path for path in cache.glob("*.weights") if path.stat().st_mtime > 1000]
        os.utime(newest, (number + 1, number + 1))
    oldest, second = sorted(cache.glob("*.weights"), key=lambda path: path.stat().st_mtime)
    monkeypatch.setattr(shared_weights, limit, 2 if limit == "MAX_FILES" else 2 * second.stat().st_size)
    packing_memory(folder, "third", pack_two, "on")
    assert not oldest.exists()
    assert second.exists()
    assert len(list(cache.glob("*.weights"))) == 2


@pytest.mark.parametrize("quantisation", [None, Quantisation(name="int8", group_size=32)])
def test_a_model_computes_the_same_to_the_bit(tmp_path: Path, cache: Path, quantisation: Quantisation | None) -> None:
    build_oracle("llama", tmp_path / "llama", hidden_size=64, intermediate_size=96)
    (tmp_path / "llama" / "tokenizer.json").write_text("{}")
    private, maker, reader = (logprobs(tmp_path / "llama", sharing, quantisation) for sharing in ("off", "on", "on"))
    assert private == maker == reader
    assert len(list(cache.glob("*.weights"))) == (native_library() is not None)


def logprobs(folder: Path, sharing: shared_weights.Sharing, quantisation: Quantisation | None) -> list[TokenLogprobs]:
    """Of a prompt's tokens: they depend on every weight."""
    config = EngineConfig(
        model_ref=str(folder),
        model_name="small",
        dtype="bfloat16",
        kv_blocks=8,
        num_threads=1,
        quantisation=quantisation,
        share_weights=sharing,
    )
    engine = LocalEngine(load_model(config), token_budget=64)
    prompt = random_prompts([40])[0]
    seq = Sequence(request_id="r", attempt=0, params=greedy(1, prompt_logprobs=1), prompt_token_ids=prompt)
    [emission] = engine.run([seq])
    assert emission.prompt_logprobs
    return emission.prompt_logprobs
