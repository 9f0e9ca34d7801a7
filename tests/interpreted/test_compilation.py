"""Every shipped kernel compiles for GPUs that are not here, without spills: as recorded, and some of them anew."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from benchmarks.gpu.compilation import read_record
from kernels.triton.shipped import Shipped
from tests.support.interpreted import device, uninterpreted_environment
from tests.support.thoroughness import in_test_long

ADVICE = "run python -m benchmarks.gpu.compilation"


@pytest.fixture(scope="module")
def report() -> Any:
    child = subprocess.run(
        [sys.executable, "-m", "tests.interpreted.compile_child", *in_test_long("all")],
        env=uninterpreted_environment(),
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout)


def test_the_record_is_of_what_is_shipped(report: Any) -> None:
    recorded = {name: entry["fingerprint"] for name, entry in read_record()["kernels"].items()}
    shipped = report["fingerprints"]
    assert {name for name in recorded.keys() | shipped.keys() if recorded.get(name) != shipped.get(name)} == set(), (
        ADVICE
    )


def test_every_architecture_is_recorded(report: Any) -> None:
    for name, entry in read_record()["kernels"].items():
        assert entry.keys() == {"fingerprint", *(f"sm_{arch}" for arch in report["architectures"][name])}, ADVICE


def test_portable_kernels_are_for_all_architectures(report: Any) -> None:
    """A configuration for some architectures only stands beside one of the same operation for all of them."""
    everywhere = {name.partition("-")[0] for name, archs in report["architectures"].items() if len(archs) == 3}
    assert {name.partition("-")[0] for name in report["architectures"]} == everywhere


SHARED_LIMITS = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""Bytes of shared memory that one block of threads may have (CUDA C++ Programming Guide, compute capabilities)."""


def check(name: str, entry: Any) -> None:
    for architecture, limit in SHARED_LIMITS.items():
        figures = entry.get(f"sm_{architecture}")
        if figures is not None:
            assert figures["spill_store_bytes"] == figures["spill_load_bytes"] == 0, (name, architecture)
            assert figures["shared_bytes"] <= limit, (name, architecture)


def test_nothing_recorded_spills_or_exceeds_shared_memory() -> None:
    for name, entry in read_record()["kernels"].items():
        check(name, entry)


def test_one_configuration_of_each_kernel_compiles_now(report: Any) -> None:
    assert report["compiled"]
    for name, entry in report["compiled"].items():
        check(name, entry)


@triton.jit
def doubled(x, out, num, BLOCK: tl.constexpr):
    numbers = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + numbers, tl.load(x + numbers, mask=numbers < num, other=0.0) * 2, mask=numbers < num)


def doubling(**changes: Any) -> Shipped:
    types = {"x": "*fp32", "out": "*fp32", "num": "i32"}
    wishes: dict[str, Any] = {"types": types, "constants": {"BLOCK": 64}} | changes
    return Shipped(name="doubled", kernel=doubled, num_warps=1, num_stages=1, **wishes)


def test_a_shipped_kernel_is_launched_with_its_constants() -> None:
    x = torch.randn(100, device=device())
    out = torch.full((128,), 7.0, device=device())
    doubling().launch((2,), x=x, out=out, num=100)
    assert torch.equal(out[:100], x * 2)
    assert (out[100:] == 7.0).all()


def test_every_parameter_has_either_a_type_or_a_value() -> None:
    with pytest.raises(ValueError, match="BLOCK must be a parameter"):
        doubling(constants={})
    with pytest.raises(ValueError, match="WIDTH must be a parameter"):
        doubling(constants={"BLOCK": 64, "WIDTH": 1})
    with pytest.raises(ValueError, match="num must be a parameter"):
        doubling(constants={"BLOCK": 64, "num": 1})
    with pytest.raises(ValueError, match="WIDTH"):
        doubling(aligned=frozenset({"WIDTH"}))
