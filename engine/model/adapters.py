"""Adapters beside a model: which of the many that requests name are loaded, and which go for others.

A slot is one adapter, by its digest, for all sequences that are computed with it. It is loaded while there is room, or
in the place of the one that is needed least, of several the one used least recently. `AdapterPool` decides; who drives
it loads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from engine.model.transformer import Model
    from kernels.adapters import Adapter


@dataclass(eq=False, slots=True)
class AdapterSlot:
    """One adapter. Its sequences are computed only while it is `loaded`."""

    digest: str
    folder: Path
    loaded: Adapter | None = None


class Need(IntEnum):
    """How much a sequence needs its adapter now."""

    LATER = 0  # it waits for something that others do: KV, or room elsewhere
    SOON = 1  # it is next where there are blocks for it
    NOW = 2  # it has its blocks, and lacks nothing else


class AdapterUser(Protocol):
    """A sequence, as far as the pool looks at it."""

    @property
    def adapter(self) -> AdapterSlot | None: ...


class AdapterPool:
    """Owns the slots: at most `max_loaded` of them are loaded, or being loaded, and the others wait in the order in
    which they were first wanted.

    Nobody gives a slot back: who uses it is asked for where that matters, so a user that is gone cannot hold it.
    """

    def __init__(self, load: Callable[[str, Path], Adapter], max_loaded: int) -> None:
        """`load(digest, folder)`, for another thread. Raises ValueError where that adapter cannot be had."""
        self.load = load
        self._max_loaded = max_loaded
        self._slots: OrderedDict[str, AdapterSlot] = OrderedDict()  # of those that are loaded, the last used comes last
        self._loading: AdapterSlot | None = None

    @property
    def loaded(self) -> list[str]:
        """The digests of the adapters that are loaded."""
        return [slot.digest for slot in self._slots.values() if slot.loaded is not None]

    @property
    def num_waiting(self) -> int:
        """Slots that are not loaded."""
        return len(self._slots) - len(self.loaded)

    @property
    def num_bytes(self) -> int:
        """Bytes of all adapters that are loaded."""
        return sum(slot.loaded.num_bytes for slot in self._slots.values() if slot.loaded is not None)

    def want(self, digest: str, folder: Path) -> AdapterSlot:
        """The slot of this adapter, for a sequence that is to be computed with it; `next_load` may follow."""
        slot = self._slots.setdefault(digest, AdapterSlot(digest, folder))
        slot.folder = folder  # equal files may lie in several, and this is where they were seen last
        if slot.loaded is not None:
            self._slots.move_to_end(digest)
        return slot

    def next_load(self, users: Iterable[tuple[AdapterUser, Need]]) -> AdapterSlot | None:
        """Which slot to load now, one at a time: `has_loaded` or `has_failed` follows. None: there is nothing to load,
        or no room.

        `users`: all sequences that are to be computed. A slot gives way only to one that is needed more; so nobody
        loses the adapter that it is computed with, and nobody who waits for something else keeps others from theirs.
        """
        if self._loading is not None or not self.num_waiting:
            return None
        needs = self._needs(users)
        waiting = [slot for slot in self._slots.values() if slot.loaded is None]
        for slot in waiting:
            if slot.digest not in needs:
                del self._slots[slot.digest]
        wanted = max((slot for slot in waiting if slot.digest in needs), key=lambda s: needs[s.digest], default=None)
        if wanted is None or not self._make_room(needs[wanted.digest], needs):
            return None
        self._loading = wanted
        return wanted

    def has_loaded(self, slot: AdapterSlot, adapter: Adapter) -> None:
        self._loading = None
        slot.loaded = adapter
        self._slots.move_to_end(slot.digest)

    def has_failed(self, slot: AdapterSlot) -> None:
        """Forget a slot that could not be loaded; who wants that adapter again is given another slot."""
        self._loading = None
        del self._slots[slot.digest]

    def check(self) -> None:
        """Raises AssertionError where more are loaded than may be."""
        assert len(self.loaded) + (self._loading is not None) <= self._max_loaded, (
            "more adapters than there is room for"
        )

    @staticmethod
    def _needs(users: Iterable[tuple[AdapterUser, Need]]) -> dict[str, Need]:
        """The largest of each slot that has users, by its digest."""
        needs: dict[str, Need] = {}
        for user, need in users:
            if user.adapter is not None:
                needs[user.adapter.digest] = max(need, needs.get(user.adapter.digest, need))
        return needs

    def _make_room(self, need: Need, needs: Mapping[str, Need]) -> bool:
        """Whether there is room for one that is needed so much, in the place of the one that is needed least if need
        be."""
        loaded = [slot for slot in self._slots.values() if slot.loaded is not None]
        if len(loaded) < self._max_loaded:
            return True
        least = min(loaded, key=lambda slot: needs.get(slot.digest, -1))
        if needs.get(least.digest, -1) >= need:
            return False
        least.loaded = None
        if least.digest in needs:
            self._slots.move_to_end(least.digest)  # behind those that wait
        else:
            del self._slots[least.digest]
        return True


def adapter_pool(model: Model, config: ModelConfig, *, max_loaded: int, max_rank: int) -> AdapterPool:
    """The pool of one model's adapters."""
    import torch  # who replays a log has the schedulers, which import this module, and computes nothing

    from engine.checkpoint.adapters import AdapterFiles, AdapterReader
    from kernels.cpu.thread_team import dissolve_team

    reader = AdapterReader(config, max_rank, model.dtype)

    def load(digest: str, folder: Path) -> Adapter:
        files = AdapterFiles.read(folder)
        try:
            with ThreadPoolExecutor(1, "adapter-digest") as beside, torch.inference_mode():
                read = beside.submit(files.digest)
                adapter = model.adapter(reader.weights(files))
                if read.result() != digest:
                    raise ValueError(f"the adapter in {folder} is another one by now; ask for it anew")
        finally:
            dissolve_team()  # beside it, those that compute steps would sleep between any two products
        return adapter

    return AdapterPool(load, max_loaded)
