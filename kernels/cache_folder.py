"""Where Legato keeps what is made once for a machine: converted models, compiled kernels; and how long that has
taken."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_WRITABLE_BY_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH

_compiling_s = 0.0  # in this process


def note_compiling(seconds: float) -> None:
    """Count this as spent on compiling kernels, or on waiting for another process that does."""
    global _compiling_s
    _compiling_s += seconds


def compiling_s() -> float:
    """How long this process has compiled kernels, or has waited for another one that did. The next process finds what
    was compiled, and does not take that long."""
    return _compiling_s


def default_cache_dir() -> Path:
    """$LEGATO_CACHE, or ~/.cache/legato."""
    configured = os.environ.get("LEGATO_CACHE")
    return Path(configured).expanduser() if configured else Path.home() / ".cache" / "legato"


def private_folder(path: Path) -> Path:
    """`path`, made if need be, for what is run or believed as it is found there: nobody else may write to it.

    Raises PermissionError where it is another user's; root's will do.
    """
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = path.stat()
    if status.st_uid == os.geteuid():
        if status.st_mode & _WRITABLE_BY_OTHERS:
            path.chmod(0o700)
    elif not _is_safe(status):
        raise PermissionError(
            f"{path} belongs to another user, who may have put anything there; set LEGATO_CACHE to a folder of your own"
        )
    return path


def is_private(path: Path) -> bool:
    """Whether it is a file that this user or root has made and nobody else may write to."""
    try:
        status = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(status.st_mode) and _is_safe(status)


def _is_safe(status: os.stat_result) -> bool:
    return status.st_uid in (os.geteuid(), 0) and not status.st_mode & _WRITABLE_BY_OTHERS
