"""What the two ends of a hand-off tell their drivers to do, and the states they go through.

A driver (`KvSender`, `KvReceiver`, a test) feeds events to `HandoffSender` or `HandoffReceiver` and carries out the
actions they return, in order. The machines never wait, read a clock or touch a byte of KV themselves.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from engine.sequence import SequenceKey
from kv_transfer.digest import DigestKind
from kv_transfer.messages import Message
from kv_transfer.messages.handoff import Commit, SlabHeader
from kv_transfer.messages.requests import Fence, RequestSpec


class ReceiverState(Enum):
    """Where a hand-off stands on the decode worker."""

    RESERVED = "Blocks are leased and a ticket is out; no prefill has spoken yet."
    RECEIVING = "A prefill sends: slabs are copied into the leased blocks as they come."
    COMMITTED = "The commit is here; some slabs, or copies of them, are still missing."
    ORPHANED = (
        "The link to the prefill is gone; what arrived may still complete, else a renewal or the end of time decides."
    )
    ABANDONED = "The prefill gave up, so the attempt cannot succeed; the blocks await a newer one until time is up."
    ADMITTED = "Every byte was verified and the lease belongs to the scheduler; repeats are answered with Verified."
    FAILED = "The attempt is over, the gateway was told why, and the lease goes back once no copy writes into it."
    CANCELLED = "The gateway wants no more of it; the lease goes back once no copy writes into it."


class SenderState(Enum):
    """Where a hand-off stands on the prefill worker."""

    WAITING = "There is no ticket yet; what is computed is kept in the source blocks."
    SENDING = "Layers are computed and sent; the source blocks are read by slabs in flight."
    COMMITTED = "Everything was sent and committed; the answer of decode is awaited, for one ttl."
    DRAINING = "It is over, but slabs in flight still read the source blocks, which are released after the last."


# --- both ends -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send the message to the worker `peer_id`. If there is no link any more it may be dropped."""

    peer_id: str
    message: Message


@dataclass(frozen=True, slots=True)
class Fail:
    """Tell the gateway that this attempt is over without success: the only such report of this end for the attempt."""

    key: SequenceKey
    reason: str


# --- decode ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """Write the delivery's payload into the blocks of the lease, release the delivery, and report `on_copied`.

    Until that report (or `on_copy_failed`) the lease stays open, whatever happens to the hand-off.
    """

    delivery_id: int
    header: SlabHeader

    @property
    def lease_id(self) -> int:
        return self.header.fence.lease


@dataclass(frozen=True, slots=True)
class Drop:
    """Release the delivery without using its payload."""

    delivery_id: int


@dataclass(frozen=True, slots=True)
class Admit:
    """The KV of `request` stands verified in the blocks of the lease, which belongs to the scheduler from now on."""

    request: RequestSpec
    lease_id: int
    commit: Commit


@dataclass(frozen=True, slots=True)
class ReleaseLease:
    """Give the lease back to the pool: nothing writes into its blocks any more."""

    lease_id: int


# --- prefill ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SendSlab:
    """Fill a slab with these tokens of this layer, send it, and report `on_slab_sent` or `on_slab_failed`."""

    worker_id: str
    request_id: str
    fence: Fence
    layer: int
    token_start: int
    num_tokens: int
    digest_kind: DigestKind

    @property
    def key(self) -> SequenceKey:
        return SequenceKey(self.request_id, self.fence.generation)

    def header(self, digest: int) -> SlabHeader:
        """The message that announces the slab, once its bytes are known."""
        return SlabHeader(
            request_id=self.request_id,
            fence=self.fence,
            layer=self.layer,
            token_start=self.token_start,
            num_tokens=self.num_tokens,
            digest=digest,
            digest_kind=self.digest_kind,
        )


@dataclass(frozen=True, slots=True)
class ReleaseSource:
    """The hand-off reads the source blocks no more. A runner that still computes into them is the driver's affair."""

    key: SequenceKey


Action = Send | Fail | Copy | Drop | Admit | ReleaseLease | SendSlab | ReleaseSource
