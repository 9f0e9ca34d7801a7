"""The steps of the GPU check: what each answers, what runs it, and about how long it takes.

Every step is one or more programs of this interpreter, so that its memory is given back and it cannot take the others
along. `benchmarks.gpu.check` runs them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass

from benchmarks.common.part import ROOT
from benchmarks.gpu.kernels import TESTS

Command = tuple[str, ...]
"""Arguments of Python."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """`minutes`: about, as guessed for an H100 that compiles all kernels. `stores`: figures, in `gpu_<name>.json`."""

    name: str
    answers: str
    minutes: float
    commands: tuple[Command, ...]
    stores: bool = False


def _tests(name: str, answers: str, minutes: float, *arguments: str) -> Step:
    return Step(name=name, answers=answers, minutes=minutes, commands=(("-m", "pytest", "-q", *arguments),))


def _measured(name: str, answers: str, minutes: float, module: str, *arguments: str) -> Step:
    command = ("-m", f"benchmarks.gpu.{module}", *arguments)
    return Step(name=name, answers=answers, minutes=minutes, commands=(command,), stores=True)


_TRANSPORT_TESTS = (
    "tests/kv_transfer/transports/test_transports.py",
    "tests/processes/test_device_transport.py",
    "tests/processes/test_distributed_transport.py",
    "tests/processes/test_transport_processes.py",
    "tests/interpreted/test_copying.py",
)
_COMPILATION_TESTS = ("tests/interpreted/test_compilation.py",)
_ENGINE_TESTS = (
    "tests/with_models/test_models.py",
    "tests/with_models/test_runner.py",
    "tests/kernels/test_kernels.py",
)
_HANDOFF = "benchmarks.gpu.handoff_exactness"

# What tells most comes first, for who has little time.
STEPS: Mapping[str, Step] = {
    step.name: step
    for step in (
        Step(
            name="exactness",
            answers="SmolLM2's tokens in float32 are the CPU's",
            minutes=1.5,
            commands=(("-m", "benchmarks.gpu.exactness"),),
        ),
        _measured(
            "model", "steps of an 8B shape beside the ceilings, and beside the cost model", 3, "speed.model_speed"
        ),
        _measured("gap", "how long the GPU waits for the host between decode steps", 2, "speed.host_gap"),
        _measured("link", "slabs to pinned host memory beside the link's rate", 0.5, "speed.link"),
        _measured("layerkv", "tokens with layers in host memory, and what their copies run beside", 2, "speed.layerkv"),
        _tests("kernels", "every kernel equals its reference on the device", 4, *TESTS),
        _measured("speed", "every kernel beside the ceilings", 2, "kernels"),
        Step(
            name="handoff",
            answers="tokens through two processes on the GPU, by its memory, shared memory and TCP",
            minutes=3,
            commands=tuple(("-m", _HANDOFF, way, "cuda:0") for way in ("device", "shm", "tcp")),
        ),
        _measured("exposed", "what a hand-off of 8k tokens of an 8B shape leaves exposed", 2.5, "handoff_share"),
        _measured("memory", "a worker's memory stays as it was after its start", 2, "speed.memory"),
        _measured("parallel", "one model over two GPUs or four; needs two GPUs", 4, "parallel"),
        _measured("peers_batching", "beside transformers' continuous batching", 4, "peers", "batching"),
        _measured("peers_compiled", "beside transformers' compiled static cache", 6, "peers", "compiled"),
        _tests("compilation", "every kernel compiles with the Triton that is there", 2, *_COMPILATION_TESTS),
        _tests("engine", "differences between versions", 1.5, *_ENGINE_TESTS),
        _tests("transports", "the transports within the GPU's memory", 3, *_TRANSPORT_TESTS),
    )
}


def run_command(command: Command, timeout_s: float) -> bool:
    """Run a command in the repository's root. Returns whether it ended with 0. What it started ends with it."""
    print(f"$ python {' '.join(command)}", flush=True)
    process = subprocess.Popen([sys.executable, *command], cwd=ROOT, start_new_session=True)
    try:
        return process.wait(timeout_s) == 0
    except subprocess.TimeoutExpired:
        print(f"stopped after {timeout_s:.0f} s", flush=True)
        return False
    finally:
        _end_group(process)


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process, and those that it started and left behind."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run_commands(step: Step, deadline_s: float) -> bool:
    """All of them, whatever the others come to; `deadline_s` is on `time.monotonic`."""
    outcomes = [run_command(command, max(deadline_s - time.monotonic(), 1.0)) for command in step.commands]
    return all(outcomes)
