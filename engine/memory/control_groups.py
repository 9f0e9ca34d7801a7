"""What this process's control groups leave it of the machine, as in a container. Of either version; Linux only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal


def memory_limits(root: Path = Path("/")) -> Iterator[int]:
    """Yields the limits in bytes, of the own group and of all above it."""
    for folder, version in _groups(root, "memory"):
        with suppress(OSError, ValueError):  # no file, or "max": no limit
            yield int((folder / ("memory.max" if version == 2 else "memory.limit_in_bytes")).read_text())


def usable_cores(root: Path = Path("/")) -> int:
    """How many cores this process may use: those that it may run on, or as many whole ones as the lowest quota of its
    time on all of them."""
    cores = float(len(os.sched_getaffinity(0)))
    for folder, version in _groups(root, "cpu"):
        with suppress(OSError, ValueError):
            if version == 2:
                quota, period = map(int, (folder / "cpu.max").read_text().split())
            else:
                quota, period = (int((folder / f"cpu.cfs_{what}_us").read_text()) for what in ("quota", "period"))
            if quota > 0:  # -1: none
                cores = min(cores, quota / period)
    return max(1, int(cores))


def _groups(root: Path, controller: str) -> Iterator[tuple[Path, Literal[1, 2]]]:
    """Yields the folders of the own group and of all above it, with the version that they are of. In a container the
    own group may be mounted as if it were the top."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        version: Literal[1, 2] = 1 if controllers else 2
        if version == 1 and controller not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / (controller if version == 1 else "")
        own = top / group.lstrip("/")
        yield from ((folder, version) for folder in (own, *own.parents) if folder.is_relative_to(top))
