"""`make gpu-check`: everything that waits for a GPU and one GPU can answer, in one command, on the machine that has it.

Runs with that machine's own Python and torch, installs nothing, goes on after a failure, and ends with a summary; the
exit code is 0 if all of it was green, 1 if not, 2 without a CUDA device. `python -m benchmarks.gpu_check STEP ...` runs
single steps.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping

import torch

from benchmarks.gpu.exactness import same_tokens
from benchmarks.gpu.kernels import TESTS
from benchmarks.provenance import ROOT

STEP_TIMEOUT_S = 1800.0
_MODEL = "smollm2-135m-instruct"


def python(*arguments: str) -> bool:
    """Run this interpreter in the repository's root; whether it ended with 0."""
    print(f"$ python {' '.join(arguments)}", flush=True)
    try:
        return subprocess.run([sys.executable, *arguments], cwd=ROOT, timeout=STEP_TIMEOUT_S).returncode == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {STEP_TIMEOUT_S:.0f} s", flush=True)
        return False


def each_way(*ways: str) -> bool:
    """Two processes that hand over on one GPU, by each way for itself; all are tried."""
    return all([python("-m", "benchmarks.gpu.handoff_exactness", way, "cuda:0") for way in ways])  # noqa: C419


_TRANSPORT_TESTS = (
    "tests/test_transports.py",
    "tests/test_device_transport.py",
    "tests/test_distributed_transport.py",
    "tests/test_transport_processes.py",
    "tests/test_copying.py",
)

STEPS: Mapping[str, Callable[[], bool]] = {
    "kernels": lambda: python("-m", "pytest", "-q", *TESTS),
    "attention": lambda: python("-m", "pytest", "-q", "tests", "-k", "attention"),
    "compilation": lambda: python("-m", "pytest", "-q", "tests/test_compilation.py"),
    "exactness": lambda: same_tokens(_MODEL, "cuda:0", vocab_size=49152),
    "engine": lambda: python(
        "-m", "pytest", "-q", "tests/test_models.py", "tests/test_runner.py", "tests/test_kernels.py"
    ),
    "transports": lambda: python("-m", "pytest", "-q", *_TRANSPORT_TESTS),
    "handoff": lambda: each_way("device", "shm", "tcp"),
    "speed": lambda: python("-m", "benchmarks.gpu.kernels"),
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu_check", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"any of {', '.join(STEPS)}; default: all")
    chosen: list[str] = parser.parse_args().steps or list(STEPS)
    if unknown := [step for step in chosen if step not in STEPS]:
        parser.error(f"there is no step {unknown[0]!r}: choose from {', '.join(STEPS)}")
    if not torch.cuda.is_available():
        print(f"gpu-check needs a CUDA device, and torch {torch.__version__} sees none here", file=sys.stderr)
        return 2
    major, minor = torch.cuda.get_device_capability()
    print(
        f"{torch.cuda.get_device_name()}, sm_{major}{minor}, torch {torch.__version__}, CUDA {torch.version.cuda},"
        f" Python {platform.python_version()}",
        flush=True,
    )
    outcomes = {step: _outcome(step) for step in chosen}
    for step, (green, duration_s) in outcomes.items():
        print(f"{'green' if green else 'RED':>5}  {step} ({duration_s:.0f} s)")
    return 0 if all(green for green, _ in outcomes.values()) else 1


def _outcome(step: str) -> tuple[bool, float]:
    print(f"\n{step}:", flush=True)
    started = time.perf_counter()
    return STEPS[step](), time.perf_counter() - started


if __name__ == "__main__":
    sys.exit(main())
