"""Masks of grammars: what they allow, when they are worked out anew, and what a row with one becomes.

Tokens are bytes here: see `write_byte_tokenizer`.
"""

from __future__ import annotations

import contextlib
import gc
import json
import weakref
from collections.abc import Callable
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling import grammar as grammar_masks
from engine.sampling.grammar import RULES_OF_A_CLIENT, GrammarError, GrammarMasks, allowed_by
from engine.sampling.params import MAX_GRAMMAR_CHARS, SamplingParams
from engine.sampling.sampler import InvalidLogitsError, Sampler
from engine.sequence import DraftedSequence, Sequence, finish_reason
from engine.text.tokenizer import Tokenizer
from tests.engine.sampling.sampling_twin import EOS, VOCAB, naive_draw, params_of, random_logits, sequence
from tests.support.byte_tokenizer import write_byte_tokenizer

DIGITS = "start: /[0-9]{2,4}/"
CLIENTS = f"{RULES_OF_A_CLIENT}\n{DIGITS}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bytes")
    write_byte_tokenizer(folder)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer(folder)


@pytest.fixture
def masks(folder: Path) -> GrammarMasks:
    return GrammarMasks(folder, VOCAB, [EOS])


@pytest.fixture
def sampler(masks: GrammarMasks) -> Sampler:
    return Sampler(VOCAB, [EOS], masks)


def allowed(masks: GrammarMasks, seq: Sequence) -> set[int]:
    [bits] = masks.of([seq])
    assert bits is not None
    return set(np.flatnonzero(allowed_by(bits, VOCAB)).tolist())


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    digits = set(tokenizer.encode("0123456789"))
    seq = sequence(params_of(grammar=DIGITS), prompt=tokenizer.encode("a prompt counts for nothing"))
    for may_end, may_go_on in ((False, True), (False, True), (True, True), (True, True), (True, False)):
        assert allowed(masks, seq) == (digits if may_go_on else set()) | ({EOS} if may_end else set())
        seq.output_token_ids.append(min(digits))
    seq.output_token_ids[-1] = EOS
    assert allowed(masks, seq) == {EOS}, "a step that was planned ahead samples once more"
    assert masks.of([sequence(params_of())]) == [None]


def test_masks_follow_the_output_whatever_becomes_of_it(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """Longer, another one, shorter: what stood there before is of no matter."""
    seq = sequence(params_of(grammar='start: "red" | "green" | "grey"'))
    for text, follows in (("", "rg"), ("gre", "ey"), ("gree", "n"), ("re", "d"), ("g", "r"), ("gr", "e")):
        seq.output_token_ids[:] = tokenizer.encode(text) if text else []
        assert allowed(masks, seq) == set(tokenizer.encode(follows)), text


def test_wrong_drafts_are_taken_back_and_nothing_else(folder: Path, masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """As a drafting model has them: its sequences' last tokens become others. What it has read of a long output it does
    not read again, and what it allows then is what a new matcher allows."""
    lines = 'start: (word "," word ";")* "."\nword: /[a-z]{1,4}/'
    text = tokenizer.encode("ab,cd;" * 50)
    for drafts, tokens in (("xy", "x,"), ("a", "ab,c"), ("abcd,efgh", "q"), ("ab,cd;.$", "ab,cd;."), ("a,b;", "")):
        seq = sequence(params_of(grammar=lines), output=[*text])
        allowed(masks, seq)
        followed = masks._followed[seq]
        for last in (drafts, tokens):
            ends = [EOS] if last.endswith("$") else []
            more = tokenizer.encode(last.rstrip("$")) if last else []
            seq.output_token_ids[:] = [*text, *more, *ends]
            elsewhere = GrammarMasks(folder, VOCAB, [EOS])
            assert allowed(masks, seq) == allowed(elsewhere, sequence(seq.params, output=[*seq.output_token_ids]))
            assert masks._followed[seq] is followed, "it began anew"


def test_a_sequence_that_is_gone_leaves_nothing(masks: GrammarMasks) -> None:
    seq = sequence(params_of(grammar=DIGITS))
    masks.of([seq])
    assert len(masks._followed) == 1
    gone = weakref.ref(seq)
    del seq
    gc.collect()
    assert gone() is None
    assert not masks._followed


def test_what_a_grammar_forces(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """Up to a choice, or the end; nothing before a mask of it was made."""
    seq = sequence(params_of(grammar='start: "red" | "green" | "grey"'))
    for output, follows in (("g", "re"), ("gre", ""), ("gree", "n"), ("grey", "")):
        seq.output_token_ids[:] = tokenizer.encode(output)
        masks.of([seq])
        assert masks.forced_tokens(seq) == tuple(tokenizer.encode(follows)), output
    seq.output_token_ids[:] = tokenizer.encode("re")
    assert masks.forced_tokens(seq) == tuple(tokenizer.encode("d")), "it is somewhere else by now"
    assert allowed(masks, seq) == set(tokenizer.encode("d"))
    assert masks.forced_tokens(seq) == tuple(tokenizer.encode("d"))
    assert masks.forced_tokens(sequence(params_of(grammar=DIGITS))) == ()
    assert masks.forced_tokens(sequence(params_of())) == ()


@pytest.mark.parametrize(
    ("grammar", "output", "drafts", "follow"),
    [
        ('start: "red" | "green" | "grey"', "g", "reen", ["r", "e", "ey", "n", "$"]),
        ('start: "red" | "green" | "grey"', "g", "rexy", ["r", "e", "ey", "", ""]),
        ('start: "red" | "green" | "grey"', "gree", "n$", ["n", "$", "$"]),
        ('start: "red" | "green" | "grey"', "", "g$", ["rg", "r", "$"]),
        ("start: /[0-1]{2,3}/", "1", "1$", ["01", "01$", "$"]),
    ],
)
def test_masks_behind_drafts(
    masks: GrammarMasks, tokenizer: Tokenizer, grammar: str, output: str, drafts: str, follow: list[str]
) -> None:
    """Nothing behind what the grammar forbids, the end behind the end; and what comes next stays the same."""

    def ids(text: str) -> list[int]:
        return [EOS if character == "$" else tokenizer.encode(character)[0] for character in text]

    seq, beside = (sequence(params_of(grammar=grammar), output=ids(output)) for _ in range(2))
    drafted = [DraftedSequence(seq, tuple(ids(drafts[: count + 1]))) for count in range(len(drafts))]
    for _ in range(2):
        found = masks.of([seq, *drafted, beside])
        allowed = [set(np.flatnonzero(allowed_by(bits, VOCAB)).tolist()) for bits in found if bits is not None]
        assert allowed == [set(ids(text)) for text in [*follow, follow[0]]]


def test_a_tokenizer_is_read_ahead(folder: Path) -> None:
    masks = GrammarMasks(folder, VOCAB, [EOS])
    assert not masks.has_tokenizer
    masks.read_ahead()
    assert masks.has_tokenizer


def test_a_tokenizer_that_cannot_be_read_ahead_is_no_error(folder: Path) -> None:
    """A model may be served without grammars, as one that nothing ends."""
    masks = GrammarMasks(folder, VOCAB, [])
    masks.read_ahead()
    assert not masks.has_tokenizer


@settings(max_examples=80, deadline=None)
@given(
    st.integers(0, 2**32),
    st.fixed_dictionaries(
        {},
        optional={
            "temperature": st.sampled_from([0.7, 1.0, 1.3]),
            "top_k": st.sampled_from([1, 5, 50]),
            "top_p": st.sampled_from([0.3, 0.9]),
            "min_p": st.sampled_from([0.01, 0.5]),
            "repetition_penalty": st.sampled_from([0.5, 1.3]),
            "frequency_penalty": st.sampled_from([-0.5, 0.7]),
            "min_tokens": st.sampled_from([2, 50]),
            "stop_token_ids": st.just((20, 21)),
            "ignore_eos": st.booleans(),
            "logit_bias": st.dictionaries(st.integers(0, 40), st.sampled_from([-100.0, 3.0, 100.0]), max_size=5),
        },
    ),
    st.text("0123456789", max_size=4),
)
def test_draws_equal_the_naive_twins(
    folder: Path, tokenizer: Tokenizer, seed: int, changes: dict[str, Any], text: str
) -> None:
    logits, masks = random_logits(seed), GrammarMasks(folder, VOCAB, [EOS])
    output = tokenizer.encode(text)
    seq = sequence(params_of(seed=seed, grammar=DIGITS, **changes), output=output)
    [token] = Sampler(VOCAB, [EOS], masks).sample(logits, [seq])
    assert token.token_id == naive_draw(logits[0].numpy(), seq, [EOS], allowed(masks, seq))


def test_rows_without_a_grammar_keep_their_tokens(sampler: Sampler) -> None:
    """And their log probabilities, to the bit, beside rows that have one; those are the model's own for them, too."""
    logits = random_logits(3, 12)
    plain = [
        sequence(params_of(seed=n, logprobs=3, temperature=0.0 if n % 3 == 0 else 1.0, top_p=0.9 if n % 2 else 1.0))
        for n in range(12)
    ]
    mixed = [sequence(params_of(seed=5, grammar=DIGITS)) if n % 4 == 1 else seq for n, seq in enumerate(plain)]
    alone, beside = sampler.sample(logits.clone(), plain), sampler.sample(logits, mixed)
    assert [token for n, token in enumerate(beside) if n % 4 != 1] == [
        token for n, token in enumerate(alone) if n % 4 != 1
    ]
    masked = sequence(params_of(grammar=DIGITS, logprobs=2))
    [token] = sampler.sample(logits[:1], [masked])
    [free] = sampler.sample(logits[:1], [sequence(params_of(logprobs=2))])
    assert token.logprobs is not None
    assert free.logprobs is not None
    assert token.logprobs.top == free.logprobs.top
    wanted = float(torch.log_softmax(logits[0].double(), dim=0)[token.token_id])
    assert token.logprobs.logprob == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_grammar_wins_over_everything(sampler: Sampler, tokenizer: Tokenizer, temperature: float) -> None:
    """A bias towards another token; and where the end is all that it leaves, neither `min_tokens` nor a bias holds."""
    one = tokenizer.encode("1")
    biased = params_of(grammar='start: "1"', temperature=temperature, logit_bias={9: 100.0, one[0]: -100.0})
    assert [token.token_id for token in sampler.sample(random_logits(1), [sequence(biased)])] == one
    ended = params_of(
        grammar='start: "1"', temperature=temperature, min_tokens=50, stop_token_ids=(EOS,), logit_bias={EOS: -100.0}
    )
    assert [token.token_id for token in sampler.sample(random_logits(2), [sequence(ended, output=one)])] == [EOS]


OPENS, CLOSES = 60, 61


def generated(sampler: Sampler, params: SamplingParams, *, num_tokens: int = 16) -> list[int]:
    """As a model that never closes its reasoning by itself, unless a bias makes it."""
    logits = random_logits(6, num_tokens)
    logits[:, CLOSES] = -20.0
    seq = sequence(params)
    for row in logits:
        [token] = sampler.sample(row[None], [seq])
        assert sampler.sample(row[None], [sequence(params, output=[*seq.output_token_ids])]) == [token]
        seq.output_token_ids.append(token.token_id)
    return seq.output_token_ids


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_reasoning_ends_at_its_budget(sampler: Sampler, temperature: float) -> None:
    """Once, at the budget exactly, and nothing else changes; the prompt may have opened it, or the answer."""
    free = generated(sampler, params_of(temperature=temperature))
    assert CLOSES not in free
    for budget in (0, 1, 7):
        closed = generated(
            sampler, params_of(temperature=temperature, thinking_budget=budget, thinking_marks=(CLOSES,))
        )
        assert closed == [*free[:budget], CLOSES, *free[budget + 1 :]]
    unopened = params_of(temperature=temperature, thinking_budget=0, thinking_marks=(OPENS, CLOSES))
    assert generated(sampler, unopened) == free
    banned = {"min_tokens": 16, "logit_bias": {CLOSES: -100.0}, "allowed_token_ids": (free[0], free[1])}
    params = params_of(temperature=temperature, thinking_budget=2, thinking_marks=(free[0], CLOSES), **banned)
    output = generated(sampler, params)
    start = output.index(free[0]) + 1
    assert output[start + 2] == CLOSES and output.count(CLOSES) == 1
    by_itself = params_of(
        temperature=temperature, thinking_budget=3, thinking_marks=(CLOSES,), logit_bias={CLOSES: 100.0}
    )
    assert generated(sampler, by_itself)[:4] == [CLOSES] * 4, "it is closed already, so nothing is due"


class _Read(list[int]):
    """Tokens that know how many of them were copied, or looked through."""

    num_read = 0

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.num_read += len(found) if isinstance(index, slice) else 1
        return found

    def __contains__(self, token_id: object) -> bool:
        self.num_read += len(self)
        return super().__contains__(token_id)


def test_what_reasoning_was_is_not_looked_through_for_the_rest_of_the_answer(masks: GrammarMasks) -> None:
    """Or each token of a long answer would take longer than the one before it, in every step that it shares."""
    marked = {"thinking_budget": 2, "thinking_marks": (OPENS, CLOSES)}
    digits = masks.tokenizer.tokenize_str("0" * 1000)
    output = _Read([OPENS, 1, 2, CLOSES, *digits])
    assert masks.of([sequence(params_of(**marked), output=output)]) == [None]
    assert output.num_read < 10
    grammar = f"start: <[{OPENS}]> <[1]> <[2]> <[{CLOSES}]> /[0-9]*/"
    seq = sequence(params_of(**marked, grammar=grammar), output=output)
    assert masks.of([seq])
    output.num_read = 0
    assert masks.of([seq])
    assert output.num_read <= len(output) + 10, "once, to see what its grammar has followed so far"


def test_a_budget_gives_way_to_the_grammar(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    one, letter = tokenizer.encode("1")[0], tokenizer.encode("a")[0]
    for mark, wanted in ((one, {one}), (letter, set(tokenizer.encode("0123456789")))):
        seq = sequence(params_of(grammar=DIGITS, thinking_budget=1, thinking_marks=(mark,)), output=[one - 1])
        assert allowed(masks, seq) == wanted
    for changes in ({"thinking_budget": 1}, {"thinking_marks": (1,)}, {"thinking_budget": -1, "thinking_marks": (1,)}):
        with pytest.raises(ValueError, match="thinking"):
            params_of(**changes)


def test_a_budget_that_ends_within_a_character_is_kept_behind_it(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """Once: what comes after the mark is the answer."""
    first, second, [end] = *tokenizer.encode("é"), tokenizer.encode("x")
    grammar = f'start: thought "x"\nTEXT: /(.|\\n)*/\nthought: TEXT <[{CLOSES}]>'
    seq = sequence(params_of(grammar=grammar, thinking_budget=2, thinking_marks=(CLOSES,)), output=[end, first])
    assert second in allowed(masks, seq) and CLOSES not in allowed(masks, seq)
    for token_id, follow in ((second, {CLOSES}), (CLOSES, {end})):
        seq.output_token_ids.append(token_id)
        assert allowed(masks, seq) == follow
        assert allowed(masks, sequence(seq.params, output=[*seq.output_token_ids])) == follow, "elsewhere, too"


def test_the_end_of_a_grammar_ends_the_sequence() -> None:
    seq = sequence(params_of(grammar=DIGITS, ignore_eos=True, min_tokens=50), output=[9, EOS])
    assert finish_reason(seq, frozenset([EOS])) == "stop"
    seq.output_token_ids.pop()
    assert finish_reason(seq, frozenset([EOS])) is None
    assert finish_reason(sequence(params_of(ignore_eos=True), output=[EOS]), frozenset([EOS])) is None


def test_a_grammar_that_fails_names_its_request(sampler: Sampler) -> None:
    for grammar, output in (("start: /[/", []), (DIGITS, [5, 5])):
        seq = sequence(params_of(grammar=grammar), output=output, name="theirs")
        with pytest.raises(GrammarError, match="request theirs"):
            sampler.sample(random_logits(1), [seq])


def test_rules_of_a_client_fail_before_a_token_takes_long(masks: GrammarMasks, tokenizer: Tokenizer) -> None:
    """All the ways to read a text as these rules are followed at once. They fail at the same token wherever the
    sequence comes to."""
    grammar = f'{RULES_OF_A_CLIENT}\nstart: x\nx: "a" | x x | x x x'
    seq, [letter] = sequence(params_of(grammar=grammar), name="theirs"), tokenizer.encode("a")
    with pytest.raises(GrammarError, match="request theirs"):
        for _ in range(300):
            masks.of([seq])
            seq.output_token_ids.append(letter)
    assert len(seq.output_token_ids) > 40
    elsewhere = sequence(params_of(grammar=grammar), output=seq.output_token_ids[:-1])
    masks.of([elsewhere])
    elsewhere.output_token_ids.append(letter)
    with pytest.raises(GrammarError):
        masks.of([elsewhere])


@pytest.fixture
def each_mask_takes(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """So many seconds of a processor, as it seems."""

    def each_takes(seconds: float) -> None:
        clock = count(0.0, seconds)
        monkeypatch.setattr(grammar_masks, "time", SimpleNamespace(thread_time=lambda: next(clock)))

    return each_takes


def test_whose_masks_take_long_together_are_out(masks: GrammarMasks, each_mask_takes: Callable[[float], None]) -> None:
    """Before their step is late for all others in it; and each is told once it computes alone."""
    first, second, third = (sequence(params_of(grammar=CLIENTS), name=name) for name in ("first", "second", "third"))
    written = sequence(params_of(grammar=DIGITS))
    each_mask_takes(0.2)
    with pytest.raises(GrammarError, match=r"request second .* takes too long"):
        masks.of([first, written, second, third])
    each_mask_takes(0.0)
    for seq in (first, second):
        with pytest.raises(GrammarError, match=rf"request {seq.request_id} .* takes too long"):
            masks.of([seq])
    masks.of([written, third])


@pytest.mark.parametrize(
    ("rules", "seconds", "num_tokens"),
    [(RULES_OF_A_CLIENT, 0.11, 13), (RULES_OF_A_CLIENT, 0.02, 100), ("", 0.11, 100)],
    ids=["dear", "honest", "what Legato writes"],
)
def test_nor_do_those_of_one_sequence_take_long_for_ever(
    masks: GrammarMasks,
    tokenizer: Tokenizer,
    each_mask_takes: Callable[[float], None],
    rules: str,
    seconds: float,
    num_tokens: int,
) -> None:
    """Those behind its drafts count as well."""
    [digit] = tokenizer.encode("1")
    seq = sequence(params_of(grammar=f"{rules}\nstart: /[0-9]*/"))
    each_mask_takes(seconds)
    with contextlib.suppress(GrammarError):
        while len(seq.output_token_ids) < 100:
            masks.of([seq, DraftedSequence(seq, (digit,))])
            seq.output_token_ids.append(digit)
    assert len(seq.output_token_ids) == num_tokens


@pytest.mark.parametrize("by_kernels", [True, False], ids=["C++", "numpy"])
@pytest.mark.parametrize("changes", [{}, {"temperature": 0.0}, {"temperature": 0.0, "presence_penalty": 1.0}], ids=str)
def test_a_row_with_no_chance_for_what_is_allowed_is_told(
    sampler: Sampler,
    tokenizer: Tokenizer,
    changes: dict[str, float],
    by_kernels: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if not by_kernels:
        monkeypatch.setattr("engine.sampling.sampler.look_at", lambda *_: None)
    logits = random_logits(4, 2)
    logits[1, tokenizer.encode("0123456789")] = -torch.inf
    rows = [sequence(params_of(), name="a"), sequence(params_of(grammar=DIGITS, **changes), name="b")]
    with pytest.raises(InvalidLogitsError, match="request b hold") as caught:
        sampler.sample(logits, rows)
    assert caught.value.rows == [1]


def test_a_grammar_is_bounded() -> None:
    with pytest.raises(ValueError, match="a grammar has"):
        params_of(grammar="x" * (MAX_GRAMMAR_CHARS + 1))


def test_a_token_that_the_model_has_no_embedding_of_is_text(tmp_path: Path) -> None:
    """As Gemma 3's `<image_soft_token>` in a model for text alone: no prompt holds it, and grammars are followed."""
    write_byte_tokenizer(tmp_path)
    path = tmp_path / "tokenizer.json"
    known = json.loads(path.read_text())
    num_embeddings = max([*known["model"]["vocab"].values(), *(token["id"] for token in known["added_tokens"])]) + 1
    picture = {**known["added_tokens"][0], "id": num_embeddings, "content": "<picture>", "special": True}
    known["added_tokens"].append(picture)
    path.write_text(json.dumps(known))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": num_embeddings}))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.vocab_size <= num_embeddings
    ids = tokenizer.encode("a <picture>", False)
    assert max(ids) < num_embeddings and tokenizer.decode(ids) == "a <picture>"
    masks = GrammarMasks(tmp_path, num_embeddings, [0])
    assert masks.tokenizer.vocab_size == num_embeddings
