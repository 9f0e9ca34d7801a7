"""Children of tests, forked from a process that has imported what they need: an import takes two seconds of each."""

from __future__ import annotations

import multiprocessing
import multiprocessing.connection
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, Self

import pytest

from engine.parallel import processes
from tests.support.waiting import HANGS_S

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload([
    "engine.parallel.follower",
    "tests.processes.disk_tier_child",
    "tests.processes.host_segment_child",
    "tests.processes.transport_child",
    "tests.support.clusters.worker_child",
])  # fmt: skip


def start_forking() -> None:
    """What forks children is at work from here on: with the first of them this process opens descriptors that stay."""
    forkserver.ensure_running()


class ForkedChild:
    """A process that calls `target(*args, pipe)`. What one end of the pipe sends the other one receives. Behind a
    `with` it is killed, if it has not been."""

    def __init__(self, target: Callable[..., None], *args: object) -> None:
        self._pipe, theirs = _FORKS.Pipe()
        self._process = _FORKS.Process(target=target, args=(*args, theirs), daemon=True)
        self._process.start()
        theirs.close()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def told(self) -> Any:
        """What it sent next. Raises EOFError where it has ended."""
        assert self._pipe.poll(3 * HANGS_S), "it says nothing"  # the first one waits for the imports
        return self._pipe.recv()

    def tell(self, message: object) -> None:
        self._pipe.send(message)

    def hang_up(self) -> None:
        """What it waits to receive is EOFError."""
        self._pipe.close()

    def exit_code(self) -> int | None:
        """Waits for its end. Negative: the signal that killed it."""
        self._process.join(HANGS_S)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()
        self._process.join(HANGS_S)
        self._pipe.close()


class ForkedRank(ForkedChild):
    """A rank of a tensor-parallel group, as `engine.parallel.processes` starts it by `subprocess.Popen` and uses it."""

    def __init__(self, command: Sequence[str], *, pass_fds: Sequence[int], **_: Any) -> None:
        assert command[2] == "engine.parallel.follower", command
        with Connection(os.dup(pass_fds[0])) as leader:
            super().__init__(_follow, leader)
        self._polled = threading.Lock()  # who looks at a child of the fork server reads its code from a pipe, once
        self.args, self.stdin = command, self._pipe

    def poll(self) -> int | None:
        with self._polled:
            return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()

    def wait(self, timeout: float | None = None) -> int:
        multiprocessing.connection.wait([self._process.sentinel], timeout)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
        return code


def fork_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """For one test, each rank of a group is forked. `tests/processes` starts them as workers do, and each takes two
    seconds for what it imports."""
    forking = SimpleNamespace(**vars(subprocess) | {"Popen": ForkedRank})
    monkeypatch.setattr(processes, "subprocess", forking)


def _follow(leader: Connection, stdin: Connection) -> None:
    from engine.parallel import follower

    os.setsid()
    os.dup2(stdin.fileno(), 0)
    stdin.close()
    sys.argv = ["follower", str(leader.fileno())]
    follower.main()
