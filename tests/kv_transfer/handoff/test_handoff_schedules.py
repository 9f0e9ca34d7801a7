"""Hand-offs on the simulator's clock: messages take time, are lost, late and doubled, and workers die at any moment.

Schedules are drawn from seeds by the thousand: what `test_handoff_chaos.py` searches by hand-picked steps happens here
in its own time, with deadlines that expire among messages that are under way. Nodes assert what must hold as it
happens; here, that nothing stays held and each request ends once, within a bounded time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import partial

import pytest

from cluster.simulation.clock import VirtualClock
from kv_transfer.messages import Message
from tests.kv_transfer.handoff.handoff_world.gateway import MAX_ATTEMPTS, RESERVE_WAIT_S
from tests.kv_transfer.handoff.handoff_world.model import DECODE, TTL_S, Packet
from tests.kv_transfer.handoff.handoff_world.world import World
from tests.support.thoroughness import examples

NUM_REQUESTS, FAULTS_S, TICK_S = 3, 30.0, 0.25
LATEST_S = TTL_S + 2.0  # a message: everybody has given up by then
MOST_S = MAX_ATTEMPTS * (RESERVE_WAIT_S + 2 * TTL_S + LATEST_S)
"""An attempt has to be reserved for, and its hand-off to begin, and to end, within a deadline each."""
BATCH = 250


class TimedWorld(World):
    """A seed's schedule: how unruly it is, and when what happens."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.clock = VirtualClock()
        self.lose, self.double, self.delay = (rng.choice((0.0, 0.02, 0.2)) for _ in range(3))
        self.pace_s = rng.choice((0.001, 0.05, 1.0))  # of computing, copying and decoding
        self.submitted: dict[str, float] = {}
        self.ended: dict[str, float] = {}
        self.num_deaths = self.num_faults = 0
        super().__init__()
        for _ in range(NUM_REQUESTS):
            self.at(rng.uniform(0, FAULTS_S / 2), self.submit)
        for _ in range(rng.choice((0, 1, 4))):
            self.at(rng.uniform(0, FAULTS_S), rng.choice((self.die, self.break_link, self.leave)))
        self.at(TICK_S, self.tick_on)
        self.at(0.0, self.work)

    @property
    def is_over(self) -> bool:
        idle = not self.packets and not self.things_to_do() and self.receiver_is_idle
        return self.now > FAULTS_S and idle and self.gateway.is_done()

    @property
    def receiver_is_idle(self) -> bool:
        senders = [prefill.sender.next_deadline() for prefill in self.prefills]
        return self.decode.receiver.next_deadline() is None and senders == [None, None]

    def at(self, time_s: float, what: Callable[[], None]) -> None:
        def happen() -> None:
            self.now = self.clock.now
            what()
            self.decode.check()
            for request in self.gateway.requests.values():
                if request.ends:
                    self.ended.setdefault(request.request_id, self.now)

        self.clock.at(time_s, happen)

    def run(self) -> None:
        while self.clock.step():
            assert self.clock.now < FAULTS_S + 4 * MOST_S, "it goes on for ever"

    # --- what happens ---

    def submit(self) -> None:
        self.submitted[self.gateway.submit(self.rng.randint(1, 6))] = self.now

    def post(self, to: str, sender: str, message: Message | None, payload: bytearray | None = None) -> None:
        """The loss of a link is always noticed in the end."""
        faulty = self.now < FAULTS_S and message is not None
        if faulty and self.rng.random() < self.lose:
            self.num_faults += 1
            return
        twice = faulty and self.rng.random() < self.double
        for _ in range(2 if twice else 1):
            late = faulty and self.rng.random() < self.delay
            self.num_faults += late or twice
            packet = Packet(to, sender, message, None if payload is None else bytearray(payload))
            self.packets.append(packet)
            after_s = self.rng.uniform(0, LATEST_S) if late else self.rng.expovariate(1 / 0.002)
            self.at(self.now + after_s, partial(self.arrive, packet))

    def arrive(self, packet: Packet) -> None:
        if packet in self.packets:
            self.deliver(packet)

    def work(self) -> None:
        """One thing that some worker does: a layer, a slab, a copy, an answer's end."""
        copies = [partial(self.decode.finish_copy, running) for running in self.decode.copies]
        ends = [partial(self.decode.finish_decoding, request_id) for request_id in self.decode.running]
        things: list[Callable[[], None]] = [
            *copies,
            *ends,
            *(thing for prefill in self.prefills for thing in prefill.things_to_do()),
        ]
        if things:
            self.rng.choice(things)()
        if not self.is_over:
            pace_s = self.pace_s if self.now < FAULTS_S else 0.001
            self.at(self.now + self.rng.expovariate(1 / (pace_s if things else TICK_S)), self.work)

    def tick_on(self) -> None:
        self.tick()
        if not self.is_over:
            self.at(self.now + TICK_S, self.tick_on)

    def die(self) -> None:
        self.num_deaths += 1
        slot = self.rng.choice((0, 1, None))
        if slot is not None:
            self.kill_prefill(slot, gateway_notices=self.rng.random() < 0.7)
        elif self.decode.epoch <= 2:
            self.kill_decode()

    def break_link(self) -> None:
        self.num_faults += 1
        prefill = self.rng.choice(self.prefills).name
        for to, sender in self.rng.sample([(DECODE, prefill), (prefill, DECODE)], self.rng.randint(1, 2)):
            self.post(to, sender, None)

    def leave(self) -> None:
        if self.gateway.requests:
            self.gateway.cancel(self.rng.choice(list(self.gateway.requests)))


@pytest.mark.parametrize("batch", range(examples(16)))
def test_whatever_is_lost_late_doubled_or_dead_each_request_ends_once_and_nothing_is_left(batch: int) -> None:
    num_finished = num_deaths = num_faults = 0
    for seed in range(batch * BATCH, (batch + 1) * BATCH):
        world = TimedWorld(seed)
        world.run()
        world.check_all_over()
        for request_id, submitted_at in world.submitted.items():
            assert world.ended[request_id] - submitted_at <= MOST_S, f"seed {seed}: {request_id} took too long"
        ends = [request.ends for request in world.gateway.requests.values()]
        if not (world.num_deaths or world.num_faults or ["cancelled"] in ends or world.gateway.num_refused):
            assert ends == [["finished"]] * NUM_REQUESTS, f"seed {seed}: nothing went wrong, and yet: {ends}"
        num_finished += ends.count(["finished"])
        num_deaths += world.num_deaths
        num_faults += world.num_faults
    assert num_finished > 0.5 * NUM_REQUESTS * BATCH
    assert num_deaths > 0.2 * BATCH
    assert num_faults > 2 * BATCH


def test_the_same_seed_is_the_same_schedule() -> None:
    first, again = TimedWorld(5), TimedWorld(5)
    first.run()
    again.run()
    assert first.ended == again.ended
