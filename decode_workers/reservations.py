"""What a decode worker has promised to prefill workers: blocks, and that KV which comes into them will be decoded.

Owns the reservations from the moment that they find room, or wait for it, until their KV is verified or they end
otherwise, and the receiver that lands it. Knows whose lease is whose; knows neither steps nor what becomes of a
sequence that has landed.
"""

from __future__ import annotations

from collections.abc import Callable

from decode_workers.scheduler import DecodeScheduler
from decode_workers.states import DecodeState
from decode_workers.waiting_reservations import PendingReserves
from engine.kv.cache import GroupRow
from engine.kv.sequence_kv import SequenceKV
from engine.memory.streams import queued_on
from engine.sequence import Sequence, SequenceKey
from engine.steps.loading import LoadedModel
from kv_transfer.connections.loop_thread import LoopThread
from kv_transfer.digest import DigestKind
from kv_transfer.handoff.receiver import KvReceiver
from kv_transfer.messages import RequestSpec, Reserved
from kv_transfer.transports.base import Transport
from kv_transfer.worker.port import GatewayId, GatewayPort
from kv_transfer.worker.sequences import sequence_of


class Landings:
    """Grants reservations as soon as the scheduler has room, and lets KV into them. Belongs to the main loop.

    `on_reserved(gateway, key, instead_of)`: it has blocks, new ones or those of an older attempt that is gone.
    `on_landed(seq)`: its KV is verified, and the scheduler decodes it from now on.
    `on_ended()`: a reservation ended otherwise and its blocks are free.
    `on_failed(key, reason, retryable)`: why, for the gateway.
    """

    def __init__(
        self,
        model: LoadedModel,
        scheduler: DecodeScheduler,
        port: GatewayPort,
        transport: Transport,
        thread: LoopThread,
        *,
        digest_kind: DigestKind,
        wait_s: float,
        on_reserved: Callable[[GatewayId, SequenceKey, SequenceKey | None], None],
        on_landed: Callable[[Sequence], None],
        on_ended: Callable[[], None],
        on_failed: Callable[[SequenceKey, str, bool], None],
    ) -> None:
        self._model = model
        self._scheduler = scheduler
        self._port = port
        self._on_reserved = on_reserved
        self._on_landed = on_landed
        self._on_ended = on_ended
        self._wait_s = wait_s
        self._key_of_lease: dict[int, SequenceKey] = {}
        self._pending = PendingReserves(
            wait_s=wait_s,
            fits=lambda request: scheduler.can_reserve(request.num_tokens),
            grant=self._grant,
            refuse=self._refuse_for_room,
        )
        self._receiver = KvReceiver(
            model.layout,
            transport,
            thread,
            digest_kind=digest_kind,
            mark_queued=queued_on(model.kv_cache.tensor.device),
            target_of=self._target_of,
            on_admit=self._on_admit,
            on_release=self._on_lease_ended,
            on_failed=lambda request_id, attempt, reason, retryable: on_failed(
                (request_id, attempt), reason, retryable
            ),
        )

    async def start(self, *, worker_id: str, ttl_s: float) -> None:
        await self._receiver.start(epoch=self._model.block_pool.epoch, worker_id=worker_id, ttl_s=ttl_s)

    def stop(self) -> None:
        self._receiver.stop()
        self._pending.stop()

    @property
    def num_waiting(self) -> int:
        """Reservations that have no blocks yet."""
        return len(self._pending)

    @property
    def num_landing(self) -> int:
        """Those whose KV is on its way."""
        return len(self._key_of_lease)

    def refusal(self, request: RequestSpec) -> str | None:
        """Why nothing may be reserved for this attempt any more, or None."""
        return self._receiver.refusal(request)

    def add(self, gateway: GatewayId, request: RequestSpec) -> None:
        """Reserve now, or as soon as there is room."""
        self._pending.add(gateway, request)

    def renew(self, gateway: GatewayId, request: RequestSpec) -> bool:
        """Let the attempt have what an older one reserved; False if there is nothing, or too little."""
        if not self._receiver.holds(request.request_id):
            return False
        older = next(key for key in self._key_of_lease.values() if key[0] == request.request_id)
        if older[1] == request.attempt:
            return True  # a repetition: it has been answered
        seq = sequence_of(request)
        if self._scheduler.state(older) is not DecodeState.RESERVED or not self._scheduler.renew(older, seq):
            return False
        assert seq.lease is not None
        self._key_of_lease[seq.lease.lease_id] = seq.key
        self._on_reserved(gateway, seq.key, older)
        ticket = self._receiver.renew(request)
        self._port.post(gateway, Reserved(attempt=request.attempt, ticket=ticket))
        return True

    def retry(self) -> None:
        """There may be room."""
        self._pending.retry()

    def cancel_waiting(self, request_id: str, attempt: int) -> None:
        """Every attempt up to this one."""
        self._pending.cancel(request_id, attempt)

    def cancel(self, key: SequenceKey) -> None:
        """A reservation that has blocks; they are free once no copy into them is in flight."""
        self._receiver.cancel(*key)

    def forget(self, gateway: GatewayId) -> None:
        """Nobody waits for its reservations any more."""
        self._pending.forget(gateway)

    def give_up_waiting(self, reason: str) -> None:
        """Whoever has no blocks yet is to ask another worker."""
        for gateway, request in self._pending.clear():
            self._port.fail(gateway, (request.request_id, request.attempt), reason, retryable=True, cause="moved")

    def _grant(self, gateway: GatewayId, request: RequestSpec) -> None:
        seq = sequence_of(request)
        self._scheduler.reserve(seq)
        assert seq.lease is not None
        self._key_of_lease[seq.lease.lease_id] = seq.key
        self._on_reserved(gateway, seq.key, None)
        ticket = self._receiver.reserve(request, seq.lease.lease_id)
        self._port.post(gateway, Reserved(attempt=request.attempt, ticket=ticket))

    def _refuse_for_room(self, gateway: GatewayId, request: RequestSpec) -> None:
        self._port.refuse(gateway, request, f"no room for its KV within {self._wait_s:g} s", self._wait_s)

    def _target_of(self, lease_id: int, layer: int) -> tuple[SequenceKV, GroupRow]:
        seq = self._scheduler.sequence(self._key_of_lease[lease_id])
        assert seq is not None
        group = layer // self._model.layout.layers_per_group
        on_host = group in seq.host_groups
        cache: SequenceKV | None = self._model.host_cache if on_host else self._model.sequence_kv
        table = seq.host_table if on_host else seq.block_table
        assert cache is not None
        assert table is not None
        return cache, table.view[group]

    def _on_admit(self, request_id: str, attempt: int, first_token: int) -> None:
        seq = self._scheduler.sequence((request_id, attempt))
        assert seq is not None
        assert seq.lease is not None
        del self._key_of_lease[seq.lease.lease_id]  # no copy will ask for it any more
        self._scheduler.admit(seq.key, first_token)
        self._on_landed(seq)

    def _on_lease_ended(self, lease_id: int) -> None:
        self._scheduler.drop(self._key_of_lease.pop(lease_id))
        self._on_ended()
