"""The sampler against a naive twin, Hugging Face's processors, statistics, and itself in other batches."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from engine.sampling.logits import adjusted, survivors
from engine.sampling.sampler import Sampler
from engine.sequence import Sequence
from tests.engine.sampling.sampling_twin import (
    EOS,
    VOCAB,
    draw,
    naive_adjusted,
    naive_draw,
    naive_kept,
    params_of,
    random_logits,
    sequence,
)
from tests.support.thoroughness import combined


@settings(max_examples=200, deadline=None, derandomize=True)  # float32 against float64: stay off new boundaries
@given(
    st.integers(0, 2**32),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.1, 0.7, 1.0, 1.7]),
            "top_k": st.sampled_from([1, 5, 40, 400]),
            "top_p": st.sampled_from([0.1, 0.5, 0.9, 0.999]),
            "min_p": st.sampled_from([0.01, 0.1, 0.5]),
            "repetition_penalty": st.sampled_from([0.5, 1.3]),
            "presence_penalty": st.sampled_from([-1.0, 1.5]),
            "frequency_penalty": st.sampled_from([-0.5, 0.7]),
            "min_tokens": st.sampled_from([3, 50]),
            "stop_token_ids": st.just((5, 6)),
            "ignore_eos": st.booleans(),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100), max_size=5),
            "allowed_token_ids": st.lists(st.integers(0, VOCAB + 5), min_size=1, max_size=12).map(tuple),
            "bad_words": st.lists(
                st.lists(st.integers(0, 5), min_size=1, max_size=3).map(tuple), min_size=1, max_size=8
            ).map(tuple),
        },
    ),
    st.lists(st.integers(0, 20), max_size=30),
)
def test_draws_equal_the_naive_twins(seed: int, changes: dict[str, Any], output: list[int]) -> None:
    logits = random_logits(seed)
    seq = sequence(params_of(seed=seed, **changes), output=output)
    [token] = Sampler(VOCAB, [EOS]).sample(logits, [seq])
    assert token.token_id == naive_draw(logits[0].numpy(), seq, [EOS])


@pytest.mark.parametrize("scale", [0.3, 3.0, 12.0])
@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    list(itertools.product([0.6, 1.0, 1.5], [0, 1, 50], [1.0, 0.95, 0.3], [0.0, 0.05])),
)
def test_the_surviving_tokens_are_hugging_faces(
    temperature: float, top_k: int, top_p: float, min_p: float, scale: float
) -> None:
    scores = random_logits(top_k, vocab_size=5000, scale=scale)
    params = params_of(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    ids, _ = survivors(scores[0].numpy(), params)
    warpers = [hf.TemperatureLogitsWarper(temperature)]
    warpers += [hf.TopKLogitsWarper(top_k)] if top_k else []
    warpers += [hf.TopPLogitsWarper(top_p)] if top_p < 1 else []
    warpers += [hf.MinPLogitsWarper(min_p)] if min_p else []
    for warper in warpers:
        scores = warper(torch.zeros(1, 1, dtype=torch.long), scores)
    expected = torch.isfinite(scores[0]).nonzero()[:, 0].tolist()
    assert (list(range(5000)) if ids is None else ids.tolist()) == expected


def test_the_repetition_penalty_is_hugging_faces() -> None:
    scores, seq = random_logits(0), sequence(params_of(repetition_penalty=1.3), prompt=[5, 5, 9], output=[11, 5])
    expected = hf.RepetitionPenaltyLogitsProcessor(1.3)(torch.tensor([[5, 5, 9, 11, 5]]), scores.clone())
    assert torch.equal(torch.from_numpy(adjusted(scores[0].numpy(), seq, frozenset())), expected[0])


@pytest.mark.parametrize(
    ("output", "banned"),
    [([], {11, 32, 33}), ([7], {11}), ([7, 8], {11, 30, 31}), ([8], {11, 31}), ([8, 7], {11, 300})],
)
def test_bad_words_are_hugging_faces(output: list[int], banned: set[int]) -> None:
    words = [[11], [7, 8, 30], [8, 31], [2, 32], [0, 1, 2, 33], [9, 9, 9, 9, 9, 9, 9, 34], [8, 7, 300]]
    scores, seq = random_logits(0), sequence(params_of(bad_words=tuple(map(tuple, words))), output=output)
    known = torch.tensor([[*seq.prompt_token_ids, *output]])
    expected = hf.NoBadWordsLogitsProcessor(words, eos_token_id=EOS)(known, scores.clone())
    assert torch.equal(torch.from_numpy(adjusted(scores[0].numpy(), seq, frozenset())), expected[0])
    assert set(torch.isinf(expected[0]).nonzero()[:, 0].tolist()) == banned


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"allowed_token_ids": (3, 4, 999)}, {3, 4}),
        ({"allowed_token_ids": (3, 4), "bad_words": ((3,),)}, {4}),
        ({"allowed_token_ids": (3, 4), "bad_words": ((3,), (4,))}, {3, 4}),
        ({"allowed_token_ids": (EOS,), "min_tokens": 5}, {EOS}),
        ({"allowed_token_ids": (EOS, 5), "min_tokens": 5}, {5}),
        ({"allowed_token_ids": (999,), "bad_words": tuple((n,) for n in range(9))}, {9}),
        ({"logit_bias": {3: -100.0, 5: 100.0}, "allowed_token_ids": (3,)}, {3}),
    ],
)
def test_what_is_allowed_wins_over_what_is_banned(changes: dict[str, Any], expected: set[int]) -> None:
    drawn = {draw(random_logits(5, vocab_size=10, scale=0.5), seed=seed, **changes) for seed in range(60)}
    assert drawn == expected


def test_presence_and_frequency_count_output_only() -> None:
    row = np.zeros(10, dtype=np.float32)
    seq = sequence(params_of(presence_penalty=0.5, frequency_penalty=0.25), prompt=[1, 1, 2], output=[2, 3, 3])
    changed = adjusted(row, seq, frozenset())
    assert changed.tolist() == [0, 0, -0.75, -1.0, 0, 0, 0, 0, 0, 0]
    assert not row.any(), "the model's logits were changed"


@settings(max_examples=50, deadline=None)
@given(st.integers(0, 2**32), st.lists(st.integers(0, 30), max_size=40))
def test_penalties_equal_the_naive_ones(seed: int, output: list[int]) -> None:
    row = random_logits(seed)[0].numpy()
    params = params_of(
        repetition_penalty=1.2, presence_penalty=-0.5, frequency_penalty=0.3, logit_bias={4: 7.0, 5: -7.0}
    )
    seq = sequence(params, prompt=[4, 8, 8, 30], output=output)
    np.testing.assert_allclose(adjusted(row, seq, frozenset()), naive_adjusted(row, seq, []), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("vocab_size", [1000, 49_152])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.99, 0.99999])
@pytest.mark.parametrize("scale", [0.01, 1.0, 4.0, 30.0])
def test_top_p_keeps_the_smallest_set_with_the_mass(scale: float, top_p: float, vocab_size: int) -> None:
    row = random_logits(7, vocab_size=vocab_size, scale=scale)[0].numpy()
    ids, _ = survivors(row, params_of(top_p=top_p))
    weights = np.exp(row.astype(np.float64) - row.max())
    kept = np.sort(weights if ids is None else weights[ids])
    assert kept.sum() >= (top_p - 1e-6) * weights.sum()
    assert kept[1:].sum() < (top_p + 1e-6) * weights.sum()
    assert ids is None or kept[0] > np.delete(weights, ids).max(initial=0.0)


@combined(
    changes={
        "plain": {},
        "temperature": {"temperature": 0.5},
        "top_k": {"temperature": 1.6, "top_k": 6},
        "top_p": {"top_p": 0.8},
        "min_p": {"min_p": 0.2},
    },
    vary=["seed", "position"],
)
def test_frequencies_are_the_probabilities(changes: dict[str, Any], vary: str) -> None:
    """Chi-square at five standard deviations above its mean."""
    num_draws, row = 6000, random_logits(3, vocab_size=12, scale=1.2)
    sampler, counts = Sampler(12), np.zeros(12)
    for index in range(num_draws):
        params = params_of(seed=index if vary == "seed" else 77, **changes)
        seq = sequence(params, output=[0] * (index if vary == "position" else 0))
        counts[sampler.sample(row, [seq])[0].token_id] += 1
    exact = row[0].numpy().astype(np.float64)
    kept = sorted(naive_kept(exact, params_of(**changes)))
    weights = np.exp(exact[kept] / changes.get("temperature", 1.0))
    expected = num_draws * weights / weights.sum()
    assert counts.sum() == counts[kept].sum() == num_draws
    freedom = len(kept) - 1
    assert ((counts[kept] - expected) ** 2 / expected).sum() < freedom + 5 * math.sqrt(2 * freedom)


_MIX: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.0, "logprobs": 5},
    {"temperature": 0.8, "top_p": 0.9, "logprobs": 0},
    {"top_k": 50, "logprobs": 20},
    {"min_p": 0.05, "repetition_penalty": 1.2},
    {"temperature": 0.0, "frequency_penalty": 1.0, "logit_bias": {7: 3.0}},
    {"min_tokens": 9, "stop_token_ids": (1, 2), "top_p": 0.5},
    {"allowed_token_ids": tuple(range(0, 1_000, 7))},
    {"temperature": 0.0, "allowed_token_ids": (9, 11, 13), "bad_words": ((9,), (3, 11))},
]


def _batch(num_rows: int) -> list[Sequence]:
    return [
        sequence(params_of(seed=index, **_MIX[index % len(_MIX)]), output=list(range(index)), name=f"r{index}")
        for index in range(num_rows)
    ]


def test_a_row_depends_on_nothing_but_itself() -> None:
    """Alone, in a batch, in another order, and as a strided view: the same tokens and log-probabilities, to the bit."""
    vocab_size, rows = 49_152, _batch(32)
    sampler, logits = Sampler(vocab_size, [EOS]), random_logits(1, 32, vocab_size)
    together = sampler.sample(logits, rows)
    assert [sampler.sample(logits[i : i + 1].clone(), [rows[i]])[0] for i in range(32)] == together
    assert sampler.sample(logits.flip(0), rows[::-1]) == together[::-1]
    wide = torch.zeros(32, 2 * vocab_size)
    wide[:, ::2] = logits
    assert sampler.sample(wide[:, ::2], rows) == together


def test_the_input_is_not_changed_and_sampling_twice_gives_the_same() -> None:
    sampler, logits, rows = Sampler(VOCAB, [EOS]), random_logits(2, 16), _batch(16)
    before = logits.clone()
    assert sampler.sample(logits, rows) == sampler.sample(logits, rows)
    assert torch.equal(logits, before)


def test_where_prompt_ends_and_output_begins_does_not_matter_to_a_draw() -> None:
    """A recovered request carries earlier output; its position, not its history, selects the randomness."""
    sampler, logits = Sampler(VOCAB), random_logits(3)
    splits = [sequence(params_of(), prompt=list(range(n)), output=list(range(n, 20))) for n in (1, 10, 20)]
    assert len({sampler.sample(logits, [seq])[0].token_id for seq in splits}) == 1


def test_seeds_and_positions_give_different_streams() -> None:
    sampler, logits = Sampler(VOCAB), random_logits(4, scale=0.1)
    by_seed = [sampler.sample(logits, [sequence(params_of(seed=seed))])[0].token_id for seed in range(60)]
    by_position = [sampler.sample(logits, [sequence(params_of(), output=[0] * n)])[0].token_id for n in range(60)]
    assert len(set(by_seed)) > 30
    assert len(set(by_position)) > 30
