"""What connections and transports say for their own sake."""

from __future__ import annotations

from kv_transfer.messages.codec import Message, message
from kv_transfer.messages.fields import Count, Flag, Items, Opaque, Text


@message
class Ping(Message):
    """Either way on any connection: I am alive. Nothing is answered."""


@message
class Goodbye(Message):
    """Either way on any connection, its last message: why this end closes it.

    `in_order`: it ends because this process stops as it was told to, not because of anything that went wrong.
    """

    reason: Text
    in_order: Flag = False


@message
class SegmentOffer(Message):
    """Shared memory: this segment of process `pid`, open there as descriptor `fd`, will hold the slabs that follow."""

    pid: Count
    fd: Count
    name: Text
    num_bytes: Count


@message
class SlabsFreed(Message):
    """Shared memory: the receiver is done with these slabs of the sender's segment."""

    slabs: Items[Count]


@message
class GroupOffer(Message):
    """Process groups: join one with me, out of which slabs of mine shall come to you."""


@message
class OfferAnswer(Message):
    """The segment that you offered is mapped, or the group joined; or `refusal` says why that could not be."""

    refusal: Text | None


@message
class GroupWord(Message):
    """Process groups: what one end must know of the other to join; `offered`: the group is of the sender's offer."""

    offered: Flag
    key: Text
    value: Opaque


@message
class SlabAnnounced(Message):
    """Process groups: slab `slab` of the sender's waits to be asked for; `message` is encoded and arrives with it."""

    slab: Count
    num_bytes: Count
    message: Opaque


@message
class SlabsWanted(Message):
    """Process groups: there is room for these slabs, which are now received, in this order."""

    slabs: Items[Count]
