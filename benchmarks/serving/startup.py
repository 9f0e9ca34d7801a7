"""From `python -m cluster serve` to the first token, in phases, with everything warm: model, caches, compiled kernels.

A phase ends when the command says so. Beside the seconds stands the CPU time that all of Legato's and Ray's processes
took until the first token: it says more than the clock where others use the machine.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from typing import Final

import psutil

from benchmarks.common.part import ROOT, Json, note, run_part, spread
from cluster.deployment.local_cluster import FIRST_QUESTION

REPEATS = 3
ENOUGH_S = 240.0  # after which no further start is begun: on a busy machine one takes minutes
END_TIMEOUT_S = 60.0
CONFIG = "ray_configs/quickstart.yaml"
# What is said at the end of each phase; the first token is what follows the question.
PHASES: Final = {"command": b"Starting Ray", "ray": b"Starting Legato", "deploy": FIRST_QUESTION.encode()}


def measure() -> Json:
    _start()  # fills the caches
    began_s = time.monotonic()
    runs = [_start()]
    while len(runs) < REPEATS and time.monotonic() - began_s < ENOUGH_S:
        runs.append(_start())
    return {
        "config": CONFIG,
        "cpus": len(os.sched_getaffinity(0)),
        "seconds": {name: spread([run[name] for run in runs]) for name in runs[0]},
    }


def _start() -> dict[str, float]:
    """Seconds of each phase and of all, and the CPU's."""
    command = [sys.executable, "-m", "cluster", "serve", CONFIG, "--exit", "--port", "8397", "--no-dashboard"]
    began_s = time.perf_counter()
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdout is not None
    output = _Output(process.stdout.fileno())
    phases: dict[str, float] = {}
    try:
        for name, words in PHASES.items():
            output.read_past(words)
            phases[name] = time.perf_counter() - began_s - sum(phases.values())
        output.read_more()
        total_s = time.perf_counter() - began_s
        phases["first_token"] = total_s - sum(phases.values())
        cpu_s = _cpu_s(psutil.Process(process.pid))
        process.communicate(timeout=END_TIMEOUT_S)
    finally:
        process.kill()
        process.wait()
    note(
        f"first token after {total_s:.1f} s and {cpu_s:.1f} s of CPU: "
        + ", ".join(f"{name} {s:.1f}" for name, s in phases.items())
    )
    return {**phases, "total": total_s, "cpu": cpu_s}


class _Output:
    """What a process says, as it says it."""

    def __init__(self, file: int) -> None:
        self._file = file
        self._said = b""

    def read_past(self, words: bytes) -> None:
        while words not in self._said:
            self._read()
        self._said = self._said.partition(words)[2]

    def read_more(self) -> None:
        """Read on until there is something but blanks."""
        while not self._said.strip():
            self._read()

    def _read(self) -> None:
        piece = os.read(self._file, 65_536)
        if not piece:
            raise RuntimeError(f"Legato ended before its first token; the last that it said: {self._said[-500:]!r}")
        self._said += piece


def _cpu_s(root: psutil.Process) -> float:
    """Processor time of a process and all that it started, those included that were waited for."""
    cpu_s = 0.0
    for process in (root, *root.children(recursive=True)):
        with contextlib.suppress(psutil.NoSuchProcess):
            cpu_s += sum(process.cpu_times()[:4])  # user, system, and the same of ended children
    return cpu_s


if __name__ == "__main__":
    run_part("startup", measure)
