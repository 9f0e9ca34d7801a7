"""What decoding sequences have of each of their steps."""

from __future__ import annotations

import pytest

from engine.cost_model.costs import StepCosts
from engine.cost_model.step_cost import StepCost
from engine.drafting.speculation import Speculation, SpeculationConfig
from engine.sampling.params import SamplingParams
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput, StepPlan

COST = StepCost(base_s=0.01, prefill_token_s=0.001, prefill_pair_s=0.0, decode_s=0.001, context_token_s=0.0)
TOKEN = SampledToken(token_id=5, logprobs=None)


def sequence(num_tokens: int, num_computed: int) -> Sequence:
    params = SamplingParams(max_tokens=100, seed=0)
    seq = Sequence(request_id="r", attempt=0, prompt_token_ids=[1] * num_tokens, params=params)
    seq.num_computed = num_computed
    return seq


def step(speculation: Speculation, *num_tokens: int, num_prompts: int = 0) -> None:
    """Sequences of which each had so many tokens of it, behind prompts."""
    items = [ScheduledSequence(sequence(9, 0), 9) for _ in range(num_prompts)]
    items += [ScheduledSequence(sequence(9, 8), 1) for _ in num_tokens]
    following = {num_prompts + index: [TOKEN] * (num - 1) for index, num in enumerate(num_tokens) if num > 1}
    plan, every = StepPlan(tuple(items)), len(items)
    speculation.computed(plan, StepOutput(sampled=[TOKEN] * every, prompt_logprobs=[None] * every, following=following))


def test_the_mean_of_decoding_sequences_lately() -> None:
    speculation = Speculation.of(SpeculationConfig(), StepCosts(COST))
    assert speculation.tokens_per_step == 1.0
    step(speculation, num_prompts=3)
    assert speculation.tokens_per_step == 1.0, "prompts have no part in it"
    step(speculation, 4, 1, 1, num_prompts=1)
    assert speculation.tokens_per_step == pytest.approx(2.0)
    for _ in range(500):
        step(speculation, 1, 5)
    assert speculation.tokens_per_step == pytest.approx(3.0, rel=1e-3)
    for _ in range(500):
        step(speculation, 1, 1)
    assert speculation.tokens_per_step == pytest.approx(1.0, rel=1e-3)


def test_how_much_longer_drafts_make_steps() -> None:
    costs = StepCosts(COST)
    speculation = Speculation.of(SpeculationConfig(), costs)
    seq = sequence(9, 8)
    plan = StepPlan((ScheduledSequence(seq, 1, (7, 7, 7)),))
    output = StepOutput(sampled=[TOKEN], prompt_logprobs=[None], following={0: [TOKEN]})
    speculation.computed(plan, output)
    assert speculation.drafts_stretch == 1.0, "nothing is known of costs"
    costs.seed(COST)
    speculation = Speculation.of(SpeculationConfig(), costs)
    speculation.computed(plan, output)
    assert speculation.drafts_stretch == pytest.approx(1.0 + 3 * 0.001 / 0.011)
    assert speculation.tokens_per_step == 2.0
