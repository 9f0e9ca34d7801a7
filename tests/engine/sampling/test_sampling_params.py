"""Every parameter outside its range is refused with a sentence that names it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from engine.sampling.params import MAX_LOGIT_BIAS, MAX_STOP_TOKEN_IDS, SamplingParams

_NAN, _INF = math.nan, math.inf

_BAD: list[tuple[str, Any]] = [
    *[("max_tokens", value) for value in (0, -1, 2**31)],
    *[("seed", value) for value in (-1, 2**63)],
    *[("temperature", value) for value in (-0.1, 2.1, _NAN, _INF)],
    *[("top_k", value) for value in (-1, 2**31)],
    *[("top_p", value) for value in (0.0, -0.5, 1.01, _NAN)],
    *[("min_p", value) for value in (-0.1, 1.1, _NAN)],
    *[("repetition_penalty", value) for value in (0.0, 1e-30, 11.0, _NAN, _INF)],
    *[("presence_penalty", value) for value in (-2.1, 2.1, _NAN)],
    *[("frequency_penalty", value) for value in (-2.1, 2.1, _NAN)],
    *[("logit_bias", value) for value in ({1: 101.0}, {1: _NAN}, {-1: 1.0}, {2**31: 1.0})],
    ("logit_bias", dict.fromkeys(range(MAX_LOGIT_BIAS + 1), 1.0)),
    *[("logprobs", value) for value in (-1, 21)],
    *[("prompt_logprobs", value) for value in (-1, 21)],
    *[("min_tokens", value) for value in (-1, 11)],
    *[("stop_token_ids", value) for value in ((-1,), (2**31,), (0,) * (MAX_STOP_TOKEN_IDS + 1))],
]


@pytest.mark.parametrize(("name", "value"), _BAD)
def test_values_out_of_range_are_refused_by_name(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=name):
        SamplingParams(**{"max_tokens": 10, "seed": 0, name: value})


def test_limits_are_allowed() -> None:
    SamplingParams(
        max_tokens=1,
        seed=2**63 - 1,
        temperature=2.0,
        top_p=1e-9,
        min_p=1.0,
        repetition_penalty=0.01,
        presence_penalty=-2.0,
        logit_bias={0: -100.0, 2**31 - 1: 100.0},
        logprobs=20,
        min_tokens=1,
    )


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_is_one_by_itself(name: str) -> None:
    plain: dict[str, Any] = {"max_tokens": 10, "seed": 0}
    assert not SamplingParams(**plain).has_penalties
    assert SamplingParams(**plain | {name: 0.5}).has_penalties


def test_another_seed_changes_nothing_else() -> None:
    params = SamplingParams(max_tokens=5, seed=1, logit_bias={1: 2.0}, stop_token_ids=(7,))
    assert params.with_seed(2) == replace(params, seed=2) and params.seed == 1
    with pytest.raises(ValueError, match="seed"):
        params.with_seed(-1)


@pytest.mark.parametrize(("temperature", "greedy"), [(0.0, True), (1e-9, True), (0.01, False)])
def test_a_vanishing_temperature_is_greedy(temperature: float, greedy: bool) -> None:
    assert SamplingParams(max_tokens=1, seed=0, temperature=temperature).is_greedy is greedy
