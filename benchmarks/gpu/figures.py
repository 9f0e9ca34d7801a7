"""What a step of the GPU check found: numbers beside their aims, printed and stored as they come.

A step that is cut off leaves what it had measured until then.
"""

from __future__ import annotations

import json
import math
import os
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.common.part import GateError, Json, provenance
from benchmarks.report.table import RESULTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """One number. `at_least` and `at_most` are aims; with neither it is for information."""

    name: str
    value: float
    unit: str = ""
    at_least: float | None = None
    at_most: float | None = None

    @property
    def reaches(self) -> bool | None:
        """Whether the figure reaches its aim; None without one."""
        if self.at_least is None and self.at_most is None:
            return None
        above = self.at_least is None or self.value >= self.at_least
        return above and (self.at_most is None or self.value <= self.at_most)

    def told(self) -> str:
        return f"{self.name}: {_spelt(self.value, self.unit)}{self._aim()}"

    def _aim(self) -> str:
        bounds = [
            f"{word} {_spelt(bound, self.unit)}"
            for word, bound in (("at least", self.at_least), ("at most", self.at_most))
            if bound is not None
        ]
        if not bounds:
            return ""
        return f" (aim: {' and '.join(bounds)}{'' if self.reaches else '; MISSED'})"


def _spelt(value: float, unit: str) -> str:
    return f"{value:.1%}" if unit == "share" else f"{value:.4g}{' ' if unit else ''}{unit}"


class Report:
    """One step's figures, in a file of its own: `gpu_<step>.json`."""

    def __init__(self, step: str, device: torch.device, folder: Path = RESULTS) -> None:
        self.path = path_of(step, folder)
        self.figures: list[Figure] = []
        self.content: Json = {"step": step, **gpu_provenance(device), "status": "unfinished"}

    def tell(self, text: str) -> None:
        """A line for whoever watches."""
        print(f"  {text}", flush=True)

    def add(self, figure: Figure) -> None:
        assert math.isfinite(figure.value), f"{figure.name} is no number"
        self.figures.append(figure)
        self.tell(figure.told())
        self._store()

    def note(self, **details: Any) -> None:
        """What else belongs to the figures: settings, versions, distributions."""
        self.content |= details
        self._store()

    def end(self, status: str, **details: Any) -> None:
        """`ok`, `wrong` (results are, so that no speed counts) or `failed`."""
        self.note(status=status, **details)

    def _store(self) -> None:
        figures = [{**asdict(figure), "reaches": figure.reaches} for figure in self.figures]
        text = json.dumps({**self.content, "figures": figures}, indent=1, ensure_ascii=False)
        part = self.path.with_suffix(".part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(self.path)


def path_of(step: str, folder: Path = RESULTS) -> Path:
    return folder / f"gpu_{step}.json"


def gpu_provenance(device: torch.device) -> Json:
    """Where figures come from, with the GPU as the device and the machine's processor beside it."""
    origin = provenance()
    if device.type != "cuda":
        return origin
    major, minor = torch.cuda.get_device_capability(device)
    return {
        **origin,
        "processor": origin["device"],
        "device": torch.cuda.get_device_name(device),
        "architecture": f"sm_{major}{minor}",
        "memory_bytes": torch.cuda.get_device_properties(device).total_memory,
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
    }


def _triton_version() -> str:
    try:
        import triton
    except ImportError:
        return "absent"
    return str(triton.__version__)


def run_step(step: str, measure: Callable[[Report, torch.device], None]) -> int:
    """A step's program, on the first GPU. Its exit code: 0 if it ran to its end, whether or not aims were met."""
    if not torch.cuda.is_available():
        print(f"the step {step!r} needs a CUDA device, and torch {torch.__version__} sees none here", file=sys.stderr)
        return 2
    return reported(step, measure, torch.device("cuda:0"), RESULTS)


def reported(step: str, measure: Callable[[Report, torch.device], None], device: torch.device, folder: Path) -> int:
    """Run a step's measurement and report its errors: the one place where they end."""
    report = Report(step, device, folder)
    started = time.perf_counter()
    status, reason = "ok", {}
    try:
        measure(report, device)
    except GateError as error:
        status, reason = "wrong", {"reason": str(error)}
        report.tell(f"wrong: {error}")
    except Exception as error:
        traceback.print_exc()
        status, reason = "failed", {"reason": f"{type(error).__name__}: {error}"}
    report.end(
        status,
        **reason,
        duration_s=round(time.perf_counter() - started, 1),
        load_average_after=round(os.getloadavg()[0], 2),
    )
    return 0 if status == "ok" else 1
