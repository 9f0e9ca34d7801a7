"""What connections and transports say for their own sake."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.messages.fields import STRICT, Count, Flag, Items, Opaque, Text


@dataclass(frozen=True, slots=True, kw_only=True)
class Ping:
    """Either way on any connection: I am alive. Nothing is answered."""

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class Goodbye:
    """Either way on any connection, its last message: why this end closes it.

    `in_order`: it ends because this process stops as it was told to, not because of anything that went wrong.
    """

    __pydantic_config__ = STRICT
    reason: Text
    in_order: Flag = False


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentOffer:
    """Shared memory: this segment of process `pid`, open there as descriptor `fd`, will hold the slabs that follow."""

    __pydantic_config__ = STRICT
    pid: Count
    fd: Count
    name: Text
    num_bytes: Count


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentAnswer:
    """Shared memory: the offered segment is mapped; or `refusal` says why it could not be."""

    __pydantic_config__ = STRICT
    refusal: Text | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabsFreed:
    """Shared memory: the receiver is done with these slabs of the sender's segment."""

    __pydantic_config__ = STRICT
    slabs: Items[Count]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupOffer:
    """Process groups: join one with me, out of which slabs of mine shall come to you."""

    __pydantic_config__ = STRICT


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAnswer:
    """Process groups: the group that you offered has been joined; or `refusal` says why it could not be."""

    __pydantic_config__ = STRICT
    refusal: Text | None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupWord:
    """Process groups: what one end must know of the other to join; `offered`: the group is of the sender's offer."""

    __pydantic_config__ = STRICT
    offered: Flag
    key: Text
    value: Opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabAnnounced:
    """Process groups: slab `slab` of the sender's waits to be asked for; `message` is encoded and arrives with it."""

    __pydantic_config__ = STRICT
    slab: Count
    num_bytes: Count
    message: Opaque


@dataclass(frozen=True, slots=True, kw_only=True)
class SlabsWanted:
    """Process groups: there is room for these slabs, which are now received, in this order."""

    __pydantic_config__ = STRICT
    slabs: Items[Count]
