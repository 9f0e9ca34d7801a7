"""The fit of the cost model: on made-up workers of known cost, and on recorded steps of a real one."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.step_cost import StepCost, StepWork
from engine.step_cost_fit import StepCostFit, fit_steps, kind_of, left_out_error, scaled
from tests.processor_time import in_loop_turns

TRUTH = StepCost(base_s=0.025, prefill_token_s=1.2e-3, prefill_pair_s=1.1e-6, decode_s=1.5e-3, context_token_s=6.5e-6)
NAMES = [field.name for field in dataclasses.fields(StepCost) if field.name != "relative_error"]
STEP_LOG = Path(__file__).parent / "step_logs" / "smollm2_cpu.json"

Draw = Callable[[random.Random], StepWork]


def prefill(rng: random.Random) -> StepWork:
    return StepWork.of_prefill(rng.randint(16, 512), rng.choice((0, 0, rng.randint(1, 2000))))


def decode(rng: random.Random) -> StepWork:
    batch = rng.randint(1, 32)
    return StepWork(decodes=batch, context_tokens=batch * rng.randint(50, 1500))


def mixed(rng: random.Random) -> StepWork:
    return prefill(rng) + decode(rng)


def any_kind(rng: random.Random) -> StepWork:
    return rng.choice((prefill, decode, mixed))(rng)


def skewed(factors: list[float]) -> StepCost:
    """TRUTH with each coefficient wrong by its own factor."""
    return dataclasses.replace(
        TRUTH, **{name: getattr(TRUTH, name) * f for name, f in zip(NAMES, factors, strict=True)}
    )


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


def coefficients(cost: StepCost) -> list[float]:
    return [getattr(cost, name) for name in NAMES]


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


def test_it_stays_sound_for_as_long_as_a_worker_lives() -> None:
    fit = StepCostFit(TRUTH)
    worker = Worker(outliers=0.02)
    for draw in (any_kind, prefill, decode, any_kind):
        worker.run(fit, 25_000, draw)
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
    assert (calm.num_steps, wild.num_steps) == (256, 100)
    assert calm.median == pytest.approx(0.02 * 0.6745, rel=0.35)
    assert calm.p90 == pytest.approx(0.02 * 1.645, rel=0.35)
    assert wild.median == pytest.approx(0.2 * 0.6745, rel=0.35)
    assert wild.p90 > 2 * wild.median


def test_errors_are_of_predictions_made_before_the_step_was_seen() -> None:
    fit = StepCostFit(TRUTH)
    work = decode(random.Random(0))
    fit.observe(work, 3 * TRUTH.step_s(work))
    assert fit.error("decode").median == pytest.approx(2.0)


def test_the_seeds_error_stands_until_there_is_one() -> None:
    fit = StepCostFit(dataclasses.replace(TRUTH, relative_error=0.3))
    assert fit.cost().relative_error == 0.3
    assert fit.error("prefill").num_steps == 0
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


# --- recorded steps of SmolLM2 ---------------------------------------------------------------------------------------


def recorded(clock: str) -> list[tuple[StepWork, float]]:
    """Every step of the log, with what `clock` said it took; recorded by `tests.record_steps`."""
    log: dict[str, Any] = json.loads(STEP_LOG.read_text())
    rows = [dict(zip(log["columns"], step, strict=True)) for run in log["runs"] for step in run["steps"]]
    names = [field.name for field in dataclasses.fields(StepWork)]
    return [(StepWork(**{name: row[name] for name in names}), row[clock]) for row in rows]


SEED = StepCost(base_s=0.05, prefill_token_s=5e-4, prefill_pair_s=1e-7, decode_s=5e-3, context_token_s=2e-6)


def prequential(steps: list[tuple[StepWork, float]]) -> Iterator[tuple[StepWork, float]]:
    """Each step and its relative error, predicted from those before it."""
    fit = StepCostFit(SEED)
    for work, seconds in steps:
        yield work, seconds / fit.cost().step_s(work) - 1
        fit.observe(work, seconds)


def test_the_log_holds_steps_of_all_kinds() -> None:
    works = [work for work, _ in recorded("cpu_s")]
    assert len(works) >= 450
    assert sum(work.decodes == 0 for work in works) >= 15
    assert sum(work.prefill_tokens == 0 for work in works) >= 100
    assert sum(work.prefill_tokens > 0 and work.decodes > 0 for work in works) >= 100


@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_real_steps_are_predicted_within_a_tenth(kind: str) -> None:
    """By processor time: the machine had other work, which is no property of the steps."""
    after_a_start = itertools.islice(prequential(recorded("cpu_s")), 60, None)
    errors = np.abs([error for work, error in after_a_start if kind_of(work) == kind])
    assert np.median(errors) <= 0.10
    assert np.percentile(errors, 90) <= 0.25


def test_a_fit_of_one_half_predicts_the_other_half() -> None:
    steps = recorded("cpu_s")
    fit = StepCostFit(SEED)
    for work, seconds in steps[::2]:
        fit.observe(work, seconds)
    errors = [abs(seconds / fit.cost().step_s(work) - 1) for work, seconds in steps[1::2]]
    assert statistics.median(errors) <= 0.10


def test_predictions_are_not_lopsided_on_a_busy_machine() -> None:
    """By the clock on the wall, neighbours and all: no better than the noise, but right in the middle."""
    errors = [error for _, error in itertools.islice(prequential(recorded("wall_s")), 60, None)]
    assert statistics.median(errors) == pytest.approx(0.0, abs=0.1)
    assert statistics.median(map(abs, errors)) <= 0.25


# --- all steps at once -----------------------------------------------------------------------------------------------


def some_steps(count: int, noise: float = 0.0) -> list[tuple[StepWork, float]]:
    rng = random.Random(3)
    works = [any_kind(rng) for _ in range(count)]
    return [(work, TRUTH.step_s(work) * math.exp(rng.gauss(0, noise))) for work in works]


def test_a_dozen_steps_tell_all_coefficients_whatever_the_estimate() -> None:
    estimate = skewed([1e-3, 1e2, 1e-4, 1e-1, 1e4])
    assert coefficients(fit_steps(estimate, some_steps(12))) == pytest.approx(coefficients(TRUTH), rel=0.05)


def test_a_few_disturbed_steps_do_not_make_long_prompts_take_minutes() -> None:
    """A calibration on a machine with other work: each of its trials takes up to eight times as long, by itself."""
    works = [
        StepWork(decodes=1, context_tokens=251),
        StepWork.of_prefill(16),
        StepWork(decodes=8, context_tokens=8 * 61),
        StepWork.of_prefill(48, 900),
        StepWork(decodes=1, context_tokens=1001),
    ]
    estimate, rng = skewed([0.6, 1.0, 0.7, 0.9, 0.25]), random.Random(0)  # a roofline's errors, and more
    for _ in range(200):
        for num_steps in range(1, len(works) + 1):
            cost = fit_steps(estimate, [(work, TRUTH.step_s(work) * 8 ** rng.random()) for work in works[:num_steps]])
            for asked in (StepWork.of_prefill(512, 1500), StepWork(decodes=16, context_tokens=16 * 600.0)):
                assert 1 / 15 < cost.step_s(asked) / TRUTH.step_s(asked) < 15


def test_an_outlier_among_a_dozen_is_seen_through() -> None:
    steps = some_steps(14)
    steps[5] = steps[5][0], 8 * steps[5][1]
    rng, cost = random.Random(8), fit_steps(TRUTH, steps)
    works = [any_kind(rng) for _ in range(100)]
    assert statistics.median(abs(cost.step_s(work) / TRUTH.step_s(work) - 1) for work in works) < 0.05


def test_what_no_step_has_is_taken_from_the_estimate_at_the_steps_speed() -> None:
    works = [decode(random.Random(seed)) for seed in range(8)]
    cost = fit_steps(TRUTH, [(work, 3 * TRUTH.step_s(work)) for work in works])
    assert coefficients(cost) == pytest.approx(coefficients(scaled(TRUTH, 3)), rel=0.02)


def test_what_no_step_has_and_the_estimate_lacks_stays_zero() -> None:
    work = decode(random.Random(0))
    cost = fit_steps(dataclasses.replace(TRUTH, prefill_pair_s=0.0), [(work, 1.0)])
    assert cost.prefill_pair_s == 0.0
    assert cost.step_s(work) == pytest.approx(1.0, rel=0.01)


def test_no_coefficient_becomes_zero() -> None:
    """A later fit that starts from there could not leave it."""
    free = dataclasses.replace(TRUTH, decode_s=0.0, prefill_pair_s=0.0)
    rng = random.Random(0)
    works = [any_kind(rng) for _ in range(20)]
    cost = fit_steps(TRUTH, [(work, free.step_s(work)) for work in works])
    assert min(coefficients(cost)) > 0
    assert all(cost.step_s(work) == pytest.approx(free.step_s(work), rel=0.05) for work in works)


def test_the_left_out_error_is_the_noise() -> None:
    assert left_out_error(TRUTH, some_steps(20)) < 0.005
    assert left_out_error(TRUTH, some_steps(40, noise=0.1)) == pytest.approx(0.1 * 0.6745, rel=0.6)


def test_a_fit_of_recorded_steps_is_as_good_as_any_line_can_be() -> None:
    steps = recorded("cpu_s")
    cost = fit_steps(SEED, steps[::25])
    assert statistics.median(abs(seconds / cost.step_s(work) - 1) for work, seconds in steps) <= 0.10
