"""Hand-offs under drops, duplicates, delays, reordering, cancels, deaths, damage and expiry, at every step.

What must hold is asserted by the world's nodes (see `tests/kv_transfer/handoff/handoff_world`) as things happen, and at
the end of each run, when the network has calmed down and the clocks have run out.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.kv_transfer.handoff.handoff_world.model import Packet
from tests.kv_transfer.handoff.handoff_world.world import World
from tests.support.thoroughness import examples

MAX_REQUESTS = 4
some = st.integers(min_value=0, max_value=2**16)
"""Picks one of however many there are."""


class HandoffChaos(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = World()
        self.harmed = False  # nothing but delay, reordering and repetition has happened so far

    @initialize(
        num_prompt=st.integers(1, 6),
        repeat=st.sampled_from([0.0, 0.3]),
        lose=st.sampled_from([0.0, 0.0, 0.05]),
        slow=st.booleans(),
    )
    def set_out(self, num_prompt: int, repeat: float, lose: float, slow: bool) -> None:
        """How unruly the network is in this run, besides keeping no order, and whether copies end only when told."""
        self.repeat, self.lose, self.copies_are_slow = repeat, lose, slow
        self.world.gateway.submit(num_prompt)

    @precondition(lambda self: len(self.world.gateway.requests) < MAX_REQUESTS)
    @rule(num_prompt=st.integers(1, 6))
    def submit(self, num_prompt: int) -> None:
        self.world.gateway.submit(num_prompt)

    @precondition(lambda self: not self.copies_are_slow)
    @rule(seed=some, num_steps=st.integers(1, 60))
    def go_on(self, seed: int, num_steps: int) -> None:
        """The ordinary course of things, but in any order."""
        self._go_on(seed, num_steps, self.world.things_to_do)

    @rule(seed=some, num_steps=st.integers(1, 60))
    def go_on_while_copies_are_slow(self, seed: int, num_steps: int) -> None:
        self._go_on(seed, num_steps, self.world.things_to_do_but_copying)

    def _go_on(self, seed: int, num_steps: int, things_to_do: Callable[[], list[Callable[[], None]]]) -> None:
        order = random.Random(seed)
        for _ in range(num_steps):
            if self.world.packets and order.random() < self.repeat:
                self.world.duplicate(order.choice(self.world.packets))
            if self.world.packets and order.random() < self.lose:
                self._lose(order.choice(self.world.packets))
            things = things_to_do()
            if things:
                order.choice(things)()

    @precondition(lambda self: self.world.packets)
    @rule(pick=some)
    def deliver(self, pick: int) -> None:
        self.world.deliver(self._packet(pick))

    @precondition(lambda self: self.world.packets)
    @rule(pick=some)
    def drop(self, pick: int) -> None:
        self._lose(self._packet(pick))

    @precondition(lambda self: self.world.packets)
    @rule(pick=some)
    def duplicate(self, pick: int) -> None:
        self.world.duplicate(self._packet(pick))

    @precondition(lambda self: self.world.payloads())
    @rule(pick=some, byte=some)
    def scribble(self, pick: int, byte: int) -> None:
        """A slab is reused, or damaged, under way or while it is being copied."""
        self.harmed = True
        payloads = self.world.payloads()
        payload = payloads[pick % len(payloads)]
        payload[byte % len(payload)] ^= 1 + byte % 255

    @precondition(lambda self: self.world.decode.copies)
    @rule(pick=some)
    def finish_copy(self, pick: int) -> None:
        copies = self.world.decode.copies
        self.world.decode.finish_copy(copies[pick % len(copies)])

    @precondition(lambda self: self.world.decode.copies or any(p.slabs for p in self.world.prefills))
    @rule(pick=some)
    def refuse_to_move(self, pick: int) -> None:
        """A copy fails at decode, or a slab does not get away at prefill."""
        self.harmed = True
        failures: list[Callable[[], None]] = [partial(self.world.decode.fail_copy, c) for c in self.world.decode.copies]
        for prefill in self.world.prefills:
            failures += [partial(prefill.fail_slab, index) for index in range(len(prefill.slabs))]
        failures[pick % len(failures)]()

    @rule(seconds=st.sampled_from([0.5, 2.0, 5.0, 11.9, 12.0, 13.0]), ticks=st.booleans())
    def advance(self, seconds: float, ticks: bool) -> None:
        self.harmed = True
        self.world.advance(seconds)
        if ticks:
            self.world.tick()

    @rule(pick=some)
    def cancel(self, pick: int) -> None:
        requests = self.world.gateway.requests
        self.harmed = True
        self.world.gateway.cancel(f"request-{pick % len(requests)}")

    @rule(slot=st.integers(0, 1), gateway_notices=st.booleans())
    def kill_prefill(self, slot: int, gateway_notices: bool) -> None:
        self.harmed = True
        self.world.kill_prefill(slot, gateway_notices=gateway_notices)

    @precondition(lambda self: self.world.decode.epoch <= 2)
    @rule()
    def kill_decode(self) -> None:
        self.harmed = True
        self.world.kill_decode()

    @rule(slot=st.integers(0, 1), decode_notices=st.booleans(), prefill_notices=st.booleans())
    def lose_link(self, slot: int, decode_notices: bool, prefill_notices: bool) -> None:
        """Each end notices in its own time, or has reconnected before it could."""
        self.harmed = True
        prefill = self.world.prefills[slot].name
        if decode_notices:
            self.world.post("decode", prefill, None)
        if prefill_notices:
            self.world.post(prefill, "decode", None)

    @invariant()
    def blocks_are_accounted_for(self) -> None:
        self.world.decode.check()

    def teardown(self) -> None:
        self.world.calm_down()
        self.world.check_all_over()
        if not self.harmed and not self.world.gateway.num_refused:
            ends = [request.ends for request in self.world.gateway.requests.values()]
            assert ends == [["finished"]] * len(ends), f"nothing went wrong, and yet: {ends}"

    def _lose(self, packet: Packet) -> None:
        if packet.message is not None:  # the loss of a link is always noticed in the end
            self.harmed = True
            self.world.packets.remove(packet)

    def _packet(self, pick: int) -> Packet:
        return self.world.packets[pick % len(self.world.packets)]


TestHandoffChaos = HandoffChaos.TestCase
TestHandoffChaos.settings = settings(max_examples=examples(1000), stateful_step_count=40, deadline=None)
