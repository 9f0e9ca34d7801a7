"""What a decode worker has promised to prefill workers: blocks, and that the KV which comes into them will be decoded.

A reservation begins in the queue, if there is no room for it; has blocks from then on, into which `KvReceiver` lets KV;
and ends when its KV is verified and its sequence is the scheduler's to decode, or otherwise. `DecodeWorker` owns the
one `Reservations` and is its listener. All of it belongs to the main loop.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from decode_workers.scheduler import DecodeScheduler, DecodeState
from engine.kv.cache import GroupRow, SequenceKV
from engine.memory.streams import queued_on
from engine.model.adapters import TURN_S
from engine.sequence import Sequence, SequenceKey
from kv_transfer.connections.event_loops import DeadlineTimer, LoopThread
from kv_transfer.handoff.receiver import KvReceiver
from kv_transfer.messages.handoff import Commit
from kv_transfer.messages.requests import RequestSpec, Reserved, RoomAwaited
from kv_transfer.worker.base import WorkerParts
from kv_transfer.worker.port import GatewayId, GatewayPort


class ReservationListener(Protocol):
    """What becomes of reservations."""

    def on_reserved(self, gateway: GatewayId, key: SequenceKey, instead_of: SequenceKey | None) -> None:
        """A sequence has blocks: new ones, or those of an older attempt, which is gone."""

    def on_received(self, seq: Sequence) -> None:
        """The sequence's KV is verified, and the scheduler decodes it from now on."""

    def on_reservation_ended(self) -> None:
        """One ended otherwise, and its blocks are free."""

    def on_reservation_failed(self, key: SequenceKey, reason: str) -> None:
        """Why, for the gateway; that it ended is said separately."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A request that found no room yet."""

    gateway: GatewayId
    request: RequestSpec
    deadline: float


class Reservations:
    """Grants reservations in the order they came, as soon as the scheduler has room, and lets KV into them.

    What finds no room within `wait_s` is refused, and told when there may be some. Later attempts of a request get the
    blocks of earlier ones.
    """

    def __init__(
        self,
        parts: WorkerParts,
        scheduler: DecodeScheduler,
        port: GatewayPort,
        thread: LoopThread,
        *,
        sequence_of: Callable[[RequestSpec], Sequence],
        wait_s: float,
        listener: ReservationListener,
    ) -> None:
        """`sequence_of`: what a request becomes here."""
        model = self._model = parts.model
        self._worker_id = parts.identity.worker_id
        self._scheduler = scheduler
        self._port = port
        self._sequence_of = sequence_of
        self._wait_s = wait_s
        self._listener = listener
        self._queue: deque[_Waiting] = deque()
        self._granted: deque[tuple[float, int]] = deque()  # when, and tokens, since the first of those who wait came
        self._timer = DeadlineTimer(self.retry)
        self._key_of_lease: dict[int, SequenceKey] = {}
        self.receiver = KvReceiver(
            model.layout,
            parts.transport,
            thread,
            digest_kind=parts.digest_kind,
            mark_queued=queued_on(model.kv_cache.tensor.device),
            owner=self,
        )

    async def start(self, *, ttl_s: float) -> None:
        """A reservation whose prefill is not heard of for `ttl_s` lapses."""
        await self.receiver.start(epoch=self._model.block_pool.epoch, worker_id=self._worker_id, ttl_s=ttl_s)

    def stop(self) -> None:
        self.receiver.stop()
        self._timer.stop()

    @property
    def num_waiting(self) -> int:
        """Reservations that have no blocks yet."""
        return len(self._queue)

    @property
    def oldest_wait_s(self) -> float:
        """Since the first of those was asked for; 0 without any."""
        return max(0.0, time.monotonic() - self._queue[0].deadline + self._wait_s) if self._queue else 0.0

    @property
    def room_in_s(self) -> float:
        """Predicted seconds until all who wait now have room: as fast as others got it while the first of them waited.
        Where nobody did, `wait_s`, which is also the most: by then each of them has room or is refused. 0: nobody
        waits."""
        if not self._queue:
            return 0.0
        came = self._queue[0].deadline - self._wait_s
        num_granted = sum(num_tokens for at, num_tokens in self._granted if at >= came)
        num_waiting = sum(waiting.request.num_tokens for waiting in self._queue)
        return min(self._wait_s, self.oldest_wait_s * num_waiting / num_granted) if num_granted else self._wait_s

    # --- what the worker wants ---

    def refusal(self, request: RequestSpec) -> str | None:
        """Why nothing may be reserved for this attempt any more, or None."""
        return self.receiver.refusal(request)

    def add(self, gateway: GatewayId, request: RequestSpec) -> None:
        """Reserve now if it fits and nobody is before it, else as soon as there is room; the gateway hears which."""
        waiting = _Waiting(gateway, request, time.monotonic() + self._wait_s)
        self._queue.append(waiting)
        self.retry()
        if self._queue and self._queue[-1] is waiting:
            self._port.post(gateway, RoomAwaited(request_id=request.request_id, attempt=request.attempt))

    def renew(self, gateway: GatewayId, request: RequestSpec) -> bool:
        """Let the attempt have what an older one reserved; False if there is nothing, or too little."""
        if not self.receiver.holds(request.request_id):
            return False
        # Of earlier ones, whose leases drain while a copy into them is under way, nothing may be taken over.
        keys = (key for key in self._key_of_lease.values() if key.request_id == request.request_id)
        older = max(keys, key=lambda key: key.attempt)
        if older.attempt == request.attempt:
            return True  # a repetition: it has been answered
        seq = self._reserved_for(request)
        if self._scheduler.state(older) is not DecodeState.RESERVED or not self._scheduler.renew(older, seq):
            return False
        assert seq.lease is not None
        self._key_of_lease[seq.lease.lease_id] = seq.key
        self._listener.on_reserved(gateway, seq.key, older)
        ticket = self.receiver.renew(request)
        self._port.post(gateway, Reserved(attempt=request.attempt, ticket=ticket))
        return True

    def retry(self) -> None:
        """Look again at those who wait: there may be room, or someone's time may be up."""
        now = time.monotonic()
        while self._queue:
            head = self._queue[0]
            if (found := self._first_with_room()) is not None:
                self._queue.remove(found)
                self._grant(found.gateway, found.request)
                self._granted.append((now, found.request.num_tokens))
            elif head.deadline <= now:
                retry_after_s = self.room_in_s  # as if it were asked for again now, behind the others
                self._queue.popleft()
                reason = f"no room for its KV within {self._wait_s:g} s"
                self._port.refuse(head.gateway, head.request, reason, retry_after_s)
            else:
                break
        while self._granted and (not self._queue or self._granted[0][0] < self._queue[0].deadline - self._wait_s):
            self._granted.popleft()
        # Sooner than its time is up: those that lack their adapters may make way by then.
        self._timer.arm(min(self._queue[0].deadline, now + TURN_S) if self._queue else None)

    def _first_with_room(self) -> _Waiting | None:
        """The first of those who wait, or, where others may make way, the first that lacks nothing but room: before it
        are those who wait for an adapter as well, and could not be computed with room either."""
        if self._scheduler.can_reserve(self._queue[0].request.num_tokens):
            return self._queue[0]
        pool = self._model.adapters
        is_open = {None, *(() if pool is None else pool.open)}
        for waiting in self._queue:
            adapter = waiting.request.adapter
            if (None if adapter is None else adapter.digest) in is_open:
                return waiting if self._scheduler.make_way(waiting.request.num_tokens) else None
        return None

    def cancel(self, key: SequenceKey) -> None:
        """A reservation that has blocks; they are free once no copy into them is in flight."""
        self.receiver.cancel(key)

    def cancel_waiting(self, request_id: str, attempt: int) -> None:
        """Every attempt up to this one that has no blocks yet."""
        self._queue = deque(
            waiting
            for waiting in self._queue
            if waiting.request.request_id != request_id or waiting.request.attempt > attempt
        )

    def forget(self, gateway: GatewayId) -> None:
        """The gateway is gone, and nobody waits for its reservations any more."""
        self._queue = deque(waiting for waiting in self._queue if waiting.gateway != gateway)

    def abort_waiting(self, reason: str) -> None:
        """Whoever has no blocks yet is to ask another worker."""
        queue, self._queue = self._queue, deque()
        for waiting in queue:
            key = SequenceKey(waiting.request.request_id, waiting.request.attempt)
            self._port.fail(waiting.gateway, key, reason, retryable=True, cause="moved")

    def _grant(self, gateway: GatewayId, request: RequestSpec) -> None:
        seq = self._reserved_for(request)
        self._scheduler.reserve(seq)
        assert seq.lease is not None
        self._key_of_lease[seq.lease.lease_id] = seq.key
        self._listener.on_reserved(gateway, seq.key, None)
        ticket = self.receiver.reserve(request, seq.lease.lease_id)
        self._port.post(gateway, Reserved(attempt=request.attempt, ticket=ticket))

    def _reserved_for(self, request: RequestSpec) -> Sequence:
        """A sequence with room for all of the request, whoever computes how much of it."""
        seq = self._sequence_of(request)
        seq.num_received = request.split_at if request.is_split else 0
        return seq

    # --- what the receiver asks and tells (`kv_transfer.handoff.receiver.LeaseOwner`) ---

    def target_of(self, lease_id: int, layer: int) -> tuple[SequenceKV, GroupRow]:
        """The cache, of whichever tier, and the block-table row to copy that layer into."""
        seq = self._scheduler.sequence(self._key_of_lease[lease_id])
        assert seq is not None
        group = layer // self._model.layout.layers_per_group
        on_host = group in seq.host_groups
        cache: SequenceKV | None = self._model.host_cache if on_host else self._model.sequence_kv
        table = seq.host_table if on_host else seq.block_table
        assert cache is not None
        assert table is not None
        return cache, table.view[group]

    def on_admitted(self, key: SequenceKey, commit: Commit) -> None:
        seq = self._scheduler.sequence(key)
        assert seq is not None
        assert seq.lease is not None
        del self._key_of_lease[seq.lease.lease_id]  # no copy will ask for it any more
        if commit.first_token is None:  # for this worker to report, with the first token
            seq.num_cached, seq.waited_before_s = commit.num_cached_tokens, commit.waited_s
        self._scheduler.admit(key, commit.first_token, time.monotonic())
        self._listener.on_received(seq)

    def on_released(self, lease_id: int) -> None:
        self._scheduler.drop(self._key_of_lease.pop(lease_id))
        self._listener.on_reservation_ended()

    def on_failed(self, key: SequenceKey, reason: str) -> None:
        self._listener.on_reservation_failed(key, reason)
