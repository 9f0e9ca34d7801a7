"""Prefill attention that only a Hopper can run: what it takes, and, on a device, that it is its twin.

There it runs in a process of its own: a kernel whose warps wait for each other may wait for ever.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from kernels.interface import CacheGeometry
from kernels.triton.attention import hopper
from kernels.triton.attention.prefill import prefill_tile
from kernels.triton.attention.tiles import Operands
from kernels.triton.shipped import architecture
from tests.support.interpreted import device

_ENDED_S = 120  # of seconds' work


@pytest.mark.skipif(device().type != "cuda" or architecture(device()) != 90, reason="needs a Hopper")
def test_attention_on_a_hopper_is_its_twin(tmp_path: Path) -> None:
    """Whether or not it is in use. What the child says last is where it stood still."""
    said = tmp_path / "said"
    with said.open("w") as output:
        child = subprocess.Popen(
            [sys.executable, "-m", "tests.interpreted.hopper_child"], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        code = child.wait(_ENDED_S)
    except subprocess.TimeoutExpired:
        child.kill()
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(10)  # no longer: a driver may be slow to let it go
        pytest.fail(f"it stood still:\n{said.read_text()}")
    assert code == 0, said.read_text()


@pytest.mark.parametrize(
    ("other", "geometry", "suits"),
    [
        ({}, {}, True),
        ({"dtype": torch.float16}, {"block_size": 32, "num_kv_heads": 1}, True),
        ({"dtype": torch.float32}, {}, False),
        ({"architecture": 80}, {}, False),
        ({"architecture": 100}, {}, False),
        ({"windowed": True}, {}, False),
        ({"softcapped": True}, {}, False),
        ({"has_sinks": True}, {}, False),
        ({}, {"head_dim": 96}, False),
        ({}, {"head_dim": 576, "latent_dim": 512}, False),
        ({}, {"block_size": 24}, False),
        ({}, {"block_size": 256}, False),
    ],
)
def test_what_the_kernel_for_a_hopper_takes(
    other: dict[str, Any], geometry: dict[str, int], suits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its tiles are of as many rows as work is planned for."""
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    monkeypatch.setattr(hopper, "IN_USE", True)
    fields = {"block_size": 16, "block_stride": 2, "num_kv_heads": 8, "head_dim": 128} | geometry
    plain = Operands(
        dtype=torch.bfloat16, geometry=CacheGeometry(**fields), softcapped=False, windowed=False, architecture=90
    )
    operands = replace(plain, **other)
    assert hopper.suits(operands) == suits
    if suits:
        assert prefill_tile(operands, batch_invariant=False).rows == hopper.ROWS
