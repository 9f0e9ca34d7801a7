"""The sampler at its limits: ties, strictest settings, biases, bans, rows without a distribution."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from engine.sampling.sampler import InvalidLogitsError, Sampler
from tests.engine.sampling.sampling_twin import EOS, VOCAB, draw, params_of, random_logits, sequence


def test_greedy_takes_the_lowest_id_among_equals() -> None:
    logits = torch.zeros(2, 9)
    logits[0, [4, 7]] = 1.0
    sampler = Sampler(9)
    tokens = sampler.sample(logits, [sequence(params_of(temperature=0.0))] * 2)
    assert [token.token_id for token in tokens] == [4, 0]
    assert draw(logits[:1], temperature=0.0, logit_bias={8: 1.0}) == 4


@pytest.mark.parametrize(
    "changes",
    [{"top_k": 1}, {"top_p": 1e-9}, {"min_p": 1.0}, {"temperature": 1e-5}, {"temperature": 1e-9}],
    ids=str,
)
def test_the_strictest_setting_of_each_parameter_is_greedy(changes: dict[str, Any]) -> None:
    logits = random_logits(5)
    assert {draw(logits, seed=seed, **changes) for seed in range(50)} == {int(logits.argmax())}


def test_an_empty_batch_gives_no_tokens() -> None:
    assert Sampler(VOCAB).sample(torch.zeros(0, VOCAB), []) == []


def test_huge_logits_do_not_overflow() -> None:
    logits = random_logits(6) * 1e30
    assert draw(logits, temperature=0.01, top_p=0.9) == int(logits.argmax())


@pytest.mark.parametrize("changes", [{"top_k": 3}, {"top_p": 0.3}, {"min_p": 1.0}], ids=str)
def test_equally_likely_tokens_survive_together(changes: dict[str, Any]) -> None:
    """What survives is decided by the logits alone, so of equals either all are kept or none."""
    row = torch.zeros(1, 8)
    row[0, :2] = -5.0
    assert {draw(row, seed=seed, **changes) for seed in range(300)} == {2, 3, 4, 5, 6, 7}


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_a_bias_of_100_forces_and_of_minus_100_bans(temperature: float) -> None:
    logits = random_logits(8, scale=1.0)
    best = int(logits.argmax())
    assert {draw(logits, seed=s, temperature=temperature, logit_bias={123: 100.0}) for s in range(30)} == {123}
    assert best not in {draw(logits, seed=s, temperature=temperature, logit_bias={best: -100.0}) for s in range(200)}


def test_a_bias_on_no_token_of_the_model_changes_nothing() -> None:
    logits = random_logits(9)
    assert draw(logits, logit_bias={10**6: 100.0}, stop_token_ids=(10**6,), min_tokens=5) == draw(logits)


def test_min_tokens_bans_every_ending_until_it_is_reached() -> None:
    logits = torch.zeros(1, 6)
    logits[0, [EOS, 4]] = 50.0
    changes: dict[str, Any] = {"min_tokens": 3, "stop_token_ids": (4,)}
    early = {draw(logits, seed=seed, output=[0, 0], **changes) for seed in range(100)}
    assert early == {0, 1, 3, 5}
    assert draw(logits, output=[0, 0], temperature=0.0, **changes) == 0
    late = {draw(logits, seed=seed, output=[0, 0, 0], **changes) for seed in range(100)}
    assert late == {EOS, 4}


def test_an_ignored_eos_may_be_sampled_at_any_time() -> None:
    logits = torch.zeros(1, 6)
    logits[0, EOS] = 50.0
    assert draw(logits, min_tokens=3, ignore_eos=True) == EOS


def test_a_ban_that_would_leave_no_token_is_lifted() -> None:
    logits = torch.full((1, 6), -math.inf)
    logits[0, [EOS, 4]] = torch.tensor([1.0, 3.0])
    assert {draw(logits, seed=s, min_tokens=3, stop_token_ids=(4,)) for s in range(50)} == {EOS, 4}


@pytest.mark.parametrize("changes", [{}, {"top_k": 5}, {"top_p": 0.999}, {"min_p": 0.001}], ids=str)
def test_a_token_that_the_model_excludes_is_never_drawn(changes: dict[str, Any]) -> None:
    logits = torch.full((1, 9), -math.inf)
    logits[0, [3, 5]] = torch.tensor([0.0, 1.0])
    assert {draw(logits, seed=seed, **changes) for seed in range(200)} == {3, 5}


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_are_named_and_nothing_is_sampled(poison: float, temperature: float) -> None:
    sampler, logits = Sampler(VOCAB), random_logits(10, 3)
    if poison == -math.inf:
        logits[1] = poison
    else:
        logits[1, 77] = poison
    rows = [sequence(params_of(temperature=temperature), name=name) for name in ("a", "b", "c")]
    with pytest.raises(InvalidLogitsError, match="logits of request b hold") as caught:
        sampler.sample(logits, rows)
    assert caught.value.rows == [1]
    assert len(sampler.sample(logits[[0, 2]], [rows[0], rows[2]])) == 2
    with pytest.raises(InvalidLogitsError, match="prompt position 1"):
        sampler.prompt_logprobs(logits, [0, 0, 0], 1)
