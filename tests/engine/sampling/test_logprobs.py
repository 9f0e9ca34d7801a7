"""Log-probabilities of sampled and of prompt tokens: those the model gave."""

from __future__ import annotations

import math

import pytest
import torch

from engine.sampling.sampler import MIN_LOGPROB, Sampler
from tests.engine.sampling.sampling_twin import VOCAB, params_of, random_logits, sequence


def test_logprobs_are_the_models_whatever_is_done_to_the_logits() -> None:
    logits = random_logits(11)
    expected = torch.log_softmax(logits[0].double(), -1)
    best = expected.topk(4)
    for changes in ({"temperature": 0.0}, {"temperature": 0.3, "top_k": 2, "logit_bias": {9: 100.0}}):
        [token] = Sampler(VOCAB).sample(logits, [sequence(params_of(logprobs=4, repetition_penalty=1.5, **changes))])
        assert token.logprobs is not None
        assert token.logprobs.logprob == pytest.approx(float(expected[token.token_id]), abs=1e-5)
        assert [token_id for token_id, _ in token.logprobs.top] == best.indices.tolist()
        assert [logprob for _, logprob in token.logprobs.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_logprobs_come_when_asked_for() -> None:
    logits = random_logits(12)
    none, zero, more = Sampler(VOCAB).sample(
        logits.expand(3, -1), [sequence(params_of(temperature=0.0, logprobs=number)) for number in (None, 0, 20)]
    )
    assert none.logprobs is None
    assert zero.logprobs is not None
    assert zero.logprobs.top == []
    assert more.logprobs is not None
    assert more.logprobs.top[0] == (more.token_id, more.logprobs.logprob)
    assert len(more.logprobs.top) == 20


def test_equal_alternatives_come_lowest_id_first_and_impossible_ones_are_finite() -> None:
    logits = torch.tensor([[0.0, 1.0, -math.inf, 1.0, 0.0]])
    [[logprobs]] = [Sampler(5).prompt_logprobs(logits, [2], 4)]
    assert [token_id for token_id, _ in logprobs.top] == [1, 3, 0, 4]
    assert logprobs.logprob == MIN_LOGPROB


def test_more_alternatives_than_tokens_gives_all_tokens() -> None:
    [logprobs] = Sampler(3).prompt_logprobs(torch.tensor([[0.0, 2.0, 1.0]]), [0], 20)
    assert [token_id for token_id, _ in logprobs.top] == [1, 2, 0]


def test_prompt_logprobs_are_log_softmax_of_what_followed() -> None:
    logits, followed = random_logits(13, rows=40, vocab_size=2000), list(range(40))
    expected = torch.log_softmax(logits.double(), -1)
    logprobs = Sampler(2000).prompt_logprobs(logits, followed, 3)
    assert [entry.logprob for entry in logprobs] == pytest.approx(expected[range(40), followed].tolist(), abs=1e-5)
    assert [[t for t, _ in entry.top] for entry in logprobs] == expected.topk(3).indices.tolist()
    assert Sampler(2000).prompt_logprobs(logits[:0], [], 3) == []
