"""Noise in steps: how much they scatter and for how long, as workers tell it and as simulated steps have it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from cluster.gateway.request_log import LoggedCluster, LoggedRequest, LoggedWorker
from cluster.simulation.steps import step_factors
from cluster.simulation.whatif import replay
from cluster.simulation.workers import WorkerShape
from cluster.slo.classes import NO_TARGETS
from engine.cost_model.costs import StepCosts
from engine.cost_model.noise import RUN_STEPS, StepNoise
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.workers import StepCostReport
from kv_transfer.worker.cost_report import cost_report, reported_noise

COST = StepCost(base_s=0.02, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_s=1e-3, context_token_s=1e-6)
SPREAD = 0.2


def logs(seed: int, correlation: float, count: int = 16_000) -> npt.NDArray[np.float64]:
    """Of the factors of so many steps: after the last one they come again."""
    return np.log(np.resize(np.array(step_factors(SPREAD, seed, correlation)), count))


@pytest.mark.parametrize("correlation", [0.3, 0.63, 0.9])
def test_simulated_steps_scatter_as_was_asked_for(correlation: float) -> None:
    deviations = logs(3, correlation)
    assert deviations.std() == pytest.approx(SPREAD, rel=0.1)
    assert np.exp(deviations).mean() == pytest.approx(1.0, abs=0.03)
    centred = deviations - deviations.mean()
    for lag in (1, 2, 4):
        assert centred[lag:] @ centred[:-lag] / (centred @ centred) == pytest.approx(correlation**lag, abs=0.06)


def test_the_same_seed_gives_the_same_steps() -> None:
    first, again, other = (logs(seed, 0.6).tolist() for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_without_memory_steps_are_what_they_were() -> None:
    rng = random.Random(7)
    assert step_factors(SPREAD, seed=7) == [rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD) for _ in range(1021)]


@pytest.mark.parametrize("correlation", [-0.1, 1.0])
def test_impossible_correlations_are_refused(correlation: float) -> None:
    with pytest.raises(ValueError, match="step_correlation"):
        WorkerShape(cost=COST, kv_tokens=1000, step_correlation=correlation)


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.8, 0.95])
def test_memory_is_told_from_what_does_not_average_out(correlation: float) -> None:
    deviations = np.concatenate([logs(seed, correlation) for seed in range(4)])
    found = StepNoise.of(deviations)
    assert found.spread == pytest.approx(SPREAD, rel=0.1)
    assert found.correlation == pytest.approx(correlation, abs=0.05)


def test_few_steps_tell_nothing() -> None:
    assert StepNoise.of(np.ones(4 * RUN_STEPS - 1)) == StepNoise()
    assert StepNoise().correlation == 0.0


def test_steps_that_never_vary_have_no_memory() -> None:
    assert StepNoise.of(np.zeros(100)) == StepNoise()


def worker_of(seed: int, correlation: float = 0.0, num_steps: int = 400) -> StepCostReport:
    """What a worker reports whose decode steps have this noise."""
    factors = step_factors(SPREAD, seed, correlation)
    costs = StepCosts(COST)
    costs.seed(COST)
    for step in range(num_steps):
        work = StepWork(decodes=1 + step % 5, context_tokens=300 * (1 + step % 7))
        costs.observe(work, COST.step_s(work) * factors[step])
    report = cost_report(costs)
    assert report is not None
    return report


def test_workers_report_how_their_steps_scatter() -> None:
    reports = {rho: [worker_of(seed, rho) for seed in range(12)] for rho in (0.0, 0.7)}
    runs = {}
    for rho, told in reports.items():
        noises = [reported_noise("decode", report) for report in told]
        spread = math.sqrt(np.mean([noise.spread**2 for noise in noises]))
        assert spread == pytest.approx(SPREAD, rel=0.15)
        runs[rho] = StepNoise(spread=spread, run_spread=math.sqrt(np.mean([noise.run_spread**2 for noise in noises])))
        assert all(reported_noise("prefill", report) == StepNoise() for report in told)
    assert runs[0.0].correlation < 0.2
    assert 0.5 < runs[0.7].correlation < 0.8


def test_a_worker_without_a_report_has_no_noise() -> None:
    assert reported_noise("decode", None) == StepNoise()
    assert reported_noise("prefill", replace(worker_of(0), prefill_spread=0.5)).spread == 0.5


def test_spells_make_replayed_answers_differ() -> None:
    """Answers of one sequence at a time: what averages out within each of them hardly shows."""
    requests = [
        LoggedRequest(request_id=f"r{n}", arrival_s=10.0 * n, prompt_tokens=40, output_tokens=33) for n in range(60)
    ]

    def spread(noise: StepNoise) -> float:
        cost = replace(COST, context_token_s=0.0, relative_error=0.67 * SPREAD)
        worker = LoggedWorker(cost=cost, kv_tokens=20_000, token_budget=512, max_num_seqs=8, noise=noise)
        cluster = LoggedCluster(
            num_prefill=1, num_decode=1, prefill=worker, decode=worker, block_size=16, slo=NO_TARGETS
        )
        times = [record.tpot_s for record in replay(cluster, requests)]
        return float(np.std([time for time in times if time is not None]) / COST.step_s(StepWork(decodes=1)))

    known, spells = StepNoise(spread=SPREAD, run_spread=SPREAD / 4), StepNoise(spread=SPREAD, run_spread=0.7 * SPREAD)
    assert spread(StepNoise()) == spread(known) == pytest.approx(SPREAD / math.sqrt(32), rel=0.35)
    assert spread(spells) > 2 * spread(known)
