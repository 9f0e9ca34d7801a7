"""Where prompts are split between the worker that begins them and the one that decodes, and when that is chosen."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.placement.filter import Filtered, filter_workers
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import Action, Decision, bind, pick
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.split import with_splits
from cluster.scheduler.placement.worker_table import Fact
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.scheduling import Place
from tests.cluster.scheduler.placement.placement_world import COST, book, costed_snapshot, ledger_of, query_of

QUADRATIC = replace(COST, prefill_pair_s=2e-7)  # of 6,000 tokens, 6 s for tokens and 3.6 s for pairs


def _found(ledger: Ledger, query: Place, now: float = 0.0) -> Filtered:
    return filter_workers(ledger, DecisionPolicy(), query, {}, now)


def _splits(ledger: Ledger, query: Place) -> dict[int, tuple[float, float, float]]:
    """Of the pair of the only two workers, by the split point: seconds of each part, and of all from its beginning."""
    one = (np.array([0]), np.array([1]))
    computing, _, prompt = with_splits(ledger, query, _found(ledger, query), one, np.array([0]))
    assert set(computing) == {0} and prompt.split_at[0] == 0.0
    parts = zip(prompt.split_at, prompt.first_s, prompt.rest_s, prompt.work_s, strict=True)
    return {int(at): (first_s, rest_s, work_s) for at, first_s, rest_s, work_s in parts if at}


def _decision(ledger: Ledger, query: Place, **policy: object) -> Decision:
    rules = DecisionPolicy(**policy)  # type: ignore[arg-type]
    decision, _ = pick(ledger, rules, query, _found(ledger, query), 0.0)
    return decision


@pytest.mark.parametrize("cost", [COST, QUADRATIC])
def test_at_the_equal_finish_both_workers_are_ready_together(cost: StepCost) -> None:
    """The one that decodes has two seconds of prompts before this one; so long the other one computes it."""
    ledger = ledger_of("p1", "d1", cost=cost, block_size=16)
    book(ledger, "before", prefill=None, prefill_s=2.0, tpot_s=None)
    splits = _splits(ledger, query_of(num_tokens=6000, ttft_s=60.0))
    first_s, rest_s, work_s = min(splits.values())
    token_s = 1.3e-3 * 16  # of a block, pairs included
    assert 2.0 <= first_s <= 2.0 + token_s
    assert work_s == pytest.approx(first_s + rest_s)


@pytest.mark.parametrize(("cost", "ttft_s"), [(COST, 15.0), (COST, 18.0), (QUADRATIC, 24.0), (QUADRATIC, 30.0)])
def test_at_the_latest_finish_the_first_token_is_just_in_time(cost: StepCost, ttft_s: float) -> None:
    """Four sequences with a tight pace leave prompts about a half of their worker's time."""
    ledger = ledger_of("p1", "d1", cost=cost, block_size=16)
    for number in range(4):
        book(ledger, f"r{number}", num_tokens=1000, tpot_s=0.03, max_new_tokens=1000)
        ledger.first_token(f"r{number}", 0.0)
    book(ledger, "before", prefill_s=0.1)
    splits = _splits(ledger, query_of(num_tokens=6000, ttft_s=ttft_s, waited_s=0.5))
    assert len(splits) == 1
    ((first_s, rest_s, work_s),) = splits.values()
    in_time_s = 0.5 * ttft_s - 0.5 - 0.1 - ledger.overhead.seconds
    assert in_time_s - 0.1 <= work_s <= in_time_s, "a block more on the first worker would be in time, too"
    assert min(first_s, rest_s) > 0.0


@given(
    st.integers(2, 100_000),
    st.floats(0.1, 100.0),
    st.lists(st.tuples(st.booleans(), st.integers(1, 20_000), st.floats(0.01, 5.0)), max_size=8),
)
def test_parts_are_whole_blocks_and_worth_a_hand_over(
    num_tokens: int, ttft_s: float, others: list[tuple[bool, int, float]]
) -> None:
    ledger = ledger_of("p1", "d1", cost=QUADRATIC, block_size=16, num_blocks=100_000)
    for number, (is_alone, tokens, prefill_s) in enumerate(others):
        book(ledger, f"r{number}", prefill=None if is_alone else "p1", num_tokens=tokens, prefill_s=prefill_s)
    for at, (first_s, rest_s, work_s) in _splits(ledger, query_of(num_tokens=num_tokens, ttft_s=ttft_s)).items():
        assert at % 16 == 0
        assert min(at, num_tokens - at) >= max(16, num_tokens / 16)
        assert first_s > 0.0 and rest_s > 0.0 and work_s >= first_s + rest_s - 1e-9


def _one_pool() -> Ledger:
    """One decodes against the clock and has no prompts; the other one has three seconds of them."""
    ledger = ledger_of("d1", "d2", block_size=16, num_blocks=10_000)
    for number in range(4):
        book(ledger, f"d{number}", prefill=None, num_tokens=1000, tpot_s=0.03, max_new_tokens=1000)
        ledger.first_token(f"d{number}", 0.0)
    book(ledger, "before", prefill=None, decode="d2", num_tokens=3000, prefill_s=3.0, tpot_s=None)
    return ledger


QUERY = query_of(num_tokens=6000, ttft_s=8.5, tpot_s=None)


def test_a_split_is_chosen_where_nobody_could_be_in_time_alone() -> None:
    """The first computes what it can until the other one comes to the rest."""
    decision = _decision(_one_pool(), QUERY, one_pool=True)
    best = decision.best
    assert (decision.action, best.prefill, best.decode) == (Action.PLACE, "d1", "d2")
    assert best.first_s == pytest.approx(3.0, abs=0.1) and 0 < best.split_at < 6000
    assert best.slo_gain > max(row.slo_gain for row in decision.rows if not row.split_at) + 0.05
    assert str(decision).splitlines()[2].endswith(f" {best.split_at}"), "the table says where it is split"
    assert _decision(_one_pool(), QUERY, one_pool=True, splits=False).best.split_at == 0
    in_time = replace(QUERY, ttft_s=20.0)
    assert _decision(_one_pool(), in_time, one_pool=True).best.split_at == 0, "it would bring nobody more in time"


def test_a_part_waits_for_its_adapter_as_the_whole_does() -> None:
    ledger = ledger_of("p1", "d1", block_size=16)
    ledger.heartbeat(costed_snapshot("p1", 2, adapter_load_s=30.0), 0.0)
    book(ledger, "before", prefill=None, prefill_s=2.0, tpot_s=None)
    query = query_of(num_tokens=6000, ttft_s=60.0)
    plain, adapted = _splits(ledger, query), _splits(ledger, replace(query, adapter="new"))
    assert plain and adapted.keys() == plain.keys()
    for at, (first_s, rest_s, work_s) in plain.items():
        assert adapted[at] == pytest.approx((first_s, rest_s, work_s + 30.0))


def test_work_without_a_promise_is_not_split() -> None:
    decision = _decision(_one_pool(), replace(QUERY, ttft_s=None), one_pool=True)
    assert {row.split_at for row in decision.rows} == {0}


def test_both_workers_are_booked() -> None:
    ledger = _one_pool()
    decision = _decision(ledger, QUERY, one_pool=True)
    before = [float(at) for at in ledger.table.facts[Fact.DRAINED_AT, :2]]
    bind(ledger, decision)
    after = [float(at) for at in ledger.table.facts[Fact.DRAINED_AT, :2]]
    best = decision.best
    assert after[0] - before[0] == pytest.approx(best.first_s)
    assert after[1] - before[1] == pytest.approx(best.rest_s)
