"""What prefix columns can be fetched from and written to, besides the worker's own device and host memory.

A *block column* is one chained prefix hash with the blocks of all layer groups. Both ends of a copy are views of whole
blocks in the host tier, one for each group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from kv_transfer.messages.fields import SourceName

ColumnViews = Sequence[memoryview]
"""The bytes of a column's blocks, layer group by layer group."""


class ColumnSource(Protocol):
    """Somewhere columns may be loaded from: another worker's host memory, a disk."""

    @property
    def name(self) -> SourceName:
        """The source's name in logs and counters."""
        ...

    @property
    def assumed_bytes_per_s(self) -> float:
        """Believed until loads have been measured."""
        ...

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether a load is worth trying. On the main loop: no I/O, no waiting."""
        ...

    def load(self, hashes: Sequence[bytes], destinations: Sequence[ColumnViews]) -> list[bool]:
        """Copy columns out and verify them; blocks, on an I/O thread.

        False for a column that is gone or damaged; its destination then holds anything.
        """
        ...


class ColumnSink(Protocol):
    """Somewhere columns are written to, without anyone waiting for it."""

    def holds(self, prefix_hash: bytes) -> bool:
        """Whether the column needs no writing. On the main loop: no I/O, no waiting."""
        ...

    def store(self, prefix_hash: bytes, column: ColumnViews, on_done: Callable[[], None]) -> bool:
        """Queue a column. Its bytes must stay until `on_done` has been called, from any thread.

        False, and no call, where it is dropped because too much is queued already.
        """
        ...

    def touch(self, hashes: Sequence[bytes]) -> None:
        """A prefix, in its order, was used, what `store` has taken before included: its last column is to go first.

        A hint. On the main loop: no I/O, no waiting.
        """
        ...
