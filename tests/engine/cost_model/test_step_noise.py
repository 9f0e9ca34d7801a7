"""Noise in steps: how much they scatter and for how long, as workers tell it and as simulated steps have it."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from cluster.gateway.request_log import LoggedCluster, LoggedRequest, LoggedWorker
from cluster.simulation.records import RequestRecord
from cluster.simulation.whatif import replay
from cluster.simulation.workers.steps import observed_factors, step_factors
from cluster.slo.classes import NO_TARGETS
from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import StepKind
from engine.cost_model.noise import DEVIATES, RUN_STEPS, StepNoise
from engine.cost_model.step_cost import StepCost, StepWork
from kv_transfer.messages.codec import MalformedMessageError, decode, encode
from kv_transfer.messages.workers import Heartbeat, StepCostReport, StepNoiseReport
from kv_transfer.worker.cost_report import cost_report, observed_steps
from tests.support.clusters.worker_reports import worker_snapshot

COST = StepCost(base_s=0.02, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_s=1e-3, context_token_s=1e-6)
SPREAD = 0.2
Array = npt.NDArray[np.float64]


def normals(seed: int, correlation: float, count: int) -> Array:
    """A first-order autoregression."""
    rng = np.random.default_rng(seed)
    deviates = rng.standard_normal(count)
    for step in range(1, count):
        deviates[step] = correlation * deviates[step - 1] + math.sqrt(1 - correlation**2) * deviates[step]
    return deviates


def log_normal(spread: float = SPREAD, correlation: float = 0.0) -> StepNoise:
    return StepNoise(ratios=tuple(math.exp(spread * deviate) for deviate in DEVIATES), correlation=correlation)


def heavy_tailed(count: int, seed: int = 0) -> Array:
    """log(measured / predicted): one step in ten takes 1.8 times as long as it should, or more, or less."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(count) < 0.1, rng.normal(0.6, 0.3, count), rng.normal(0.0, 0.08, count))


def observed(kind: StepKind, deviations: Array, costs: StepCosts | None = None) -> StepCosts:
    """A worker that saw these steps; what they were made of varies."""
    if costs is None:
        costs = StepCosts(COST)
        costs.seed(COST)
    for step, deviation in enumerate(deviations.tolist()):
        work = StepWork(decodes=1 + step % 5, context_tokens=300 * (1 + step % 7))
        if kind == "prefill":
            work = work.plus_prefill(64 * (1 + step % 3), 0)
        costs.observe(work, COST.step_s(work) * math.exp(deviation))
    return costs


def report_of(costs: StepCosts) -> StepCostReport:
    report = cost_report(costs)
    assert report is not None
    return report


def told(costs: StepCosts) -> dict[StepKind, StepNoise]:
    """Of a decode worker."""
    seen = observed_steps("decode", report_of(costs))
    assert seen is not None
    return seen[1]


# --- what was seen is what is drawn ---


def test_what_was_recorded_with_a_heavy_tail_is_drawn_with_the_same_quantiles() -> None:
    """P99 is 2.7 times P50; that of a log-normal of the same spread is 1.7 times it."""
    recorded = heavy_tailed(40_000)
    noise = StepNoise.of(recorded, np.ones_like(recorded))
    drawn = np.log(observed_factors(noise, seed=5))
    for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        assert np.quantile(drawn, share) == pytest.approx(np.quantile(recorded, share), abs=0.03), share
    assert np.exp(drawn).mean() == pytest.approx(np.exp(recorded).mean(), rel=0.02)
    assert np.quantile(drawn, 0.99) - np.quantile(drawn, 0.5) > 1.7 * 2.33 * recorded.std()


@pytest.mark.parametrize("correlation", [0.0, 0.4, 0.8, 0.95])
def test_spells_last_as_long_as_they_did(correlation: float) -> None:
    recorded = SPREAD * normals(4, correlation, 40_000)
    noise = StepNoise.of(recorded, np.ones_like(recorded))
    assert noise.correlation == pytest.approx(correlation, abs=0.05)
    drawn = np.log(observed_factors(noise, seed=5))
    assert drawn.std() == pytest.approx(SPREAD, rel=0.15)
    centred = drawn - drawn.mean()
    for lag in (1, 2, 4):
        assert centred[lag:] @ centred[:-lag] / (centred @ centred) == pytest.approx(correlation**lag, abs=0.07)


def test_a_log_normal_is_told_exactly() -> None:
    noise = log_normal()
    deviates = np.linspace(-3.0, 3.0, 50)
    assert noise.at(deviates).tolist() == pytest.approx(np.exp(SPREAD * deviates).tolist())
    assert noise.mean == pytest.approx(math.exp(SPREAD**2 / 2), rel=0.002)


def test_beyond_what_so_few_steps_tell_nothing_is_drawn() -> None:
    noise = log_normal()
    assert noise.at(np.array([-9.0, 9.0])).tolist() == noise.at(np.array([-3.0, 3.0])).tolist()


def test_short_steps_are_off_by_more_and_count_by_their_time() -> None:
    deviations = np.tile([0.5, 0.02, -0.5, -0.02], 100)
    as_steps = StepNoise.of(deviations, np.ones_like(deviations))
    by_time = StepNoise.of(deviations, np.tile([0.01, 1.0], 200))
    assert as_steps.ratios[7] == pytest.approx(math.exp(0.5))  # a deviate of 1: of more than four steps in five
    assert by_time.ratios[7] == pytest.approx(math.exp(0.02), rel=0.01)


def test_workers_that_differ_are_one_or_the_other() -> None:
    """What one look in five saw is not spread over all of them, and lasts."""
    calm = StepNoise(ratios=(1.0,) * len(DEVIATES), correlation=0.2)
    slow = StepNoise(ratios=(3.0,) * len(DEVIATES), correlation=0.7)
    mixed = StepNoise.of_all([calm, calm, StepNoise(), calm, calm, slow])
    assert mixed.at(np.array([0.0, 2.0])).tolist() == pytest.approx([1.0, 3.0])
    assert mixed.correlation > 0.95
    assert StepNoise.of_all([StepNoise()]) == StepNoise.of_all([]) == StepNoise()


def test_few_steps_tell_nothing() -> None:
    count = 4 * RUN_STEPS - 1
    assert StepNoise.of(np.ones(count), np.ones(count)) == StepNoise()
    assert StepNoise().mean == 1.0


def test_steps_that_never_vary_have_no_memory() -> None:
    noise = StepNoise.of(np.zeros(100), np.ones(100))
    assert (noise.correlation, noise.mean) == (0.0, 1.0)


def test_the_same_seed_gives_the_same_steps() -> None:
    first, again, other = (observed_factors(log_normal(correlation=0.6), seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other


def test_steps_that_nobody_observed_are_log_normal_of_mean_one() -> None:
    rng = random.Random(7)
    assert step_factors(SPREAD, seed=7) == [rng.lognormvariate(-SPREAD * SPREAD / 2, SPREAD) for _ in range(1021)]
    assert step_factors(0.0, seed=7) == [1.0]


@pytest.mark.parametrize(
    ("ratios", "correlation"), [((), -0.1), ((), 1.0), ((1.0,), 0.0), ((0.0,) * len(DEVIATES), 0.0)]
)
def test_impossible_noise_is_refused(ratios: tuple[float, ...], correlation: float) -> None:
    with pytest.raises(ValueError, match=r"ratio|correlation"):
        StepNoise(ratios=ratios, correlation=correlation)


# --- what workers report ---


def test_workers_report_how_their_steps_scatter_by_kind() -> None:
    costs = observed("decode", heavy_tailed(400), observed("prefill", np.random.default_rng(1).normal(0, 0.05, 400)))
    noise = told(costs)
    ratio = {kind: noise[kind].at(np.array([0.0, 2.33])) for kind in noise}
    assert ratio["decode"][1] / ratio["decode"][0] > 2.0
    assert ratio["prefill"][1] / ratio["prefill"][0] < 1.25


def test_noise_is_around_the_cost_that_is_reported() -> None:
    """Of a decode worker that takes its decode steps' stretch; those with prompts are none the slower for it."""
    costs = observed("decode", heavy_tailed(400), observed("prefill", np.zeros(400)))
    seen = observed_steps("decode", report_of(costs))
    assert seen is not None
    cost, noises = seen
    assert noises["decode"].mean == pytest.approx(1.0, abs=0.01)
    work = {"prefill": StepWork(prefill_tokens=128, prefill_pairs=8256), "decode": StepWork(decodes=3)}
    for kind, noise in noises.items():
        mean = float(np.exp(heavy_tailed(400)[-256:]).mean()) if kind == "decode" else 1.0
        assert cost.step_s(work[kind]) * noise.mean == pytest.approx(COST.step_s(work[kind]) * mean, rel=0.1), kind


def test_spells_are_reported() -> None:
    for correlation, least, most in ((0.0, 0.0, 0.35), (0.7, 0.4, 0.9)):
        costs = observed("decode", SPREAD * normals(3, correlation, 400))
        assert least <= told(costs)["decode"].correlation <= most


def test_kinds_of_which_too_few_steps_are_known_are_not_told() -> None:
    assert observed_steps("decode", None) is None
    assert told(observed("decode", np.zeros(20))) == {}
    assert list(told(observed("decode", np.zeros(200)))) == ["decode"]


def test_noise_is_reported_with_all_ratios() -> None:
    report = report_of(observed("decode", heavy_tailed(400)))
    whole = Heartbeat(snapshot=worker_snapshot("d1", step_cost=report))
    assert decode(encode(whole)) == whole
    for wrong in ([1.0], [0.0] * len(DEVIATES), [1.0] * 500):
        noise = StepNoiseReport(ratios=wrong, correlation=0.0)
        bad = replace(whole.snapshot, step_cost=replace(report, decode_noise=noise))
        with pytest.raises(MalformedMessageError, match="ratios"):
            decode(encode(Heartbeat(snapshot=bad)))


# --- what simulated workers do with it ---


def test_each_kind_of_step_takes_its_own_factors_in_turn() -> None:
    """Whatever comes between: what was observed of one kind, one after the other, was of that kind alone."""
    assert replayed_ttfts({"prefill": doubled(), "decode": log_normal()}) == pytest.approx(
        [2 * COST.step_s(StepWork.of_prefill(40)) + 0.002] * NUM_REPLAYED, abs=0.01
    )


NUM_REPLAYED = 60


def doubled() -> StepNoise:
    return StepNoise(ratios=(2.0,) * len(DEVIATES))


def replayed(noise: dict[StepKind, StepNoise]) -> list[RequestRecord]:
    """Answers of one sequence at a time."""
    requests = [
        LoggedRequest(request_id=f"r{n}", arrival_s=10.0 * n, prompt_tokens=40, output_tokens=33)
        for n in range(NUM_REPLAYED)
    ]
    cost = replace(COST, context_token_s=0.0, relative_error=0.67 * SPREAD)
    worker = LoggedWorker(cost=cost, kv_tokens=20_000, token_budget=512, max_num_seqs=8, noise_by_kind=noise)
    cluster = LoggedCluster(num_prefill=0, num_decode=1, prefill=None, decode=worker, block_size=16, slo=NO_TARGETS)
    return replay(cluster, requests)


def replayed_ttfts(noise: dict[StepKind, StepNoise]) -> list[float | None]:
    return [record.ttft_s for record in replayed(noise)]


def test_spells_make_replayed_answers_differ() -> None:
    """What averages out within each of them hardly shows."""

    def spread(noise: dict[StepKind, StepNoise]) -> float:
        times = [record.tpot_s for record in replayed(noise)]
        return float(np.std([time for time in times if time is not None]) / COST.step_s(StepWork(decodes=1)))

    alone = spread({"decode": log_normal()})
    assert spread({}) == pytest.approx(SPREAD / math.sqrt(32), rel=0.35)
    assert alone == pytest.approx(SPREAD / math.sqrt(32), rel=0.35)
    assert spread({"decode": log_normal(correlation=0.9)}) > 2 * alone
