"""Shorthand for tests that walk one hand-off through its transitions, one message at a time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from engine.sequence import SequenceKey
from kv_transfer.handoff.actions import Action, Copy, Send
from kv_transfer.handoff.receiver_state import HandoffReceiver, ReceiverMessage
from kv_transfer.handoff.sender_state import HandoffSender
from kv_transfer.messages.connections import Ping
from kv_transfer.messages.handoff import Commit, Rejected, SlabHeader, Verified
from kv_transfer.messages.requests import Endpoint, Fence, RequestSpec, Ticket
from tests.kv_transfer.handoff.handoff_world.model import DECODE, NUM_LAYERS, TTL_S, request_spec

_Action = TypeVar("_Action", bound=Action)

PREFILL = "prefill-a"
NUM_TOKENS = 4
LEASE = 11
EPOCH = 5
FENCE = Fence(epoch=EPOCH, lease=LEASE, generation=1)
ENDPOINT = Endpoint(host="127.0.0.1", port=1, node_id="node")
KEY = SequenceKey("r", 1)
TICKET = Ticket(request_id="r", fence=FENCE, endpoint=ENDPOINT, worker_id=DECODE, num_tokens=NUM_TOKENS, ttl_s=TTL_S)


def request(attempt: int = 1) -> RequestSpec:
    return request_spec("r", attempt, NUM_TOKENS)


def digest_of(layer: int, start: int) -> int:
    """The digest that stands for this slab's content."""
    return 2**64 - 1 - 1000 * layer - start


def slab(layer: int, start: int, count: int = 2, *, fence: Fence = FENCE, request_id: str = "r") -> SlabHeader:
    return SlabHeader(
        request_id=request_id,
        fence=fence,
        layer=layer,
        token_start=start,
        num_tokens=count,
        digest=digest_of(layer, start),
    )


def all_slabs(fence: Fence = FENCE) -> list[SlabHeader]:
    return [slab(layer, start, fence=fence) for layer in range(NUM_LAYERS) for start in (0, 2)]


def commit(fence: Fence = FENCE, *, request_id: str = "r", num_tokens: int = NUM_TOKENS, index: int = 0) -> Commit:
    sums = [(digest_of(layer, 0) + digest_of(layer, 2)) % 2**64 for layer in range(NUM_LAYERS)]
    return Commit(
        request_id=request_id,
        fence=fence,
        num_tokens=num_tokens,
        layer_digests=sums,
        first_token=9,
        first_token_index=index,
    )


@dataclass
class ScriptedReceiver:
    """A receiver with a clock of its own and delivery ids that count up."""

    machine: HandoffReceiver = field(
        default_factory=lambda: HandoffReceiver(
            epoch=EPOCH, num_layers=NUM_LAYERS, worker_id=DECODE, endpoint=ENDPOINT, ttl_s=TTL_S
        )
    )
    now: float = 100.0
    last_delivery: int = 0

    def reserve(self, attempt: int = 1, lease: int = LEASE) -> None:
        self.machine.reserve(request(attempt), lease, self.now)

    def renew(self, attempt: int) -> list[Action]:
        return self.machine.renew(request(attempt), self.now)[1]

    @property
    def state(self) -> str:
        state = self.machine.state("r")
        return "unknown" if state is None else state.name

    def hear(self, message: ReceiverMessage, peer: str = PREFILL) -> list[Action]:
        delivery_id = None
        if isinstance(message, SlabHeader):
            self.last_delivery += 1
            delivery_id = self.last_delivery
        return self.machine.on_message(peer, message, self.now, delivery_id)

    def copied(self, copy: Copy, digest: int | None = None) -> list[Action]:
        return self.machine.on_copied(copy.delivery_id, copy.header.digest if digest is None else digest, self.now)

    def hear_all_slabs(self, fence: Fence = FENCE) -> list[Copy]:
        return [only(self.hear(header), Copy) for header in all_slabs(fence)]

    def admit(self) -> None:
        """Reserve and walk the straight path to the end."""
        self.reserve()
        for copy in self.hear_all_slabs():
            self.copied(copy)
        self.hear(commit())


class ScriptedSender:
    """A sender with a clock of its own."""

    def __init__(self) -> None:
        self.machine = HandoffSender()
        self.now = 50.0

    @property
    def state(self) -> str:
        """Of attempt 1."""
        state = self.machine.state(KEY)
        return "OVER" if state is None else state.name

    def begin(self, ticket: Ticket = TICKET, num_tokens: int = NUM_TOKENS) -> list[Action]:
        return self.machine.begin(ticket, num_layers=NUM_LAYERS, num_tokens=num_tokens, now=self.now)

    def ready(self, layer: int, start: int, count: int = 2) -> list[Action]:
        return self.machine.on_layer_ready(KEY, layer, start, count, self.now)

    def sent(self, layer: int, start: int) -> list[Action]:
        return self.machine.on_slab_sent(KEY, layer, start, digest_of(layer, start), self.now)

    def first_token(self) -> list[Action]:
        return self.machine.on_computed(KEY, (9, 0), self.now)

    def hear(self, message: Verified | Rejected | Ping, peer: str = DECODE) -> list[Action]:
        return self.machine.on_message(peer, message)

    def send_all(self) -> list[Action]:
        actions = []
        for layer in range(NUM_LAYERS):
            for start in (0, 2):
                self.ready(layer, start)
                actions += self.sent(layer, start)
        return actions

    def commit(self) -> None:
        self.begin()
        self.send_all()
        self.first_token()


def only(actions: list[Action], kind: type[_Action]) -> _Action:
    """The single action of this kind among `actions`."""
    found = [action for action in actions if isinstance(action, kind)]
    assert len(found) == 1, f"{len(found)} {kind.__name__} in {actions}"
    return found[0]


def rejection(actions: list[Action]) -> Rejected:
    """The single rejection that is sent."""
    messages = [action.message for action in actions if isinstance(action, Send)]
    rejected = [message for message in messages if isinstance(message, Rejected)]
    assert len(rejected) == 1, f"{len(rejected)} rejections in {actions}"
    return rejected[0]


def kinds(actions: list[Action]) -> list[str]:
    return [type(action).__name__ for action in actions]
