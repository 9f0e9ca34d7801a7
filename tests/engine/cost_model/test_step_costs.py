"""What a worker knows of its steps' cost: from a calibration on, and without one."""

from __future__ import annotations

import dataclasses
import random

import pytest

from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import scaled
from engine.cost_model.step_cost import StepCost, StepWork
from engine.cost_model.step_room import StepRoom
from engine.sampling.params import SamplingParams
from engine.sequence import ScheduledSequence, Sequence, StepPlan
from kv_transfer.messages.fields import Role
from kv_transfer.worker.cost_report import cost_report, reported_cost

TRUTH = StepCost(
    base_s=0.02, prefill_token_s=1e-3, prefill_pair_s=1e-6, decode_s=1.5e-3, context_token_s=6e-6, relative_error=0.1
)
ESTIMATE = dataclasses.replace(scaled(TRUTH, 1e-3), relative_error=0.3)  # right in proportion, for a faster device
FAR_OFF = dataclasses.replace(ESTIMATE, base_s=0.1 * ESTIMATE.base_s)
PROMPT = StepWork.of_prefill(200, 100)
DECODES = StepWork(decodes=4, context_tokens=800)


def decodes(rng: random.Random) -> StepWork:
    batch = rng.randint(1, 16)
    return StepWork(decodes=batch, context_tokens=batch * rng.randint(50, 1500))


def shown(costs: StepCosts, num_steps: int) -> StepCosts:
    rng = random.Random(0)
    for _ in range(num_steps):
        work = decodes(rng)
        costs.observe(work, TRUTH.step_s(work))
    return costs


def step_s(costs: StepCosts, work: StepWork) -> float:
    cost = costs.cost()
    assert cost is not None
    return cost.step_s(work)


@pytest.mark.parametrize("has_prompt", [False, True])
def test_a_draft_beside_prompts_is_one_of_their_tokens(has_prompt: bool) -> None:
    params = SamplingParams(max_tokens=9, seed=0)
    stream, prompt = (
        Sequence(request_id=name, attempt=0, params=params, prompt_token_ids=[1] * 100) for name in ("stream", "prompt")
    )
    stream.num_computed = 99
    items = [ScheduledSequence(stream, 1, (7, 7, 7))] + [ScheduledSequence(prompt, 40)] * has_prompt
    expected = StepWork(decodes=1, context_tokens=100, drafts=3)
    if has_prompt:
        expected = StepWork.of_prefill(40).plus_prefill(3, 100) + StepWork(decodes=1, context_tokens=100)
    assert StepWork.of_plan(StepPlan(tuple(items))) == expected


def test_nothing_is_known_before_the_first_step() -> None:
    costs = StepCosts(ESTIMATE)
    costs.observe(StepWork(), 1.0)  # copies alone
    assert costs.cost() is None
    assert cost_report(costs) is None


@pytest.mark.parametrize("num_steps", [1, 8, 9, 50])
def test_without_a_calibration_the_estimate_is_brought_to_the_first_steps_speed(num_steps: int) -> None:
    costs = shown(StepCosts(ESTIMATE), num_steps)
    assert step_s(costs, DECODES) == pytest.approx(TRUTH.step_s(DECODES), rel=0.05)
    assert step_s(costs, PROMPT) == pytest.approx(TRUTH.step_s(PROMPT), rel=0.05), "never seen, hence in proportion"


def test_a_first_step_that_pays_for_all_is_seen_through() -> None:
    costs = StepCosts(ESTIMATE)
    costs.observe(DECODES, 30 * TRUTH.step_s(DECODES))
    shown(costs, 7)
    assert step_s(costs, DECODES) == pytest.approx(TRUTH.step_s(DECODES), rel=0.1)
    assert step_s(costs, PROMPT) == pytest.approx(TRUTH.step_s(PROMPT), rel=0.1)


def test_steps_go_on_teaching() -> None:
    costs = StepCosts(FAR_OFF)
    work = decodes(random.Random(1))
    assert abs(step_s(shown(costs, 1), work) / TRUTH.step_s(work) - 1) > 0.05
    assert step_s(shown(costs, 200), work) == pytest.approx(TRUTH.step_s(work), rel=0.03)


def test_a_calibration_counts_before_any_step_and_is_learnt_on_from() -> None:
    costs = StepCosts(FAR_OFF)
    costs.seed(TRUTH)
    assert costs.cost() == TRUTH
    for _ in range(60):
        costs.observe(DECODES, 2 * TRUTH.step_s(DECODES))
    assert step_s(costs, DECODES) == pytest.approx(2 * TRUTH.step_s(DECODES), rel=0.05)


def test_an_error_is_the_seeds_until_steps_of_its_kind_were_predicted() -> None:
    costs = StepCosts(ESTIMATE)
    assert (costs.error("prefill"), costs.error("decode")) == (0.3, 0.3)
    costs.seed(TRUTH)
    assert (costs.error("prefill"), costs.error("decode")) == (0.1, 0.1)
    costs.observe(DECODES, 1.5 * TRUTH.step_s(DECODES))
    assert costs.error("decode") == pytest.approx(0.5)
    assert costs.error("prefill") == 0.1


def test_the_report_says_what_is_known() -> None:
    costs = shown(StepCosts(ESTIMATE), 40)
    cost, report = costs.cost(), cost_report(costs)
    assert cost is not None
    assert report is not None
    for field in dataclasses.fields(cost):
        if field.name not in ("relative_error", "margin"):
            assert getattr(report, field.name) == getattr(cost, field.name)
    assert report.decode_error == costs.error("decode") < 0.05
    assert report.prefill_error == costs.error("prefill") == 0.3
    assert report.decode_stretch == costs.stretch("decode") == pytest.approx(1.0, abs=0.05)
    assert report.prefill_stretch == 1.0


def test_who_reads_a_report_gets_what_steps_take_in_the_mean() -> None:
    report = cost_report(shown(StepCosts(ESTIMATE), 40))
    assert report is not None
    report = dataclasses.replace(report, decode_stretch=1.25, prefill_stretch=1.1)
    stretches: dict[Role, float] = {"decode": 1.25, "prefill": 1.1}
    for role, stretch in stretches.items():
        cost = reported_cost(role, report)
        assert cost is not None
        assert cost.base_s == pytest.approx(stretch * report.base_s)
        assert cost.relative_error == (report.decode_error if role == "decode" else report.prefill_error)


def test_nearly_all_steps_stay_below_the_cautious_cost() -> None:
    costs = StepCosts(ESTIMATE)
    assert costs.cautious_cost() is None
    costs.seed(dataclasses.replace(TRUTH, relative_error=0.1))
    cautious = costs.cautious_cost()
    assert cautious is not None
    assert cautious.step_s(PROMPT) == pytest.approx(1.45 * TRUTH.step_s(PROMPT)), (
        "by what the calibration says of itself"
    )
    rng = random.Random(3)
    late = 0
    for number in range(600):
        work = StepWork.of_prefill(rng.randint(20, 400), rng.randint(0, 800)) + decodes(rng)
        seconds = TRUTH.step_s(work) * rng.lognormvariate(0.0, 0.08)
        cautious = costs.cautious_cost()
        assert cautious is not None
        late += number >= 100 and seconds > cautious.step_s(work)
        costs.observe(work, seconds)
    assert late <= 0.01 * 500, "a P99 is promised"
    assert cautious.step_s(PROMPT) < 1.3 * TRUTH.step_s(PROMPT)
    for _ in range(64):
        costs.observe(PROMPT, 2 * TRUTH.step_s(PROMPT))
    slower = costs.cautious_cost()
    assert slower is not None
    assert slower.step_s(PROMPT) > 2 * TRUTH.step_s(PROMPT), "it follows a machine that has become slower"


class _Curved:
    """What few prompt tokens in a step take: as if there were `lost` more."""

    def __init__(self, cost: StepCost, lost: float) -> None:
        self._cost, self._lost = cost, lost

    def step_s(self, work: StepWork) -> float:
        prompts_s = self._cost.prefill_token_s * work.prefill_tokens + self._cost.prefill_pair_s * work.prefill_pairs
        return self._cost.step_s(work) + (prompts_s * self._lost / work.prefill_tokens if work.prefill_tokens else 0.0)


def test_chunks_do_not_shrink_because_small_ones_are_dear() -> None:
    """Steps are sized by what earlier ones taught. A token of a small chunk takes long, which says nothing of one more:
    put down to tokens, each chunk would be smaller than the last, down to the fewest that there are."""
    known = StepCost(
        base_s=6.6e-3, prefill_token_s=3.4e-5, prefill_pair_s=1.8e-9, decode_s=3.6e-5, context_token_s=4.9e-8
    )
    truth, rng = _Curved(known, lost=180), random.Random(0)
    costs = StepCosts(known)
    costs.seed(dataclasses.replace(known, relative_error=0.1))
    chunks: list[int] = []
    late = 0
    for _ in range(60):
        num_tokens, num_cached = rng.randint(500, 8000), 0
        while num_cached < num_tokens and len(chunks) < 1500:
            batch = rng.randint(1, 32)
            beside = StepWork(decodes=batch, context_tokens=4000 * batch)
            room = StepRoom(
                costs.cautious_cost(), most_tokens=2048, beside=beside, allowed_s=0.02, is_due=rng.random() < 1 / 16
            )
            chunk = room.chunk(num_tokens - num_cached, num_cached)
            work = beside + StepWork.of_prefill(chunk, num_cached) if chunk else beside
            took_s = truth.step_s(work) * rng.lognormvariate(0.0, 0.05)
            costs.observe(work, took_s)
            num_cached += chunk
            if chunk:
                chunks.append(chunk)
                late += took_s > 0.02
    # With 16 decodes of 4,000 tokens there is time for some 70 tokens behind others, and 130 at a prompt's beginning.
    assert sum(chunks[300:]) / len(chunks[300:]) > 35
    assert late < 0.1 * len(chunks)


def test_a_prompts_time_is_assumed_at_first_and_then_what_steps_have_cost() -> None:
    """LayerKV and prefix loading decide by the same model that the scheduler is told of."""
    costs = StepCosts(ESTIMATE)
    assert costs.prefill_s(2000, 500) == 2.0, "at the speed that is assumed of a worker without a step"
    costs.seed(TRUTH)
    assert costs.prefill_s(2000, 500) == TRUTH.prefill_s(2000, 0.0, 500)
    for _ in range(64):
        costs.observe(PROMPT, 3 * TRUTH.step_s(PROMPT))
    num_tokens = int(PROMPT.prefill_tokens)
    known = costs.cost()
    assert known is not None
    assert costs.prefill_s(num_tokens, num_tokens) >= known.prefill_s(num_tokens) > 2 * TRUTH.prefill_s(num_tokens)
