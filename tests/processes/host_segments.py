"""Workers in processes of their own that hold host segments, for tests that kill them."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.processes.host_segment_child import run
from tests.support.forked_child import ForkedChild

SHARED_MEMORY = Path("/dev/shm")


@pytest.fixture
def scope() -> Iterator[str]:
    """An application of its own for each test, of which nothing is left in shared memory afterwards."""
    name = uuid.uuid4().hex
    yield name
    for path in SHARED_MEMORY.glob(f"legato-kv-{name}-*"):
        path.unlink()


class Worker(ForkedChild):
    """A process of `tests.processes.host_segment_child`."""

    def __init__(self, role: str, scope: str, folder: Path = SHARED_MEMORY) -> None:
        super().__init__(run, role, folder, scope)

    def opened(self) -> tuple[Path, bool]:
        """The path of its segment, once it stands, and whether it was adopted."""
        path, adopted = self.told()
        return path, adopted

    def end(self) -> None:
        """Have it close its segment."""
        self.hang_up()
        assert self.exit_code() == 0
