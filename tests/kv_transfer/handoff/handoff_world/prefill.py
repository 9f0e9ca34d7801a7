"""The prefill worker around `HandoffSender`: source blocks, an engine that computes in chunks, and slabs in flight."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from engine.sequence import SequenceKey
from kv_transfer.digest import slab_digest
from kv_transfer.handoff.actions import Action, Fail, ReleaseSource, Send, SenderState, SendSlab
from kv_transfer.handoff.sender_state import HandoffSender
from kv_transfer.messages.requests import Cancel, RequestSpec, Start, Ticket
from tests.kv_transfer.handoff.handoff_world.decode import Surroundings
from tests.kv_transfer.handoff.handoff_world.model import DECODE, NUM_LAYERS, TOKEN_BYTES, Packet, kv_of

CHUNK_TOKENS = 3
LIVE = (SenderState.WAITING, SenderState.SENDING, SenderState.COMMITTED)
Key = SequenceKey


@dataclass(eq=False, slots=True)
class Source:
    """The blocks of one attempt at the prefill; poisoned when released, as if another prompt had taken them."""

    request: RequestSpec
    kv: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (layer, token) -> KV
    num_computed: int = 0
    next_layer: int = 0


class PrefillNode:
    """Asserts of the sender's actions that

    sources are released once, never under a slab in flight; nothing is reported after a cancel; one failure at most.
    """

    def __init__(
        self, world: Surroundings, name: str, *, num_layers: int = NUM_LAYERS, chunk_tokens: int = CHUNK_TOKENS
    ) -> None:
        self.world = world
        self.name = name
        self.num_layers = num_layers
        self.chunk_tokens = chunk_tokens
        self.sender = HandoffSender()
        self.sources: dict[Key, Source] = {}
        self.slabs: list[tuple[SendSlab, Source]] = []
        self.failures: list[Fail] = []
        self.seen: dict[Key, None] = {}  # a real worker would refuse a repeated Start likewise
        self._silent: set[Key] = set()  # attempts of which nothing may be reported any more

    def on_packet(self, packet: Packet) -> None:
        message = packet.message
        if message is None:
            self.do(self.sender.on_link_lost(packet.sender))
        elif isinstance(message, Start):
            self.start(message.request, message.ticket)
        elif isinstance(message, Cancel):
            self.cancel(message.request_id, message.attempt)
        else:
            self.do(self.sender.on_message(packet.sender, message))

    def start(self, request: RequestSpec, ticket: Ticket | None) -> None:
        key = Key(request.request_id, request.attempt)
        if key in self.seen and (ticket is None or self.sender.state(key) is not SenderState.WAITING):
            return
        if key not in self.seen:
            self.seen[key] = None
            self.sources[key] = Source(request)
        if ticket is None:
            self.sender.keep(key)
            return
        self.do(
            self.sender.begin(
                ticket, num_layers=self.num_layers, num_tokens=request.num_handed_tokens, now=self.world.now
            )
        )

    def cancel(self, request_id: str, attempt: int) -> None:
        actions = self.sender.cancel(Key(request_id, attempt), "the client left")
        self._silent |= {key for key in self.sources if key.request_id == request_id and key.attempt <= attempt}
        self.do(actions)

    def tick(self) -> None:
        self.do(self.sender.tick(self.world.now))
        deadline = self.sender.next_deadline()
        assert deadline is None or deadline > self.world.now, "tick left something overdue"

    def compute(self, key: Key) -> None:
        """One layer of the next chunk; after the last of all, the first token, unless decode computes more."""
        source, now = self.sources[key], self.world.now
        request, layer, start = source.request, source.next_layer, source.num_computed
        stop = min(start + self.chunk_tokens, request.num_handed_tokens)
        for token in range(start, stop):
            source.kv[layer, token] = kv_of(request, layer, token)
        source.next_layer += 1
        if source.next_layer == self.num_layers:
            source.next_layer, source.num_computed = 0, stop
        self.do(self.sender.on_layer_ready(key, layer, start, stop - start, now))
        if source.num_computed == request.num_handed_tokens:
            first_token = None if request.is_split else (7, len(request.output_token_ids))
            self.do(self.sender.on_computed(key, first_token, now))

    def find_prefix(self, key: Key, num_tokens: int) -> None:
        """The first tokens were computed before, and go out before anything else is."""
        source = self.sources[key]
        for layer in range(self.num_layers):
            for token in range(num_tokens):
                source.kv[layer, token] = kv_of(source.request, layer, token)
            self.do(self.sender.on_layer_ready(key, layer, 0, num_tokens, self.world.now))
        source.num_computed = num_tokens

    def send_slab(self, index: int) -> None:
        """Fill a slab from the source blocks as they are now, and hand it to the network."""
        action, source = self.slabs.pop(index)
        tokens = range(action.token_start, action.token_start + action.num_tokens)
        payload = bytearray(b"".join(source.kv[action.layer, token] for token in tokens))
        assert len(payload) == action.num_tokens * TOKEN_BYTES
        digest = slab_digest(payload)
        self.world.post(action.worker_id, self.name, action.header(digest), payload)
        self.do(self.sender.on_slab_sent(action.key, action.layer, action.token_start, digest, self.world.now))

    def fail_slab(self, index: int) -> None:
        action, _ = self.slabs.pop(index)
        reason = "the link did not take it"
        self.do(self.sender.on_slab_failed(action.key, action.layer, action.token_start, reason))

    def things_to_do(self) -> list[Callable[[], None]]:
        uncomputed = [
            key
            for key, source in self.sources.items()
            if self.sender.state(key) in LIVE and source.num_computed < source.request.num_handed_tokens
        ]
        slabs = [partial(self.send_slab, index) for index in range(len(self.slabs))]
        return [*slabs, *(partial(self.compute, key) for key in uncomputed)]

    def check_idle(self) -> None:
        assert not self.sources, "source blocks were never released"
        assert self.sender.next_deadline() is None, "a hand-off was never ended"

    def do(self, actions: list[Action]) -> None:
        for action in actions:
            self.world.trace(self.name, action)
            match action:
                case SendSlab():
                    assert action.worker_id == DECODE
                    self.slabs.append((action, self.sources[action.key]))
                case Send():
                    self.world.post(action.peer_id, self.name, action.message)
                case ReleaseSource():
                    self._release(action.key)
                case Fail():
                    self._note_failure(action)
                    self.world.on_failed(*action.key)
                case _:
                    raise AssertionError(f"{action} is not prefill's")

    def _release(self, key: Key) -> None:
        source = self.sources.pop(key)
        assert not any(reader is source for _, reader in self.slabs), "a slab in flight still reads the source"
        self._silent.add(key)

    def _note_failure(self, fail: Fail) -> None:
        key = fail.key
        assert key not in self._silent, f"attempt {key} was reported after it was over"
        self._silent.add(key)
        self.failures.append(fail)
