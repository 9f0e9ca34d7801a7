"""The kernels' benchmark where it cannot measure: its calls are right at small shapes, and without a GPU it says so."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from benchmarks.kernel_cases import Case, Shape, cases
from benchmarks.kernels import TESTS, Ceilings, Times, judged
from benchmarks.provenance import ROOT
from benchmarks.table import RESULTS
from tests.interpreted import device

SMALL = Shape(
    hidden=32,
    intermediate=48,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    block_size=4,
    dtype=torch.float16,
    prompt_tokens=13,
    decode_rows=2,
    decode_context=9,
    few_rows=(1,),
)


def test_every_case_runs() -> None:
    torch.manual_seed(0)
    found = {case.name: case for case in cases(SMALL, device())}
    for case in found.values():
        case.run()
        assert case.num_bytes > 0
        assert case.against is None or case.against in found


def test_both_ways_to_compute_one_thing_agree() -> None:
    """What a case is compared with computes the same: only so is the comparison fair."""
    torch.manual_seed(0)
    found = {case.name: case for case in cases(SMALL, device())}
    pairs = [(case, found[case.against]) for case in found.values() if case.against and "rows" in case.name]
    assert pairs
    for ours, theirs in pairs:
        actual, expected = ours.run(), theirs.run()
        assert isinstance(actual, torch.Tensor)
        assert isinstance(expected, torch.Tensor)
        torch.testing.assert_close(actual, expected, rtol=1e-2, atol=1e-2)


def test_shares_of_the_ceilings() -> None:
    limits = Ceilings(bytes_per_s=1000.0, flops_per_s=200.0)
    theirs = judged(Case(name="theirs", run=list, num_bytes=500), Times(3.0, 3.0, 3.0), limits, {})
    ours = Case(name="ours", run=list, num_bytes=500, flops=100, against="theirs")
    row = judged(ours, Times(2.0, 1.0, 4.0), limits, {"theirs": theirs})
    assert row.of_copy_rate == pytest.approx(0.25)
    assert row.of_matmul_rate == pytest.approx(0.25)
    assert row.times_as_fast_as == {"theirs": pytest.approx(1.5)}


def test_the_gate_asks_tests_that_exist() -> None:
    assert [name for name in TESTS if not (ROOT / name).is_file()] == []


def test_without_a_gpu_nothing_is_measured_and_nothing_written() -> None:
    path = RESULTS / "kernels.json"
    before = path.read_bytes() if path.exists() else None
    program = (
        "import torch; torch.cuda.is_available = lambda: False\n"
        "import sys; from benchmarks.kernels import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
    assert (path.read_bytes() if path.exists() else None) == before
