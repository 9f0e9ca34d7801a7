"""The fit of the cost model on made-up workers of known cost."""

from __future__ import annotations

import dataclasses
import math
import random
import statistics
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cost_model.fit import StepCostFit, kind_of, scaled
from engine.cost_model.step_cost import StepCost, StepWork
from tests.engine.cost_model.made_up_steps import NAMES, TRUTH, any_kind, coefficients, decode, mixed, prefill, skewed
from tests.support.processor_time import in_loop_turns
from tests.support.thoroughness import examples

Draw = Callable[[random.Random], StepWork]


@dataclasses.dataclass
class Worker:
    """Makes steps of known cost, with noise and now and then an outlier, and shows them to a fit."""

    cost: StepCost = TRUTH
    noise: float = 0.05
    outliers: float = 0.0
    rng: random.Random = dataclasses.field(default_factory=lambda: random.Random(0))

    def run(self, fit: StepCostFit, num_steps: int, draw: Draw = any_kind) -> StepCostFit:
        for _ in range(num_steps):
            work = draw(self.rng)
            seconds = self.cost.step_s(work) * math.exp(self.rng.gauss(0, self.noise))
            fit.observe(work, seconds * (10 if self.rng.random() < self.outliers else 1))
        return fit


def held_out(fit: StepCostFit, truth: StepCost = TRUTH, draw: Draw = any_kind) -> float:
    """Median error of steps that the fit has not seen, against what they would take without noise."""
    rng, cost = random.Random(99), fit.cost()
    works = [draw(rng) for _ in range(200)]
    return statistics.median(abs(cost.step_s(work) / truth.step_s(work) - 1) for work in works)


# --- what it learns --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "factors", [[1.0] * 5, [5, 0.2, 5, 0.2, 5], [0.1] * 5, [10] * 5, [0.1, 10, 0.1, 10, 0.1]], ids=str
)
def test_it_learns_what_steps_cost_from_any_seed(factors: list[float]) -> None:
    fit = Worker().run(StepCostFit(skewed(factors)), 400)
    assert held_out(fit) < 0.04


def test_without_noise_it_finds_the_coefficients() -> None:
    fit = Worker(noise=0.0).run(StepCostFit(skewed([2, 0.5, 2, 0.5, 2])), 2000)
    assert coefficients(fit.cost()) == pytest.approx(coefficients(TRUTH), rel=0.02)


def test_a_tenth_of_steps_may_take_ten_times_as_long() -> None:
    fit = Worker(outliers=0.1).run(StepCostFit(skewed([2, 0.5, 2, 0.5, 2])), 600)
    assert held_out(fit) < 0.06


def test_what_outliers_add_in_the_mean_is_told_apart() -> None:
    """One step in twenty takes ten times as long, of which what is beyond five times does not count."""
    worker, fit = Worker(outliers=0.05), StepCostFit(TRUTH)
    stretches = [worker.run(fit, 100, decode).stretch("decode") for _ in range(30)]
    assert held_out(fit, draw=decode) < 0.06
    assert statistics.fmean(stretches[3:]) == pytest.approx(1.2, abs=0.05)
    assert fit.stretch("prefill") == 1.0, "of which nothing was seen"


def test_without_outliers_steps_take_what_is_predicted_in_the_mean() -> None:
    fit = Worker(noise=0.1).run(StepCostFit(skewed([2, 0.5, 2, 0.5, 2])), 1000)
    assert (fit.stretch("prefill"), fit.stretch("decode")) == pytest.approx((1.0, 1.0), abs=0.03)


def test_a_step_that_hangs_does_not_count_for_all() -> None:
    fit = Worker().run(StepCostFit(TRUTH), 200, decode)
    fit.observe(decode(random.Random(5)), 1000.0)
    assert fit.stretch("decode") < 1.1


def test_one_outlier_moves_next_to_nothing() -> None:
    fit = Worker().run(StepCostFit(TRUTH), 200)
    before = fit.cost()
    for work in (prefill(random.Random(5)), decode(random.Random(5))):
        fit.observe(work, 10 * TRUTH.step_s(work))
    rng = random.Random(6)
    for work in (any_kind(rng) for _ in range(50)):
        assert fit.cost().step_s(work) == pytest.approx(before.step_s(work), rel=0.05)


@pytest.mark.parametrize("draw", [prefill, decode, any_kind], ids=lambda draw: draw.__name__)
@pytest.mark.parametrize("factor", [0.4, 2.5])
def test_a_lasting_change_of_speed_is_followed_within_a_hundred_steps(draw: Draw, factor: float) -> None:
    fit = Worker().run(StepCostFit(TRUTH), 500, draw)
    slower = scaled(TRUTH, factor)
    Worker(cost=slower).run(fit, 100, draw)
    assert held_out(fit, slower, draw) < 0.06


@pytest.mark.parametrize("num_steps", [7, 8])
def test_a_change_of_speed_is_believed_after_eight_steps_and_no_sooner(num_steps: int) -> None:
    """A usual step before them is none of these."""
    fit = Worker().run(StepCostFit(TRUTH), 200, decode)
    Worker(cost=scaled(TRUTH, 3), noise=0.0).run(fit, num_steps, decode)
    work = decode(random.Random(5))
    assert (fit.cost().step_s(work) > 2.5 * TRUTH.step_s(work)) == (num_steps == 8)


def test_an_outlier_among_the_first_steps_moves_little() -> None:
    fit, rng = StepCostFit(dataclasses.replace(TRUTH, relative_error=0.1)), random.Random(0)
    for work in (decode(rng), prefill(rng), mixed(rng)):
        fit.observe(work, 20 * TRUTH.step_s(work))
        Worker(rng=rng).run(fit, 3)
    assert held_out(fit) < 0.15


def test_outliers_during_a_change_of_speed_are_outliers_still() -> None:
    fit = Worker().run(StepCostFit(TRUTH), 300)
    slower = scaled(TRUTH, 2)
    Worker(cost=slower, outliers=0.15).run(fit, 100)
    assert held_out(fit, slower) < 0.08


def test_a_change_of_memory_speed_alone_is_followed() -> None:
    """A neighbour on the memory bus: steps and contexts cost more, arithmetic does not."""
    fit = Worker().run(StepCostFit(TRUTH), 400)
    now = dataclasses.replace(TRUTH, base_s=2 * TRUTH.base_s, context_token_s=3 * TRUTH.context_token_s)
    Worker(cost=now).run(fit, 100)
    assert held_out(fit, now) < 0.06
    assert fit.cost().prefill_token_s == pytest.approx(TRUTH.prefill_token_s, rel=0.15)


def test_one_chunk_tells_that_prompts_are_no_longer_dear() -> None:
    """After a disturbance workers let hardly any prompt tokens in, and that is all that could teach them otherwise."""
    fit = Worker().run(StepCostFit(TRUTH), 300)
    Worker(cost=scaled(TRUTH, 8)).run(fit, 12, mixed)
    Worker().run(fit, 50, decode)
    chunk = StepWork.of_prefill(64, 2000)
    assert fit.cost().step_s(chunk) > 4 * TRUTH.step_s(chunk), "the machine is not disturbed"
    fit.observe(chunk, TRUTH.step_s(chunk))
    assert fit.cost().step_s(chunk) < 3.5 * TRUTH.step_s(chunk)


def test_it_stays_sound_for_as_long_as_a_worker_lives() -> None:
    fit = StepCostFit(TRUTH)
    worker = Worker(outliers=0.02)
    for draw in (any_kind, prefill, decode, any_kind):
        worker.run(fit, examples(25_000), draw)
    assert held_out(fit) < 0.05


def test_a_slow_drift_is_followed() -> None:
    fit, rng = StepCostFit(TRUTH), random.Random(0)
    for step in range(600):
        now = scaled(TRUTH, 1 + step / 600)
        Worker(cost=now, rng=rng).run(fit, 1)
    assert held_out(fit, scaled(TRUTH, 2)) < 0.1


# --- what it does not see --------------------------------------------------------------------------------------------


def test_a_prefill_worker_keeps_what_it_was_told_of_decoding() -> None:
    cost = Worker(cost=scaled(TRUTH, 2)).run(StepCostFit(TRUTH), 5000, prefill).cost()
    assert cost.decode_s == TRUTH.decode_s
    assert cost.context_token_s == TRUTH.context_token_s


def test_a_decode_worker_keeps_what_it_learnt_of_prefill() -> None:
    fit = Worker().run(StepCostFit(skewed([2, 0.5, 2, 0.5, 2])), 300, prefill)
    Worker().run(fit, 5000, decode)
    assert held_out(fit, draw=prefill) < 0.08


def test_steps_that_are_all_alike_do_not_ruin_it_for_others() -> None:
    """Base and decodes cannot be told apart here; both must stay plausible."""
    fit = Worker().run(StepCostFit(TRUTH), 20_000, lambda rng: StepWork(decodes=8, context_tokens=8.0 * 500))
    assert held_out(fit, draw=decode) < 0.1
    assert held_out(fit, draw=mixed) < 0.1


def test_a_zero_in_the_seed_stays_zero() -> None:
    fit = Worker().run(StepCostFit(dataclasses.replace(TRUTH, prefill_pair_s=0.0)), 200)
    assert fit.cost().prefill_pair_s == 0.0


def test_what_any_step_with_prompts_takes_is_learnt_from_nothing() -> None:
    truth = dataclasses.replace(TRUTH, prefill_base_s=0.03)
    fit = Worker(cost=truth).run(StepCostFit(TRUTH), 400)
    assert fit.cost().prefill_base_s == pytest.approx(0.03, rel=0.25)
    assert held_out(fit, truth) < 0.04
    assert Worker().run(fit, 400).cost().prefill_base_s < 0.012, "and forgotten where it is no longer so"


def test_steps_of_copies_alone_say_nothing() -> None:
    fit = StepCostFit(TRUTH)
    fit.observe(StepWork(), 3.0)
    assert coefficients(fit.cost()) == pytest.approx(coefficients(TRUTH))


@settings(max_examples=40, deadline=None)
@given(
    seed=st.lists(st.floats(1e-9, 1e3), min_size=5, max_size=5),
    steps=st.lists(
        st.tuples(st.integers(0, 4096), st.integers(0, 8192), st.integers(0, 256), st.floats(1e-5, 300.0)), max_size=60
    ),
)
def test_whatever_comes_costs_stay_positive_and_finite(
    seed: list[float], steps: list[tuple[int, int, int, float]]
) -> None:
    fit = StepCostFit(StepCost(**dict(zip(NAMES, seed, strict=True))))
    for num_tokens, num_cached, batch, seconds in steps:
        fit.observe(StepWork.of_prefill(num_tokens, num_cached) + StepWork(decodes=batch), seconds)
        values = coefficients(fit.cost())
        assert all(math.isfinite(value) for value in values)
        assert all(value >= 0.0099 * unit for value, unit in zip(values, seed, strict=True))


@pytest.mark.parametrize("changes", [{"base_s": 0.0}, {"decode_s": -1e-6}, {"context_token_s": math.nan}], ids=str)
def test_an_unusable_seed_is_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="cannot seed a fit"):
        StepCostFit(dataclasses.replace(TRUTH, **changes))


# --- what it says of itself ------------------------------------------------------------------------------------------


def test_it_reports_the_error_of_its_predictions_by_kind_of_step() -> None:
    fit = StepCostFit(TRUTH)
    Worker(noise=0.02).run(fit, 300, decode)
    Worker(noise=0.2).run(fit, 100, prefill)
    calm, wild = fit.error("decode"), fit.error("prefill")
    assert calm == pytest.approx(0.02 * 0.6745, rel=0.35)
    assert wild == pytest.approx(0.2 * 0.6745, rel=0.35)


def test_errors_are_of_predictions_made_before_the_step_was_seen() -> None:
    fit = StepCostFit(TRUTH)
    work = decode(random.Random(0))
    fit.observe(work, 3 * TRUTH.step_s(work))
    assert fit.error("decode") == pytest.approx(2.0)


def test_the_seeds_error_stands_until_there_is_one() -> None:
    fit = StepCostFit(dataclasses.replace(TRUTH, relative_error=0.3))
    assert fit.cost().relative_error == 0.3
    assert fit.error("prefill") is None
    Worker().run(fit, 300)
    assert fit.cost().relative_error == pytest.approx(0.05 * 0.6745, rel=0.35)


def test_kinds() -> None:
    rng = random.Random(0)
    assert [kind_of(draw(rng)) for draw in (prefill, decode, mixed)] == ["prefill", "decode", "prefill"]


def test_taking_a_step_in_is_cheap() -> None:
    """Some 13 µs of processor time on the machine where a turn of a loop takes 20 ns."""
    rng = random.Random(0)
    steps = [(work, TRUTH.step_s(work)) for work in (any_kind(rng) for _ in range(1000))]

    def observe() -> None:
        fit = StepCostFit(skewed([2, 0.5, 2, 0.5, 2]))
        for work, seconds in steps:
            fit.observe(work, seconds)

    assert in_loop_turns(observe, rounds=5) / len(steps) < 2000
