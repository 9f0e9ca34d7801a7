"""Where the two ends of a process group find each other: a store that lives on their authenticated connection.

What one end sets, the other learns. Nobody else can read or write it, and no port is opened for it. Used by the threads
of `torch.distributed`; knows nothing of groups.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from datetime import timedelta

from torch._C._distributed_c10d import Store  # where it has types


class WordStore(Store):
    """One end. `tell(key, value)` is called for each word that is set here, in the thread that sets it."""

    def __init__(self, tell: Callable[[str, bytes], None], *, timeout_s: float) -> None:
        super().__init__()
        self._tell = tell
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._words: dict[str, bytes] = {}
        self._closed_because: str | None = None

    def learn(self, key: str, value: bytes) -> None:
        """The other end has set it."""
        with self._changed:
            self._words[key] = value
            self._changed.notify_all()

    def close(self, reason: str) -> None:
        """Nothing will be learned any more; who waits is told why. Idempotent."""
        with self._changed:
            self._closed_because = self._closed_because or reason
            self._changed.notify_all()

    # What torch calls:

    def set(self, key: str, value: bytes) -> None:  # type: ignore[override]  # bytes come, not text
        self.learn(key, bytes(value))
        self._tell(key, bytes(value))

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
