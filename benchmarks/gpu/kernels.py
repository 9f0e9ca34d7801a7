"""`python -m benchmarks.gpu.kernels`: every kernel on the GPU beside that GPU's ceilings, measured in the same run.

The kernels' tests must be green on that device: where the GPU check has not just run them, they run first, and with a
red one nothing is timed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.part import ROOT, GateError, commit
from benchmarks.gpu.figures import Figure, Report, run_step
from benchmarks.gpu.kernel_cases import Case, LayerShape, cases
from benchmarks.gpu.speed.ceilings import Ceilings, Times, ceilings, timed
from benchmarks.report.table import RESULTS

TESTS = (
    "tests/interpreted/test_dense_kernels.py",
    "tests/interpreted/test_quantised_products.py",
    "tests/interpreted/test_expert_kernels.py",
    "tests/interpreted/test_attention_kernels.py",
    "tests/interpreted/test_attention_invariance.py",
    "tests/interpreted/test_attention_work.py",
    "tests/interpreted/test_cascade_attention.py",
    "tests/interpreted/test_slab_kernels.py",
    "tests/interpreted/test_device_copying.py",
    "tests/interpreted/test_pinned_slabs.py",
    "tests/interpreted/test_block_copier.py",
    "tests/interpreted/test_offloading.py",
    "tests/interpreted/test_sampling_kernels.py",
    "tests/kernels/test_block_digest.py",
    "tests/interpreted/test_gpu_kernels.py",
    "tests/interpreted/test_decode_graphs.py",
    "tests/interpreted/test_batch_invariance.py",
)


_JUST_NOW_S = 3600.0


def require_green(checked: Path = RESULTS / "gpu_check.json") -> None:
    """The kernels' tests on this device. Raises GateError if one fails."""
    if _were_green_just_now(checked):
        return
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *TESTS], cwd=ROOT)
    if done.returncode:
        raise GateError(f"the kernels' tests are red (pytest ended with {done.returncode}): nothing is timed")


def _were_green_just_now(checked: Path) -> bool:
    """Whether a GPU check of this commit found the tests green within the last hour."""
    if not checked.exists() or time.time() - checked.stat().st_mtime > _JUST_NOW_S:
        return False
    known: dict[str, Any] = json.loads(checked.read_text(encoding="utf-8")).get("kernels", {})
    return known.get("verdict") == "green" and known.get("commit") == commit()


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a case reached, absolutely and as a share of both ceilings."""

    name: str
    times: Times
    bytes_per_s: float
    flops_per_s: float
    of_copy_rate: float
    of_matmul_rate: float
    times_as_fast_as: dict[str, float]  # by the name of the case that it stands against


def judged(case: Case, times: Times, limits: Ceilings, others: dict[str, Row]) -> Row:
    bytes_per_s, flops_per_s = case.num_bytes / times.median, case.flops / times.median
    against = {} if case.against is None else {case.against: others[case.against].times.median / times.median}
    return Row(
        name=case.name,
        times=times,
        bytes_per_s=bytes_per_s,
        flops_per_s=flops_per_s,
        of_copy_rate=bytes_per_s / limits.bytes_per_s,
        of_matmul_rate=flops_per_s / limits.flops_per_s,
        times_as_fast_as=against,
    )


def measure(report: Report, device: torch.device) -> None:
    require_green()
    with torch.inference_mode():
        shape = LayerShape()
        measure_cases(report, device, shape, ceilings(device, shape.dtype))


def measure_cases(report: Report, device: torch.device, shape: LayerShape, limits: Ceilings) -> None:
    report.note(ceilings=asdict(limits))
    report.tell(f"matmul {limits.flops_per_s / 1e12:.0f} TFLOP/s, copy {limits.bytes_per_s / 1e9:.0f} GB/s")
    rows: dict[str, Row] = {}
    for case in cases(shape, device):
        row = rows[case.name] = judged(case, timed(case.run, device), limits, rows)
        report.tell(
            f"{case.name}: {row.times.median * 1e6:.1f} us, {row.of_copy_rate:.0%} of the copy rate,"
            f" {row.of_matmul_rate:.0%} of the matmul rate"
        )
        _add_aims(report, case, row)
        report.note(kernels=[asdict(row) for row in rows.values()])


def _add_aims(report: Report, case: Case, row: Row) -> None:
    for what, value, aim in (
        ("of the copy rate", row.of_copy_rate, case.of_copy_rate),
        ("of the matmul rate", row.of_matmul_rate, case.of_matmul_rate),
    ):
        if aim is not None:
            report.add(Figure(name=f"{case.name}, {what}", value=value, unit="share", at_least=aim))
    if case.times_as_fast is not None:
        (times,) = row.times_as_fast_as.values()
        name = f"{case.name}, as torch's"
        report.add(Figure(name=name, value=times, unit="times as fast", at_least=case.times_as_fast))


if __name__ == "__main__":
    sys.exit(run_step("speed", measure))
