"""A peer's process: started, awaited by the line that it says when it is ready, ended with all that it started."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.peers.engines.installation import foreign_environment, last_lines
from benchmarks.peers.peer import PeerUnavailableError

START_TIMEOUT_S = 600.0
STOP_TIMEOUT_S = 30.0
LISTEN_TIMEOUT_S = 30.0
_LOOKS_EVERY_S = 0.02
_SHARED_MEMORY = "/dev/shm/"


@contextlib.contextmanager
def started(
    name: str,
    command: Sequence[object],
    *,
    ready: str,
    folder: Path,
    environment: dict[str, str] | None = None,
    timeout_s: float = START_TIMEOUT_S,
) -> Iterator[None]:
    """Start a server, wait until `ready` stands in a line of its output, which goes to `server.log`, and end it after
    the block; then nothing of it is left in the folders for temporary files and for shared memory. Raises
    PeerUnavailableError."""
    log = folder / "server.log"
    with tempfile.TemporaryDirectory(prefix="legato-peer-", ignore_cleanup_errors=True) as temporary:
        try:
            process = subprocess.Popen(
                [str(word) for word in command],
                cwd=folder,
                env=foreign_environment() | {"TMPDIR": temporary} | (environment or {}),
                text=True,
                errors="replace",
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise PeerUnavailableError(f"{name} cannot be started: {error}") from None
        try:
            _await_line(name, process, ready, log, timeout_s)
            yield
        finally:
            end_process(process)


def _await_line(name: str, process: subprocess.Popen[str], ready: str, log: Path, timeout_s: float) -> None:
    heard: queue.Queue[bool] = queue.Queue()
    log.write_text("")  # to be read, however soon
    threading.Thread(target=_listen, args=(process, ready, log, heard), daemon=True).start()
    try:
        came_up = heard.get(timeout=timeout_s)
    except queue.Empty:
        raise PeerUnavailableError(f"{name} was not ready within {timeout_s:.0f} s: {last_lines(log)}") from None
    if not came_up:
        raise PeerUnavailableError(f"{name} ended with {process.wait(STOP_TIMEOUT_S)} at start: {last_lines(log)}")


def await_listening(name: str, port: int, timeout_s: float = LISTEN_TIMEOUT_S) -> None:
    """Wait for a server that says it is ready before it listens. Looks again and again: a stranger's port tells
    nobody."""
    deadline_s = time.monotonic() + timeout_s
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout_s).close()
        except ConnectionRefusedError as error:
            if time.monotonic() > deadline_s:
                raise PeerUnavailableError(f"{name} said it was ready, but does not listen: {error}") from None
            time.sleep(_LOOKS_EVERY_S)
        else:
            return


def _listen(process: subprocess.Popen[str], ready: str, log: Path, heard: queue.Queue[bool]) -> None:
    """Read a server's output to the end, or it would block. Tells `heard` True when it is ready, False at its end."""
    assert process.stdout is not None
    with log.open("a", encoding="utf-8") as file:  # a pair of servers shares it
        for line in process.stdout:
            print(line, end="", file=file, flush=True)
            if ready in line:
                heard.put(True)
    heard.put(False)


def end_process(process: subprocess.Popen[str]) -> None:
    """Ask a process to end, then kill it with its whole session. Shared memory that these have named and cannot remove
    any more is removed."""
    names = _shared_memory_of(process.pid)
    process.send_signal(signal.SIGINT)
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(STOP_TIMEOUT_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for path in names:
        path.unlink(missing_ok=True)


def _shared_memory_of(session: int) -> set[Path]:
    """Files in /dev/shm that processes of a session have mapped."""
    names: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended
            if os.getsid(int(maps.parent.name)) == session:
                fields = (line.split(maxsplit=5) for line in os.fsdecode(maps.read_bytes()).splitlines())
                names.update(Path(words[5]) for words in fields if words[5:] and words[5].startswith(_SHARED_MEMORY))
    return {path for path in names if not path.name.startswith("legato-kv-")}  # which the next worker takes over
