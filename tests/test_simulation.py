"""The simulated cluster against arithmetic by hand, and its promises: determinism, exact fast-forward, empty pools."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.simulation.router import PlaceQuery, QueueLengthRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.synthetic import LogNormal, Workload, draw_requests
from cluster.simulation.traces import TraceRequest
from cluster.simulation.workers import WorkerShape
from engine.step_cost import StepCost
from kv_transfer.messages import Placement, Unplaceable

COST = StepCost(base_s=0.004, prefill_token_s=3e-5, prefill_pair_s=1e-9, decode_s=2e-5, context_token_s=4e-8)
SHAPE = WorkerShape(
    cost=COST, kv_tokens=64_000, token_budget=1024, block_size=32, handoff_s=0.002, handoff_token_s=1e-6
)
CONFIG = SimulationConfig(num_prefill=2, num_decode=2, prefill=SHAPE, decode=SHAPE, message_s=0.001)
WORKLOAD = Workload(
    requests_per_s=4.0, num_requests=120, burstiness=3.0, turn=LogNormal(median=900, sigma=1.0, most=6000)
)


class DecodeOnlyRouter(QueueLengthRouter):
    """The one decode worker computes everything."""

    def place(self, request: PlaceQuery, now: float) -> Placement | Unplaceable:
        return Placement(request_id=request.request_id, attempt=request.attempt, prefill=None, decode="decode-0")


def one(prompt_tokens: int, output_tokens: int, request_id: str = "r0", arrival_s: float = 1.0) -> TraceRequest:
    return TraceRequest(
        request_id=request_id, arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens
    )


def prefill_s(*chunks: tuple[int, int]) -> float:
    """Of chunks of (tokens, tokens before them)."""
    return sum(COST.base_s + 3e-5 * n + 1e-9 * (n * cached + n * (n + 1) / 2) for n, cached in chunks)


def decode_s(contexts: range) -> float:
    return sum(COST.base_s + 2e-5 + 4e-8 * context for context in contexts)


def test_a_lone_request_takes_as_long_as_by_hand() -> None:
    [record] = simulate(CONFIG, [one(2500, 100)], QueueLengthRouter()).records
    assert record.ttft_s == pytest.approx(6 * 0.001 + prefill_s((1024, 0), (1024, 1024), (452, 2048)), rel=1e-12)
    # The last chunk's slab is exposed, then 99 steps attend to 2501 to 2599 tokens.
    exposed = 0.002 + 452 * 1e-6
    assert record.tpot_s == pytest.approx((exposed + decode_s(range(2501, 2600))) / 99, rel=1e-12)
    assert record.e2e_s == pytest.approx((record.ttft_s or 0) + 99 * (record.tpot_s or 0), rel=1e-12)


def test_a_lone_request_computed_by_decode_alone() -> None:
    [record] = simulate(replace(CONFIG, num_prefill=0), [one(1500, 10)], DecodeOnlyRouter()).records
    assert record.ttft_s == pytest.approx(4 * 0.001 + prefill_s((1024, 0), (476, 1024)), rel=1e-12)
    assert record.tpot_s == pytest.approx(decode_s(range(1501, 1510)) / 9, rel=1e-12)
    assert (record.prefill, record.decode) == (None, "decode-0")


def test_one_token_ends_with_prefill() -> None:
    [record] = simulate(CONFIG, [one(500, 1)], QueueLengthRouter()).records
    assert record.end_s == record.first_token_s
    assert record.tpot_s is None


def test_a_prefix_that_was_computed_before_is_not_computed_again() -> None:
    first = TraceRequest(
        request_id="a", arrival_s=0.0, prompt_tokens=2048, output_tokens=4, content=(1, 2, 3, 4), content_tokens=512
    )
    second = replace(first, request_id="b", arrival_s=5.0, content=(1, 2, 9, 4))
    config = replace(CONFIG, num_prefill=1, num_decode=1)
    records = simulate(config, [first, second], QueueLengthRouter()).records
    assert [record.cached_tokens for record in records] == [0, 1024]
    assert records[1].ttft_s == pytest.approx(6 * 0.001 + prefill_s((1024, 1024)), rel=1e-12)


def played(config: SimulationConfig, seed: int = 5) -> SimulationResult:
    return simulate(config, draw_requests(WORKLOAD, seed), QueueLengthRouter())


def test_the_same_seed_gives_the_same_records() -> None:
    assert played(CONFIG) == played(CONFIG)
    assert played(CONFIG) != played(CONFIG, seed=6)


@pytest.mark.parametrize(("kv_tokens", "is_short"), [(64_000, False), (8_000, True)])
def test_fast_forward_changes_no_bit(kv_tokens: int, is_short: bool) -> None:
    """Also where sequences are preempted for lack of blocks."""
    decode = replace(SHAPE, kv_tokens=kv_tokens)
    quick = played(replace(CONFIG, decode=decode))
    assert quick == played(replace(CONFIG, decode=replace(decode, fast_forward=False)))
    assert (quick.summary.num_preemptions > 0) is is_short
