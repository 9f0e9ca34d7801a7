"""The kernels' benchmark where it cannot measure: its calls are right at small shapes, and without a GPU it says so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import gpu_check
from benchmarks.gpu.ceilings import Ceilings, Times
from benchmarks.gpu.exactness import same_tokens
from benchmarks.gpu.kernel_cases import Case, Shape, cases
from benchmarks.gpu.kernels import TESTS, judged
from benchmarks.gpu_check import STEPS
from benchmarks.provenance import ROOT
from benchmarks.table import RESULTS
from tests.interpreted import device
from tests.model_families import VOCAB_SIZE
from tests.small_models import SmallModel

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
    vocab_size=97,
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
        "import sys; from benchmarks.gpu.kernels import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr
    assert (path.read_bytes() if path.exists() else None) == before


def test_the_gpu_check_says_what_it_needs() -> None:
    program = (
        "import torch; torch.cuda.is_available = lambda: False\n"
        "import sys; sys.argv = ['gpu_check']; from benchmarks.gpu_check import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    assert "needs a CUDA device" in done.stderr


def test_the_gpu_check_compares_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the CPU for both, since here there is nothing else."""
    model = SmallModel("llama", tmp_path)
    assert same_tokens(str(model.folder), "cpu", VOCAB_SIZE, lengths=(1, 9))
    assert capsys.readouterr().out.count("equal") == 2


def test_every_step_of_the_gpu_check_runs_tests_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[tuple[str, ...]] = []

    def note_command(*arguments: str) -> bool:
        commands.append(arguments)
        return True

    monkeypatch.setattr(gpu_check, "python", note_command)
    assert all(STEPS[step]() for step in STEPS if step != "exactness")
    files = [argument for command in commands for argument in command if argument.endswith(".py")]
    assert files
    assert [name for name in files if not (ROOT / name).is_file()] == []
