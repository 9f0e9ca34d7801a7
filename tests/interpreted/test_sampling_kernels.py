"""Sampling by the GPU's kernels gives the CPU's tokens: every parameter, ties, bans, rows without a distribution."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from engine.sampling.device_sampler import DeviceSampler
from engine.sampling.grammar import GrammarMasks
from engine.sampling.logits import survivors, tempered
from engine.sampling.params import SamplingParams
from engine.sampling.pending_output import PendingOutput, joined
from engine.sampling.philox import gumbel as defined_noise
from engine.sampling.sampler import MIN_LOGPROB, InvalidLogitsError, Sampler
from engine.sequence import DraftedSequence, SampledToken, Sequence, TokenLogprobs, TokensSoFar
from engine.steps.loading import sampler_for
from kernels.triton.sampling import floor as floors
from kernels.triton.sampling import logprobs, sample
from kernels.triton.sampling.floor import find_floors
from kernels.triton.sampling.rows import NUM_FIELDS, SHIPPED_SPLITS, SPLIT, RowOptions, no_edits, pack_rows
from kernels.triton.sampling.sample import best_of_splits, gumbel
from kernels.triton.shipped import Shipped
from tests.engine.sampling.sampling_twin import EOS, params_of, random_logits, sequence
from tests.support.byte_tokenizer import write_byte_tokenizer
from tests.support.interpreted import device

_WISHES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.0},
    {"temperature": 0.1},
    {"temperature": 1.7, "top_k": 40},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 1},
    {"top_k": 400},
    {"top_p": 0.1},
    {"top_p": 0.999},
    {"min_p": 0.05},
    {"min_p": 1.0},
    {"temperature": 1.3, "top_k": 30, "top_p": 0.8, "min_p": 0.02},
    {"repetition_penalty": 1.3},
    {"repetition_penalty": 0.5, "temperature": 0.0},
    {"presence_penalty": 1.5, "frequency_penalty": -0.5},
    {"presence_penalty": -1.0, "frequency_penalty": 0.7, "temperature": 0.0},
    {"logit_bias": {7: 3.5, 200: -100.0, 250: 2.25, 9999: 5.0}},
    {"logit_bias": {123: 100.0}, "top_p": 0.5},
    {"min_tokens": 50, "stop_token_ids": (5, 6)},
    {"min_tokens": 50, "ignore_eos": True, "stop_token_ids": (5, 9999), "logit_bias": {5: 90.0}},
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "logit_bias": {3: 1.0}, "min_tokens": 60, "top_k": 20},
    {"allowed_token_ids": (3, 5, 8, 200, 9999), "temperature": 1.5},
    {"allowed_token_ids": (5, 6, EOS), "min_tokens": 50, "stop_token_ids": (5, 6)},
    {"bad_words": (*itertools.product(range(40), (7, 123, 200)), (9,), (9999,))},
    {"allowed_token_ids": (4, 5, 6, 7), "bad_words": ((4,), (5,)), "repetition_penalty": 1.3, "top_k": 3},
    {"temperature": 0.9, "logprobs": 0},
    {"temperature": 0.0, "logprobs": 5, "repetition_penalty": 1.5},
    {"logprobs": 20, "top_p": 0.7},
]


def _row(number: int, wish: dict[str, Any]) -> Sequence:
    output = [int(token) for token in np.random.default_rng(number).integers(0, 40, number)]
    return sequence(params_of(seed=(number << 40) + number, **wish), output=output, name=f"r{number}")


def _both(logits: Tensor, rows: list[Sequence]) -> tuple[list[SampledToken], list[SampledToken]]:
    vocab_size = logits.shape[1]
    on_device = DeviceSampler(vocab_size, [EOS]).begin(logits.to(device()), rows).finish()
    return on_device, Sampler(vocab_size, [EOS]).sample(logits, rows)


def _assert_same(ours: TokenLogprobs | None, theirs: TokenLogprobs | None) -> None:
    if ours is None or theirs is None:
        assert ours is theirs
        return
    assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in theirs.top]
    values = [ours.logprob, *(value for _, value in ours.top)]
    assert values == pytest.approx([theirs.logprob, *(value for _, value in theirs.top)], rel=1e-6, abs=1e-6)


def test_tokens_are_the_cpus() -> None:
    """Every parameter, alone and with others, in one batch of flat and of steep rows."""
    rows = [_row(number, wish) for number, wish in enumerate(_WISHES)]
    scales = torch.tensor([0.3, 1.0, 3.0, 9.0, 0.05]).repeat(len(rows))[: len(rows), None]
    ours, theirs = _both(random_logits(1, len(rows), 257, 1.0) * scales, rows)
    assert [token.token_id for token in ours] == [token.token_id for token in theirs]
    for one, other in zip(ours, theirs, strict=True):
        _assert_same(one.logprobs, other.logprobs)


def test_tokens_of_a_large_vocabulary_are_the_cpus() -> None:
    """As many splits as it has, the last one whole; and a number of tokens that is no multiple of anything."""
    wishes: list[dict[str, Any]] = [{"logit_bias": {40_000: 4.0}, "logprobs": 3}, {"top_k": 50, "top_p": 0.95}]
    rows = [_row(number, wish) for number, wish in enumerate(wishes, 3)]
    ours, theirs = _both(random_logits(5, 2, 49_152), rows)
    assert [token.token_id for token in ours] == [token.token_id for token in theirs]
    _assert_same(ours[0].logprobs, theirs[0].logprobs)
    ours, theirs = _both(random_logits(6, 1, 2 * SPLIT + 1), [_row(9, {"temperature": 2.0})])
    assert ours == theirs


def test_greedy_takes_the_lowest_id_among_equals_also_of_different_splits() -> None:
    logits = torch.zeros(3, 2 * SPLIT + 5)
    logits[0, [4, 7]] = 1.0
    logits[1, [SPLIT + 1, 2 * SPLIT + 1]] = 1.0
    logits[2] = -0.0
    logits[2, 9] = 0.0
    ours, theirs = _both(logits, [sequence(params_of(temperature=0.0))] * 3)
    assert [token.token_id for token in ours] == [4, SPLIT + 1, 0] == [token.token_id for token in theirs]


def _words(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    wishes = [
        RowOptions(seed=0, position=0, temperature=p.temperature, top_k=p.top_k, top_p=p.top_p, edits=no_edits())
        for p in params
    ]
    words = torch.from_numpy(pack_rows(wishes, logits.shape[1]).words).to(device())
    return words[: len(logits) * NUM_FIELDS]


def _floors(logits: Tensor, params: list[SamplingParams]) -> Tensor:
    moved = logits.to(device())
    return find_floors(moved, _words(logits, params), best_of_splits(moved)[0]).cpu()


@pytest.mark.parametrize("levels", [1, 40, None], ids=str)
def test_what_top_k_and_top_p_keep_is_what_the_cpu_keeps(levels: int | None) -> None:
    """With few levels most logits are equal: of equals either all are kept or none."""
    wishes: list[dict[str, Any]] = [
        {"top_k": 1},
        {"top_k": 7},
        {"top_k": 256},
        {"top_p": 1e-9},
        {"top_p": 0.35},
        {"top_p": 0.99999},
        {"temperature": 0.3, "top_k": 20, "top_p": 0.6},
        {"temperature": 2.0, "top_k": 100, "top_p": 0.97},
    ]
    logits = random_logits(11, len(wishes), 257)
    if levels is not None:
        logits = torch.floor(logits.sigmoid() * levels)
    logits[:, 100:103] = -math.inf
    params = [params_of(**wish) for wish in wishes]
    for row, floor, wanted in zip(logits.numpy(), _floors(logits, params), params, strict=True):
        relative = tempered(row, wanted.temperature)
        ids, _ = survivors(row, wanted)
        expected = np.arange(257) if ids is None else ids
        assert np.flatnonzero(relative >= float(floor)).tolist() == expected.tolist(), wanted


def _assert_some_are_kept_as_on_the_cpu(logits: Tensor, params: list[SamplingParams]) -> None:
    """At a temperature of 1, of rows that are all filtered."""
    for row, floor, wanted in zip(logits.numpy(), _floors(logits, params), params, strict=True):
        relative = tempered(row, 1.0)
        ids, _ = survivors(row, wanted)
        assert ids is not None
        assert np.flatnonzero(relative >= float(floor)).tolist() == ids.tolist(), wanted


def test_what_is_kept_of_many_tiles_near_the_best_and_far_from_it() -> None:
    """Nearly all tokens within the smallest distance; few; and so many that all have to be looked at."""
    logits = random_logits(12, 3, 9001) * torch.tensor([[0.01], [1.0], [10.0]])
    params = [params_of(top_p=0.9), params_of(top_p=0.9), params_of(top_k=8000, top_p=0.999999)]
    _assert_some_are_kept_as_on_the_cpu(logits, params)


@pytest.mark.parametrize("gap", [1.0, 4.0, 8.0, 13.0, 19.0, 40.0])
def test_what_is_kept_where_a_row_is_sure_of_a_few(gap: float) -> None:
    """Each distance within which tokens are collected is the least that holds enough of them, in some row."""
    logits = random_logits(13, 3, 2 * SPLIT + 300) * 0.1 - gap
    logits[:, [3, SPLIT - 1, SPLIT, 2 * SPLIT + 299]] = torch.tensor([0.0, -0.5, -0.5, -0.9])
    params = [params_of(top_k=3), params_of(top_k=9), params_of(top_k=20, top_p=0.9999)]
    _assert_some_are_kept_as_on_the_cpu(logits, params)


def test_tokens_that_a_grammar_forbids_are_not_looked_at_where_it_leaves_less_than_top_k() -> None:
    logits = torch.full((2, 2 * SPLIT + 300), -math.inf)
    logits[:, [3, SPLIT, 2 * SPLIT + 299]] = torch.tensor([0.0, -50.0, -3.0])
    params = [params_of(top_k=20), params_of(top_k=20, top_p=0.5)]
    assert _floors(logits, params).tolist() == [-math.inf, 0.0]
    amounts = torch.empty(2, 6, 3, dtype=torch.float64, device=device())
    counts = torch.empty(2, 6, 3, dtype=torch.int32, device=device())
    moved = logits.to(device())
    floors._surveying(4).launch(
        (2, 3),
        logits=moved,
        rows=_words(logits, params),
        best_values=best_of_splits(moved)[0],
        amounts=amounts,
        counts=counts,
        vocab_size=logits.shape[1],
        row_stride=logits.shape[1],
        num_splits=3,
    )
    assert counts.sum(2).tolist() == [[1, 2, 2, 2, 2, 3]] * 2


def test_rows_that_keep_everything_have_no_floor() -> None:
    params = [params_of(), params_of(temperature=0.0, top_k=3), params_of(top_k=257), params_of(top_k=10**6)]
    assert (_floors(random_logits(1, 4, 257), params) == -math.inf).all()


@triton.jit
def noise_kernel(out, seed, position, first_counter, COUNT: tl.constexpr):
    noise = gumbel(tl.load(seed), tl.load(position), first_counter, COUNT)
    tl.store(out + tl.arange(0, COUNT), noise)


@pytest.mark.parametrize("seed", [0, 1, 2**32, 2**63 - 1, 0x0123456789ABCDEF])
@pytest.mark.parametrize("position", [0, 7, 2**31, 2**32 - 1])
def test_the_noise_is_the_cpus(seed: int, position: int) -> None:
    out = torch.empty(64, dtype=torch.float64, device=device())
    words = [torch.tensor([word], dtype=torch.int64, device=device()) for word in (seed, position)]
    noise_kernel[(1,)](out, *words, 1000, COUNT=64)
    expected = defined_noise(seed, position, np.arange(4000, 4064), 10**6)
    np.testing.assert_allclose(out.cpu().numpy(), expected, rtol=1e-14, atol=1e-14)


def test_a_row_depends_on_nothing_but_itself() -> None:
    """Alone, in another order, and in rows of a larger matrix whose other columns are NaN."""
    rows = [_row(number, _WISHES[number]) for number in (4, 11, 20, 22, 23, 26)]
    logits = random_logits(1, len(rows), 257).to(device())
    sampler = DeviceSampler(257, [EOS])
    together = sampler.begin(logits, rows).finish()
    parts = joined([sampler.begin(logits[:5], rows[:5]), sampler.begin(logits[5:], rows[5:])])
    assert parts.finish() == together and parts.token_ids.tolist() == [token.token_id for token in together]
    assert [sampler.begin(logits[i : i + 1].clone(), [row]).finish()[0] for i, row in enumerate(rows)] == together
    wide = torch.full((len(rows), 300), math.nan, device=device())
    wide[:, 20:277] = logits.flip(0)
    before = wide.clone()
    assert sampler.begin(wide[:, 20:277], rows[::-1]).finish() == together[::-1]
    assert torch.equal(wide.nan_to_num(9.0), before.nan_to_num(9.0)), "the model's logits were changed"


def test_a_ban_that_would_leave_no_token_is_lifted() -> None:
    logits = torch.full((1, 60), -math.inf)
    logits[0, [EOS, 4]] = torch.tensor([1.0, 3.0])
    rows = [sequence(params_of(seed=s, min_tokens=3, stop_token_ids=(4, 4))) for s in range(12)]
    ours, theirs = _both(logits.repeat(12, 1), rows)
    assert ours == theirs
    assert {token.token_id for token in ours} == {EOS, 4}


def test_grammars_are_the_cpus(tmp_path: Path) -> None:
    """Of rows in any company, which keep their tokens; the end is allowed where nothing else is, whatever bans it."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    masks, size = GrammarMasks(tmp_path, 307, [EOS]), 307
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"logprobs": 3},
        {"logit_bias": {5: 50.0, 20: -100.0}, "repetition_penalty": 1.3},
        {"top_k": 4, "min_tokens": 50, "stop_token_ids": (20,)},
        {"top_p": 0.5, "temperature": 0.6},
        {"min_p": 0.2, "ignore_eos": True},
    ]
    digit = masks.tokenizer.tokenize_str("7")
    rows = [
        sequence(params_of(seed=n, grammar=grammar, **wish), output=digit * given, name=f"r{n}")
        for n, (grammar, given, wish) in enumerate(
            (grammar, given, wish)
            for grammar, given in (("start: /[0-9]{1,3}/", 0), (None, 1), ('start: "7"', 1))
            for wish in wishes
        )
    ]
    logits = random_logits(3, len(rows), size)
    sampler = DeviceSampler(size, [EOS], masks)
    ours = sampler.begin(logits.to(device()), rows).finish()
    theirs = Sampler(size, [EOS], masks).sample(logits, rows)
    assert [token.token_id for token in ours] == [token.token_id for token in theirs]
    for one, other in zip(ours, theirs, strict=True):
        _assert_same(one.logprobs, other.logprobs)
    free = [n for n, seq in enumerate(rows) if seq.params.grammar is None]
    assert DeviceSampler(size, [EOS]).begin(logits[free].to(device()), [rows[n] for n in free]).finish() == [
        ours[n] for n in free
    ]
    logits[0, masks.tokenizer.tokenize_str("0123456789")] = -math.inf
    with pytest.raises(InvalidLogitsError, match="logits of request r0 hold"):
        sampler.begin(logits.to(device()), rows).finish()


def test_lists_of_tokens_give_way_to_a_grammar_one_by_one_as_on_the_cpu(tmp_path: Path) -> None:
    """Where the grammar leaves none of the allowed tokens, or bans would leave none of those, the other list counts."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    masks, size = GrammarMasks(tmp_path, 307, [EOS]), 307
    three, four, letter = (masks.tokenizer.tokenize_str(text)[0] for text in "34a")
    wishes: list[dict[str, Any]] = [
        {"allowed_token_ids": (three, letter), "bad_words": ((three,),)},
        {
            "allowed_token_ids": (letter,),
            "bad_words": tuple((token,) for token in masks.tokenizer.tokenize_str("0123")),
        },
        {"allowed_token_ids": (three, four, letter), "bad_words": ((three,),)},
    ]
    rows = [
        sequence(params_of(seed=seed, temperature=2.0, grammar="start: /[0-9]{2}/", **wish))
        for wish in wishes
        for seed in range(8)
    ]
    logits = random_logits(17, len(rows), size)
    ours = DeviceSampler(size, [EOS], masks).begin(logits.to(device()), rows).finish()
    assert ours == Sampler(size, [EOS], masks).sample(logits, rows)
    tokens = [token.token_id for token in ours]
    assert set(tokens[:8]) == {three}
    assert not set(tokens[8:16]) & {letter, three}
    assert set(tokens[16:]) == {four}


def test_what_follows_drafts_is_the_cpus(tmp_path: Path) -> None:
    """The device samples after wrong ones, too: what it found there counts for nothing."""
    write_byte_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    size = 307
    masks = GrammarMasks(tmp_path, size, [EOS])
    wishes: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "seed": 5, "presence_penalty": 0.7, "repetition_penalty": 1.3},
        {"temperature": 0.8, "seed": 6, "min_tokens": 3},
        {"temperature": 1.0, "seed": 7, "grammar": "start: /[a-z]{3,9}/", "logprobs": 2},
    ]
    seqs = [sequence(params_of(**wish), name=f"r{number}") for number, wish in enumerate(wishes)]
    logits = random_logits(21, 5 * len(seqs), size)
    rights = [_plainly(seq, logits[5 * n : 5 * n + 5], masks) for n, seq in enumerate(seqs)]
    for num_right in range(5):
        rows: list[TokensSoFar] = []
        drafts: dict[int, int] = {}
        for seq, right in zip(seqs, rights, strict=True):
            guess = [*right[:num_right], *((token + 1) % size for token in right[num_right:4])]
            for count in range(5):
                rows.append(DraftedSequence(seq, tuple(guess[:count])) if count else seq)
                drafts |= {len(rows) - 1: guess[count]} if count < 4 else {}
        ours, theirs = (
            PendingOutput(
                prompt_logprobs=[None] * len(seqs),
                sampling_items=tuple(range(len(seqs))),
                tokens=tokens,
                drafts=drafts,
            ).output()
            for tokens in (
                DeviceSampler(size, [EOS], masks).begin(logits.to(device()), rows, drafts),
                Sampler(size, [EOS], masks).begin(logits, rows, drafts),
            )
        )
        for n, right in enumerate(rights):
            first = theirs.sampled[n]
            assert first is not None
            assert [first.token_id, *(token.token_id for token in theirs.following[n])] == right[: num_right + 1]
            assert [token.token_id for token in ours.following[n]] == right[1 : num_right + 1]
            for one, other in zip(ours.following[n], theirs.following[n], strict=True):
                _assert_same(one.logprobs, other.logprobs)


def _plainly(seq: Sequence, logits: Tensor, masks: GrammarMasks) -> list[int]:
    """One token after the other, each known before the next is sampled."""
    found: list[int] = []
    sampler = Sampler(logits.shape[1], [EOS], masks)
    for row in logits:
        then = dataclasses.replace(seq, output_token_ids=[*seq.output_token_ids, *found])
        found.append(sampler.sample(row[None], [then])[0].token_id)
    return found


@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_without_a_distribution_are_named(poison: float, temperature: float) -> None:
    sampler, logits = DeviceSampler(99), random_logits(10, 3, 99).to(device())
    if poison == -math.inf:
        logits[1] = poison
    else:
        logits[1, 77] = poison
    rows = [sequence(params_of(temperature=temperature, logprobs=1), name=name) for name in ("a", "b", "c")]
    pending = sampler.begin(logits, rows)
    assert pending.token_ids.device == logits.device and int(pending.token_ids[1]) == -1
    with pytest.raises(InvalidLogitsError, match="logits of request b hold") as caught:
        pending.finish()
    assert caught.value.rows == [1]
    assert len(sampler.begin(logits[[0, 2]], [rows[0], rows[2]]).finish()) == 2
    with pytest.raises(InvalidLogitsError, match="prompt position 1"):
        sampler.prompt_logprobs(logits, [0, 0, 0], 1)


def test_alternatives_are_the_cpus_among_equals_zeros_and_impossible_tokens() -> None:
    logits = torch.tensor([[0.0, -0.0, 1.0, -math.inf, 1.0, -0.0, 0.0], [-math.inf] * 6 + [2.0]])
    rows = [sequence(params_of(temperature=0.0, logprobs=n)) for n in (6, 20)]
    ours, theirs = _both(logits, rows)
    for one, other in zip(ours, theirs, strict=True):
        _assert_same(one.logprobs, other.logprobs)
    last = ours[1].logprobs
    assert last is not None
    assert last.top[0] == (6, 0.0) and last.top[-1] == (5, MIN_LOGPROB) and len(last.top) == 7


def test_prompt_logprobs_are_the_cpus() -> None:
    logits, followed = random_logits(8, 5, 257), [3, 0, 256, 17, 17]
    ours = DeviceSampler(257).prompt_logprobs(logits.to(device()), followed, 3)
    for one, other in zip(ours, Sampler(257).prompt_logprobs(logits, followed, 3), strict=True):
        _assert_same(one, other)
    assert DeviceSampler(257).prompt_logprobs(logits[:0].to(device()), [], 3) == []


def test_all_that_rows_may_ask_for_is_compiled_before_a_step_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step in which kernels are compiled takes a hundred times as long as predicted: its worker would be taken for
    one that hangs."""
    launched: set[str] = set()
    monkeypatch.setattr(Shipped, "launch", lambda shipped, grid, **arguments: launched.add(shipped.name))
    size = SHIPPED_SPLITS[0]
    DeviceSampler(size * SPLIT).compile_on(device())
    shipped = [shipped for module in (floors, logprobs, sample) for shipped in module.shipped()]
    assert launched == {shipped.name for shipped in shipped if shipped.constants.get("SPLITS", size) == size}


def test_logits_on_a_cpu_are_sampled_there() -> None:
    assert isinstance(sampler_for(torch.device("cpu"), 9), Sampler)
    assert isinstance(sampler_for(torch.device("cuda", 0), 9, [EOS]), DeviceSampler)
