"""Groups of two processes, made with `torch.distributed`: one end sends tensors, the other receives them, in order.

NCCL between GPUs, gloo between CPUs. A group is joined through a store that lives on the two ends' connection, moves
bytes, and lets go of whoever waits in it. An end lives in a `GroupThread`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta
from queue import SimpleQueue
from typing import Any, Final, Literal, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroupGloo, Store  # where they have types

from engine.memory.streams import CudaStream
from kv_transfer.connections.event_loops import HomeLoop

Rank = Literal[0, 1]
SENDER: Final[Rank] = 0
RECEIVER: Final[Rank] = 1

_TAG: Final = 0
_NEVER_SENT: Final = 1  # the tag of what nobody sends
_AT_ONCE: Final = timedelta(milliseconds=1)

# Without its watchdog, which ends the process when something fails, and with errors told by `wait` alone.
_NCCL_SETTINGS: Final = {"TORCH_NCCL_BLOCKING_WAIT": "1", "TORCH_NCCL_ENABLE_MONITORING": "0"}


class PairGroup(Protocol):
    """One end. Whatever fails raises RuntimeError, and the group is of no use after that."""

    def move(self, slab: Tensor) -> None:
        """Send or receive all of `slab [num_bytes]`, whichever this end does; its memory is free again on return."""
        ...

    def abort(self) -> None:
        """End the group, from any thread: whoever waits in `move`, here or there, fails soon. May block for a while."""
        ...


class GlooGroup:
    """Memory of the host over TCP; `host` is the address that the other end reaches this one at."""

    def __init__(self, store: Store, rank: Rank, *, host: str, timeout_s: float) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub gives it another name
        options._timeout = timedelta(seconds=timeout_s)
        options._threads = 1  # of those for collectives, which are not used
        options._devices = [ProcessGroupGloo.create_device(hostname=host)]
        self._backend: Any = ProcessGroupGloo(store, rank, 2, options)  # the stub knows none of its methods
        self._start, self._peer = _direction(self._backend, rank)

    def move(self, slab: Tensor) -> None:
        self._start([slab], self._peer, _TAG).wait()

    def abort(self) -> None:
        """Gloo's own `abort` does nothing; but when one wait of a group comes to its deadline, all of it is closed."""
        with contextlib.suppress(RuntimeError):
            self._backend.recv([torch.empty(1, dtype=torch.uint8)], self._peer, _NEVER_SENT).wait(_AT_ONCE)


class NcclGroup:
    """Memory of GPUs. A communicator of its own, since of one communicator the two directions would wait in turns."""

    def __init__(self, store: Store, rank: Rank, *, device: torch.device, timeout_s: float) -> None:
        from torch._C._distributed_c10d import ProcessGroupNCCL

        for name, value in _NCCL_SETTINGS.items():
            os.environ.setdefault(name, value)
        options = ProcessGroupNCCL.Options()
        options._timeout = timedelta(seconds=timeout_s)
        self._backend = ProcessGroupNCCL(store, rank, 2, options)
        self._start, self._peer = _direction(self._backend, rank)
        self.stream = CudaStream(device)
        self._aborted = threading.Event()

    def move(self, slab: Tensor) -> None:
        """Waits by an event, which does not keep a core busy, and asks only then how it went."""
        works: list[Any] = []

        def start() -> None:
            works.append(self._start([slab], self._peer, _TAG))
            works[0].synchronize()  # this stream is to wait, not this thread

        self.stream.queue(start)
        self.stream.record().wait()
        self.stream.queue(lambda: works[0].wait())
        if self._aborted.is_set():
            raise RuntimeError("the group of the two GPUs was aborted")

    def abort(self) -> None:
        self._aborted.set()
        self._backend.abort()


def _direction(backend: Any, rank: Rank) -> tuple[Callable[[list[Tensor], int, int], Any], int]:
    """What this end does, and the rank that it does it with."""
    return (backend.send, RECEIVER) if rank == SENDER else (backend.recv, SENDER)


def join_group(store: Store, rank: Rank, *, device: torch.device, host: str, timeout_s: float) -> PairGroup:
    """Returns when both ends have joined and a first byte has been moved. Raises RuntimeError."""
    group: PairGroup
    if device.type == "cuda":
        group = NcclGroup(store, rank, device=device, timeout_s=timeout_s)
        first = group.stream.empty(1)  # of compute's stream it could be memory that is used still
    else:
        group = GlooGroup(store, rank, host=host, timeout_s=timeout_s)
        first = torch.zeros(1, dtype=torch.uint8)
    group.move(first)
    return group


_Job = tuple[Tensor, Callable[[], None]]


class GroupThread:
    """One end in a thread of its own, so that no event loop waits in `torch.distributed`.

    Joins a group, then moves slabs in the order of the calls. Belongs to the loop that it is made on. Everything has a
    deadline: who is late, or fails, is reported once on the loop, and its owner aborts it.

    `on_joined(refusal)` is called on the loop once, `on_failed(reason)` at most once after it. A daemon thread, as what
    `torch.distributed` does not let go of must not keep a process from ending.
    """

    def __init__(
        self,
        join: Callable[[], PairGroup],
        *,
        timeout_s: float,
        on_joined: Callable[[str | None], None],
        on_failed: Callable[[str], None],
    ) -> None:
        self._join: Callable[[], PairGroup] | None = join
        self._timeout_s = timeout_s
        self._on_joined = on_joined
        self._on_failed = on_failed
        self._loop = asyncio.get_running_loop()
        self._home = HomeLoop()
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._timers: set[asyncio.TimerHandle] = set()
        self._ended = asyncio.Event()
        self._lock = threading.Lock()
        self._group: PairGroup | None = None  # guarded by the lock, as is `_aborter`
        self._aborter: threading.Thread | None = None
        self._aborted = False
        self._thread = threading.Thread(target=self._run, name="kv-group", daemon=True)
        self._thread.start()

    def move(self, slab: Tensor, on_moved: Callable[[], None]) -> None:
        """`on_moved` is called on the loop when the memory is free again, or what was to come is there."""
        timer = self._loop.call_later(self._timeout_s, self._fail, f"a slab did not move within {self._timeout_s:g} s")
        self._timers.add(timer)

        def moved() -> None:
            timer.cancel()
            self._timers.discard(timer)
            on_moved()

        self._jobs.put((slab, moved))

    def abort(self) -> None:
        """Move nothing any more, let go of what waits; idempotent."""
        while self._timers:
            self._timers.pop().cancel()
        self._on_failed = _nobody_asks
        with self._lock:
            self._aborted = True
            self._start_aborting()
        self._jobs.put(None)

    async def wait_ended(self, timeout_s: float) -> bool:
        """After `abort`, until the thread has let go of everything; whether it has."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._ended.wait()
        except TimeoutError:
            return False
        self._thread.join()
        return True

    def _fail(self, reason: str) -> None:
        on_failed, self._on_failed = self._on_failed, _nobody_asks
        on_failed(reason)

    def _start_aborting(self) -> None:
        """Abort the group in a thread, since NCCL may take its time. Called with the lock held."""
        if self._aborted and self._group is not None and self._aborter is None:
            self._aborter = threading.Thread(target=self._group.abort, name="kv-group-abort", daemon=True)
            self._aborter.start()

    # --- in the group's thread ---

    def _run(self) -> None:
        if self._join_group():
            while (job := self._jobs.get()) is not None:
                self._move(*job)
                del job  # its memory is not this thread's any more
        with self._lock:
            aborter, self._group = self._aborter, None
        if aborter is not None:
            aborter.join()
        self._home.run(self._ended.set)

    def _join_group(self) -> bool:
        assert self._join is not None
        try:
            group = self._join()
        except (RuntimeError, ValueError, OSError) as error:
            self._home.run(self._on_joined, str(error) or type(error).__name__)
            return False
        finally:
            self._join = None  # it knows the link, which is not to wait for this thread's end
        with self._lock:
            self._group = group
            self._start_aborting()
        self._home.run(self._on_joined, None)
        return True

    def _move(self, slab: Tensor, moved: Callable[[], None]) -> None:
        assert self._group is not None
        try:
            self._group.move(slab)
        except RuntimeError as error:
            self._home.run(self._fail, str(error))
        else:
            self._home.run(moved)


def _nobody_asks(reason: str) -> None:
    pass


class PeerStore(Store):
    """The store by which the two ends of a process group find each other: what one end sets, the other receives.

    It lives on their authenticated connection, so nobody else can read or write it and no port is opened for it.
    `send(key, value)` is called for each value that is set here, in the thread of `torch.distributed` that sets it.
    """

    def __init__(self, send: Callable[[str, bytes], None], *, timeout_s: float) -> None:
        super().__init__()
        self._send = send
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._words: dict[str, bytes] = {}
        self._closed_because: str | None = None

    def receive(self, key: str, value: bytes) -> None:
        """Take in what the other end has set."""
        with self._changed:
            self._words[key] = value
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Nothing will be received any more; who waits is told why. Idempotent."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify_all()

    # What torch calls:

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come, not text
        self.receive(key, bytes(value))
        self._send(key, bytes(value))

    def get(self, key: str) -> bytes:
        self._await([key], self._timeout_s)
        return self._words[key]

    def wait(self, keys: Collection[str], timeout: timedelta | None = None) -> None:
        self._await(keys, self._timeout_s if timeout is None else timeout.total_seconds())

    def check(self, keys: Collection[str]) -> bool:
        return all(key in self._words for key in keys)

    def _await(self, keys: Collection[str], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while not self.check(keys):
                if self._closed_because is not None:
                    raise RuntimeError(self._closed_because)
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    raise RuntimeError(f"The other end of the group did not say {', '.join(keys)} in {timeout_s:g} s.")
                self._changed.wait(left_s)
