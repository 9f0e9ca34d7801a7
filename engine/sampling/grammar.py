"""Which tokens a grammar allows next: the state of each sequence's grammar, and its mask.

A grammar's state is a function of its text and of the tokens that were sampled, so it never travels: each worker works
it out anew for each sequence that comes to it, half a microsecond a token, and forgets it with the sequence.
The library is llguidance (docs/decisions/0026); the text is what it reads, and `cluster.http.openai.structured` writes
it. The end of a sequence is allowed exactly where the grammar may end, and is all that is allowed where it must.

A budget of reasoning makes masks, too, within what the grammar allows: after so many tokens between its two marks the
closing one is all that may come, under a grammar that does not allow it there, as within a character, where it does
next. Each mark is one token; `cluster.http.openai.tools` refuses a budget where it is several.

The samplers call it, after the tokens of the step before were taken in. Bits: `[ceil(V / 32)]` int32, bit i % 32 of
word i // 32 set if token i is allowed, which ids beyond the tokenizer's never are.
"""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.sequence import DraftedSequence, Sequence, SequenceKey, TokensSoFar
from engine.text.tokenizer import tokenizer_json

if TYPE_CHECKING:
    from engine.sampling.pending_output import Rows  # with torch, which a gateway does without

logger = logging.getLogger(__name__)

Bits = npt.NDArray[np.int32]
Allowed = npt.NDArray[np.bool_]  # [V]

_MAX_TOKENIZERS: Final = 4  # of a process; each is tens of megabytes
_MAX_COMPILED: Final = 64  # grammars that are kept, for the next sequences with them
_OPENS_WITHIN: Final = 4  # tokens: a model that reasons begins with that, but for space
RULES_OF_A_CLIENT: Final = "// rules of a client"
"""A comment before the rules of a grammar, or of a part of one, that Legato has not written, or in which a repeat
repeats a repeat: see `limits_of`."""
# A token's work in the parser grows with the square of what a row of it holds. What Legato writes else has rows as long
# as a schema is wide, however long the answer becomes: four items for each property that need not be there.
_LIMITS: Final = LLParserLimits(verbose_errors=False)
# Rules of a client may be ambiguous, so that rows grow with each token: by the library's own limits, to a quarter of a
# second for one token and more for each that follows. By this one they end before that, at up to 0.2 s a token, and
# what was followed by then is followed anew in half a second (docs/log/grammars.md), less than a step may be late; a
# right-recursive list of 500 items, or a schema of 120 optional properties, has room.
_LIMITS_OF_A_CLIENT: Final = LLParserLimits(max_items_in_row=600, verbose_errors=False)
# No count of the library's tells what a mask of a client's rules costs: up to 0.4 s within these limits, where honest
# ones take 13 ms, and 32 behind 550 characters that rules recur with. So a few that take long end their sequences by
# the clock: that of this thread on a processor, which goes no faster on a busy machine. Of a step they take less than
# it may be late.
_DEAR_S: Final = 0.05
_MOST_OF_A_STEP_S: Final = 0.3
_MOST_OF_A_SEQUENCE_S: Final = 3.0


def limits_of(grammar: str) -> LLParserLimits:
    """What following a grammar may take, by its text: counts, so that it fails at the same token everywhere."""
    return _LIMITS_OF_A_CLIENT if RULES_OF_A_CLIENT in grammar else _LIMITS


class GrammarError(RuntimeError):
    """The grammar of the sequence `key` gave no mask: it is too complex, or the tokens so far do not follow it. Nothing
    was sampled."""

    def __init__(self, key: SequenceKey, reason: str) -> None:
        super().__init__(f"the grammar of request {key.request_id} cannot be followed any further: {reason}")
        self.key = key


class GrammarMasks:
    """The masks of one model's sequences. One thread at a time may ask for some."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._tokenizer: LLTokenizer | None = None
        self._reading = threading.Lock()
        self._compiled = lru_cache(maxsize=_MAX_COMPILED)(self._compile)
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()
        self._dear: list[tuple[_Followed, float]] = []  # of a step: whose masks took long, and how long

    def of(self, rows: Rows) -> list[Bits | None]:
        """What may come after the output so far of each row of a step; None: anything, by its request. A sequence's
        rows of drafts follow its own, each with one draft more, or one stands alone; behind a draft that its grammar
        forbids nothing may come. Raises GrammarError."""
        bits = np.zeros((len(rows), -(-self._vocab_size // 32)), dtype=np.int32)
        found = [None if row.params.grammar is None else mask for row, mask in zip(rows, bits, strict=True)]
        address, size = bits.ctypes.data, bits.strides[0]
        self._dear.clear()
        for index, row in enumerate(rows):
            if row.params.grammar is not None:
                newest = row.drafts if isinstance(row, DraftedSequence) else row.output_token_ids
                if newest and newest[-1] in self._eos_token_ids:
                    bits[index] = self._mask_of(*self._eos_token_ids)  # it is over, and samples once more for nothing
                elif isinstance(row, Sequence):
                    self._fill(row, _drafts_after(rows, index), 0, address + index * size, size)
                elif isinstance(row, DraftedSequence) and not _is_behind_its_own(rows, index):  # a drafter's
                    self._fill(row.seq, row.drafts, len(row.drafts), address + index * size, size)
            if row.params.thinking_budget is not None:
                found[index] = self._within_budget(row, found[index])
        return found

    def _fill(self, seq: Sequence, drafts: tuple[int, ...], first: int, address: int, size: int) -> None:
        """Write the masks of the tokens after its `first` drafts, after one more and so on to all of them, `size` bytes
        each; none after a draft that is forbidden. Raises GrammarError."""
        followed = self._at_output(seq)
        matcher, num_taken = followed.matcher, 0
        while followed.left_s > 0:
            if num_taken >= first:
                began = time.thread_time()
                matcher.unsafe_compute_mask_ptr(address + (num_taken - first) * size, size)
                self._note_cost(followed, time.thread_time() - began)
            if num_taken == len(drafts) or matcher.is_stopped() or not matcher.try_consume_tokens([drafts[num_taken]]):
                break
            num_taken += 1
        if num_taken:
            matcher.rollback(num_taken)
        if matcher.is_error():
            if drafts:  # it may be one of them that failed
                del self._followed[seq]
            raise GrammarError(seq.key, matcher.get_error())
        if followed.left_s <= 0:
            raise GrammarError(seq.key, "what may come next takes too long to find")

    def _note_cost(self, followed: _Followed, seconds: float) -> None:
        """Note what a mask took. Where those of a step took too long together, all whose did get no more of them."""
        if seconds <= _DEAR_S or followed.left_s == math.inf:
            return
        followed.left_s -= seconds
        self._dear.append((followed, seconds))
        if sum(each for _, each in self._dear) > _MOST_OF_A_STEP_S:
            for each, _ in self._dear:
                each.left_s = 0.0

    def _at_output(self, seq: Sequence) -> _Followed:
        """The sequence's grammar in the state that the output so far leads to; what is wrong is told by its masks."""
        grammar = seq.params.grammar
        assert grammar is not None
        followed = self._followed.get(seq)
        if followed is None or not followed.go_to(seq.output_token_ids):
            left_s = _MOST_OF_A_SEQUENCE_S if RULES_OF_A_CLIENT in grammar else math.inf
            followed = _Followed(self._compiled(grammar).deep_copy(), left_s if followed is None else followed.left_s)
            self._followed[seq] = followed
            followed.go_to(seq.output_token_ids)
        return followed

    def _within_budget(self, row: TokensSoFar, bits: Bits | None) -> Bits | None:
        """The end of reasoning alone, where that is due and what a grammar allows has it."""
        closing = row.params.thinking_marks[-1]
        is_allowed = bits is None or int(bits[closing // 32]) >> closing % 32 & 1  # the rest of an answer has no marks
        return self._mask_of(closing) if is_allowed and _must_close(row) else bits

    def forced_tokens(self, seq: Sequence) -> tuple[int, ...]:
        """What must come after the output so far, as the tokenizer cuts it, up to a choice or the end. Nothing where
        nothing is forced, or where no mask of `seq` was made here yet."""
        followed, output_token_ids = self._followed.get(seq), seq.output_token_ids
        if followed is None or not output_token_ids or not followed.go_to(output_token_ids):
            return ()
        return tuple(followed.matcher.compute_ff_tokens())

    def _compile(self, grammar: str) -> LLMatcher:
        """Milliseconds, for most; what is wrong with it is told by its masks."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=limits_of(grammar))

    def _mask_of(self, *token_ids: int) -> Bits:
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        for token_id in token_ids:
            bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return bits

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def read_ahead(self) -> None:
        """Read the tokenizer now, so that no grammar has to wait for it."""
        try:
            _ = self.tokenizer
        except Exception as error:  # gateways refuse grammars for the same reason; all else is served
            logger.info("this model's tokenizer cannot follow a grammar: %s", error)

    @property
    def tokenizer(self) -> LLTokenizer:
        """The first use takes 0.2 s of a processor for 49,152 tokens, 2.7 for 262,144; meanwhile the library keeps all
        other threads from running Python."""
        with self._reading:
            if self._tokenizer is None:
                text = tokenizer_json(self._folder)
                self._tokenizer = grammar_tokenizer(text, self._vocab_size, self._eos_token_ids)
            return self._tokenizer


def _is_behind_its_own(rows: Rows, index: int) -> bool:
    """Whether the row before is of the same sequence, whose first one wrote the masks of all."""
    row, before = rows[index], rows[index - 1] if index else None
    assert isinstance(row, DraftedSequence)
    return before is row.seq or (isinstance(before, DraftedSequence) and before.seq is row.seq)


def _drafts_after(rows: Rows, index: int) -> tuple[int, ...]:
    """The drafts in the rows that follow a sequence's own."""
    drafts: tuple[int, ...] = ()
    while index + 1 < len(rows) and isinstance(row := rows[index + 1], DraftedSequence):
        drafts, index = row.drafts, index + 1
    return drafts


def _must_close(row: TokensSoFar) -> bool:
    """Whether the closing mark of the reasoning is all that may come next. Under a grammar, only asked where that
    allows the mark. A function of the request and of its output tokens alone, so a sequence that goes on elsewhere
    needs nothing else."""
    params = row.params
    if params.thinking_budget is None:
        return False
    *opening, closing = params.thinking_marks
    start = row.num_tokens - row.num_output_tokens
    if opening:
        beginning = row.tokens(start, min(start + _OPENS_WITHIN, row.num_tokens))
        if opening[0] not in beginning:
            return False
        start += beginning.index(opening[0]) + 1
    due = start + params.thinking_budget
    # Without a grammar it is always taken where it is due, so that nobody has to look for it ever after.
    is_due = row.num_tokens == due if params.grammar is None else row.num_tokens >= due
    return is_due and closing not in row.tokens(start, row.num_tokens)


@dataclass(slots=True)
class _Followed:
    """A grammar's state after the tokens `consumed`. `left_s`: what its masks that take long may take yet."""

    matcher: LLMatcher
    left_s: float
    consumed: list[int] = field(default_factory=list)

    def go_to(self, token_ids: list[int]) -> bool:
        """Come to the state after these tokens, from where the last ones are others: of a drafting model, whose drafts
        were wrong. False: only a new matcher can."""
        num_kept, step = min(len(self.consumed), len(token_ids)), 1
        while token_ids[:num_kept] != self.consumed[:num_kept]:
            num_kept, step = max(num_kept - step, 0), 2 * step
        num_undone = len(self.consumed) - num_kept
        if num_undone and not self.matcher.rollback(num_undone):
            return False
        more = token_ids[num_kept:]
        for token_id in more:  # each call holds the interpreter's lock, for tens of milliseconds in the worst grammars
            self.matcher.consume_tokens([token_id])  # an error is kept, and told by the mask
        self.consumed[num_kept:] = more
        return True


@lru_cache(maxsize=_MAX_TOKENIZERS)
def grammar_tokenizer(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """What a tokenizer.json says, as llguidance has it, with `vocab_size` ids, which may be more than it names; once
    for all of a process. Raises ValueError for one that it cannot read."""
    # To the library each closed object is an error that it makes and passes over. Where RUST_BACKTRACE is set for other
    # programs, each would note its stack, 60 us of a compile, for nobody.
    os.environ.setdefault("RUST_LIB_BACKTRACE", "0")
    if not eos_token_ids:
        raise ValueError("the model has no token that ends a sequence, so nothing could end a grammar")
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def allowed_by(bits: Bits, vocab_size: int) -> Allowed:
    """`[V]`"""
    return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
