"""Workers in processes of their own that hold host segments, for tests that kill them."""

from __future__ import annotations

import json
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.waiting import HANGS_S

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def scope() -> Iterator[str]:
    """An application of its own for each test, of which nothing is left in shared memory afterwards."""
    name = uuid.uuid4().hex
    yield name
    for path in SHARED_MEMORY.glob(f"legato-kv-{name}-*"):
        path.unlink()


class Worker:
    """A process of `tests.processes.host_segment_child`."""

    def __init__(self, role: str, scope: str, folder: Path = SHARED_MEMORY) -> None:
        command = [sys.executable, "-m", "tests.processes.host_segment_child", role, str(folder), scope]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def line(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline()

    def go(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()

    def opened(self) -> tuple[Path, bool]:
        """The path of its segment, once it stands, and whether it was adopted."""
        answer = json.loads(self.line())
        return Path(answer["path"]), answer["adopted"]

    def end(self) -> None:
        """Have it close its segment."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        assert self._process.wait(timeout=HANGS_S) == 0

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()


@contextmanager
def worker(role: str, scope: str, folder: Path = SHARED_MEMORY) -> Iterator[Worker]:
    """Killed at the end, if it has not been."""
    started = Worker(role, scope, folder)
    try:
        yield started
    finally:
        started.kill()
