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


def test_a_sequence_is_paced_by_what_it_was_promised_itself() -> None:
    pacer, seq = Pacer(0.1), _seq("r", 1)
    seq.tpot_s = 0.03
    pacer.follow([seq], now=0.0)
    seq.output_token_ids += [4, 4]
    assert pacer.slack_s(seq, 0.05) == pytest.approx(0.01)


def test_a_step_lasts_at_most_until_the_next_token_that_is_due() -> None:
    """By gaps and by means, of which a twentieth is kept back."""
    pacer = Pacer()
    assert pacer.longest_step_s([], 0.0, 0.01) == math.inf
    gap, mean, nothing = _seq("gap", 1), _seq("mean", 1), _seq("nothing", 1)
    gap.gap_s, mean.tpot_s = 0.2, 0.1
    pacer.follow([gap, mean, nothing], now=0.0)
    assert pacer.longest_step_s([nothing], 0.0, 0.01) == math.inf
    assert pacer.longest_step_s([gap, nothing], 0.05, 0.01) == pytest.approx(0.19 - 0.05)
    assert pacer.longest_step_s([gap], 0.185, 0.01) == pytest.approx(0.19), "this gap is late in any case"
    assert pacer.longest_step_s([gap], 0.05, 0.2) == math.inf, "as all of its gaps would be"
    assert pacer.longest_step_s([mean], 0.02, 0.01) == pytest.approx(0.095 - 0.02)
    mean.output_token_ids += [3] * 4
    pacer.follow([mean], now=0.1)
    assert pacer.longest_step_s([mean, gap], 0.1, 0.01) == pytest.approx(0.19 - 0.1), "whoever bears least"
    assert pacer.longest_step_s([mean], 0.1, 0.01) == pytest.approx(5 * 0.095 - 0.1), "what four tokens have saved up"
    assert pacer.longest_step_s([mean], 9.0, 0.01) == pytest.approx(0.095 / 2), "late, it catches up by half at most"


def test_a_gap_is_kept_by_what_nearly_all_steps_take_and_a_mean_by_the_mean() -> None:
    """Steps are told in careful seconds, here 1.2 times what they take in the mean."""
    pacer, gap, mean = Pacer(), _seq("gap", 1), _seq("mean", 1)
    gap.gap_s, mean.tpot_s = 0.2, 0.1
    pacer.follow([gap, mean], now=0.0)
    assert pacer.longest_step_s([gap], 0.05, 0.012, 1.2) == pytest.approx(0.19 - 0.05)
    assert pacer.longest_step_s([mean], 0.02, 0.012, 1.2) == pytest.approx(1.2 * (0.095 - 0.02))
    assert pacer.longest_step_s([gap], 0.0, 0.228, 1.2) == math.inf, "too many of its gaps would be late"
    assert pacer.longest_step_s([mean], 0.0, 0.108, 1.2) == pytest.approx(1.2 * 0.095), "in the mean it is in time"
    assert pacer.longest_step_s([mean], 0.0, 0.132, 1.2) == math.inf


def test_tokens_in_flight_have_come_when_the_next_step_begins() -> None:
    pacer, gap, mean = Pacer(), _seq("gap", 1), _seq("mean", 1)
    gap.gap_s, mean.tpot_s = 0.2, 0.1
    pacer.follow([gap, mean], now=0.0)
    gap.num_awaited = mean.num_awaited = 1
    assert pacer.longest_step_s([gap], 0.15, 0.01) == pytest.approx(0.19)
    assert pacer.longest_step_s([mean], 0.12, 0.01) == pytest.approx(2 * 0.095 - 0.12)


@pytest.mark.parametrize("wrong", [{"tpot_target_s": 0.0}, {"max_in_flight": 0}, {"max_steps_without_prefill": 0}])
def test_a_pace_that_cannot_be_kept_is_refused(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="|".join(wrong)):
        LayerKvConfig(**wrong)  # type: ignore[arg-type]
