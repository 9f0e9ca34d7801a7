"""Links that simulated workers share, against arithmetic by hand; and what that does to requests."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from cluster.simulation.clock import VirtualClock
from cluster.simulation.routers.base import PlacedRequest
from cluster.simulation.routers.baselines import QueueLengthRouter, RoundRobin
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.workers.links import Flow, Network, NetworkLink
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.workload.traces import TraceRequest
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.scheduling import Place

LINK = NetworkLink(bytes_per_s=1000.0, token_bytes=10, num_layers=5)
COST = StepCost(base_s=0.004, prefill_token_s=3e-5, prefill_pair_s=1e-9, decode_s=2e-5, context_token_s=4e-8)
TOKEN_BYTES, NUM_LAYERS, BYTES_PER_S = 131_072, 32, 50e9
LAST_LAYER_S = TOKEN_BYTES / NUM_LAYERS / BYTES_PER_S  # of a token, on a link of its own
SHAPE = WorkerShape(
    cost=COST,
    kv_tokens=64_000,
    token_budget=1024,
    block_size=32,
    handoff_token_s=LAST_LAYER_S,
    link=NetworkLink(bytes_per_s=BYTES_PER_S, token_bytes=TOKEN_BYTES, num_layers=NUM_LAYERS),
)
CONFIG = SimulationConfig(num_prefill=2, num_decode=1, prefill=SHAPE, decode=SHAPE, message_s=0.001)
WORKLOAD = Workload(
    requests_per_s=6.0, num_requests=80, burstiness=3.0, turn=LogNormal(median=900, sigma=1.0, most=6000)
)


def unshared(shape: WorkerShape) -> WorkerShape:
    return replace(shape, link=None)


def slower(factor: float) -> SimulationConfig:
    assert SHAPE.link is not None
    shape = replace(SHAPE, link=replace(SHAPE.link, bytes_per_s=BYTES_PER_S / factor))
    return replace(CONFIG, prefill=shape, decode=shape)


class World:
    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.network = Network(self.clock)
        self.ends: dict[str, float] = {}

    def open(self, name: str, *, out: NetworkLink = LINK, into: NetworkLink = LINK) -> Flow:
        return self.network.open(name[0], out, name[1], into)

    def send(self, name: str, num_bytes: float) -> None:
        flow = self.open(name)
        flow.add(num_bytes)
        flow.close(lambda: self.ends.__setitem__(name, self.clock.now))

    def run(self) -> dict[str, float]:
        while self.clock.step():
            pass
        return self.ends


def test_who_comes_together_shares_and_who_is_left_has_all() -> None:
    world = World()
    world.send("ax", 1000)
    world.send("bx", 3000)
    world.send("cy", 1000)
    assert world.run() == pytest.approx({"ax": 2.0, "bx": 4.0, "cy": 1.0})


def test_what_one_cannot_use_is_the_others() -> None:
    narrow = World()
    flow = narrow.open("ax", into=replace(LINK, bytes_per_s=100.0))
    flow.add(100)
    flow.close(lambda: narrow.ends.__setitem__("ax", narrow.clock.now))
    narrow.send("ay", 900)
    assert narrow.run() == pytest.approx({"ax": 1.0, "ay": 1.0}), "y gets the nine tenths that x cannot take"


def test_what_becomes_ready_slowly_is_sent_as_it_does() -> None:
    world = World()
    flow = world.open("ax")
    flow.add_over(800, 2.0)
    world.send("ay", 900)  # at 600 bytes/s, since the other one has only 400
    world.clock.at(2.0, lambda: flow.add(200))
    world.clock.at(2.0, lambda: flow.close(lambda: world.ends.__setitem__("ax", world.clock.now)))
    assert world.run() == pytest.approx({"ay": 1.5, "ax": 2.2})


def test_a_flow_that_nobody_wants_any_more_leaves_its_share() -> None:
    world = World()
    flow = world.open("ax")
    flow.add(1e6)
    world.send("bx", 1000)
    world.clock.at(1.0, lambda: flow.close(None))
    assert world.run() == pytest.approx({"bx": 1.5})


def test_every_byte_arrives_and_no_link_carries_more_than_it_can() -> None:
    for seed in range(40):
        rng, world = random.Random(seed), World()
        sizes: dict[str, float] = {}

        def send(name: str, num_bytes: float, world: World = world) -> Callable[[], None]:
            return lambda: world.send(name, num_bytes)

        for sender in "abc":
            for receiver in "xyz":
                sizes[sender + receiver] = rng.uniform(1, 3000)
                world.clock.at(rng.uniform(0, 5), send(sender + receiver, sizes[sender + receiver]))
        ends = world.run()
        assert ends.keys() == sizes.keys()
        for end in "abcxyz":
            through = [name for name in sizes if end in name]
            assert max(ends[name] for name in through) >= sum(sizes[name] for name in through) / LINK.bytes_per_s - 1e-6
        assert max(ends.values()) <= 5 + sum(sizes.values()) / LINK.bytes_per_s


# --- workers ---


class ToTheFirst(QueueLengthRouter):
    """Each prompt on a worker of its own; all are decoded by the first of those that decode."""

    def choose(self, query: Place, now: float) -> PlacedRequest:
        computing = self.prefills or self.decodes[1:]
        return PlacedRequest(query, computing[int(query.request_id[1:]) % len(computing)], self.decodes[0])


def one(prompt_tokens: int, output_tokens: int, request_id: str = "r0") -> TraceRequest:
    return TraceRequest(request_id=request_id, arrival_s=1.0, prompt_tokens=prompt_tokens, output_tokens=output_tokens)


def first_gaps(config: SimulationConfig, requests: list[TraceRequest]) -> list[float]:
    return [record.gaps.longest_s for record in simulate(config, requests, ToTheFirst()).records]


def test_alone_a_hand_off_takes_what_it_takes_without_sharing() -> None:
    alone = replace(CONFIG, prefill=unshared(SHAPE), decode=unshared(SHAPE))
    assert first_gaps(CONFIG, [one(2500, 9)]) == pytest.approx(first_gaps(alone, [one(2500, 9)]), rel=1e-6)


@pytest.mark.parametrize("num_prefill", [2, 0])
def test_two_that_come_to_one_worker_together_take_twice_as_long(num_prefill: int) -> None:
    config = replace(slower(10), num_prefill=num_prefill, num_decode=1 if num_prefill else 3)
    [alone] = first_gaps(config, [one(1000, 5)])
    together = first_gaps(config, [one(1000, 5), one(1000, 5, "r1")])
    # The other layers are hidden: 131 MB in 34 ms are less than a link of 5 GB/s carries, of two together they are not.
    num_bytes = TOKEN_BYTES * 1000
    step_s = COST.base_s + 3e-2 + 1e-9 * 1000 * 1001 / 2
    assert num_bytes / step_s < BYTES_PER_S / 10 < 2 * num_bytes / step_s
    late_s = 2 * num_bytes / (BYTES_PER_S / 10) - step_s
    assert alone == pytest.approx(0.002 + 10 * 1000 * LAST_LAYER_S + COST.base_s + 2e-5 + 1001 * 4e-8, rel=1e-6)
    both_decode_s = COST.base_s + 2 * (2e-5 + 1001 * 4e-8)
    assert together == pytest.approx([0.002 + late_s + both_decode_s] * 2, rel=1e-6)


def test_a_link_that_is_slower_than_prompts_are_computed_holds_up_hand_offs_and_what_follows() -> None:
    [record] = simulate(slower(100), [one(4096, 3)], ToTheFirst()).records
    sent_s = 100 * 4096 * TOKEN_BYTES / BYTES_PER_S
    assert record.gaps.longest_s > 0.8 * sent_s > 0.5
    assert record.ttft_s is not None
    assert record.ttft_s < 0.2, "its first token waits for no bytes"


def test_what_is_pulled_is_sent_as_a_whole_and_what_lands_is_sent_before() -> None:
    pulled = replace(slower(10), reserves_late=True, prefill=replace(slower(10).prefill, pulled_token_s=1.0))
    landing = replace(slower(10), reserves_late=True)
    whole_s = 10 * 1000 * TOKEN_BYTES / BYTES_PER_S
    [late], [early] = (first_gaps(config, [one(1000, 5)]) for config in (pulled, landing))
    assert late - early == pytest.approx(whole_s * (NUM_LAYERS - 1) / NUM_LAYERS, rel=1e-6)


def test_all_are_served_over_narrow_links_the_same_way_each_time() -> None:
    config = replace(slower(40), num_decode=2, decode=replace(slower(40).decode, kv_tokens=20_000))
    for router in (LegatoRouter, RoundRobin):
        results = [simulate(config, draw_requests(WORKLOAD, 3), router()) for _ in range(2)]
        assert results[0] == results[1]
        assert sum(record.end_s is not None for record in results[0].records) > 0.9 * WORKLOAD.num_requests


def test_a_decode_worker_s_prompts_go_on_while_bytes_travel_and_single_tokens_send_none() -> None:
    [single] = simulate(slower(1000), [one(2500, 1)], ToTheFirst()).records
    assert single.end_s == single.first_token_s


def test_a_neighbour_s_prefix_is_fetched_over_the_link_where_that_is_faster() -> None:
    """The second prefill worker has not seen the prompt that the first one computed."""
    host_token_s = 1e-6
    tiers = replace(
        SHAPE, host_kv_tokens=64_000, host_token_s=host_token_s, asks_neighbours=True, link=slower(10).prefill.link
    )
    config = replace(CONFIG, prefill=tiers, decode=replace(tiers, asks_neighbours=False))
    turns = [
        TraceRequest(
            request_id=f"r{n}",
            arrival_s=5.0 * n,
            prompt_tokens=2048,
            output_tokens=3,
            content=(7,),
            content_tokens=2048,
        )
        for n in range(2)
    ]
    found = 2048 - 32
    alone_s = COST.prefill_s(2048, 0, 1024)
    computed_s = COST.prefill_s(2048 - found, found)
    fetched_s = found * TOKEN_BYTES / (BYTES_PER_S / 10)
    first, second = simulate(config, turns, RoundRobin()).records
    assert (first.prefill, second.prefill) == ("prefill-0", "prefill-1")
    assert (first.cached_tokens, second.cached_tokens) == (0, found)
    assert first.ttft_s == pytest.approx(0.006 + alone_s, rel=1e-6)
    assert second.ttft_s == pytest.approx(0.006 + fetched_s + found * host_token_s + computed_s, rel=1e-6)
    narrow = replace(tiers, link=slower(100).prefill.link)
    records = simulate(replace(config, prefill=narrow, decode=narrow), turns, RoundRobin()).records
    assert [record.cached_tokens for record in records] == [0, 0], "computing is faster"
    with pytest.raises(ValueError, match="over links into host memory"):
        replace(tiers, host_kv_tokens=0)


def test_links_are_all_workers_or_nobody_s() -> None:
    with pytest.raises(ValueError, match="either all workers have a link"):
        replace(CONFIG, decode=unshared(SHAPE))
    with pytest.raises(ValueError, match="positive"):
        replace(LINK, bytes_per_s=0.0)
