"""How many workers each pool is advised to have, on a clock of the test's own."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.autoscaling.demand import WorkRate, decode_work_s, largest_batch, prefill_work_s
from cluster.autoscaling.sizing import PoolAdvice, PoolRules, PoolSize, PoolSizer, PoolsPlan, PoolView
from engine.cost_model.step_cost import StepCost

COST = StepCost(base_s=0.01, prefill_token_s=1e-4, prefill_pair_s=0.0, decode_s=1e-3, context_token_s=1e-6)
RULES = PoolRules(max_workers=20, hold_s=60.0)


def view(demand: float, live: int, *, burns: bool = False) -> PoolView:
    return PoolView(demand=demand, bounds=(demand, demand), burns=burns, live=live)


def look(pool: PoolSize, now: float, demand: float, *, burns: bool = False) -> int:
    """One tick of a pool whose workers start at once."""
    pool.observe(now, view(demand, pool.size, burns=burns))
    pool.scale(now)
    return pool.size


# --- work ---


def test_a_busy_prefill_worker_fills_its_steps() -> None:
    whole = prefill_work_s(COST, 1000.0, 0.0, chunk_tokens=1000.0)
    assert math.isclose(whole, COST.prefill_s(1000.0))
    assert math.isclose(10 * prefill_work_s(COST, 100.0, 0.0, chunk_tokens=1000.0), whole)
    assert math.isclose(prefill_work_s(COST, 5000.0, 0.0, chunk_tokens=1000.0), 5 * 0.01 + 0.5)
    any_step = replace(COST, prefill_base_s=0.02)
    for num_tokens in (100.0, 1000.0, 5000.0):  # so many that steps are full take as long as one prompt of them all
        together_s = any_step.prefill_s(100 * num_tokens, chunk_tokens=1000.0)
        assert math.isclose(100 * prefill_work_s(any_step, num_tokens, 0.0, chunk_tokens=1000.0), together_s)


def test_as_many_decode_at_once_as_target_memory_and_limit_allow() -> None:
    batch_of = partial(largest_batch, COST, 100_000.0, 64.0)
    assert batch_of(context_tokens=1000.0, tpot_s=0.05) == 20  # (50 - 10) ms at 2 ms each
    assert batch_of(context_tokens=10_000.0, tpot_s=math.inf) == 10
    assert batch_of(context_tokens=1000.0, tpot_s=math.inf) == 64
    assert batch_of(context_tokens=1000.0, tpot_s=0.001) == 1  # one at a time is as fast as it gets


def test_decode_work_fills_a_worker_exactly_at_its_largest_batch() -> None:
    step_s = COST.base_s + 20 * (COST.decode_s + 1000 * COST.context_token_s)
    work = decode_work_s(COST, 1e6, math.inf, context_tokens=1000, num_output=100, tpot_s=0.05)
    assert math.isclose(20 * work, 100 * step_s)


# --- demand ---


def poisson(rate: WorkRate, seconds: tuple[float, float], per_s: float, work_s: float, seed: int = 0) -> None:
    rng, now = random.Random(seed), seconds[0]
    while (now := now + rng.expovariate(per_s)) < seconds[1]:
        rate.add(now, work_s)


def test_demand_is_what_comes_per_second() -> None:
    rate = WorkRate(0.0, short_s=30.0, long_s=180.0)
    poisson(rate, (0.0, 400.0), per_s=50.0, work_s=0.04)
    assert 1.8 < rate.forecast(400.0, lead_s=30.0) < 2.3


def test_a_rise_is_carried_on_as_far_as_a_worker_needs_to_start() -> None:
    rate = WorkRate(0.0, short_s=30.0, long_s=180.0)
    for tick in range(40_000):
        rate.add(tick / 100, 0.01 + 1e-6 * max(0, tick - 20_000))  # from 1 to 3 per second in the last 200 s
    in_last_30_s = 2.85
    assert in_last_30_s < rate.forecast(400.0, lead_s=30.0) < 3.6


def test_who_asks_changes_nothing() -> None:
    """Also the first to ask in a new part of the window: work is per second of the parts that it is in."""
    rate = WorkRate(0.0, short_s=30.0, long_s=180.0)
    poisson(rate, (0.0, 400.0), per_s=50.0, work_s=0.04)
    assert rate.forecast(420.0, lead_s=30.0) == rate.forecast(420.0, lead_s=30.0)


def test_chance_is_not_taken_for_a_rise() -> None:
    """Rare, large pieces of work: the short window differs from the long one by chance alone."""
    predicted = []
    for seed in range(50):
        rate = WorkRate(0.0, short_s=30.0, long_s=180.0)
        poisson(rate, (0.0, 400.0), per_s=0.5, work_s=2.0, seed=seed)
        predicted.append(rate.forecast(400.0, lead_s=30.0))
    assert sorted(predicted)[25] < 1.2
    assert sorted(predicted)[47] < 1.7


def test_what_is_over_is_forgotten_in_time() -> None:
    rate = WorkRate(0.0, short_s=10.0, long_s=60.0)
    poisson(rate, (0.0, 100.0), per_s=10.0, work_s=0.5)
    assert rate.forecast(130.0, 0.0) > 1.0
    assert rate.forecast(161.0, 0.0) == 0.0


# --- one pool ---


def test_growth_is_at_once_and_as_far_as_needed() -> None:
    pool = PoolSize(RULES, 1)
    assert look(pool, 0.0, 4.0) == 6  # 4 / 0.7, rounded up


def test_shrinking_waits_and_goes_one_by_one() -> None:
    pool = PoolSize(RULES, 6)
    sizes = [look(pool, float(second), 1.0) for second in range(400)]
    assert sizes[59] == 6 and sizes[60] == 5
    assert all(after in (before, before - 1) for before, after in itertools.pairwise(sizes))
    assert sizes[-1] == 2


def test_one_fewer_must_fit_with_a_margin() -> None:
    """Demand for 1.95 of 2 workers at their target: it fits in 2, but not well enough to leave 3 for it."""
    pool = PoolSize(RULES, 3)
    assert {look(pool, float(second), 1.95 * 0.7) for second in range(500)} == {3}


def test_bounds_hold_whatever_is_asked() -> None:
    pool = PoolSize(PoolRules(min_workers=2, initial=2, max_workers=4), 2)
    assert look(pool, 0.0, 100.0) == 4
    assert [look(pool, 60.0 * tick, 0.0) for tick in range(1, 6)][-1] == 2


def test_nothing_shrinks_before_it_is_there() -> None:
    """Workers that are still starting are not taken away because nobody has asked for them yet."""
    pool = PoolSize(PoolRules(initial=4, max_workers=4, hold_s=10.0, patience_s=600.0), 4, raised_at=0.0)
    for second in range(599):
        pool.observe(float(second), view(0.0, live=1))
        pool.scale(float(second))
    assert pool.size == 4
    for second in range(599, 640):
        pool.observe(float(second), view(0.0, live=1))
        pool.scale(float(second))
    assert pool.size < 4


def test_a_burning_budget_adds_one_and_is_remembered() -> None:
    """The prediction says that 2 suffice, the clients that they do not: 3 it is, also when it burns no more."""
    pool = PoolSize(RULES, 2)
    assert look(pool, 0.0, 1.3, burns=True) == 3
    assert look(pool, 1.0, 1.3, burns=True) == 3  # the new worker is still starting
    assert {look(pool, 2.0 + second, 1.3) for second in range(900)} == {3}
    assert {look(pool, 902.0 + second, 1.3, burns=True) for second in range(80)} == {4}


def test_more_workers_are_no_help_where_few_are_busy() -> None:
    """Single requests that no worker serves in time burn the budget of an idle pool, too."""
    pool = PoolSize(RULES, 4)
    assert max(look(pool, float(second), 0.3, burns=True) for second in range(600)) == 4
    assert pool.size < 4


@settings(max_examples=60, deadline=None)
@given(demand=st.floats(0.0, 15.0), first=st.integers(1, 20), hold_s=st.floats(1.0, 120.0))
def test_a_constant_demand_leads_to_a_constant_size(demand: float, first: int, hold_s: float) -> None:
    pool = PoolSize(PoolRules(max_workers=20, hold_s=hold_s), first)
    for second in range(round(25 * hold_s) + 25):
        look(pool, float(second), demand)
    settled = pool.size
    assert {look(pool, 1e4 + second, demand) for second in range(300)} == {settled}
    assert demand <= settled * RULES.target + 1e-6 or settled == 20


@settings(max_examples=60, deadline=None)
@given(
    low=st.floats(0.1, 8.0),
    swing=st.floats(0.0, 6.0),
    period_s=st.integers(2, 59),
    noise=st.floats(0.0, 0.5),
    seed=st.integers(0, 1000),
)
def test_a_demand_that_swings_does_not_make_the_size_swing(
    low: float, swing: float, period_s: int, noise: float, seed: int
) -> None:
    """What swings faster than `hold_s` is served by the size that its peak needs; nothing shrinks and grows again."""
    rng, pool, sizes = random.Random(seed), PoolSize(RULES, 1), []
    for second in range(1200):
        demand = low + swing * (second % period_s < period_s / 2) + noise * rng.random()
        sizes.append(look(pool, float(second), demand))
    assert sizes == sorted(sizes)


# --- both pools ---


def test_it_listens_first() -> None:
    sizer = PoolSizer(PoolsPlan(prefill=RULES, decode=RULES, settle_s=5.0), 0.0)
    assert sizer.advise(1.0, view(9.0, 3), view(0.0, 2)) is None
    assert sizer.advise(4.0, view(0.0, 4), view(0.0, 2)) is None
    assert sizer.advise(5.0, view(0.0, 4), view(0.0, 2)) == PoolAdvice(num_prefill=4, num_decode=2)


def test_workers_on_their_way_are_wanted_after_a_restart() -> None:
    """Serve would give up those that load at the moment, and those that it starts for one that is about to stop."""
    sizer = PoolSizer(PoolsPlan(prefill=RULES, decode=RULES, settle_s=5.0), 0.0)
    assert sizer.advise(4.0, replace(view(0.0, 3), present=5), view(0.0, 2)) is None
    assert sizer.advise(5.0, view(0.0, 3), view(0.0, 2)) == PoolAdvice(num_prefill=5, num_decode=2)


def fixed(initial: int) -> PoolRules:
    return PoolRules(initial=initial, max_workers=8, scales=False)


def test_a_worker_changes_its_role_where_the_other_pool_can_do_without_it() -> None:
    sizer = PoolSizer(PoolsPlan(prefill=fixed(2), decode=fixed(3), flips=True), 0.0)
    prefill, decode = 2, 3
    flips = []
    for second in range(5, 400):
        advice = sizer.advise(float(second), view(2.0, prefill), view(0.5, decode))
        if advice is not None and advice.flip is not None:
            flips.append((second, advice.flip))
            prefill, decode = advice.num_prefill, advice.num_decode
    assert flips == [(20, "prefill")]  # it held for 15 s; a second flip would leave decode without a margin
    assert (prefill, decode) == (3, 2)


def test_no_worker_leaves_a_pool_that_needs_it() -> None:
    sizer = PoolSizer(PoolsPlan(prefill=fixed(2), decode=fixed(2), flips=True), 0.0)
    advices = [sizer.advise(float(second), view(5.0, 2), view(1.0, 2)) for second in range(5, 300)]
    assert {advice.flip for advice in advices if advice is not None} == {None}


def test_a_pool_at_its_bound_gets_a_worker_of_the_other() -> None:
    """What can scale scales; a flip is quicker where the other pool has one to spare."""
    rules = PoolRules(initial=4, max_workers=6)
    sizer = PoolSizer(PoolsPlan(prefill=rules, decode=rules, flips=True), 0.0)
    for second in range(30):
        sizer.advise(float(second), view(0.5, 4), view(2.0, 4))
    advice = sizer.advise(30.0, view(0.5, 4), view(3.0, 4))
    assert advice == PoolAdvice(num_prefill=3, num_decode=5, flip="decode")


@settings(max_examples=40, deadline=None)
@given(
    total=st.integers(2, 8),
    share=st.floats(0.1, 0.9),
    load=st.floats(0.1, 1.5),
    swing=st.floats(0.0, 0.8),
    period_s=st.integers(2, 600),
)
def test_roles_do_not_swing_with_the_demand(total: int, share: float, load: float, swing: float, period_s: int) -> None:
    """Never more than one flip in `flip_cooldown_s`, none at all where the demand is constant once it settled, and each
    pool keeps a worker."""
    prefill = max(1, min(total - 1, round(total * share)))
    decode, flipped_at = total - prefill, []
    sizer = PoolSizer(PoolsPlan(prefill=fixed(prefill), decode=fixed(decode), flips=True), 0.0)
    for second in range(5, 1800):
        wave = swing * math.sin(2 * math.pi * second / period_s)
        demands = (load * total * share * (1 + wave), load * total * (1 - share) * (1 - wave))
        advice = sizer.advise(float(second), view(demands[0], prefill), view(demands[1], decode))
        if advice is not None and advice.flip is not None:
            flipped_at.append(second)
            prefill, decode = advice.num_prefill, advice.num_decode
        assert prefill >= 1 and decode >= 1 and prefill + decode == total
    assert all(after - before >= 60 for before, after in itertools.pairwise(flipped_at))
    if swing == 0.0:
        assert not [second for second in flipped_at if second > 700]


# --- workers for another model ---

FIXED = PoolsPlan(
    prefill=PoolRules(min_workers=0, initial=0, max_workers=0, scales=False),
    decode=PoolRules(min_workers=0, initial=2, max_workers=9, scales=False),
)


def sizer_of(live: int, bounds: tuple[float, float], demand: float) -> PoolSizer:
    """Of a model whose decode workers have this demand."""
    sizer, nothing = PoolSizer(FIXED, 0.0), view(0.0, 0)
    sizer.advise(10.0, nothing, PoolView(demand=demand, bounds=bounds, burns=False, live=live))
    return sizer


def test_a_model_lends_a_worker_where_its_own_stay_less_busy() -> None:
    lacks = sizer_of(1, (1.2, 1.5), 1.4).lacking()
    assert lacks == ("decode", 1.2)
    assert sizer_of(3, (1.0, 1.4), 2.0).sparing(1.2) == "decode", "what was usual does not matter"
    assert sizer_of(3, (1.0, 2.1), 1.1).sparing(1.2) is None, "it may be as busy then"
    assert sizer_of(1, (0.0, 0.0), 0.0).sparing(1.2) is None, "a model keeps one"
    assert sizer_of(2, (0.9, 1.2), 1.3).lacking() is None


@given(st.integers(1, 6), st.integers(2, 6), *[st.floats(0.0, 8.0) for _ in range(6)])
@settings(max_examples=200, deadline=None)
def test_who_was_lent_does_not_come_back_unless_demand_changes(
    num_a: int, num_b: int, low_a: float, more_a: float, ahead_a: float, low_b: float, more_b: float, ahead_b: float
) -> None:
    bounds_a, bounds_b = (low_a, low_a + more_a), (low_b, low_b + more_b)
    lacks = sizer_of(num_a, bounds_a, ahead_a).lacking()
    if lacks is None or sizer_of(num_b, bounds_b, ahead_b).sparing(lacks[1]) is None:
        return
    lacks = sizer_of(num_b - 1, bounds_b, ahead_b).lacking()
    assert lacks is None or sizer_of(num_a + 1, bounds_a, ahead_a).sparing(lacks[1]) is None
