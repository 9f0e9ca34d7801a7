"""`make gpu-check`: everything that waits for a GPU and one GPU can answer, in one command, on the machine that has it.

Runs with that machine's own Python and torch, installs nothing, goes on after a failure, and ends with a summary: every
figure beside its aim. Stores it as it goes (`benchmarks/results/gpu_check.json`). The exit code is 0 if all was green
and all aims were met, 1 if not, 2 without a CUDA device.

`python -m benchmarks.gpu.check STEP ...` runs single steps. Where a command may only last so long, `--minutes 9` says
how the steps fall into parts of that length, and `--minutes 9 --part 2` runs one of them, within that time.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.part import Json
from benchmarks.gpu.figures import Figure, gpu_provenance, path_of
from benchmarks.gpu.random_model import forget_checkpoints
from benchmarks.gpu.steps import STEPS, Step, run_commands
from benchmarks.report.table import RESULTS

STEP_TIMEOUT_S = 1800.0
# Of the project's requirements those that steps cannot do without, by the names they are imported by.
NEEDED = (
    "triton",
    "transformers",
    "safetensors",
    "pydantic",
    "msgpack",
    "xxhash",
    "uvloop",
    "psutil",
    "filelock",
    "httpx",
    "pytest",
    "pytest_asyncio",
    "hypothesis",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """`missed`: figures that do not reach their aims; `figures`: all that were stored."""

    step: str
    verdict: str  # green, RED, missed (ran, short of an aim), absent (the machine lacks what it needs), left (no time)
    duration_s: float
    figures: tuple[Figure, ...] = ()

    @property
    def missed(self) -> list[str]:
        return [figure.name for figure in self.figures if figure.reaches is False]


def main() -> int:
    arguments = _arguments()
    chosen = [STEPS[name] for name in arguments.steps or STEPS]
    in_parts = parts(chosen, arguments.minutes)
    if arguments.list:
        _tell_parts(in_parts)
        return 0
    if not torch.cuda.is_available():
        print(f"gpu-check needs a CUDA device, and torch {torch.__version__} sees none here", file=sys.stderr)
        return 2
    lacking = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if lacking:
        print(f"gpu-check needs packages that {sys.executable} lacks: {', '.join(lacking)}", file=sys.stderr)
        return 2
    if arguments.part is not None:
        chosen = in_parts[arguments.part - 1]
    _tell_device()
    until_s = time.monotonic() + arguments.minutes * 60 if arguments.part is not None else None
    results = run_steps(chosen, torch.device("cuda:0"), RESULTS, until_s)
    if not arguments.keep:
        forget_checkpoints()
    tell_summary(results)
    return 0 if all(result.verdict in ("green", "absent") for result in results) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.check", description=__doc__)
    parser.add_argument("steps", nargs="*", metavar="step", help=f"any of {', '.join(STEPS)}; default: all")
    parser.add_argument("--list", action="store_true", help="what there is, in parts, and about how long it takes")
    parser.add_argument("--minutes", type=float, default=9.0, help="how long a part may take (%(default)s)")
    parser.add_argument("--part", type=int, help="run this part only, the first is 1")
    parser.add_argument("--keep", action="store_true", help="keep the checkpoint of random weights for another part")
    arguments = parser.parse_args()
    unknown = [step for step in arguments.steps if step not in STEPS]
    if unknown:
        parser.error(f"there is no step {unknown[0]!r}: choose from {', '.join(STEPS)}")
    num_parts = len(parts([STEPS[name] for name in arguments.steps or STEPS], arguments.minutes))
    if arguments.part is not None and not 1 <= arguments.part <= num_parts:
        parser.error(f"there is no part {arguments.part}: these steps fall into {num_parts}")
    return arguments


def parts(steps: Sequence[Step], minutes: float) -> list[list[Step]]:
    """Cut steps into parts, in their order and as many in each as should fit; a longer one is alone."""
    found: list[list[Step]] = [[]]
    for step in steps:
        if found[-1] and sum(other.minutes for other in found[-1]) + step.minutes > minutes:
            found.append([])
        found[-1].append(step)
    return found


def _tell_parts(in_parts: list[list[Step]]) -> None:
    for number, steps in enumerate(in_parts, start=1):
        print(f"part {number}, about {sum(step.minutes for step in steps):g} minutes")
        for step in steps:
            print(f"  {step.name:15} {step.minutes:4g} min  {step.answers}")


def _tell_device() -> None:
    major, minor = torch.cuda.get_device_capability()
    print(
        f"{torch.cuda.get_device_name()}, sm_{major}{minor}, torch {torch.__version__}, CUDA {torch.version.cuda},"
        f" Python {platform.python_version()}",
        flush=True,
    )


def run_steps(steps: Sequence[Step], device: torch.device, folder: Path, until_s: float | None) -> list[StepResult]:
    """Run one step after the other. Each result is stored at once, beside those of steps that ran before.

    `until_s`, on `time.monotonic`: by then all must be over; a step that needs longer than is left is not begun.
    """
    results = []
    for step in steps:
        results.append(_run_step(step, folder, until_s))
        _store(results[-1], device, folder)
    return results


def _run_step(step: Step, folder: Path, until_s: float | None) -> StepResult:
    started = time.monotonic()
    if until_s is not None and until_s - started < step.minutes * 60 / 2:
        return StepResult(step=step.name, verdict="left", duration_s=0.0)
    print(f"\n{step.name}: {step.answers} (about {step.minutes:g} minutes)", flush=True)
    if step.stores:
        path_of(step.name, folder).unlink(missing_ok=True)  # or an older run's would be taken for this one's
    green = run_commands(step, until_s or started + STEP_TIMEOUT_S)
    stored = _stored(path_of(step.name, folder)) if step.stores else {}
    figures = tuple(_figure(fields) for fields in stored.get("figures", ()))
    return StepResult(
        step=step.name,
        verdict=_verdict(green, figures, needs=stored.get("needs")),
        duration_s=time.monotonic() - started,
        figures=figures,
    )


def _verdict(green: bool, figures: Sequence[Figure], *, needs: str | None) -> str:
    if not green:
        return "RED"
    if needs is not None:
        return "absent"
    return "missed" if any(figure.reaches is False for figure in figures) else "green"


def _stored(path: Path) -> dict[str, Any]:
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return stored


def _figure(fields: dict[str, Any]) -> Figure:
    return Figure(**{name: value for name, value in fields.items() if name != "reaches"})


def _store(result: StepResult, device: torch.device, folder: Path) -> None:
    path = folder / "gpu_check.json"
    known: Json = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[result.step] = {
        "verdict": result.verdict,
        "duration_s": round(result.duration_s, 1),
        "missed": result.missed,
        **gpu_provenance(device),
    }
    path.write_text(json.dumps(known, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def tell_summary(results: Sequence[StepResult]) -> None:
    print()
    for result in results:
        for figure in result.figures:
            if figure.reaches is not None:
                print(f"{result.step:>15}  {figure.told()}")
    for result in results:
        print(f"{result.verdict:>7}  {result.step} ({result.duration_s:.0f} s)")


if __name__ == "__main__":
    sys.exit(main())
