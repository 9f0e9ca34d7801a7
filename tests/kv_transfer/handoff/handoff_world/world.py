"""Gateway, two prefills and a decode worker on one clock, and the network between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from kv_transfer.handoff.actions import Action
from kv_transfer.handoff.sender_state import KEPT_S
from kv_transfer.messages import Message
from tests.kv_transfer.handoff.handoff_world.decode import DecodeNode
from tests.kv_transfer.handoff.handoff_world.gateway import Gateway
from tests.kv_transfer.handoff.handoff_world.model import DECODE, GATEWAY, TTL_S, Packet
from tests.kv_transfer.handoff.handoff_world.prefill import PrefillNode


class World:
    def __init__(self) -> None:
        self.now = 0.0
        self.packets: list[Packet] = []
        self.decode = DecodeNode(self, epoch=1)
        self.prefills = [PrefillNode(self, f"prefill-{slot}.1") for slot in range(2)]
        self.gateway = Gateway(self)

    def prefill_name(self, slot: int) -> str:
        return self.prefills[slot].name

    def post(self, to: str, sender: str, message: Message | None, payload: bytearray | None = None) -> None:
        self.packets.append(Packet(to, sender, message, payload))

    def deliver(self, packet: Packet) -> None:
        self.packets.remove(packet)
        if packet.to == GATEWAY:
            assert packet.message is not None
            self.gateway.on_message(packet.message)
        elif packet.to == DECODE:
            self.decode.on_packet(packet)
        else:
            for prefill in self.prefills:
                if prefill.name == packet.to:  # else it was for a life that is over
                    prefill.on_packet(packet)

    def duplicate(self, packet: Packet) -> None:
        payload = None if packet.payload is None else bytearray(packet.payload)
        self.post(packet.to, packet.sender, packet.message, payload)

    def on_admitted(self, request_id: str, attempt: int) -> None:
        self.gateway.on_admitted(request_id, attempt)

    def on_finished(self, request_id: str, attempt: int) -> None:
        self.gateway.on_finished(request_id, attempt)

    def on_failed(self, request_id: str, attempt: int) -> None:
        self.gateway.on_failed(request_id, attempt)

    def trace(self, who: str, action: Action) -> None:
        """What must hold is asserted; nobody reads along."""

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def tick(self) -> None:
        self.decode.tick()
        for prefill in self.prefills:
            prefill.tick()
        self.gateway.tick()

    def kill_prefill(self, slot: int, *, gateway_notices: bool) -> None:
        dead = self.prefills[slot].name
        name, life = dead.split(".")
        self.prefills[slot] = PrefillNode(self, f"{name}.{int(life) + 1}")
        self.post(DECODE, dead, None)
        if gateway_notices:
            self.gateway.on_prefill_lost(slot)

    def kill_decode(self) -> None:
        self.decode = DecodeNode(self, epoch=self.decode.epoch + 1)
        for prefill in self.prefills:
            self.post(prefill.name, DECODE, None)
        self.gateway.on_decode_lost()

    def things_to_do(self) -> list[Callable[[], None]]:
        """All that would happen by itself if nothing went wrong and no time passed."""
        copies = [partial(self.decode.finish_copy, running) for running in self.decode.copies]
        return [*self.things_to_do_but_copying(), *copies]

    def things_to_do_but_copying(self) -> list[Callable[[], None]]:
        things: list[Callable[[], None]] = [partial(self.deliver, packet) for packet in self.packets]
        things += [partial(self.decode.finish_decoding, request_id) for request_id in self.decode.running]
        for prefill in self.prefills:
            things += prefill.things_to_do()
        return things

    def payloads(self) -> list[bytearray]:
        """All slabs that are under way or being copied."""
        under_way = [packet.payload for packet in self.packets if packet.payload is not None]
        return under_way + [running.payload for running in self.decode.copies]

    def calm_down(self) -> None:
        """No more faults: all happens that still can, and time passes whenever nothing else does."""
        idle_s = 0.0
        while idle_s < max(2 * TTL_S, KEPT_S + 1.0) or not self.gateway.is_done():
            things = self.things_to_do()
            if things:
                things[0]()
                self.decode.check()
                idle_s = 0.0
            else:
                assert idle_s < 20 * TTL_S, "the gateway was left waiting"
                self.advance(1.0)
                idle_s += 1.0
                self.tick()

    def check_all_over(self) -> None:
        """Nothing is held anywhere, and every request is in exactly one terminal state."""
        self.decode.check_idle()
        for prefill in self.prefills:
            prefill.check_idle()
        for request in self.gateway.requests.values():
            assert len(request.ends) == 1, f"{request.request_id} ended {len(request.ends)} times: {request.ends}"
