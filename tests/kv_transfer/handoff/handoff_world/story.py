"""Runs one story of the hand-off, command by command, and says what each of them did.

The state machines, decode's block pool, the bytes and their digests are real, and the nodes around them assert what
must hold (see `decode` and `prefill` here). Messages stay under way until the story says what becomes of them.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.sequence import SequenceKey
from kv_transfer.handoff.actions import Action, Admit, Copy, Drop, Fail, ReleaseLease, ReleaseSource, Send, SendSlab
from kv_transfer.messages import Message
from kv_transfer.messages.handoff import Abort, Commit, KeepAlive, Rejected, SlabHeader, Verified
from kv_transfer.messages.requests import Reserved, Ticket
from tests.kv_transfer.handoff.handoff_world.decode import DecodeNode
from tests.kv_transfer.handoff.handoff_world.model import DECODE, NUM_LAYERS, Packet, request_spec
from tests.kv_transfer.handoff.handoff_world.prefill import CHUNK_TOKENS, PrefillNode


class Story:
    """One decode worker, `prefill-a` and `prefill-b`. `run(command)` gives the lines of what happened.

    Commands (R: a request, its attempt is 1 unless `attempt=` says otherwise; P: a prefill):

        world layers=2 chunk=3      sizes; the first command, if at all
        reserve R tokens=4          the gateway asks decode for room; again with a newer attempt, it renews
        start R at P                the gateway hands the ticket to a prefill
        keep R at P                 it has P compute the prompt while decode has no room; `start` follows, or `cancel`
        found R at P tokens=2       the first tokens' KV is in P's prefix cache
        compute R at P              one layer of the next chunk; with the last one, the first token
        send P                      the oldest slab that P has to fill is filled and sent
        fail send P                 it cannot be
        deliver [WHAT]              the oldest message under way (a Slab, Commit, ...) arrives; `all`: until there is
        none lose WHAT, repeat WHAT      it never arrives; it will arrive twice
        delay WHAT                  it will arrive after all that is under way now
        damage Slab                 a byte of it changes
        copy, fail copy             the oldest copy at decode ends; `copy all`
        cancel R at WORKER          the gateway wants no more of it
        cut P, kill P, kill decode  the link, or one end of it, is gone, and the other end notices
        lose-sight P                decode alone notices that its link to P is gone
        wait 12s                    time passes, and who has a deadline acts
        decode R                    it is decoded to its end
        under way                   what has not arrived
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.packets: list[Packet] = []
        self._lines: list[str] = []
        self._num_layers, self._chunk_tokens = NUM_LAYERS, CHUNK_TOKENS
        self._tickets: dict[SequenceKey, Ticket] = {}
        self._num_tokens: dict[str, int] = {}
        self._set_up()

    def _set_up(self) -> None:
        self.decode = DecodeNode(self, epoch=1, num_layers=self._num_layers)
        self.prefills = {name: self._prefill(name) for name in ("prefill-a", "prefill-b")}

    def _prefill(self, name: str) -> PrefillNode:
        return PrefillNode(self, name, num_layers=self._num_layers, chunk_tokens=self._chunk_tokens)

    def run(self, command: str) -> list[str]:
        words = command.split()
        options = dict(word.split("=") for word in words if "=" in word)
        plain = [word for word in words if "=" not in word]
        for length in (2, 1):
            name = "do_" + "_".join(plain[:length]).replace("-", "_")
            handler: Callable[..., None] | None = getattr(self, name, None)
            if handler is not None:
                break
        assert handler is not None, f"no such command: {command}"
        before = self._states()
        self._lines = []
        handler(*(word for word in plain[length:] if word != "at"), **options)
        self.decode.check()
        after = self._states()
        for who in before | after:
            if before.get(who) != after.get(who):
                self._say(f"{who} is {after.get(who, 'forgotten' if who.startswith(DECODE) else 'over')}")
        return self._lines or ["nothing happens"]

    def _states(self) -> dict[str, str]:
        states = {}
        for request_id in self._num_tokens:
            state = self.decode.receiver.state(request_id)
            if state is not None:
                states[f"decode: {request_id}"] = state.name
        for name, prefill in self.prefills.items():
            for key in prefill.seen:
                sending = prefill.sender.state(key)
                if sending is not None:
                    states[f"{name}: {_of(key)}"] = sending.name
        return states

    # --- what the nodes need (`Surroundings`) ---

    def post(self, to: str, sender: str, message: Message | None, payload: bytearray | None = None) -> None:
        self.packets.append(Packet(to, sender, message, payload))
        if isinstance(message, SlabHeader):
            self._say(f"{sender} → {to}: {_message(message)}")

    def on_admitted(self, request_id: str, attempt: int) -> None: ...

    def on_finished(self, request_id: str, attempt: int) -> None: ...

    def on_failed(self, request_id: str, attempt: int) -> None: ...

    def trace(self, who: str, action: Action) -> None:
        self._say(f"{who} {_action(action)}")

    def _say(self, line: str) -> None:
        self._lines.append(line)

    # --- commands ---

    def do_world(self, layers: str = str(NUM_LAYERS), chunk: str = str(CHUNK_TOKENS)) -> None:
        self._num_layers, self._chunk_tokens = int(layers), int(chunk)
        self._set_up()
        pool = self.decode.pool
        self._say(f"{layers} layers, chunks of {chunk} tokens, {pool.num_available} blocks of 2 tokens at decode")

    def do_reserve(self, request_id: str, tokens: str = "", attempt: str = "1") -> None:
        if tokens:
            self._num_tokens[request_id] = int(tokens)
        request = request_spec(request_id, int(attempt), self._num_tokens[request_id])
        answer = self.decode.reserve(request)
        if not isinstance(answer, Reserved):
            self._say(f"decode refuses: {answer.reason}")
            return
        ticket = self._tickets[SequenceKey(request_id, int(attempt))] = answer.ticket
        blocks = len(self.decode.leases[ticket.fence.lease].blocks)
        fence = ticket.fence
        self._say(
            f"decode issues a ticket for {ticket.num_tokens} tokens: epoch {fence.epoch}, lease {fence.lease}"
            f" ({blocks} blocks), attempt {fence.generation}"
        )

    def do_start(self, request_id: str, prefill: str, attempt: str = "1") -> None:
        request = request_spec(request_id, int(attempt), self._num_tokens[request_id])
        self.prefills[prefill].start(request, self._tickets[SequenceKey(request_id, int(attempt))])

    def do_keep(self, request_id: str, prefill: str, attempt: str = "1", tokens: str = "") -> None:
        if tokens:
            self._num_tokens[request_id] = int(tokens)
        self.prefills[prefill].start(request_spec(request_id, int(attempt), self._num_tokens[request_id]), None)

    def do_found(self, request_id: str, prefill: str, tokens: str, attempt: str = "1") -> None:
        self.prefills[prefill].find_prefix(SequenceKey(request_id, int(attempt)), int(tokens))

    def do_compute(self, request_id: str, prefill: str, attempt: str = "1") -> None:
        self.prefills[prefill].compute(SequenceKey(request_id, int(attempt)))

    def do_send(self, prefill: str) -> None:
        self.prefills[prefill].send_slab(0)

    def do_fail_send(self, prefill: str) -> None:
        self.prefills[prefill].fail_slab(0)

    def do_deliver(self, what: str = "") -> None:
        if what != "all":
            self._deliver(self._packet(what))
            return
        while self.packets:
            self._deliver(self.packets[0])

    def do_lose(self, what: str) -> None:
        packet = self._packet(what)
        self.packets.remove(packet)
        self._say(f"lost: {_packet(packet)}")

    def do_repeat(self, what: str) -> None:
        packet = self._packet(what)
        again = None if packet.payload is None else bytearray(packet.payload)
        self.packets.append(Packet(packet.to, packet.sender, packet.message, again))
        self._say(f"twice under way: {_packet(packet)}")

    def do_delay(self, what: str) -> None:
        packet = self._packet(what)
        self.packets.remove(packet)
        self.packets.append(packet)
        self._say(f"delayed: {_packet(packet)}")

    def do_damage(self, what: str) -> None:
        packet = self._packet(what)
        assert packet.payload is not None
        packet.payload[0] ^= 1
        self._say(f"damaged: {_packet(packet)}")

    def do_copy(self, which: str = "") -> None:
        self._copy()
        while which == "all" and self.decode.copies:
            self._copy()

    def _copy(self) -> None:
        running = self.decode.copies[0]
        header = running.copy.header
        tokens = _tokens(header.token_start, header.num_tokens)
        self._say(f"copied: layer {header.layer}, {tokens} of {header.request_id}/{header.fence.generation}")
        self.decode.finish_copy(running)

    def do_fail_copy(self) -> None:
        self.decode.fail_copy(self.decode.copies[0])

    def do_cancel(self, request_id: str, worker: str, attempt: str = "1") -> None:
        node = self.decode if worker == DECODE else self.prefills[worker]
        node.cancel(request_id, int(attempt))

    def do_cut(self, prefill: str) -> None:
        self.packets = [packet for packet in self.packets if prefill not in (packet.to, packet.sender)]
        self.decode.on_packet(Packet(DECODE, prefill, None))
        self.prefills[prefill].on_packet(Packet(prefill, DECODE, None))

    def do_lose_sight(self, prefill: str) -> None:
        self.decode.on_packet(Packet(DECODE, prefill, None))

    def do_kill(self, worker: str) -> None:
        if worker == DECODE:
            self.packets = [packet for packet in self.packets if packet.sender != DECODE]
            self.decode = DecodeNode(self, epoch=self.decode.epoch + 1, num_layers=self._num_layers)
            for name, prefill in self.prefills.items():
                prefill.on_packet(Packet(name, DECODE, None))
        else:
            self.packets = [packet for packet in self.packets if packet.to != worker]
            self.prefills[worker] = self._prefill(worker)
            self.decode.on_packet(Packet(DECODE, worker, None))

    def do_wait(self, seconds: str) -> None:
        self.now += float(seconds.removesuffix("s"))
        self.decode.tick()
        for prefill in self.prefills.values():
            prefill.tick()

    def do_decode(self, request_id: str) -> None:
        self.decode.finish_decoding(request_id)
        self._say(f"decode has decoded {request_id} on its own KV; {self.decode.pool.num_available} blocks are free")

    def do_under_way(self) -> None:
        self._lines += [_packet(packet) for packet in self.packets]

    # --- messages under way ---

    def _packet(self, what: str) -> Packet:
        """The oldest whose name that is; without a name, the oldest."""
        return next(packet for packet in self.packets if _message(packet.message).startswith(what))

    def _deliver(self, packet: Packet) -> None:
        self.packets.remove(packet)
        self._say(f"[{_packet(packet)}]")
        node = self.decode if packet.to == DECODE else self.prefills[packet.to]
        node.on_packet(packet)


# --- in words ---


def _of(key: SequenceKey) -> str:
    return f"{key.request_id}/{key.attempt}"


def _packet(packet: Packet) -> str:
    return f"{packet.sender} → {packet.to}: {_message(packet.message)}"


def _tokens(start: int, count: int) -> str:
    return f"tokens [{start}, {start + count})"


def _message(message: Message | None) -> str:
    match message:
        case SlabHeader():
            tokens = _tokens(message.token_start, message.num_tokens)
            return f"Slab of {message.request_id}/{message.fence.generation}, layer {message.layer}, {tokens}"
        case Commit():
            return f"Commit of {message.request_id}/{message.fence.generation}, first token {message.first_token}"
        case Verified():
            return f"Verified {message.request_id}/{message.fence.generation}"
        case Rejected():
            return f"Rejected {message.request_id}/{message.fence.generation}: {message.reason}"
        case Abort():
            return f"Abort of {message.request_id}/{message.fence.generation}: {message.reason}"
        case KeepAlive():
            return "KeepAlive of " + ", ".join(f"{name}/{fence.generation}" for name, fence in message.fences)
    raise AssertionError(f"{message} has no place in a story")


def _action(action: Action) -> str:
    match action:
        case Send():
            return f"→ {action.peer_id}: {_message(action.message)}"
        case Fail():
            return f"tells the gateway that {_of(action.key)} failed: {action.reason}"
        case Copy():
            header = action.header
            tokens = _tokens(header.token_start, header.num_tokens)
            return f"copies layer {header.layer}, {tokens} of {header.request_id}/{header.fence.generation}"
        case Drop():
            return f"drops delivery {action.delivery_id}"
        case Admit():
            return f"admits {action.request.request_id}/{action.request.attempt}"
        case ReleaseLease():
            return f"gives lease {action.lease_id} back"
        case SendSlab():
            tokens = _tokens(action.token_start, action.num_tokens)
            return f"has a slab to fill: {_of(action.key)}, layer {action.layer}, {tokens}"
        case ReleaseSource():
            return f"releases the source blocks of {_of(action.key)}"
