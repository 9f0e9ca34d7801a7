"""Each baseline's rule in situations in which its published formula says who is chosen."""

from __future__ import annotations

from collections import Counter
from typing import TypeVar

import pytest

from cluster.simulation.arguments import DEVICE_NAMES, MODEL_NAMES, ROUTER_NAMES
from cluster.simulation.command import DEVICES, MODELS, ROUTERS
from cluster.simulation.routers.base import Baseline, Member, PlacedRequest
from cluster.simulation.routers.baselines import (
    CacheAware,
    Colocated,
    DistServe,
    Dynamo,
    LeastOutstandingTokens,
    LlmdHeadroom,
    Mooncake,
    RoundRobin,
)
from cluster.simulation.simulate import SimulationConfig, simulate
from cluster.simulation.workers.worker import WorkerShape
from cluster.simulation.workload.synthetic import Workload, draw_requests
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.blocks import BlockChange, BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Place, Placement, Unplaceable
from kv_transfer.worker.cost_report import stated_report
from tests.support.clusters.worker_reports import worker_info, worker_snapshot

BLOCK = 16
COST = StepCost(base_s=0.01, prefill_token_s=1e-4, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=1e-6)
HASHES = tuple(bytes([i]) * 16 for i in range(1, 63))


_Router = TypeVar("_Router", bound=Baseline)


def fleet(router: _Router, num_prefill: int = 2, num_decode: int = 2) -> _Router:
    for index in range(num_prefill):
        _register(router, f"prefill-{index}")
    for index in range(num_decode):
        _register(router, f"decode-{index}")
    return router


def _register(router: Baseline, worker_id: str) -> None:
    info = worker_info(worker_id, max_model_len=10**6, num_blocks=10**5, block_size=BLOCK, chunk_tokens=10**6)
    router.register(info, worker_snapshot(worker_id, blocks_available=0, step_cost=stated_report(COST)), 0.0)
    whole = BlockIndexSnapshot(worker_id=worker_id, epoch=1, next_id=0, part=0, num_parts=1, tier="device", hashes=b"")
    router.update_blocks(whole, 0.0)


def caches(router: Baseline, worker_id: str, num_blocks: int) -> None:
    change = BlockChange(tier="device", stored=b"".join(HASHES[:num_blocks]), removed=b"")
    router.update_blocks(BlockEvents(worker_id=worker_id, epoch=1, first_id=0, changes=[change]), 0.0)


def query(
    request_id: str, num_tokens: int = 1000, *, new: int = 100, ttft_s: float | None = 1.0, tpot_s: float | None = 0.1
) -> Place:
    return Place(
        request_id=request_id,
        attempt=0,
        num_tokens=num_tokens,
        max_new_tokens=new,
        ttft_s=ttft_s,
        tpot_s=tpot_s,
        prefix_hashes=b"".join(HASHES[: (num_tokens - 1) // BLOCK]),
    )


def places(router: Baseline, asked: Place, now: float = 0.0) -> tuple[str | None, str]:
    answer = router.place(asked, now)
    assert isinstance(answer, Placement), answer
    return answer.prefill, answer.decode


def test_round_robin_takes_turns() -> None:
    router = fleet(RoundRobin(), 2, 3)
    assert [places(router, query(f"r{i}"))[1] for i in range(4)] == ["decode-0", "decode-1", "decode-2", "decode-0"]
    assert places(fleet(RoundRobin(), 0, 1), query("r"))[0] is None


def test_least_outstanding_tokens_forgets_what_is_done() -> None:
    router = fleet(LeastOutstandingTokens())
    assert places(router, query("a", 5000)) == ("prefill-0", "decode-0")
    assert places(router, query("b", 100)) == ("prefill-1", "decode-1")
    assert places(router, query("c", 100)) == ("prefill-1", "decode-1")
    router.first_token("a", 1.0)
    assert places(router, query("d", 100)) == ("prefill-0", "decode-1")
    router.ended("a", 2.0, 100)
    assert places(router, query("e", 100))[1] == "decode-0"


def test_distserve_counts_requests_and_not_tokens() -> None:
    router = fleet(DistServe())
    assert places(router, query("a", 5000)) == ("prefill-0", "decode-0")
    assert places(router, query("b", 10)) == ("prefill-1", "decode-1")
    assert places(router, query("c", 10)) == ("prefill-0", "decode-0")


def test_colocated_uses_decode_workers_alone() -> None:
    router = fleet(Colocated(), 0, 2)
    assert [places(router, query(f"r{i}", 1000 - i)) for i in range(2)] == [(None, "decode-0"), (None, "decode-1")]


@pytest.mark.parametrize(("num_cached", "expected"), [(0, "prefill-1"), (62, "prefill-0")])
def test_dynamo_weighs_overlap_against_the_queue(num_cached: int, expected: str) -> None:
    """On prefill-0 wait 640 tokens: 40 blocks to prefill, against an overlap of `num_cached`."""
    router = fleet(Dynamo())
    places(router, query("a", 640))
    caches(router, "prefill-0", num_cached)
    assert places(router, query("b", 1000))[0] == expected


def test_dynamo_decides_on_decode_by_active_blocks_alone() -> None:
    router = fleet(Dynamo())
    caches(router, "decode-0", 62)
    assert places(router, query("a", 1000))[1] == "decode-0"
    router.ended("a", 1.0, 10)
    assert places(router, query("b", 1000))[1] == "decode-0"


def test_dynamo_counts_a_block_that_several_requests_share_once() -> None:
    """Both prompts begin with the same 61 blocks; those of 320 tokens on decode-1 are part of neither's worker."""
    router = fleet(Dynamo())
    assert places(router, query("a", 980))[1] == "decode-0"
    assert places(router, query("b", 320))[1] == "decode-1"
    # 62 blocks are active on decode-0 and 2 would be new there; on decode-1 20 are, and 43 would be new.
    assert places(router, query("c", 980))[1] == "decode-0"
    router.ended("c", 1.0, 10)
    assert places(router, query("d", 980))[1] == "decode-0"
    router.ended("a", 2.0, 10)
    router.ended("d", 2.0, 10)
    assert places(router, query("e", 320))[1] == "decode-0"


def test_dynamo_turns_away_where_all_are_busy() -> None:
    router = fleet(Dynamo(busy_tokens=1500))
    for request_id in ("a", "b", "c", "d"):
        places(router, query(request_id, 1000))
    assert isinstance(router.place(query("e", 100), 0.0), Unplaceable)
    router.first_token("a", 1.0)
    assert places(router, query("f", 100))[0] == "prefill-0"
    full = fleet(Dynamo(busy_blocks=0.001), 0, 1)  # of 100,000 blocks
    assert places(full, query("a", 1700))
    assert isinstance(full.place(query("b", 100), 0.0), Unplaceable)


def test_cache_aware_follows_a_prefix_or_else_spreads() -> None:
    router = fleet(CacheAware(), 0, 2)
    assert places(router, query("a", 640)) == (None, "decode-0")
    assert places(router, query("b", 992)) == (None, "decode-0")  # 39 blocks of 62 were sent there
    other = Place(request_id="c", attempt=0, num_tokens=160, max_new_tokens=1, prefix_hashes=b"x" * 16 * 9)
    assert places(router, other) == (None, "decode-1")
    mixed = Place(
        request_id="d", attempt=0, num_tokens=160, max_new_tokens=1, prefix_hashes=HASHES[0] + HASHES[1] + b"y" * 16 * 7
    )
    assert places(router, mixed) == (None, "decode-1")  # 2 blocks of 10 are too few: the smallest tree


def test_cache_aware_balances_only_where_loads_are_far_apart() -> None:
    router = fleet(CacheAware(), 0, 2)
    for number in range(65):
        assert places(router, query(f"r{number}"))[1] == "decode-0"
    assert places(router, query("more"))[1] == "decode-1"


def test_the_plainest_refusal_is_of_what_would_have_to_be_computed() -> None:
    router = fleet(CacheAware(most_uncached=500), 0, 1)
    long = router.place(query("a", 992), 0.0)
    assert isinstance(long, Unplaceable)
    assert long.retry_after_s is None
    places(router, query("b", 500))
    assert places(router, query("c", 992))  # 30 blocks of it are known


def test_mooncake_adds_up_queue_and_uncached_prefill() -> None:
    router = fleet(Mooncake())
    # 0.11 s of work each; prefill-1 has 31 blocks of it cached: 0.0604 s.
    caches(router, "prefill-1", 31)
    assert places(router, query("a"))[0] == "prefill-1"
    assert places(router, query("b"))[0] == "prefill-0"  # 0.11 s against 0.0604 s + 0.0604 s
    assert places(router, query("c"), now=0.05)[0] == "prefill-1"  # of its queue 0.0104 s are left


def test_mooncake_turns_away_who_would_miss_a_target() -> None:
    router = fleet(Mooncake())
    late = router.place(query("a", 20_000), 0.0)
    assert isinstance(late, Unplaceable)
    assert late.retry_after_s == pytest.approx(1.01)
    slow = router.place(query("b", 1000, tpot_s=0.011), 0.0)
    assert isinstance(slow, Unplaceable)
    assert "12 ms" in slow.reason
    assert places(router, query("c", 20_000, ttft_s=None, tpot_s=None))


def test_mooncakes_ties_go_to_who_decodes_least() -> None:
    router = fleet(Mooncake(), 0, 3)
    occupy(router, query("x"), router.decodes[0])
    assert places(router, query("a"))[1] == "decode-1"


def test_mooncakes_own_limits_are_shares_of_the_targets() -> None:
    asked = query("a", 5000)  # 0.51 s, tokens every 16 ms
    assert places(fleet(Mooncake()), asked)
    assert isinstance(fleet(Mooncake(ttft_share=0.5)).place(asked, 0.0), Unplaceable)
    assert isinstance(fleet(Mooncake(tbt_share=0.15)).place(asked, 0.0), Unplaceable)
    gap = Place(request_id="g", attempt=0, num_tokens=5000, max_new_tokens=1, ttft_s=1.0, gap_s=0.012)
    assert isinstance(fleet(Mooncake()).place(gap, 0.0), Unplaceable)


def test_llmd_spreads_where_it_is_told_to() -> None:
    chosen = Counter[str]()
    for seed in range(200):
        router = fleet(LlmdHeadroom(seed, strategy="most"), 1, 2)
        occupy(router, query("before"), router.decodes[0])
        chosen[places(router, query("a"))[1]] += 1
    assert chosen["decode-1"] > chosen["decode-0"]


def occupy(router: Baseline, asked: Place, decode: Member) -> None:
    """It decodes there, with all of its prompt found cached."""
    router.book(PlacedRequest(asked, None, decode, asked.num_tokens), 0.0)


def test_llmd_packs_those_with_headroom() -> None:
    chosen = Counter[str]()
    for seed in range(300):
        router = fleet(LlmdHeadroom(seed), 1, 2)
        occupy(router, query("before"), router.decodes[0])
        chosen[places(router, query("a"))[1]] += 1
    # Weights 82 and 66: only TPOT headroom tells them apart, and weighs 0.2.
    assert chosen["decode-0"] / 300 == pytest.approx(82 / 148, abs=0.08)


def test_llmd_prefers_idle_workers_when_all_miss() -> None:
    for seed in range(20):
        router = fleet(LlmdHeadroom(seed), 0, 3)
        for member in router.decodes[:2]:
            occupy(router, query(member.info.worker_id), member)
        assert places(router, query("a", tpot_s=0.001)) == (None, "decode-2")


def test_llmd_heeds_the_strictest_target_of_who_runs() -> None:
    num_other = 0
    for seed in range(100):
        router = fleet(LlmdHeadroom(seed), 1, 2)
        occupy(router, query("strict", tpot_s=0.012), router.decodes[0])
        num_other += places(router, query("a"))[1] == "decode-1"
    assert num_other >= 94


def test_the_command_line_knows_every_name() -> None:
    assert (tuple(ROUTERS), tuple(MODELS), tuple(DEVICES)) == (ROUTER_NAMES, MODEL_NAMES, DEVICE_NAMES)


@pytest.mark.parametrize("name", ROUTER_NAMES)
def test_every_router_plays_a_workload_twice_alike(name: str) -> None:
    cost = StepCost(base_s=0.006, prefill_token_s=4e-5, prefill_pair_s=1e-9, decode_s=1e-5, context_token_s=5e-8)
    shape = WorkerShape(cost=cost, kv_tokens=60_000, block_size=64)
    config = SimulationConfig(
        num_prefill=0 if name == "colocated" else 2, num_decode=2, prefill=shape, decode=shape, max_returns=1
    )
    workload = Workload(requests_per_s=12.0, num_requests=60)
    first, second = (simulate(config, draw_requests(workload, 3), ROUTERS[name]()) for _ in range(2))
    assert first == second
    assert len(first.records) == 60
    assert all((r.end_s is None) is bool(r.rejected) for r in first.records)
