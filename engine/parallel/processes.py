"""The processes of a group's other ranks: started, heard, watched and ended by the leader's."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle

from engine.parallel.spec import RankSpec

END_S = 5.0  # for a process that is told to end
APART = 3  # a rank's exit code: not by itself, but since another one is gone or late


class GroupError(RuntimeError):
    """A tensor-parallel group is of no use any more; the message says why."""


class RankProcess:
    """One rank's process. It ends when it is dismissed or this process ends, however that happens."""

    def __init__(self, spec: RankSpec) -> None:
        self.rank = spec.rank
        self.connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "engine.parallel.follower", str(theirs.fileno())],
                stdin=subprocess.PIPE,  # its end tells the rank of ours
                pass_fds=[theirs.fileno()],
                env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                start_new_session=True,  # an interrupt from the terminal is the leader's to answer
            )
        self.tell(spec.to_bytes())

    @property
    def pid(self) -> int:
        """Of the rank's process, for whoever looks at it from outside."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def tell(self, message: bytes) -> None:
        """Short enough to be buffered: never waits for the rank. Raises GroupError if it is gone."""
        try:
            self.connection.send_bytes(message)
        except OSError as error:
            raise self._gone() from error

    def tell_file(self, message: bytes, descriptor: int) -> None:
        """A message, and a file descriptor for the rank to have as well. As `tell`."""
        self.tell(message)
        try:
            send_handle(self.connection, descriptor, self._process.pid)
        except OSError as error:
            raise self._gone() from error

    def expect(self, message: bytes, deadline: float) -> None:
        """Wait for this message, until `deadline` (`time.monotonic()`). Raises GroupError if it does not come."""
        try:
            if not self.connection.poll(max(0.0, deadline - time.monotonic())):
                raise GroupError(f"rank {self.rank} of the tensor-parallel group did not start in time")
            heard = self.connection.recv_bytes()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        assert heard == message, f"rank {self.rank} said {heard!r} where {message!r} was due"

    def end(self, deadline: float) -> str | None:
        """How it ended, if it has by `deadline` (`time.monotonic()`) and another rank was not the reason."""
        try:
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"rank {self.rank} has left the group"
        if code == APART:
            return None
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}; its reason is in the worker's log"
        return f"rank {self.rank} has ended {how}"

    def dismiss(self) -> None:
        """Have it end."""
        self.connection.close()
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def wait_for_end(self) -> None:
        """After `dismiss`."""
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:  # it is stopped, or hangs in its device
            self._process.kill()
            self._process.wait()

    def _gone(self) -> GroupError:
        return GroupError(f"rank {self.rank} of the tensor-parallel group has ended; its reason is in the worker's log")
