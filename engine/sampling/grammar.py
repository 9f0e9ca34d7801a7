"""Which tokens a grammar allows next: the state of each sequence's grammar, and its mask.

A grammar's state is a function of its text and of the tokens that were sampled, so it never travels: each worker works
it out anew for each sequence that comes to it, half a microsecond a token, and forgets it with the sequence.
The library is llguidance (docs/decisions/0026); the text is what it reads, and `cluster.http.openai.structured` writes
it. The end of a sequence is allowed exactly where the grammar may end, and is all that is allowed where it must.

A budget of reasoning makes masks, too (`engine.sampling.thinking`), within what the grammar allows.

The samplers call it, after the tokens of the step before were taken in. Bits: `[ceil(V / 32)]` int32, bit i % 32 of
word i // 32 set if token i is allowed, which ids beyond the tokenizer's never are.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Final
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from engine.sampling.thinking import forced_token
from engine.sequence import DraftedSequence, Sequence, TokensSoFar
from engine.text.tokenizer import tokenizer_json

Bits = npt.NDArray[np.int32]
Allowed = npt.NDArray[np.bool_]  # [V]

_MAX_TOKENIZERS: Final = 4  # of a process; each is tens of megabytes
_MAX_COMPILED: Final = 64  # grammars that are kept, for the next sequences with them
# What one mask may cost: about 15 ms in the lexer and 2.5 in the parser, by the library's own figures.
LIMITS: Final = LLParserLimits(verbose_errors=False)


class GrammarError(RuntimeError):
    """A grammar gave no mask: it is too complex, or the tokens so far do not follow it. Nothing was sampled."""


class GrammarMasks:
    """The masks of one model's sequences. One thread at a time may use it."""

    def __init__(self, folder: Path, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._folder = folder
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(sorted(eos_token_ids))
        self._tokenizer: LLTokenizer | None = None
        self._compiled = lru_cache(maxsize=_MAX_COMPILED)(self._compile)
        self._followed: WeakKeyDictionary[Sequence, _Followed] = WeakKeyDictionary()

    def bits(self, row: TokensSoFar) -> Bits | None:
        """What may come after the output so far; None: anything, by its request. Raises GrammarError."""
        output_token_ids = row.output_token_ids
        grammar, forced = row.params.grammar, forced_token(row.params, output_token_ids)
        if grammar is None:
            return None if forced is None else self._only(forced)
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        if output_token_ids and output_token_ids[-1] in self._eos_token_ids:
            return self._only(*self._eos_token_ids)  # it is over; a step planned ahead samples once more, for nothing
        seq = row.seq if isinstance(row, DraftedSequence) else row
        assert isinstance(seq, Sequence), "grammars are followed by sequence"
        followed = self._followed.get(seq)
        if followed is None or not followed.leads_to(output_token_ids):
            followed = self._followed[seq] = _Followed(self._compiled(grammar).deep_copy())
        followed.consume(output_token_ids)
        followed.matcher.unsafe_compute_mask_ptr(bits.ctypes.data, bits.nbytes)
        if followed.matcher.is_error() or not bits.any():
            why = followed.matcher.get_error() or "it allows no token"
            raise GrammarError(f"the grammar of request {row.request_id} cannot be followed any further: {why}")
        if forced is not None and (only := bits & self._only(forced)).any():
            return only
        return bits

    def forced_tokens(self, seq: Sequence) -> tuple[int, ...]:
        """What must come after the output so far, as the tokenizer cuts it, up to a choice or the end. Nothing where
        nothing is forced, or where no mask of `seq` was made here yet."""
        followed, output_token_ids = self._followed.get(seq), seq.output_token_ids
        if followed is None or not output_token_ids or not followed.leads_to(output_token_ids):
            return ()
        followed.consume(output_token_ids)
        return tuple(followed.matcher.compute_ff_tokens())

    def _compile(self, grammar: str) -> LLMatcher:
        """Milliseconds, for most; what is wrong with it is told by its masks."""
        return LLMatcher(self.tokenizer, grammar, log_level=0, limits=LIMITS)

    def _only(self, *token_ids: int) -> Bits:
        bits = np.zeros(-(-self._vocab_size // 32), dtype=np.int32)
        for token_id in token_ids:
            bits.view(np.uint32)[token_id // 32] |= np.uint32(1 << token_id % 32)
        return bits

    @property
    def tokenizer(self) -> LLTokenizer:
        """The first use takes up to a second."""
        if self._tokenizer is None:
            text = tokenizer_json(self._folder)
            self._tokenizer = grammar_tokenizer(text, self._vocab_size, self._eos_token_ids)
        return self._tokenizer


@dataclass(slots=True)
class _Followed:
    """A grammar's state after the tokens `consumed`."""

    matcher: LLMatcher
    consumed: list[int] = field(default_factory=list)

    def leads_to(self, token_ids: list[int]) -> bool:
        return token_ids[: len(self.consumed)] == self.consumed

    def consume(self, token_ids: list[int]) -> None:
        more = token_ids[len(self.consumed) :]
        self.matcher.consume_tokens(more)  # an error is kept, and told by the mask
        self.consumed += more


@lru_cache(maxsize=_MAX_TOKENIZERS)
def grammar_tokenizer(tokenizer: str, vocab_size: int, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    """What a tokenizer.json says, as llguidance has it, with `vocab_size` ids, which may be more than it names; once
    for all of a process. Raises ValueError for one that it cannot read."""
    if not eos_token_ids:
        raise ValueError("the model has no token that ends a sequence, so nothing could end a grammar")
    return LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=list(eos_token_ids))


def allowed_by(bits: Bits, vocab_size: int) -> Allowed:
    """`[V]`"""
    return np.unpackbits(bits.view(np.uint8), count=vocab_size, bitorder="little").view(np.bool_)
