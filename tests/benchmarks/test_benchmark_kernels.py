"""The kernels' benchmark where it cannot measure: its calls are right at small shapes, and it times nothing on red."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.common.part import ROOT, GateError, commit
from benchmarks.gpu import exactness, kernels
from benchmarks.gpu.exactness import same_tokens
from benchmarks.gpu.figures import Report, path_of, reported
from benchmarks.gpu.kernel_cases import Case, LayerShape, cases
from benchmarks.gpu.kernels import TESTS, judged, measure_cases
from benchmarks.gpu.speed.ceilings import Ceilings, Times
from engine.checkpoint.builtin_models import ModelUnavailableError
from tests.benchmarks.gpu_steps import TINY, models_in
from tests.support.interpreted import device
from tests.support.model_families import VOCAB_SIZE
from tests.support.small_models import SmallModel

SMALL = LayerShape(
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


def test_every_case_runs_and_stands_beside_its_aims(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr("benchmarks.gpu.speed.ceilings._CPU_REPEATS", 1)

    def step(report: Report, where: torch.device) -> None:
        measure_cases(report, where, SMALL, Ceilings(flops_per_s=1e9, bytes_per_s=1e9))

    assert reported("speed", step, device(), tmp_path) == 0
    stored = json.loads(path_of("speed", tmp_path).read_text())
    assert len(stored["kernels"]) > 20
    assert all(row["times"]["median"] > 0 and row["bytes_per_s"] > 0 for row in stored["kernels"])
    assert {figure["name"]: figure["at_least"] for figure in stored["figures"]} == {
        "prefill attention, 13 tokens, of the matmul rate": 0.75,
        "prefill attention, 13 tokens, as torch's": 1.0,
        "decode attention, 2 x 9 tokens, of the copy rate": 0.85,
        "slab of 13 tokens, gathered and digested, of the copy rate": 0.8,
    }


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


def test_tests_that_were_green_just_now_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else they decide: here none of them exist, so that they are red."""
    monkeypatch.setattr(kernels, "TESTS", ("tests/no_such_test.py",))
    checked = tmp_path / "gpu_check.json"
    checked.write_text(json.dumps({"kernels": {"verdict": "green", "commit": commit()}}))
    kernels.require_green(checked)
    for known in ({}, {"kernels": {"verdict": "RED", "commit": commit()}}, {"kernels": {"verdict": "green"}}):
        checked.write_text(json.dumps(known))
        assert not kernels._were_green_just_now(checked)
    with pytest.raises(GateError, match="are red"):
        kernels.require_green(checked)


def test_a_device_computes_the_cpus_tokens(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the CPU for both, since here there is nothing else."""
    model = SmallModel("llama", tmp_path)
    assert same_tokens(str(model.folder), "cpu", VOCAB_SIZE, lengths=(1, 9))
    assert capsys.readouterr().out.count("equal") == 2


def test_random_weights_stand_in_where_the_model_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(ref: str) -> Path:
        raise ModelUnavailableError(f"{ref} cannot be fetched")

    models_in(tmp_path, monkeypatch)
    monkeypatch.setattr(exactness, "resolve_model", unavailable)
    monkeypatch.setattr(exactness, "_STAND_IN", TINY)
    first = exactness.model_or_stand_in()
    assert same_tokens(first, "cpu", TINY.shape.vocab_size, lengths=(9,))
    monkeypatch.delattr(exactness, "resolve_model")  # is not asked again
    assert exactness.model_or_stand_in() == first
