"""The decode end of all hand-offs of one worker: reserves, has slabs copied, verifies, admits.

Pure: events and the time go in, actions come out (`actions.py`). `KvReceiver` (`receiver.py`) drives it in a worker.

```
               slab, keep-alive            Commit              every slab copied, all digests right
   RESERVED ──────────────────▶ RECEIVING ───────▶ COMMITTED ──────────────────────────────────────▶ ADMITTED
                                 ▲     │            │     ▲                                              ▲
                     heard again │     │ link lost  │     │ heard again                                  │
                                 │     ▼            ▼     │    the last copy, if the Commit is here      │
                                 └──────── ORPHANED ──────┴──────────────────────────────────────────────┘

   from these, and from ABANDONED, but not from ADMITTED:
       newer attempt ▶ RESERVED      Abort ▶ ABANDONED      cancel ▶ CANCELLED
       time is up, a check failed, a copy failed ▶ FAILED
```

RESERVED, RECEIVING, COMMITTED, ORPHANED and ABANDONED are *open* and hold the lease; ADMITTED, FAILED and CANCELLED are
*ended*. What each event does in each state ("=": the state stays; "–": nothing, or it cannot be):

| event        | RESERVED          | RECEIVING     | COMMITTED       | ORPHANED            | ABANDONED  | ended      |
|--------------|-------------------|---------------|-----------------|---------------------|------------|------------|
| slab, new    | RECEIVING, `Copy` | =, `Copy`     | =, `Copy`       | heard again, `Copy` | `Rejected` | `Rejected` |
| slab, again  | –                 | =, `Drop`     | =, `Drop`       | heard again, `Drop` | `Rejected` | `Rejected` |
| slab, wrong  | FAILED            | FAILED        | FAILED          | FAILED              | `Rejected` | `Rejected` |
| keep-alive   | RECEIVING         | =             | =               | heard again         | `Rejected` | [3]        |
| Commit       | COMMITTED [1]     | COMMITTED [1] | = [2]           | COMMITTED [1]       | `Rejected` | [3]        |
| Abort        | ABANDONED         | ABANDONED     | ABANDONED       | ABANDONED           | =          | –          |
| copy ended   | –                 | =             | =, ADMITTED [1] | =, ADMITTED [1]     | =          | [5]        |
| wrong bytes  | –                 | FAILED        | FAILED          | FAILED              | =          | [5]        |
| copy failed  | –                 | FAILED        | FAILED          | FAILED              | =          | [5]        |
| link lost    | =                 | ORPHANED      | ORPHANED        | =                   | =          | –          |
| renew        | RESERVED          | RESERVED      | RESERVED        | RESERVED            | RESERVED   | – [4]      |
| cancel       | CANCELLED         | CANCELLED     | CANCELLED       | CANCELLED           | CANCELLED  | –          |
| time is up   | FAILED            | FAILED        | FAILED          | FAILED              | FAILED     | –          |

[1] ADMITTED once the Commit and every copy are here; FAILED if a digest, or the reservation, contradicts them. [2]
FAILED if it differs from the first. [3] `Verified` again to the attempt that was admitted; else `Rejected`, with how it
ended. [4] A newer attempt reserves anew. [5] `ReleaseLease` after the last one. Every valid message and every finished
copy starts the time to live again.

A reference that is not current (*fence*: another epoch, another lease, an older attempt) gets `Rejected` in every state
and changes nothing.

The rules, whatever peers and networks do:

* a sequence is admitted only if, under its current fence, every layer covers [0, num_tokens) without hole or overlap
  and the digests, read back in the destination, are the sender's, slab by slab and layer by layer;
* a lease is released, or given to the scheduler by `Admit`, exactly once, and never while a copy into it is in flight;
* a newer attempt's copies wait until the older attempt's have ended, since a late old copy could overwrite new bytes
  that were digested already;
* every delivery gets exactly one of `Copy` and `Drop`; every attempt at most one of `Admit` and `Fail`.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field, replace

from engine.sequence import SequenceKey
from kv_transfer.digest import DigestKind
from kv_transfer.handoff.actions import Action, Admit, Copy, Drop, Fail, ReceiverState, ReleaseLease, Send
from kv_transfer.handoff.coverage import BrokenHandoffError, Coverage
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, Rejected, SlabHeader, Verified
from kv_transfer.messages.requests import Endpoint, Fence, RequestSpec, Ticket

ReceiverMessage = SlabHeader | Commit | Abort | KeepAlive
NUM_REMEMBERED = 4096


# --- one reservation -------------------------------------------------------------------------------------------------


@dataclass(eq=False, slots=True, kw_only=True)
class Reservation:
    """A lease, the attempt that it is promised to at present, and what has arrived for that attempt."""

    request: RequestSpec
    fence: Fence
    deadline: float
    coverage: Coverage
    peer_id: str | None = None  # who spoke last for this attempt and can be answered
    was_orphaned: bool = False
    why_abandoned: str | None = None
    commit: Commit | None = None
    waiting: list[tuple[int, SlabHeader]] = field(default_factory=list)  # deliveries behind an older attempt's copies

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def attempt(self) -> int:
        return self.fence.generation

    @property
    def lease_id(self) -> int:
        return self.fence.lease

    @property
    def state(self) -> ReceiverState:
        """Follows from what has happened, so that it cannot contradict it."""
        if self.why_abandoned is not None:
            return ReceiverState.ABANDONED
        if self.peer_id is None:
            return ReceiverState.ORPHANED if self.was_orphaned else ReceiverState.RESERVED
        return ReceiverState.RECEIVING if self.commit is None else ReceiverState.COMMITTED

    def lose_peer(self) -> None:
        self.peer_id = None
        self.was_orphaned = True

    def take_waiting(self) -> list[tuple[int, SlabHeader]]:
        waiting, self.waiting = self.waiting, []
        return waiting

    def take_commit(self, commit: Commit) -> None:
        """Raises BrokenHandoffError if the commit contradicts the reservation or an earlier commit."""
        index = None if self.request.is_split else len(self.request.output_token_ids)
        counts = (
            ("tokens", commit.num_tokens, self.request.num_handed_tokens),
            ("layers", len(commit.layer_digests), self.coverage.num_layers),
        )
        for what, committed, reserved in counts:
            if committed != reserved:
                raise BrokenHandoffError(f"the commit is of {committed} {what}, but {reserved} were reserved")
        if commit.first_token_index != index or (commit.first_token is None) != self.request.is_split:
            raise BrokenHandoffError(
                f"the commit's token has index {commit.first_token_index}, but the request goes on at {index}"
            )
        if self.commit not in (None, commit):
            raise BrokenHandoffError("two commits that contradict each other came for one attempt")
        self.commit = commit

    def verify_slab(self, header: SlabHeader, digest: int) -> None:
        """The slab was copied and its bytes, read back in the blocks, have this digest. Raises BrokenHandoffError."""
        if digest != header.digest:
            stop = header.token_start + header.num_tokens
            raise BrokenHandoffError(
                f"layer {header.layer}, tokens [{header.token_start}, {stop}): digest {header.digest:016x} was"
                f" announced, but what was copied has {digest:016x}; the slab was damaged, or reused before it"
                " had been read"
            )
        self.coverage.complete(header.layer, header.num_tokens, digest)

    def verified_commit(self) -> Commit | None:
        """The commit once every layer stands whole; None before. Raises BrokenHandoffError if the digests differ."""
        if self.commit is None or not self.coverage.is_complete:
            return None
        for layer, (received, sent) in enumerate(
            zip(self.coverage.layer_digests, self.commit.layer_digests, strict=True)
        ):
            if received != sent:
                raise BrokenHandoffError(
                    f"layer {layer} arrived with digest {received:016x}, but was committed with {sent:016x}"
                )
        return self.commit


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How the newest attempt of a request that is over on this worker ended."""

    attempt: int
    state: ReceiverState
    reason: str
    fence: Fence | None = None  # None: the attempt was called off before anything was reserved
    commit: Commit | None = None  # of an admitted attempt


# --- the machine -----------------------------------------------------------------------------------------------------


class HandoffReceiver:
    """All reservations of one decode worker, the copies into them, and how the last `NUM_REMEMBERED` ended.

    A reservation is open until it is admitted, fails or is cancelled. What happens goes in, with the time in seconds
    where it matters, on any clock that does not go back. Out comes what the driver has to do, in order.
    """

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
        self.endpoint = endpoint  # what tickets say
        self._ttl_s = ttl_s
        self._digest_kind = digest_kind
        self._open: dict[str, Reservation] = {}
        # By delivery. A copy cannot be recalled: cancelling a hand-off stops neither the thread nor the device of it.
        self._copies: dict[int, Copy] = {}
        self._draining: set[int] = set()  # leases to give back after the last copy into them
        self._endings: OrderedDict[str, Ending] = OrderedDict()

    # --- questions ---

    def state(self, request_id: str) -> ReceiverState | None:
        """The state of the request's reservation, or how its newest attempt ended; None if nothing is known of it."""
        known = self._open.get(request_id) or self._endings.get(request_id)
        return None if known is None else known.state

    def holds(self, request_id: str) -> bool:
        """Whether a lease is reserved for the request, so that a newer attempt renews instead of reserving."""
        return request_id in self._open

    def refusal(self, request: RequestSpec) -> str | None:
        """Why nothing may be reserved for this attempt: it is void already. Ask before taking a lease or renewing."""
        reservation = self._open.get(request.request_id)
        if reservation is not None and request.attempt < reservation.attempt:
            return f"attempt {request.attempt} is void: attempt {reservation.attempt} has taken over"
        ending = self._endings.get(request.request_id)
        if ending is not None and request.attempt <= ending.attempt:
            return f"attempt {request.attempt} is over: {ending.reason}"
        return None

    # --- the gateway's requests ---

    def reserve(self, request: RequestSpec, lease_id: int, now: float) -> Ticket:
        """Promise the lease's blocks to the request. The receiver owns the lease until it releases or admits it."""
        assert self.refusal(request) is None, self.refusal(request)
        assert request.request_id not in self._open, f"{request.request_id} holds a reservation already"
        fence = Fence(epoch=self._epoch, lease=lease_id, generation=request.attempt)
        reservation = self._open[request.request_id] = self._reservation(request, fence, now)
        return self._ticket(reservation)

    def renew(self, request: RequestSpec, now: float) -> tuple[Ticket, list[Action]]:
        """Promise the held lease to a newer attempt; references of older ones are void at once.

        Should the newer attempt have more tokens, the caller extends the lease first. The current attempt repeated gets
        the same ticket again.
        """
        assert self.refusal(request) is None, self.refusal(request)
        old = self._open.get(request.request_id)
        assert old is not None, f"{request.request_id} holds no reservation to renew"
        if request.attempt == old.attempt:
            return self._ticket(old), []
        new = self._reservation(request, replace(old.fence, generation=request.attempt), now)
        self._open[request.request_id] = new
        return self._ticket(new), [*_drop_waiting(old), *_reject(old, f"attempt {new.attempt} has taken over")]

    def cancel(self, key: SequenceKey) -> list[Action]:
        """Forget every attempt up to this one, also those that are yet to come. Nothing is reported to the gateway."""
        request_id, attempt = key
        reason = "the gateway cancelled it"
        reservation, ending = self._open.get(request_id), self._endings.get(request_id)
        if reservation is not None and reservation.attempt <= attempt:
            self._close(reservation, ReceiverState.CANCELLED, reason, up_to=attempt)
            release = self._release(reservation.lease_id)
            return [*_drop_waiting(reservation), *_reject(reservation, reason), *release]
        if reservation is None and (ending is None or ending.attempt < attempt):
            self._remember(request_id, Ending(attempt=attempt, state=ReceiverState.CANCELLED, reason=reason))
        return []

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

    def on_link_lost(self, peer_id: str) -> list[Action]:
        """Reservations stay: what arrived may be complete, and the gateway may renew for another prefill."""
        for reservation in self._open.values():
            if reservation.peer_id == peer_id:
                reservation.lose_peer()
        return []

    def _on_slab(self, peer_id: str, header: SlabHeader, now: float, delivery_id: int | None) -> list[Action]:
        reservation, refused = self._resolve(peer_id, header.request_id, header.fence, now)
        if reservation is None:
            return _drop(delivery_id) + refused
        if delivery_id is None:
            return self._fail(reservation, "a slab was announced without its bytes")
        try:
            is_new = reservation.coverage.claim(header.layer, header.token_start, header.num_tokens, header.digest)
        except BrokenHandoffError as error:
            return _drop(delivery_id) + self._fail(reservation, f"a slab was announced wrongly: {error}")
        if not is_new:
            return _drop(delivery_id)
        reservation.waiting.append((delivery_id, header))
        return self._start_copies(reservation)

    def _on_commit(self, peer_id: str, commit: Commit, now: float) -> list[Action]:
        if self._admitted_by(commit.request_id, commit.fence) == commit:
            return [Send(peer_id, Verified(request_id=commit.request_id, fence=commit.fence))]
        reservation, refused = self._resolve(peer_id, commit.request_id, commit.fence, now)
        if reservation is None:
            return refused
        try:
            reservation.take_commit(commit)
        except BrokenHandoffError as error:
            return self._fail(reservation, str(error))
        return self._admit_if_verified(reservation)

    def _on_keep_alive(self, peer_id: str, request_id: str, fence: Fence, now: float) -> list[Action]:
        if self._admitted_by(request_id, fence) is not None:
            return [Send(peer_id, Verified(request_id=request_id, fence=fence))]
        return self._resolve(peer_id, request_id, fence, now)[1]

    def _on_abort(self, abort: Abort) -> list[Action]:
        reservation = self._open.get(abort.request_id)
        if reservation is None or reservation.fence != abort.fence:
            return []
        reservation.why_abandoned = abort.reason
        return _drop_waiting(reservation)

    # --- what the driver's copies come to ---

    def on_copied(self, delivery_id: int, digest: int, now: float) -> list[Action]:
        """A `Copy` was carried out; `digest` is of what now stands in the blocks."""
        copy, actions = self._finish_copy(delivery_id)
        reservation = self._counts_for(copy)
        if reservation is None:
            return actions
        reservation.deadline = max(reservation.deadline, now + self._ttl_s)
        try:
            reservation.verify_slab(copy.header, digest)
        except BrokenHandoffError as error:
            return actions + self._fail(reservation, str(error))
        return actions + self._admit_if_verified(reservation)

    def on_copy_failed(self, delivery_id: int, reason: str) -> list[Action]:
        """A `Copy` could not be carried out, and nothing writes for it any more."""
        copy, actions = self._finish_copy(delivery_id)
        reservation = self._counts_for(copy)
        if reservation is None:
            return actions
        return actions + self._fail(reservation, f"a slab could not be copied: {reason}")

    def _start_copies(self, reservation: Reservation) -> list[Action]:
        """Order the copies that wait, unless an older attempt's copies still write into the lease."""
        if any(copy.header.fence != reservation.fence for copy in self._copies_into(reservation.lease_id)):
            return []
        assert reservation.lease_id not in self._draining, f"lease {reservation.lease_id} is on its way back"
        copies = [Copy(delivery_id, header) for delivery_id, header in reservation.take_waiting()]
        for copy in copies:
            assert copy.delivery_id not in self._copies, f"delivery {copy.delivery_id} is already being copied"
            self._copies[copy.delivery_id] = copy
        return list(copies)

    def _finish_copy(self, delivery_id: int) -> tuple[Copy, list[Action]]:
        """The copy that ended, with what waited for its end: the lease's release, or a newer attempt's copies."""
        copy = self._copies.pop(delivery_id)
        reservation = self._open.get(copy.header.request_id)
        started = [] if reservation is None else self._start_copies(reservation)
        return copy, [*self._release_if_drained(copy.lease_id), *started]

    def _counts_for(self, copy: Copy) -> Reservation | None:
        """The reservation whose current attempt the copy belongs to, if that can still succeed."""
        reservation = self._open.get(copy.header.request_id)
        if reservation is None or reservation.fence != copy.header.fence:
            return None
        return None if reservation.state is ReceiverState.ABANDONED else reservation

    def _copies_into(self, lease_id: int) -> list[Copy]:
        return [copy for copy in self._copies.values() if copy.lease_id == lease_id]

    def _release(self, lease_id: int) -> list[Action]:
        """Give the lease back: now if nothing writes into it, else when the last copy has ended."""
        assert lease_id not in self._draining, f"lease {lease_id} is released twice"
        self._draining.add(lease_id)
        return self._release_if_drained(lease_id)

    def _release_if_drained(self, lease_id: int) -> list[Action]:
        if lease_id not in self._draining or self._copies_into(lease_id):
            return []
        self._draining.remove(lease_id)
        return [ReleaseLease(lease_id)]

    # --- time ---

    def tick(self, now: float) -> list[Action]:
        """End what has expired. To be called at `next_deadline()`; harmless at any other time."""
        return [action for reservation in list(self._open.values()) for action in self._expire(reservation, now)]

    def next_deadline(self) -> float | None:
        return min((reservation.deadline for reservation in self._open.values()), default=None)

    def _expire(self, reservation: Reservation, now: float) -> list[Action]:
        if now < reservation.deadline:
            return []
        stood = reservation.state.value
        if reservation.why_abandoned is not None:
            stood = f"The prefill gave up: {reservation.why_abandoned}"
        reason = f"the reservation expired: nothing was heard of it for {self._ttl_s:g} s. {stood}"
        return self._fail(reservation, reason)

    # --- references ---

    def _resolve(
        self, peer_id: str, request_id: str, fence: Fence, now: float
    ) -> tuple[Reservation | None, list[Action]]:
        """The reservation that a reference is good for, its time renewed; or None, and what to do about a void one."""
        reservation = self._open.get(request_id)
        expired = [] if reservation is None else self._expire(reservation, now)
        reason = self._why_void(request_id, fence)
        if reason is not None:
            return None, [*expired, Send(peer_id, Rejected(request_id=request_id, fence=fence, reason=reason))]
        assert reservation is not None
        reservation.peer_id = peer_id
        reservation.deadline = now + self._ttl_s
        return reservation, []

    def _why_void(self, request_id: str, fence: Fence) -> str | None:
        """A sentence, unless this is the current reference to a reservation that can still succeed."""
        if fence.epoch != self._epoch:
            return f"{self._worker_id} has restarted since the reservation was made, and its blocks with it"
        reservation, ending = self._open.get(request_id), self._endings.get(request_id)
        if reservation is not None and reservation.fence == fence:
            if reservation.state is ReceiverState.ABANDONED:
                return f"the prefill gave this attempt up: {reservation.why_abandoned}"
            return None
        if ending is not None and ending.fence == fence:
            return f"the reservation is over: {ending.reason}"
        newest = max((known.attempt for known in (reservation, ending) if known is not None), default=None)
        if newest is None:
            return f"{self._worker_id} knows no reservation for request {request_id}"
        return (
            f"the reference (lease {fence.lease}, attempt {fence.generation}) is stale: attempt {newest} is the newest"
        )

    def _admitted_by(self, request_id: str, fence: Fence) -> Commit | None:
        """The commit under which this very attempt was admitted, if it was."""
        ending = self._endings.get(request_id)
        return ending.commit if ending is not None and ending.fence == fence else None

    # --- ends ---

    def _admit_if_verified(self, reservation: Reservation) -> list[Action]:
        try:
            commit = reservation.verified_commit()
        except BrokenHandoffError as error:
            return self._fail(reservation, str(error))
        if commit is None:
            return []
        assert not (self._copies_into(reservation.lease_id) or reservation.waiting), "verified while bytes still move"
        reason = "its sequence was admitted and is being decoded"
        self._close(reservation, ReceiverState.ADMITTED, reason, commit=commit)
        verified = Verified(request_id=reservation.request_id, fence=reservation.fence)
        answer = [] if reservation.peer_id is None else [Send(reservation.peer_id, verified)]
        return [Admit(reservation.request, reservation.lease_id, commit), *answer]

    def _fail(self, reservation: Reservation, reason: str) -> list[Action]:
        self._close(reservation, ReceiverState.FAILED, reason)
        failed = Fail(SequenceKey(reservation.request_id, reservation.attempt), reason)
        release = self._release(reservation.lease_id)
        return [*_drop_waiting(reservation), *_reject(reservation, reason), failed, *release]

    def _close(
        self,
        reservation: Reservation,
        state: ReceiverState,
        reason: str,
        *,
        up_to: int | None = None,
        commit: Commit | None = None,
    ) -> None:
        del self._open[reservation.request_id]
        attempt = reservation.attempt if up_to is None else up_to
        ending = Ending(attempt=attempt, state=state, reason=reason, fence=reservation.fence, commit=commit)
        self._remember(reservation.request_id, ending)

    def _remember(self, request_id: str, ending: Ending) -> None:
        self._endings[request_id] = ending
        self._endings.move_to_end(request_id)
        if len(self._endings) > NUM_REMEMBERED:
            self._endings.popitem(last=False)

    # --- what is made ---

    def _reservation(self, request: RequestSpec, fence: Fence, now: float) -> Reservation:
        coverage = Coverage(self._num_layers, request.num_handed_tokens)
        return Reservation(request=request, fence=fence, deadline=now + self._ttl_s, coverage=coverage)

    def _ticket(self, reservation: Reservation) -> Ticket:
        return Ticket(
            request_id=reservation.request_id,
            fence=reservation.fence,
            endpoint=self.endpoint,
            worker_id=self._worker_id,
            num_tokens=reservation.request.num_handed_tokens,
            ttl_s=self._ttl_s,
            digest_kind=self._digest_kind,
        )


def _drop(delivery_id: int | None) -> list[Action]:
    return [] if delivery_id is None else [Drop(delivery_id)]


def _drop_waiting(reservation: Reservation) -> list[Action]:
    return [Drop(delivery_id) for delivery_id, _ in reservation.take_waiting()]


def _reject(reservation: Reservation, reason: str) -> list[Action]:
    """Tell the reservation's prefill, if one can be reached, to spare itself the rest."""
    if reservation.peer_id is None:
        return []
    return [
        Send(reservation.peer_id, Rejected(request_id=reservation.request_id, fence=reservation.fence, reason=reason))
    ]
