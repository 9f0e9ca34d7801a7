"""`python -m benchmarks.gpu.kernels`: every kernel on the GPU beside that GPU's ceilings, measured in the same run.

Needs a CUDA device: without one it says so, exits with 2 and writes nothing. The kernels' tests run first, on that
device; with a red one nothing is timed. Stores `benchmarks/results/kernels.json`.
"""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import asdict, dataclass

import torch

from benchmarks.gpu.ceilings import Ceilings, Times, ceilings, timed
from benchmarks.gpu.kernel_cases import Case, Shape, cases
from benchmarks.part import GateError, note
from benchmarks.provenance import ROOT, provenance
from benchmarks.summary import Json
from benchmarks.table import RESULTS

TESTS = (
    "tests/test_dense_kernels.py",
    "tests/test_attention_kernels.py",
    "tests/test_attention_invariance.py",
    "tests/test_attention_work.py",
    "tests/test_cascade_attention.py",
    "tests/test_slab_kernels.py",
    "tests/test_device_copying.py",
    "tests/test_pinned_slabs.py",
    "tests/test_sampling_kernels.py",
    "tests/test_block_digest.py",
    "tests/test_gpu_kernels.py",
    "tests/test_decode_graphs.py",
    "tests/test_batch_invariance.py",
)


def require_green() -> None:
    """The kernels' tests on this device. Raises GateError if one fails."""
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", "-x", *TESTS], cwd=ROOT)
    if done.returncode:
        raise GateError(f"the kernels' tests are red (pytest ended with {done.returncode}): nothing is timed")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """What a case reached, absolutely and as a share of both ceilings."""

    name: str
    times: Times
    bytes_per_s: float
    flops_per_s: float
    of_copy_rate: float
    of_matmul_rate: float
    aim: str | None
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
        aim=case.aim,
        times_as_fast_as=against,
    )


def measure(device: torch.device, shape: Shape) -> Json:
    limits = ceilings(device, shape.dtype)
    note(f"matmul {limits.flops_per_s / 1e12:.0f} TFLOP/s, copy {limits.bytes_per_s / 1e9:.0f} GB/s")
    rows: dict[str, Row] = {}
    for case in cases(shape, device):
        row = rows[case.name] = judged(case, timed(case.run, device), limits, rows)
        note(
            f"{case.name}: {row.times.median * 1e6:.1f} us, {row.of_copy_rate:.0%} of the copy rate,"
            f" {row.of_matmul_rate:.0%} of the matmul rate"
        )
    return {"ceilings": asdict(limits), "kernels": [asdict(row) for row in rows.values()]}


def main() -> int:
    if not torch.cuda.is_available():
        print(
            "python -m benchmarks.gpu.kernels needs a CUDA device and sees none: nothing was measured", file=sys.stderr
        )
        return 2
    device = torch.device("cuda")
    report: Json = {"part": "kernels", **provenance()}
    report["device"] = torch.cuda.get_device_name(device)
    report["cuda"] = torch.version.cuda
    try:
        require_green()
    except GateError as error:
        print(error, file=sys.stderr)
        return 1
    with torch.inference_mode():
        report |= {"status": "ok", "results": measure(device, Shape())}
    path = RESULTS / "kernels.json"
    path.write_text(json.dumps(report, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    print(f"stored in {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
