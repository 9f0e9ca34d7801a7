"""The decode end of all hand-offs of one worker: reserves, has slabs copied, verifies, admits.

Pure: events and the time go in, actions come out. The rules it keeps, whatever peers and networks do:

* a sequence is admitted only if, under its current fence, every layer covers [0, num_tokens) without hole or overlap
  and the digests, read back in the destination, are the sender's, slab by slab and layer by layer;
* a lease is released, or passed on by `Admit`, exactly once, and never while a copy into it is in flight;
* a newer attempt's copies wait until the older attempt's have ended, since a late old copy could overwrite new bytes
  that were digested already;
* every delivery gets exactly one of `Copy` and `Drop`; every attempt at most one of `Admit` and `Fail`.

Knows nothing of block tables, tensors, links or threads.
"""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.digest import DigestKind
from kv_transfer.handoff.actions import Action, Drop, ReceiverState, Send
from kv_transfer.handoff.coverage import Coverage
from kv_transfer.handoff.reservation import BrokenHandoffError, Landing
from kv_transfer.handoff.reservations import Reservations, drop_waiting
from kv_transfer.messages import (
    Abort,
    Commit,
    Endpoint,
    Fence,
    KeepAlive,
    Rejected,
    RequestSpec,
    SlabHeader,
    Ticket,
    Verified,
)

ReceiverMessage = SlabHeader | Commit | Abort | KeepAlive


class HandoffReceiver:
    def __init__(
        self,
        *,
        epoch: int,
        num_layers: int,
        worker_id: str,
        endpoint: Endpoint,
        ttl_s: float,
        digest_kind: DigestKind = "xxh3_64",
    ) -> None:
        self._epoch = epoch
        self._num_layers = num_layers
        self._worker_id = worker_id
        self._endpoint = endpoint
        self._ttl_s = ttl_s
        self._digest_kind = digest_kind
        self._reservations = Reservations()

    # --- the gateway's wishes ---

    def holds(self, request_id: str) -> bool:
        """Whether a lease is reserved for the request, so that a newer attempt renews instead of reserving."""
        return self._reservations.get(request_id) is not None

    def refusal(self, request: RequestSpec) -> str | None:
        """Why nothing may be reserved for this attempt: it is void already. Ask before taking a lease or renewing."""
        landing = self._reservations.get(request.request_id)
        if landing is not None and request.attempt < landing.attempt:
            return f"attempt {request.attempt} is void: attempt {landing.attempt} has taken over"
        ending = self._reservations.ending(request.request_id)
        if ending is not None and request.attempt <= ending.attempt:
            return f"attempt {request.attempt} is over: {ending.reason}"
        return None

    def reserve(self, request: RequestSpec, lease_id: int, now: float) -> Ticket:
        """Promise the lease's blocks to the request. The receiver owns the lease until it releases or admits it."""
        assert self.refusal(request) is None, self.refusal(request)
        landing = self._landing(request, Fence(epoch=self._epoch, lease=lease_id, generation=request.attempt), now)
        self._reservations.open(landing)
        return self._ticket(landing)

    def renew(self, request: RequestSpec, now: float) -> tuple[Ticket, list[Action]]:
        """Promise the held lease to a newer attempt; references of older ones are void at once.

        Should the newer attempt have more tokens, the caller extends the lease first. The current attempt repeated gets
        the same ticket again.
        """
        assert self.refusal(request) is None, self.refusal(request)
        current = self._reservations.get(request.request_id)
        assert current is not None, f"{request.request_id} holds no reservation to renew"
        if request.attempt == current.attempt:
            return self._ticket(current), []
        landing = self._landing(request, replace(current.fence, generation=request.attempt), now)
        return self._ticket(landing), self._reservations.supersede(landing)

    def cancel(self, request_id: str, attempt: int, now: float) -> list[Action]:
        """Forget every attempt up to this one, also those that are yet to come. Nothing is reported to the gateway."""
        return self._reservations.cancel(request_id, attempt, "the gateway cancelled it")

    # --- what comes over links ---

    def on_message(self, peer_id: str, message: ReceiverMessage, now: float, delivery_id: int | None) -> list[Action]:
        """`delivery_id` names the payload that came with the message and that the driver holds; None: no payload."""
        if isinstance(message, SlabHeader):
            return self._on_slab(peer_id, message, now, delivery_id)
        dropped = _drop(delivery_id)
        if isinstance(message, KeepAlive):
            return dropped + [a for reference in message.fences for a in self._on_keep_alive(peer_id, *reference, now)]
        if isinstance(message, Commit):
            return dropped + self._on_commit(peer_id, message, now)
        return dropped + self._on_abort(message)

    def on_link_lost(self, peer_id: str, now: float) -> list[Action]:
        """Reservations stay: what arrived may be complete, and the gateway may renew for another prefill."""
        for landing in self._reservations:
            if landing.peer_id == peer_id:
                landing.lose_peer()
        return []

    # --- what the driver's copies come to ---

    def on_copied(self, delivery_id: int, digest: int, now: float) -> list[Action]:
        """A `Copy` was carried out; `digest` is of what now stands in the blocks."""
        copy, actions = self._reservations.finish_copy(delivery_id)
        landing = self._reservations.landing_of(copy)
        if landing is None:
            return actions
        landing.deadline = max(landing.deadline, now + self._ttl_s)
        try:
            landing.settle(copy.header, digest)
        except BrokenHandoffError as error:
            return actions + self._reservations.fail(landing, str(error))
        return actions + self._admit_if_verified(landing)

    def on_copy_failed(self, delivery_id: int, reason: str, now: float) -> list[Action]:
        """A `Copy` could not be carried out, and nothing writes for it any more."""
        copy, actions = self._reservations.finish_copy(delivery_id)
        landing = self._reservations.landing_of(copy)
        if landing is None:
            return actions
        return actions + self._reservations.fail(landing, f"a slab could not be copied: {reason}")

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """End what has expired. To be called at `next_deadline()`; harmless at any other time."""
        return [action for landing in self._reservations for action in self._expire(landing, now)]

    def next_deadline(self) -> float | None:
        return min((landing.deadline for landing in self._reservations), default=None)

    def _on_slab(self, peer_id: str, header: SlabHeader, now: float, delivery_id: int | None) -> list[Action]:
        landing, refused = self._resolve(peer_id, header.request_id, header.fence, now)
        if landing is None:
            return _drop(delivery_id) + refused
        if delivery_id is None:
            return self._reservations.fail(landing, "a slab was announced without its bytes")
        try:
            is_new = landing.announce(header)
        except BrokenHandoffError as error:
            return _drop(delivery_id) + self._reservations.fail(landing, str(error))
        if not is_new:
            return _drop(delivery_id)
        landing.waiting.append((delivery_id, header))
        return self._reservations.start_copies(landing)

    def _on_commit(self, peer_id: str, commit: Commit, now: float) -> list[Action]:
        if self._reservations.admitted(commit.request_id, commit.fence) == commit:
            return [Send(peer_id, Verified(request_id=commit.request_id, fence=commit.fence))]
        landing, refused = self._resolve(peer_id, commit.request_id, commit.fence, now)
        if landing is None:
            return refused
        try:
            landing.take_commit(commit)
        except BrokenHandoffError as error:
            return self._reservations.fail(landing, str(error))
        return self._admit_if_verified(landing)

    def _on_keep_alive(self, peer_id: str, request_id: str, fence: Fence, now: float) -> list[Action]:
        if self._reservations.admitted(request_id, fence) is not None:
            return [Send(peer_id, Verified(request_id=request_id, fence=fence))]
        return self._resolve(peer_id, request_id, fence, now)[1]

    def _on_abort(self, abort: Abort) -> list[Action]:
        landing = self._reservations.get(abort.request_id)
        if landing is None or landing.fence != abort.fence:
            return []
        landing.why_abandoned = abort.reason
        return drop_waiting(landing)

    def _resolve(self, peer_id: str, request_id: str, fence: Fence, now: float) -> tuple[Landing | None, list[Action]]:
        """The landing that a reference is good for, its time renewed; or None, and what to do about a void one."""
        landing = self._reservations.get(request_id)
        expired = [] if landing is None else self._expire(landing, now)
        reason = self._why_void(request_id, fence)
        if reason is not None:
            return None, [*expired, Send(peer_id, Rejected(request_id=request_id, fence=fence, reason=reason))]
        assert landing is not None
        landing.peer_id = peer_id
        landing.deadline = now + self._ttl_s
        return landing, []

    def _why_void(self, request_id: str, fence: Fence) -> str | None:
        """A sentence, unless this is the current reference to a reservation that can still succeed."""
        if fence.epoch != self._epoch:
            return f"{self._worker_id} has restarted since the reservation was made, and its blocks with it"
        landing, ending = self._reservations.get(request_id), self._reservations.ending(request_id)
        if landing is not None and landing.fence == fence:
            if landing.state is ReceiverState.ABANDONED:
                return f"the prefill gave this attempt up: {landing.why_abandoned}"
            return None
        if ending is not None and ending.fence == fence:
            return f"the reservation is over: {ending.reason}"
        newest = max((known.attempt for known in (landing, ending) if known is not None), default=None)
        if newest is None:
            return f"{self._worker_id} knows no reservation for request {request_id}"
        return (
            f"the reference (lease {fence.lease}, attempt {fence.generation}) is stale: attempt {newest} is the newest"
        )

    def _admit_if_verified(self, landing: Landing) -> list[Action]:
        try:
            commit = landing.verified_commit()
        except BrokenHandoffError as error:
            return self._reservations.fail(landing, str(error))
        return [] if commit is None else self._reservations.admit(landing, commit)

    def _expire(self, landing: Landing, now: float) -> list[Action]:
        if now < landing.deadline:
            return []
        stood = (
            landing.state.value if landing.why_abandoned is None else f"The prefill gave up: {landing.why_abandoned}"
        )
        reason = f"the reservation expired: nothing was heard of it for {self._ttl_s:g} s. {stood}"
        return self._reservations.fail(landing, reason)

    def _landing(self, request: RequestSpec, fence: Fence, now: float) -> Landing:
        coverage = Coverage(self._num_layers, request.num_tokens)
        return Landing(request=request, fence=fence, deadline=now + self._ttl_s, coverage=coverage)

    def _ticket(self, landing: Landing) -> Ticket:
        return Ticket(
            request_id=landing.request_id,
            fence=landing.fence,
            endpoint=self._endpoint,
            worker_id=self._worker_id,
            num_tokens=landing.request.num_tokens,
            ttl_s=self._ttl_s,
            digest_kind=self._digest_kind,
        )


def _drop(delivery_id: int | None) -> list[Action]:
    return [] if delivery_id is None else [Drop(delivery_id)]
