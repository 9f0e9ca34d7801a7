"""How much memory the processes here may take: the machine's, or less where a container has a limit. Linux only."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil


def memory_bytes(root: Path = Path("/")) -> int:
    """The machine's memory, or the lowest limit of this process's control groups, of either version of them."""
    return min([psutil.virtual_memory().total, *_limits(root)])


def _limits(root: Path) -> Iterator[int]:
    for file in _limit_files(root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max": no limit
            yield int(text)


def _limit_files(root: Path) -> Iterator[Path]:
    """Of the own group and of all above it. In a container the own group may be mounted as if it were the top."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, group = line.split(":", 2)
        if controllers == "":
            top, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            top, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        own = top / group.lstrip("/")
        yield from (folder / name for folder in (own, *own.parents) if folder.is_relative_to(top))
