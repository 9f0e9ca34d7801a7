"""The decode worker around `HandoffReceiver`: block pool, KV memory, copying threads, a scheduler that is a dict."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from engine.kv.block_pool import BlockLease, BlockPool, OutOfBlocksError
from engine.sequence import SequenceKey
from kv_transfer.digest import slab_digest
from kv_transfer.handoff.actions import Action, Admit, Copy, Drop, Fail, ReleaseLease, Send
from kv_transfer.handoff.receiver_state import HandoffReceiver
from kv_transfer.messages import Message
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, SlabHeader
from kv_transfer.messages.requests import Cancel, Endpoint, Refused, RequestSpec, Reserve, Reserved, Ticket
from tests.kv_transfer.handoff.handoff_world.model import (
    BLOCK_SIZE,
    DECODE,
    GATEWAY,
    NUM_BLOCKS,
    NUM_LAYERS,
    TOKEN_BYTES,
    TTL_S,
    Packet,
    layer_kv,
    num_blocks_for,
)


class Surroundings(Protocol):
    """What a node needs of the world."""

    now: float

    def post(self, to: str, sender: str, message: Message | None, payload: bytearray | None = None) -> None: ...

    def on_admitted(self, request_id: str, attempt: int) -> None: ...

    def on_finished(self, request_id: str, attempt: int) -> None: ...

    def on_failed(self, request_id: str, attempt: int) -> None: ...

    def trace(self, who: str, action: Action) -> None:
        """A node is about to carry out what its machine told it."""


@dataclass(eq=False, slots=True)
class RunningCopy:
    copy: Copy
    payload: bytearray
    blocks: list[int]  # where it writes: fixed when it starts, as in a thread that was handed its rows


class DecodeNode:
    """Asserts of the receiver's actions that

    no lease is released or admitted twice, or while a copy writes into it; no delivery is used twice; nothing is
    admitted unless its blocks hold what the attempt's prefill computed; every attempt has at most one outcome.
    """

    def __init__(self, world: Surroundings, *, epoch: int, num_layers: int = NUM_LAYERS) -> None:
        self.world = world
        self.epoch = epoch
        self.num_layers = num_layers
        self.pool = BlockPool(NUM_BLOCKS, epoch=epoch)
        self.receiver = HandoffReceiver(
            epoch=epoch,
            num_layers=num_layers,
            worker_id=DECODE,
            endpoint=Endpoint(host="127.0.0.1", port=1, node_id="node"),
            ttl_s=TTL_S,
        )
        self.memory: dict[tuple[int, int, int], bytes] = {}  # (block, layer, slot) -> KV of one token
        self.leases: dict[int, BlockLease] = {}
        self.deliveries: dict[int, bytearray] = {}
        self.copies: list[RunningCopy] = []
        self.running: dict[str, Admit] = {}
        self.failures: list[Fail] = []
        self.num_admitted = 0
        self._num_deliveries = 0
        self._void: set[tuple[str, int]] = set()  # attempts that had their outcome

    def on_packet(self, packet: Packet) -> None:
        message, now = packet.message, self.world.now
        if message is None:
            self.do(self.receiver.on_link_lost(packet.sender))
        elif isinstance(message, Reserve):
            self.world.post(GATEWAY, DECODE, self.reserve(message.request))
        elif isinstance(message, Cancel):
            self.cancel(message.request_id, message.attempt)
        else:
            assert isinstance(message, SlabHeader | Commit | Abort | KeepAlive)
            delivery_id = None if packet.payload is None else self._hold(packet.payload)
            self.do(self.receiver.on_message(packet.sender, message, now, delivery_id))

    def reserve(self, request: RequestSpec) -> Reserved | Refused:
        reason = self.receiver.refusal(request)
        if reason is None:
            if request.request_id in self.running:  # an older attempt, since this one is not refused
                self._retire(request.request_id)
            try:
                return Reserved(attempt=request.attempt, ticket=self._ticket(request))
            except OutOfBlocksError as error:
                reason = str(error)
                self.do(self.receiver.cancel(SequenceKey(request.request_id, request.attempt)))
        return Refused(request_id=request.request_id, attempt=request.attempt, reason=reason, retry_after_s=None)

    def cancel(self, request_id: str, attempt: int) -> None:
        self.do(self.receiver.cancel(SequenceKey(request_id, attempt)))
        running = self.running.get(request_id)
        if running is not None and running.request.attempt <= attempt:
            self._retire(request_id)

    def tick(self) -> None:
        self.do(self.receiver.tick(self.world.now))
        deadline = self.receiver.next_deadline()
        assert deadline is None or deadline > self.world.now, "tick left something overdue"

    def finish_copy(self, running: RunningCopy) -> None:
        """The copying thread writes, reads back, and reports."""
        self.copies.remove(running)
        header, lease = running.copy.header, self.leases.get(running.copy.lease_id)
        assert lease is not None and not lease.released, "a copy wrote into a lease that had been given back"
        assert lease.blocks[: len(running.blocks)] == running.blocks, "a copy wrote into blocks of another lease"
        for i in range(header.num_tokens):
            kv = bytes(running.payload[i * TOKEN_BYTES : (i + 1) * TOKEN_BYTES])
            self.memory[_cell(running.blocks, header.layer, header.token_start + i)] = kv
        written = self.read(running.blocks, header.layer, header.token_start, header.num_tokens)
        self.do(self.receiver.on_copied(running.copy.delivery_id, slab_digest(written), self.world.now))

    def fail_copy(self, running: RunningCopy) -> None:
        self.copies.remove(running)
        self.do(self.receiver.on_copy_failed(running.copy.delivery_id, "the device refused it"))

    def finish_decoding(self, request_id: str) -> None:
        admit = self.running[request_id]
        self._require_true_kv(admit)  # still: nothing may have written since it was verified
        self._retire(request_id)
        self.world.on_finished(request_id, admit.request.attempt)

    def check(self) -> None:
        self.pool.check()
        assert self.pool.num_leases == len(self.leases), "a lease is forgotten"

    def check_idle(self) -> None:
        self.pool.check_idle()
        assert self.receiver.next_deadline() is None, "a reservation outlived its time"
        assert not self.deliveries, "a delivery was neither copied nor dropped"

    def read(self, blocks: list[int], layer: int, start: int, count: int) -> bytes:
        return b"".join(self.memory.get(_cell(blocks, layer, start + i), b"?") for i in range(count))

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.world.trace(DECODE, action)
            match action:
                case Copy():
                    blocks = list(self.leases[action.lease_id].blocks)
                    self.copies.append(RunningCopy(action, self.deliveries.pop(action.delivery_id), blocks))
                case Drop():
                    del self.deliveries[action.delivery_id]
                case Send():
                    self.world.post(action.peer_id, DECODE, action.message)
                case Admit():
                    self._admit(action)
                case ReleaseLease():
                    self._release(action.lease_id)
                case Fail():
                    self._note_outcome(*action.key)
                    self.failures.append(action)
                    self.world.on_failed(*action.key)
                case _:
                    raise AssertionError(f"{action} is not decode's")

    def _ticket(self, request: RequestSpec) -> Ticket:
        if not self.receiver.holds(request.request_id):
            lease = self.pool.lease(num_blocks_for(request))
            self.leases[lease.lease_id] = lease
            return self.receiver.reserve(request, lease.lease_id, self.world.now)
        ticket, actions = self.receiver.renew(request, self.world.now)
        self.do(actions)
        lease = self.leases[ticket.fence.lease]
        self.pool.extend(lease, max(0, num_blocks_for(request) - len(lease.blocks)))
        return ticket

    def _admit(self, admit: Admit) -> None:
        self._note_outcome(admit.request.request_id, admit.request.attempt)
        assert admit.request.request_id not in self.running
        self._require_true_kv(admit)
        self.running[admit.request.request_id] = admit
        self.num_admitted += 1
        self.world.on_admitted(admit.request.request_id, admit.request.attempt)

    def _require_true_kv(self, admit: Admit) -> None:
        request, lease = admit.request, self.leases[admit.lease_id]
        assert not lease.released
        assert not any(running.copy.lease_id == admit.lease_id for running in self.copies)
        for layer in range(self.num_layers):
            stands = self.read(lease.blocks, layer, 0, request.num_handed_tokens)
            assert stands == layer_kv(request, layer), f"{request.request_id} is decoded on KV that is not its own"

    def _retire(self, request_id: str) -> None:
        self._release(self.running.pop(request_id).lease_id)

    def _release(self, lease_id: int) -> None:
        assert not any(running.copy.lease_id == lease_id for running in self.copies), "a copy still writes into it"
        self.pool.release(self.leases.pop(lease_id))

    def _note_outcome(self, request_id: str, attempt: int) -> None:
        assert (request_id, attempt) not in self._void, f"attempt {attempt} of {request_id} has two outcomes"
        self._void.add((request_id, attempt))

    def _hold(self, payload: bytearray) -> int:
        self._num_deliveries += 1
        self.deliveries[self._num_deliveries] = payload
        return self._num_deliveries


def _cell(blocks: list[int], layer: int, token: int) -> tuple[int, int, int]:
    return blocks[token // BLOCK_SIZE], layer, token % BLOCK_SIZE
