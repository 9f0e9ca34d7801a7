"""Adapters beside a model: which of the many that requests name are loaded, and which go for others.

A slot is one adapter, by its digest, for all sequences that are computed with it. It is loaded while there is room, or
in the place of the one that is needed least, of several the one used least recently. Where all are needed, one that has
had its turn drains for the one that has waited longest. `AdapterPool` decides; who drives it loads.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol

if TYPE_CHECKING:
    from engine.model.config import ModelConfig
    from engine.model.transformer import Model
    from kernels.adapters import Adapter


TURN_S: Final = 2.0
"""How long a loaded adapter takes on every sequence that names it, whoever waits, and how long one waits until another
drains for it. Some tens of loads: less would mostly load, and keep more sequences waiting for adapters that drain."""


@dataclass(eq=False, slots=True)
class AdapterSlot:
    """One adapter. Its sequences are computed only while it is `loaded`; while it drains, only its `last` ones."""

    digest: str
    folder: Path
    loaded: Adapter | None = None
    last: Set[AdapterUser] | None = None  # None: it does not drain
    turn_at: float = 0.0  # when it was loaded, or stopped to drain
    waits_at: float | None = None  # since when sequences that lack nothing else wait for a place; None: none do
    num_loads_before: int = 0  # of the pool's loads, those before it began to wait
    is_overdue: bool = False  # it has waited for `TURN_S`
    is_stalled: bool = False  # one has been read for `TURN_S`, and may be for ever, that it waits for

    def serves(self, user: AdapterUser) -> bool:
        """Whether this sequence can be computed with it now."""
        return self.loaded is not None and (self.last is None or user in self.last)

    def waited_s(self, now: float) -> float:
        """Since it began to wait for a place; 0: it does not."""
        return 0.0 if self.waits_at is None else now - self.waits_at


class Need(IntEnum):
    """How much a sequence needs its adapter now."""

    LATER = 0  # it waits for something that others do: KV, or room elsewhere
    SOON = 1  # it is next where there are blocks for it
    NOW = 2  # it has its blocks, or there are some for it, and lacks nothing else


class AdapterUser(Protocol):
    """A sequence, as far as the pool looks at it."""

    @property
    def adapter(self) -> AdapterSlot | None: ...

    @property
    def accepted_at(self) -> float: ...


class AdapterPool:
    """Owns the slots: at most `max_loaded` of them are loaded, or being loaded, and the others wait in the order in
    which they were first wanted.

    Nobody gives a slot back: who uses it is asked for where that matters, so a user that is gone cannot hold it. Times
    are those of the clock that sequences' `accepted_at` is on.
    """

    def __init__(self, load: Callable[[str, Path], Adapter], max_loaded: int) -> None:
        """`load(digest, folder)`, for another thread. Raises ValueError where that adapter cannot be had."""
        self.load = load
        self._max_loaded = max_loaded
        self._slots: OrderedDict[str, AdapterSlot] = OrderedDict()  # of those that are loaded, the last used comes last
        self._draining: list[AdapterSlot] = []  # in the order in which they began to
        self._loading: AdapterSlot | None = None
        self._loading_since = 0.0
        self.is_stalled = False  # that one takes long
        self._num_loads = 0
        self.on_open: Callable[[], None] = lambda: None  # those of an adapter that drained may go on after all

    @property
    def loaded(self) -> list[str]:
        """The digests of the adapters that are loaded."""
        return [slot.digest for slot in self._slots.values() if slot.loaded is not None]

    @property
    def open(self) -> list[str]:
        """The digests of those that take on every sequence which names them."""
        return [slot.digest for slot in self._slots.values() if slot.loaded is not None and slot.last is None]

    @property
    def is_contended(self) -> bool:
        """Whether anything waits to be loaded, or drains."""
        return bool(self.num_waiting or self._draining)

    @property
    def stalls_at(self) -> float | None:
        """When what is being read will have taken so long that others need not wait with it. None: nothing is read, or
        it has."""
        return None if self._loading is None or self.is_stalled else self._loading_since + TURN_S

    def is_loading(self, slot: AdapterSlot) -> bool:
        return self._loading is slot

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

    def next_load(self, users: Iterable[tuple[AdapterUser, Need]], now: float) -> AdapterSlot | None:
        """Which slot to load now, one at a time: `has_loaded` or `has_failed` follows. None: there is nothing to load,
        or no room.

        `users`: all sequences that are to be computed. A slot gives way only to one that is needed more; so nobody
        loses the adapter that it is computed with, and nobody who waits for something else keeps others from theirs.
        One that waits for long has others drain, which give way when the sequences that they have are through.
        """
        if not self.is_contended:
            return None
        needing = [(user, user.adapter, need) for user, need in users if user.adapter is not None]
        asked_for = {slot for user, slot, need in needing if need is not Need.LATER and not slot.serves(user)}
        if self._loading is not None:
            self._note_waits(asked_for, now)  # it may take for ever
            return None
        needs = self._needs(needing)
        for slot in [slot for slot in self._slots.values() if slot.loaded is None and slot not in needs]:
            del self._slots[slot.digest]
        self._note_waits(asked_for, now)
        waiting = [slot for slot in self._slots.values() if slot.loaded is None]
        self._drain(waiting, needing, needs, now)
        needs = self._needs(needing)  # of one that opened, its newcomers count by now, or it would go with them waiting
        wanted = max(waiting, key=lambda slot: (needs[slot], slot.waited_s(now)), default=None)
        if wanted is None or not self._make_room(needs[wanted], needs, now):
            return None
        self._loading, self._loading_since = wanted, now
        return wanted

    def has_loaded(self, slot: AdapterSlot, adapter: Adapter, now: float) -> None:
        self._end_loading()
        self._num_loads += 1
        slot.loaded, slot.turn_at, slot.is_overdue = adapter, now, False
        self._slots.move_to_end(slot.digest)

    def place_in_s(self, now: float) -> float | None:
        """Predicted seconds until the adapters that wait now have had a place: as fast as others got theirs while the
        first of these waited. None: nobody did. 0: none waits."""
        waiting = [slot for slot in self._slots.values() if slot.loaded is None and slot.waits_at is not None]
        if not waiting:
            return 0.0
        first = max(waiting, key=lambda slot: slot.waited_s(now))
        num_loads = self._num_loads - first.num_loads_before
        return first.waited_s(now) * len(waiting) / num_loads if num_loads else None

    def oldest_wait_s(self, now: float) -> float:
        """Since the first of those that wait for a place began to; 0 without any."""
        return max((slot.waited_s(now) for slot in self._slots.values() if slot.loaded is None), default=0.0)

    def has_failed(self, slot: AdapterSlot) -> None:
        """Forget a slot that could not be loaded; who wants that adapter again is given another slot."""
        self._end_loading()
        del self._slots[slot.digest]

    def _end_loading(self) -> None:
        self._loading, self.is_stalled = None, False
        for slot in self._slots.values():
            slot.is_stalled = False

    def check(self) -> None:
        """Raises AssertionError where more are loaded than may be."""
        assert len(self.loaded) + (self._loading is not None) <= self._max_loaded, (
            "more adapters than there is room for"
        )

    @staticmethod
    def _needs(needing: list[tuple[AdapterUser, AdapterSlot, Need]]) -> dict[AdapterSlot, Need]:
        """The largest of each slot that has users; of one that drains, only its last ones count."""
        needs: dict[AdapterSlot, Need] = {}
        for user, slot, need in needing:
            if slot.last is None or user in slot.last:
                needs[slot] = max(need, needs.get(slot, need))
        return needs

    def _note_waits(self, asked_for: Set[AdapterSlot], now: float) -> None:
        """Note who waits for a place or for another turn, and since when. Nobody becomes overdue while another one is
        loaded: for who is, blocks are kept, and all that while nobody could use them. Where that takes long, nobody is
        any more."""
        self.is_stalled = self._loading is not None and now - self._loading_since >= TURN_S
        for slot in self._slots.values():
            if slot.loaded is not None and slot.last is None:
                continue
            if slot not in asked_for:
                slot.waits_at = None
            elif slot.waits_at is None:
                slot.waits_at, slot.num_loads_before = now, self._num_loads
            if self._loading is None:
                slot.is_overdue = slot.loaded is None and slot.waited_s(now) >= TURN_S
            elif self.is_stalled:
                slot.is_overdue, slot.is_stalled = False, True

    def _drain(
        self,
        waiting: list[AdapterSlot],
        needing: list[tuple[AdapterUser, AdapterSlot, Need]],
        needs: Mapping[AdapterSlot, Need],
        now: float,
    ) -> None:
        """Have one slot more drain where that is due, or open again what drains for nobody.

        For each slot that waits one drains after a turn, two after two turns, and so on: the first of them may have a
        sequence that takes minutes. Those come first whose own turn began first. Who is computed with a slot that
        drains, or asked for it before the one that waits longest began to, is still to be. For those that wait only
        until others are loaded, as there is room for them, nobody drains.
        """
        loaded = [slot for slot in self._slots.values() if slot.loaded is not None]
        num_taken = sum(slot in needs or slot.last is not None for slot in loaded)
        overdue = sorted((slot for slot in waiting if slot.is_overdue), key=lambda slot: slot.waited_s(now))
        overdue = overdue[: max(0, len(overdue) - (self._max_loaded - num_taken))]
        num_due = sum(int(slot.waited_s(now) / TURN_S) for slot in overdue)
        self._draining = [slot for slot in self._draining if slot.loaded is not None]
        while len(self._draining) > num_due:
            opened = self._draining.pop()
            opened.last, opened.turn_at, opened.waits_at = None, now, None
            self.on_open()
        candidates = [slot for slot in loaded if slot.last is None and now - slot.turn_at >= TURN_S]
        for slot in sorted(candidates, key=lambda slot: slot.turn_at)[: num_due - len(self._draining)]:
            since = now - max(each.waited_s(now) for each in overdue)
            slot.last = {
                user for user, own, need in needing if own is slot and (need is Need.NOW or user.accepted_at <= since)
            }
            slot.waits_at = None
            self._draining.append(slot)

    def _make_room(self, need: Need, needs: Mapping[AdapterSlot, Need], now: float) -> bool:
        """Whether there is room for one that is needed so much, in the place of the one that is needed least if need
        be."""
        loaded = [slot for slot in self._slots.values() if slot.loaded is not None]
        if len(loaded) < self._max_loaded:
            return True
        least = min(loaded, key=lambda slot: needs.get(slot, -1))
        if needs.get(least, -1) >= need:
            return False
        least.loaded = None
        if least in needs or least.last is not None:
            self._slots.move_to_end(least.digest)  # behind those that wait
        else:
            del self._slots[least.digest]
        if least.last is None and now - least.turn_at >= TURN_S:
            least.waits_at = None  # else it has had no turn, and waits as long as it did
        least.last = None
        return True


def adapter_pool(model: Model, config: ModelConfig, *, max_loaded: int, max_rank: int) -> AdapterPool:
    """The pool of one model's adapters."""
    import torch  # who replays a log has the schedulers, which import this module, and computes nothing

    from engine.checkpoint.adapters import MAX_LAYOUTS, AdapterFiles, AdapterReader
    from kernels.cpu.thread_team import dissolve_team

    reader = AdapterReader(config, max_rank)
    packer = lru_cache(MAX_LAYOUTS)(model.adapter_packer)

    def load(digest: str, folder: Path) -> Adapter:
        try:
            with ThreadPoolExecutor(1, "adapter-digest") as beside, torch.inference_mode():
                files = AdapterFiles.read(folder, beside)
                layout = reader.layout(files)
                adapter = packer(layout)(files.tensors[layout.start :])
                if files.digest() != digest:
                    raise ValueError(f"the adapter in {folder} is another one by now; ask for it anew")
        finally:
            dissolve_team()  # beside it, those that compute steps would sleep between any two products
        return adapter

    return AdapterPool(load, max_loaded)
