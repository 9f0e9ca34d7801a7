"""Schedules of sequences and what they leave for others."""

from __future__ import annotations

import math

import pytest

from decode_workers.pacing import LayerKvConfig, Pacer
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence


def _seq(name: str, num_output: int, max_tokens: int = 10) -> Sequence:
    return Sequence(
        request_id=name,
        attempt=0,
        params=SamplingParams(max_tokens=max_tokens, seed=0),
        prompt_token_ids=[2],
        output_token_ids=[3] * num_output,
    )


def test_slack_grows_by_the_target_with_each_token_and_falls_with_time() -> None:
    pacer, seq = Pacer(0.1), _seq("r", 1)
    pacer.follow([seq], now=5.0)
    assert pacer.slack_s(seq, 5.0) == 0.0
    seq.output_token_ids += [4, 4, 4]
    assert pacer.slack_s(seq, 5.1) == pytest.approx(0.2)
    assert pacer.slack_s(seq, 5.5) == pytest.approx(-0.2)
    pacer.follow([seq], now=9.0)
    assert pacer.slack_s(seq, 5.5) == pytest.approx(-0.2), "its schedule does not begin anew"
    pacer.forget(seq.key)
    pacer.follow([seq], now=9.0)
    assert pacer.slack_s(seq, 9.0) == 0.0


def test_prefill_may_take_what_the_tightest_sequence_can_make_good_until_its_end() -> None:
    pacer, early, late = Pacer(0.1), _seq("early", 1), _seq("late", 8)
    assert pacer.prefill_allowance_s([], 0.0, 0.05) == math.inf
    pacer.follow([early, late], now=0.0)
    assert pacer.prefill_allowance_s([early], 0.0, 0.05) == pytest.approx(9 * 0.05)
    assert pacer.prefill_allowance_s([early, late], 0.0, 0.05) == pytest.approx(2 * 0.05)
    assert pacer.prefill_allowance_s([early, late], 0.3, 0.05) < 0, "0.3 s later it is late for good"
    assert pacer.prefill_allowance_s([early], 0.0, 0.2) < 0, "steps take longer than tokens may"


@pytest.mark.parametrize("wrong", [{"tpot_target_s": 0.0}, {"max_in_flight": 0}, {"max_steps_without_prefill": 0}])
def test_a_pace_that_cannot_be_kept_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(wrong)):
        LayerKvConfig(**wrong)  # type: ignore[arg-type]
