"""The two directions of a link over process groups: what this end sends, and what it receives.

Each owns its slabs, and a group in a thread of its own. They react to messages and know no connection: what they
have to say they `post`, and what goes wrong ends the link through `fail`.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from torch import Tensor

from engine.memory.devices import CPU
from kv_transfer.connections.event_loops import HomeLoop
from kv_transfer.connections.frames import Frame
from kv_transfer.connections.receive_queue import ReceiveQueue
from kv_transfer.messages import MalformedMessageError, Message, decode, encode
from kv_transfer.messages.connections import GroupAnswer, GroupOffer, GroupWord, SlabAnnounced, SlabsWanted
from kv_transfer.transports.base import SlabBytes
from kv_transfer.transports.process_group.group_thread import GroupThread
from kv_transfer.transports.process_group.pair import RECEIVER, SENDER, PeerStore, Rank, join_group
from kv_transfer.transports.slab_pool import PooledSlab, SlabConfig, SlabPool, private_arena
from kv_transfer.transports.sockets import CarrierUnavailableError, LinkConfig

_MAX_WAITING: Final = 1024  # slabs that one peer has announced: more than any pool has
_GROUP_END_S: Final = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DistributedConfig(LinkConfig):
    """`device`: where slabs lie. A group is given up if it is not joined within `join_timeout_s`, or if a slab that was
    asked for does not move within `move_timeout_s`."""

    device: torch.device = CPU
    join_timeout_s: float = 10.0
    move_timeout_s: float = 10.0

    @property
    def purpose(self) -> str:
        return "kv-nccl" if self.device.type == "cuda" else "kv-gloo"


@dataclass(frozen=True, slots=True)
class Side:
    """What both directions of a link have in common. `host`: the address that the peer reaches this end at."""

    config: DistributedConfig
    host: str
    post: Callable[[Message], None]
    fail: Callable[[str], None]

    def store(self, *, offered: bool) -> PeerStore:
        home = HomeLoop()

        def send(key: str, value: bytes) -> None:
            home.run(self.post, GroupWord(offered=offered, key=key, value=value))

        return PeerStore(send, timeout_s=self.config.join_timeout_s)

    def group_thread(self, store: PeerStore, rank: Rank, on_joined: Callable[[str | None], None]) -> GroupThread:
        timeout_s = self.config.join_timeout_s
        return GroupThread(
            partial(join_group, store, rank, device=self.config.device, host=self.host, timeout_s=timeout_s),
            timeout_s=self.config.move_timeout_s,
            on_joined=on_joined,
            on_failed=self.fail,
        )


class Outgoing:
    """Our slabs, and the group that they leave by."""

    def __init__(self, side: Side) -> None:
        config = side.config.slabs
        self._timeout_s = side.config.join_timeout_s
        self._joined: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()
        self.pool: SlabPool[SlabBytes] = SlabPool(arena_on(side.config.device, config), config)
        self._announced: dict[int, PooledSlab[SlabBytes]] = {}
        self._store = side.store(offered=True)
        side.post(GroupOffer())
        self.group = side.group_thread(self._store, SENDER, self.on_joined)

    async def joined(self) -> None:
        """Wait for both ends. Raises CarrierUnavailableError with the words of the one that could not."""
        refusal: str | None
        try:
            refusal = await asyncio.wait_for(asyncio.shield(self._joined), self._timeout_s)
        except TimeoutError:
            refusal = f"the two ends did not come together within {self._timeout_s:g} s"
        self.pool.check_open()
        if refusal is not None:
            raise CarrierUnavailableError(f"No process group could be made: {refusal}")

    def on_joined(self, refusal: str | None) -> None:
        """Here; the first byte that arrived there said that the peer has, too. Or at the peer, which refuses."""
        if not self._joined.done():
            self._joined.set_result(refusal)

    def receive(self, word: GroupWord) -> None:
        self._store.receive(word.key, word.value)

    def announce(self, message: Message, slab: PooledSlab[SlabBytes]) -> SlabAnnounced:
        self._announced[slab.index] = slab
        return SlabAnnounced(slab=slab.index, num_bytes=len(slab.view), message=encode(message))

    def on_wanted(self, slabs: list[int]) -> bool:
        """False if the peer wants what it was not offered."""
        for index in slabs:
            slab = self._announced.pop(index, None)
            if slab is None:
                return False
            self.group.move(as_tensor(slab.view), slab.discard)
        return True

    def close(self, reason: str) -> None:
        self.pool.close(reason)
        while self._announced:
            self._announced.popitem()[1].discard()
        self._store.close(reason)
        self.on_joined(reason)
        self.group.abort()

    async def wait_ended(self) -> None:
        await self.group.wait_ended(_GROUP_END_S)


class Incoming:
    """The peer's group, and room for the slabs that arrive in it."""

    def __init__(self, side: Side, inbox: ReceiveQueue) -> None:
        self._side = side
        self._inbox = inbox
        config = side.config.slabs
        self._staging = SlabPool(arena_on(side.config.device, config), config, on_free=self._ask)
        self._waiting: deque[tuple[SlabAnnounced, Message]] = deque()
        self._store = side.store(offered=False)
        self.group = side.group_thread(self._store, RECEIVER, lambda refusal: side.post(GroupAnswer(refusal=refusal)))

    def receive(self, word: GroupWord) -> None:
        self._store.receive(word.key, word.value)

    def on_announced(self, announced: SlabAnnounced) -> str | None:
        """What is wrong with it, if anything is."""
        if not 1 <= announced.num_bytes <= self._side.config.slabs.slab_bytes:
            return f"announces a slab of {announced.num_bytes} bytes"
        if len(self._waiting) == _MAX_WAITING:
            return f"announces more than {_MAX_WAITING} slabs at a time"
        try:
            self._waiting.append((announced, decode(announced.message)))
        except MalformedMessageError as error:
            return f"announces a slab with what is no message: {error}"
        self._ask()
        return None

    def close(self, reason: str) -> None:
        self._waiting.clear()
        self._staging.close(reason)
        self._store.close(reason)
        self.group.abort()

    async def wait_ended(self) -> None:
        await self.group.wait_ended(_GROUP_END_S)

    def _ask(self) -> None:
        """For as many as there is room for; in the order in which they will be received."""
        wanted = []
        while self._waiting:
            announced, message = self._waiting[0]
            slab = self._staging.try_acquire(announced.num_bytes)
            if slab is None:
                break
            self._waiting.popleft()
            frame = Frame(message, slab, len(announced.message))
            self.group.move(as_tensor(slab.view), partial(self._inbox.put, frame))
            wanted.append(announced.slab)
        if wanted:
            self._side.post(SlabsWanted(slabs=wanted))


def arena_on(device: torch.device, config: SlabConfig) -> SlabBytes:
    """Freed with the last view of it."""
    if device.type == "cpu":
        return private_arena(config)
    return torch.empty(config.arena_bytes, dtype=torch.uint8, device=device)


def as_tensor(view: SlabBytes) -> Tensor:
    """Its bytes `[num_bytes]`, uint8, without a copy; the memory lives as long as the tensor."""
    return view if isinstance(view, Tensor) else torch.frombuffer(view, dtype=torch.uint8)
