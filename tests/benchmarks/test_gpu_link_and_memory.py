"""The steps `link` and `memory` of the GPU check, small: kernels in the interpreter, a process's memory for a GPU's."""

from __future__ import annotations

import functools
from pathlib import Path

import pytest
import torch

from benchmarks.gpu.kernel_cases import LayerShape
from benchmarks.gpu.speed import link, memory
from tests.benchmarks.gpu_steps import TINY, figures, models_in, run_here
from tests.interpreted.device_queues import device_copies
from tests.support.interpreted import device


def test_slabs_of_both_sizes_stand_beside_the_link(tmp_path: Path) -> None:
    shape = LayerShape(num_kv_heads=2, head_dim=16, block_size=4, dtype=torch.float16)
    small = link.Scale(shape=shape, slab_tokens=(5, 9), num_slabs=2, link_bytes=1 << 20, repeats=1)
    measure = functools.partial(link.measure, scale=small, copies=device_copies())
    found = figures(run_here("link", tmp_path, measure, device=device()))
    aimed = [name for name, figure in found.items() if figure["at_least"] == link.AIM]
    assert aimed == [f"slab of {2 * n * 64 / 2**20:.3g} MiB to pinned host, of the link" for n in (5, 9)]
    assert all(figure["value"] > 0 for figure in found.values())


def test_what_is_in_use_is_watched_under_requests_of_all_kinds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models_in(tmp_path, monkeypatch)
    small = memory.Scale(
        model=TINY,
        kv_blocks=64,
        chunk_tokens=32,
        num_seqs=4,
        waves=(1, 6),
        longest_prompt=60,
        answer_tokens=3,
    )
    used = iter([10 << 20, 50 << 20, 53 << 20, 51 << 20])
    monkeypatch.setattr(memory, "used_bytes", lambda device: next(used))
    found = figures(run_here("memory", tmp_path, functools.partial(memory.measure, scale=small)))
    assert found["grown at full load"]["value"] == 3.0
    assert found["grown at full load, of the memory"]["at_most"] == memory.MOST_GROWTH


def test_a_process_uses_memory() -> None:
    assert memory.used_bytes(torch.device("cpu")) > 1 << 20
