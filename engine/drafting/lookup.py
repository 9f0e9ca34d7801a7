"""Drafters that copy: from what a client predicts, from a sequence's own text, from earlier answers.

Each looks for the newest tokens in a text, and proposes what followed them there ("prompt lookup": Saxena 2023, in
transformers as `prompt_lookup_num_tokens`; over earlier answers: Oliaro et al., "SuffixDecoding", arXiv:2411.04975).
A sequence's own texts are kept as bytes, four a token, so that the search is the C library's: microseconds in some
thousand tokens. Answers, which are many, are found by their runs of three.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final
from weakref import WeakKeyDictionary

from engine.drafting.drafter import Draft, DrafterName
from engine.sequence import Sequence

_TOKEN_BYTES: Final = array("I").itemsize
_LENGTHS: Final = (3, 6)
"""Of the runs of newest tokens that are looked for: the longest that is found counts."""
_MISALIGNED_MOST: Final = 16
"""Finds that begin within a token, before a search is given up."""
_CLOSE: Final = 64
"""Tokens of a prediction after the place reached in which the text is looked for first, when it has changed."""
_SHORTEST: Final = _LENGTHS[0]
_SALTS_MOST, _HISTORY_TOKENS = 64, 16_384
_Half = tuple[list[int], dict[tuple[int, ...], int]]


class TokenText:
    """Tokens that runs of tokens are looked for in."""

    __slots__ = ("_bytes",)

    def __init__(self, token_ids: Iterable[int] = ()) -> None:
        self._bytes = bytearray()
        self.extend(token_ids)

    def __len__(self) -> int:
        return len(self._bytes) // _TOKEN_BYTES

    def extend(self, token_ids: Iterable[int]) -> None:
        self._bytes += array("I", token_ids).tobytes()

    def tokens(self, start: int, stop: int) -> tuple[int, ...]:
        return tuple(array("I", bytes(self._bytes[max(start, 0) * _TOKEN_BYTES : stop * _TOKEN_BYTES])))

    def after_last(self, run: tuple[int, ...], before: int) -> int | None:
        """The position after the last place before position `before`, end included, where the run stands."""
        wanted, end = array("I", run).tobytes(), before * _TOKEN_BYTES
        for _ in range(_MISALIGNED_MOST):
            at = self._bytes.rfind(wanted, 0, end)
            if at < 0:
                return None
            if at % _TOKEN_BYTES == 0:
                return at // _TOKEN_BYTES + len(run)
            end = at + len(wanted) - 1
        return None

    def after_first(self, run: tuple[int, ...], start: int, stop: int) -> int | None:
        """The position after the first place that begins at `start` or later and ends before `stop` where the run
        stands; None if there is none."""
        wanted, begin = array("I", run).tobytes(), start * _TOKEN_BYTES
        for _ in range(_MISALIGNED_MOST):
            at = self._bytes.find(wanted, begin, stop * _TOKEN_BYTES)
            if at < 0:
                return None
            if at % _TOKEN_BYTES == 0:
                return at // _TOKEN_BYTES + len(run)
            begin = at + 1
        return None


def _newest(seq: Sequence, length: int) -> tuple[int, ...] | None:
    num_tokens = seq.num_tokens
    return tuple(seq.tokens(num_tokens - length, num_tokens)) if num_tokens >= length else None


def _longest_run(seq: Sequence, text: TokenText, before: int) -> tuple[int, int] | None:
    """The position after the longest run of newest tokens that `text` has, and the run's length."""
    found = None
    for length in _LENGTHS:  # where a short one is not, no longer one is
        run = _newest(seq, length)
        at = None if run is None else text.after_last(run, before)
        if at is None:
            break
        found = at, length
    return found


class LookupDrafter:
    """Drafts from the sequence's own prompt and output."""

    name: DrafterName = "lookup"

    def __init__(self) -> None:
        self._texts: WeakKeyDictionary[Sequence, TokenText] = WeakKeyDictionary()

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        text = self._texts.get(seq)
        if text is None:
            text = self._texts[seq] = TokenText()
        text.extend(seq.tokens(len(text), seq.num_tokens))
        found = _longest_run(seq, text, len(text) - 1)  # the newest tokens are no find of themselves
        if found is None:
            return None
        at, length = found
        return Draft(text.tokens(at, at + most), self.name, length)

    def ended(self, seq: Sequence) -> None:
        self._texts.pop(seq, None)


class _Answers:
    """Tokens of answers one after the other, and where each run of three was seen last. The older half goes at once
    when the newer one is full, so that nothing has to be taken out of it."""

    def __init__(self) -> None:
        self._older: _Half = ([], {})
        self._newer: _Half = ([], {})

    def add(self, token_ids: list[int]) -> None:
        if len(self._newer[0]) + len(token_ids) > _HISTORY_TOKENS // 2:
            self._older, self._newer = self._newer, ([], {})
        text, ends = self._newer
        start = len(text)
        text += token_ids
        for end in range(start + _SHORTEST, len(text)):
            ends[text[end - 3], text[end - 2], text[end - 1]] = end

    def following(self, newest: tuple[int, ...], most: int) -> tuple[tuple[int, ...], int] | None:
        """What came after the `newest` tokens when these were seen last, and how many of them were the same there."""
        for text, ends in (self._newer, self._older):
            at = ends.get(newest[-_SHORTEST:])
            if at is not None:
                is_long = len(newest) > _SHORTEST and tuple(text[max(at - len(newest), 0) : at]) == newest
                return tuple(text[at : at + most]), len(newest) if is_long else _SHORTEST
        return None


class HistoryDrafter:
    """Drafts from what sequences of the same cache salt generated on this worker before.

    That something was said before shows in how fast it comes. So answers are kept apart as cached prefixes are: by the
    salt, which the gateway draws from the client's key.
    """

    name: DrafterName = "history"

    def __init__(self) -> None:
        self._answers: OrderedDict[str, _Answers] = OrderedDict()

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        answers = self._answers.get(seq.cache_salt)
        newest = _newest(seq, _LENGTHS[-1]) or _newest(seq, _SHORTEST)
        found = None if answers is None or newest is None else answers.following(newest, most)
        return None if found is None else Draft(found[0], self.name, found[1])

    def ended(self, seq: Sequence) -> None:
        answers = self._answers.setdefault(seq.cache_salt, _Answers())
        self._answers.move_to_end(seq.cache_salt)
        answers.add(seq.output_token_ids[-_HISTORY_TOKENS // 2 :])
        if len(self._answers) > _SALTS_MOST:
            self._answers.popitem(last=False)


@dataclass(slots=True)
class _Reading:
    """How far a sequence's output has gone along its prediction."""

    text: TokenText
    num_read: int = 0  # output tokens
    at: int = 0  # the prediction's token that is expected next
    num_matched: int = 0  # tokens in a row that were as predicted

    def read(self, seq: Sequence) -> None:
        for token_id in seq.output_token_ids[self.num_read :]:
            self.num_read += 1
            if self.text.tokens(self.at, self.at + 1) == (token_id,):
                self.num_matched += 1
            else:
                self.num_matched = 0
            self.at += 1  # also where another token has taken its place: much of what is changed keeps its length
        if self.num_matched == 0:
            self._find_again(seq)

    def _find_again(self, seq: Sequence) -> None:
        """Something else was written, or something left out: where do the newest tokens stand?"""
        num_output, start, stop = len(seq.output_token_ids), max(self.at - _CLOSE, 0), self.at + _CLOSE
        for length in (2, 3, 4):  # where a short run is not, no longer one is
            run = _newest(seq, length) if num_output >= length else None
            at = None if run is None else self.text.after_first(run, start, stop)
            if run is not None and at is None:
                at = self.text.after_last(run, len(self.text))
            if at is None:
                return
            self.at, self.num_matched = at, length


class PredictionDrafter:
    """Drafts from what the request's client expects: OpenAI's `prediction`."""

    name: DrafterName = "prediction"

    def __init__(self) -> None:
        self._readings: WeakKeyDictionary[Sequence, _Reading] = WeakKeyDictionary()

    def propose(self, seq: Sequence, most: int) -> Draft | None:
        if not seq.prediction_token_ids:
            return None
        reading = self._readings.get(seq)
        if reading is None:
            reading = self._readings[seq] = _Reading(TokenText(seq.prediction_token_ids))
        reading.read(seq)
        token_ids = reading.text.tokens(reading.at, reading.at + most)
        return Draft(token_ids, self.name, reading.num_matched) if token_ids else None

    def ended(self, seq: Sequence) -> None:
        self._readings.pop(seq, None)
