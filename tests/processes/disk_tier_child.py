"""Processes that own a disk tier, for tests that kill them or take away their means."""

from __future__ import annotations

import os
import resource
import signal
from itertools import count
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from tests.kv_transfer.tiers.disk_tiers import FORM, budget, load, opened, store

NUM_SLOTS = 16


def write_for_ever(folder: Path, pipe: Connection) -> None:
    with opened(folder, NUM_SLOTS) as tier:
        for number in count():
            store(tier, number)
            pipe.send(number)


def die_in_mid_write(folder: Path, named: bool, _: Connection) -> None:
    """Store columns 0 to 2; get killed with half of 3 written, before or (as if the rest was lost) after its rename."""
    with opened(folder, NUM_SLOTS) as tier:
        store(tier, 0, 1, 2)
        write, rename = os.pwrite, os.rename

        def write_half(fd: int, data: memoryview, offset: int) -> int:
            write(fd, data[: FORM.file_bytes // 2 // 4096 * 4096], offset)
            if not named:
                os.kill(os.getpid(), signal.SIGKILL)
            return data.nbytes

        def rename_and_die(*args: Any, **kwargs: Any) -> None:
            rename(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)

        os.pwrite = write_half  # type: ignore[assignment]
        os.rename = rename_and_die
        store(tier, 3)


def write_on_a_full_disk(folder: Path, pipe: Connection) -> None:
    with opened(folder, NUM_SLOTS) as tier:
        store(tier, 0)
        resource.setrlimit(resource.RLIMIT_FSIZE, (FORM.file_bytes // 2, resource.RLIM_INFINITY))
        store(tier, 1)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        store(tier, 2)
        assert load(tier, 0, 1, 2) == [True, False, True]
        assert tier.report().write_errors == 1
        assert [file.name for file in tier.path.glob("*.tmp")] == []
        pipe.send("fine")


def hold(folder: Path, pipe: Connection) -> None:
    with opened(folder, budget(NUM_SLOTS) // FORM.file_bytes) as tier:
        pipe.send(tier.path.name)
        pipe.recv()
