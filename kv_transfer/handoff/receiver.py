"""The receiving end of hand-offs, at work: runs `HandoffReceiver`'s actions against real links and a real KV cache.

The state machine lives on the worker's main loop; receiving, copying and digesting happen on the KV thread. What
a device has to copy is waited for in threads for that alone, one for each copy in flight.
"""

from __future__ import annotations

import itertools
import logging
import time
from typing import Protocol

from engine.kv.cache import GroupRow, KVLayout, SequenceKV
from engine.memory.streams import Event, MarkQueued, nothing_queued
from engine.sequence import SequenceKey
from kv_transfer.connections.event_loops import DeadlineTimer, HomeLoop, LoopThread
from kv_transfer.digest import DigestKind
from kv_transfer.handoff.actions import Action, Admit, Copy, Drop, Fail, ReleaseLease, Send
from kv_transfer.handoff.receiver_state import HandoffReceiver, ReceiverMessage
from kv_transfer.handoff.slab_copy import copying_threads, write_slab
from kv_transfer.messages import Message
from kv_transfer.messages.handoff import Commit
from kv_transfer.messages.requests import Endpoint, RequestSpec, Ticket
from kv_transfer.transports.base import Delivery, Link, Transport, TransportError

logger = logging.getLogger(__name__)


class LeaseOwner(Protocol):
    """The owner of the blocks into which KV is received, which hears what became of it: a decode worker's
    `Reservations`.

    All of it is called on the main loop. Each lease ends in one call, of `on_admitted` or of `on_released`.
    """

    def target_of(self, lease_id: int, layer: int) -> tuple[SequenceKV, GroupRow]:
        """The cache, of whichever tier, and the block-table row to copy that layer into."""

    def on_admitted(self, key: SequenceKey, commit: Commit) -> None:
        """The sequence's KV is verified, of as many tokens as `commit` says; the lease is the owner's again."""

    def on_released(self, lease_id: int) -> None:
        """The reservation ended otherwise, and nothing writes into its blocks any more."""

    def on_failed(self, key: SequenceKey, reason: str) -> None:
        """The attempt failed: why, for the gateway. Its lease is released separately, perhaps later."""


class KvReceiver:
    """Receives sequences into leased blocks, for `owner`. All public methods belong to the main loop.

    `mark_queued`: of the device that computes. What used a lease's blocks before has been queued when it is reserved,
    or renewed.
    """

    def __init__(
        self,
        layout: KVLayout,
        transport: Transport,
        thread: LoopThread,
        *,
        owner: LeaseOwner,
        digest_kind: DigestKind = "xxh3_64",
        mark_queued: MarkQueued = nothing_queued,
    ) -> None:
        self._layout = layout
        self._transport = transport
        self._thread = thread
        self._digest_kind = digest_kind
        self._owner = owner
        self._mark_queued = mark_queued
        self._free_after: dict[int, Event | None] = {}  # by lease
        self._copying = copying_threads("kv-copies-in")
        self._home = HomeLoop()
        self._timer = DeadlineTimer(self._on_deadline)
        self.machine: HandoffReceiver
        # Touched on the KV thread only.
        self._links: dict[str, Link] = {}
        self._deliveries: dict[int, Delivery] = {}
        self._delivery_ids = itertools.count(1)
        self._link_numbers = itertools.count(1)

    async def start(self, *, epoch: int, worker_id: str, ttl_s: float) -> Endpoint:
        endpoint = await self._thread.run(self._transport.listen(self._serve_link))
        self.machine = HandoffReceiver(
            epoch=epoch,
            num_layers=self._layout.num_layers,
            worker_id=worker_id,
            endpoint=endpoint,
            ttl_s=ttl_s,
            digest_kind=self._digest_kind,
        )
        return endpoint

    def holds(self, request_id: str) -> bool:
        """Whether a reservation of this request waits for its KV."""
        return self.machine.holds(request_id)

    def refusal(self, request: RequestSpec) -> str | None:
        """Why nothing may be reserved for this attempt any more, or None."""
        return self.machine.refusal(request)

    def reserve(self, request: RequestSpec, lease_id: int) -> Ticket:
        ticket = self.machine.reserve(request, lease_id, now=time.monotonic())
        self._free_after[lease_id] = self._mark_queued()
        self._do([])
        return ticket

    def renew(self, request: RequestSpec) -> Ticket:
        """A newer attempt on the same lease: references of the older one are void from now on."""
        ticket, actions = self.machine.renew(request, now=time.monotonic())
        self._free_after[ticket.fence.lease] = self._mark_queued()  # the lease may have grown
        self._do(actions)
        return ticket

    def cancel(self, key: SequenceKey) -> None:
        """Every attempt of the request up to this one."""
        self._do(self.machine.cancel(key))

    def stop(self) -> None:
        self._timer.stop()
        self._copying.shutdown(wait=False)  # what was taken is done

    def _on_deadline(self) -> None:
        self._do(self.machine.tick(time.monotonic()))

    def _on_message(self, link_id: str, message: ReceiverMessage, delivery_id: int | None) -> None:
        self._do(self.machine.on_message(link_id, message, now=time.monotonic(), delivery_id=delivery_id))

    def _on_copied(self, delivery_id: int, digest: int) -> None:
        self._do(self.machine.on_copied(delivery_id, digest, now=time.monotonic()))

    def _on_copy_failed(self, delivery_id: int, reason: str) -> None:
        self._do(self.machine.on_copy_failed(delivery_id, reason))

    def _on_link_lost(self, link_id: str) -> None:
        self._do(self.machine.on_link_lost(link_id))

    def _do(self, actions: list[Action]) -> None:
        for action in actions:
            match action:
                case Copy():
                    cache, row = self._owner.target_of(action.lease_id, action.header.layer)
                    after = self._free_after[action.lease_id]
                    self._thread.call(self._write, action, cache, row, after)
                case Drop():
                    self._thread.call(self._drop, action.delivery_id)
                case Send():
                    self._thread.submit(self._send(action.peer_id, action.message))
                case Admit():
                    request = action.request
                    del self._free_after[action.lease_id]
                    self._owner.on_admitted(SequenceKey(request.request_id, request.attempt), action.commit)
                case ReleaseLease():
                    del self._free_after[action.lease_id]
                    self._owner.on_released(action.lease_id)
                case Fail():
                    self._owner.on_failed(action.key, action.reason)
        self._timer.arm(self.machine.next_deadline())

    # --- on the KV thread ---

    async def _serve_link(self, link: Link) -> None:
        # A peer that comes back has a new name, so that the loss of its old link does not count against the new one.
        link_id = f"{link.peer_id}/{next(self._link_numbers)}"
        self._links[link_id] = link
        try:
            while True:
                self._accept(link_id, await link.receive())
        except TransportError as error:
            logger.info("KV link %s is down: %s", link_id, error)
        finally:
            del self._links[link_id]
            self._home.run(self._on_link_lost, link_id)

    def _accept(self, link_id: str, delivery: Delivery) -> None:
        message = delivery.message
        if not isinstance(message, ReceiverMessage):
            delivery.release()
            raise TransportError(f"{type(message).__name__} has no place on a KV link")
        delivery_id = None
        if delivery.payload is not None:
            delivery_id = next(self._delivery_ids)
            self._deliveries[delivery_id] = delivery
        self._home.run(self._on_message, link_id, message, delivery_id)

    def _write(self, copy: Copy, kv_cache: SequenceKV, row: GroupRow, after: Event | None) -> None:
        delivery = self._deliveries.pop(copy.delivery_id)
        if after is None and kv_cache.device.type == "cpu":
            self._copy(copy, delivery, kv_cache, row, after)
            return
        try:
            self._copying.submit(self._copy, copy, delivery, kv_cache, row, after)
        except RuntimeError:  # stopped, and nobody waits for the copy any more
            delivery.release()

    def _copy(self, copy: Copy, delivery: Delivery, kv_cache: SequenceKV, row: GroupRow, after: Event | None) -> None:
        """Copy a delivery into its blocks. Runs on the KV thread, or where a device is waited for."""
        header, payload = copy.header, delivery.payload
        assert payload is not None
        place = (kv_cache, row, header.layer, header.token_start, header.num_tokens)
        try:
            digest = write_slab(*place, payload, header.digest_kind, after=after)
        except Exception as error:  # the thread's boundary: a copy of which nothing is heard holds its lease for ever
            self._home.run(self._on_copy_failed, copy.delivery_id, str(error) or type(error).__name__)
        else:
            self._home.run(self._on_copied, copy.delivery_id, digest)
        finally:
            delivery.release()

    def _drop(self, delivery_id: int) -> None:
        self._deliveries.pop(delivery_id).release()

    async def _send(self, link_id: str, message: Message) -> None:
        link = self._links.get(link_id)
        if link is None:
            return
        try:
            await link.send(message)
        except TransportError as error:
            logger.info("could not answer on KV link %s: %s", link_id, error)
