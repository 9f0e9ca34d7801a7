"""From the token events of one choice to text: detokenised, cut at a stop string, with its log probabilities.

Knows one choice and no API shape. A piece of text is never taken back: what might be the beginning of a stop string
or of a character waits until it is decided.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.sequence import FinishReason
from engine.text.formats import ReasoningFormat
from engine.text.harmony import output_parser
from engine.text.output import EventReader
from engine.text.tokenizer import IncrementalDetokenizer, StopChecker, Tokenizer
from kv_transfer.messages.requests import RequestSpec, TokenEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenEntry:
    """The log probabilities of one output token, and where its text begins."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]]  # best first
    offset: int  # in characters of the choice's generated text


@dataclass(slots=True, kw_only=True)
class Delta:
    """What has become certain of a choice since the delta before."""

    text: str = ""
    entries: list[TokenEntry] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)  # as they came, if asked for; may be ahead of the text
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None  # the stop string or token of the client's that ended the choice
    num_tokens: int = 0  # tokens of the choice, up to here
    num_reasoning: int = 0  # how many of these are up to the end of the reasoning

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.entries or self.token_ids or self.finish_reason)

    @property
    def num_bytes(self) -> int:
        """How much memory the delta takes, estimated by what the allocator takes for its objects."""
        entries = len(self.entries) * (200 + 120 * len(self.entries[0].top)) if self.entries else 0
        return 200 + sys.getsizeof(self.text) + 40 * len(self.token_ids) + entries

    def merge(self, later: Delta) -> None:
        """Add the delta that came next of the same choice."""
        self.text += later.text
        self.entries += later.entries
        self.token_ids += later.token_ids
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.num_tokens, self.num_reasoning = later.num_tokens, later.num_reasoning

    @classmethod
    def total(cls, deltas: Sequence[Delta]) -> Delta:
        """The sum of all deltas of a choice, of which there may be thousands."""
        return cls(
            text="".join(delta.text for delta in deltas),
            entries=[entry for delta in deltas for entry in delta.entries],
            token_ids=[token_id for delta in deltas for token_id in delta.token_ids],
            finish_reason=deltas[-1].finish_reason,
            stop_reason=deltas[-1].stop_reason,
            num_tokens=deltas[-1].num_tokens,
            num_reasoning=deltas[-1].num_reasoning,
        )


class Choice:
    """One choice as it grows. `append` takes every event in order until `finish_reason` is set.

    The token that ends a choice by itself (end of sequence, or one of `stop_token_ids`) is counted, but is part
    neither of the text nor of the log probabilities. With `include_stop` it is, and so is a stop string of the text;
    with `end_has_logprob` it is part of the log probabilities alone.

    `spec` is what workers generate, `echo` what the answer's text begins with (None: no echo is wanted), `text_end` the
    prompt's last tokens as `Tokenizer.text_end` gives them. `discard_output`: only the prompt is wanted
    (`max_tokens: 0` with `echo`).
    `shown` are special tokens that stay in the text for whoever reads it next: marks of calls and of reasoning.
    `reasoning`: how the reasoning begins and ends, None: there is none; `reasons`: the prompt ends within it.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        spec: RequestSpec,
        text_end: list[int],
        *,
        echo: str | None = None,
        stop: list[str],
        include_stop: bool = False,
        end_has_logprob: bool = False,
        skip_special_tokens: bool = True,
        return_token_ids: bool = False,
        discard_output: bool = False,
        shown: frozenset[int] = frozenset(),
        reasoning: ReasoningFormat | None = None,
        reasons: bool = False,
    ) -> None:
        self.spec = spec
        self.echo = echo or ""
        self.has_echo = echo is not None  # which has no text where all of its tokens are special
        self._return_token_ids = return_token_ids
        self._discard_output = discard_output
        self._detokenizer = IncrementalDetokenizer(
            tokenizer, text_end, skip_special_tokens=skip_special_tokens, shown=shown
        )
        self._stop = StopChecker(stop, include=include_stop) if stop else None
        self._include_stop = include_stop
        self._end_has_logprob = end_has_logprob
        ends = frozenset[int]() if spec.params.ignore_eos else tokenizer.eos_token_ids
        self._stop_token_ids = frozenset(spec.params.stop_token_ids) - ends  # without the model's own
        self._waiting: deque[TokenEntry] = deque()  # entries whose text is not out yet
        self._num_read = 0  # characters that the detokeniser has given
        self._num_out = 0  # of those, characters given on
        self._thought = None if reasoning is None else output_parser(reasoning=reasoning, reasons=reasons)
        self.num_tokens = 0
        self.num_reasoning_tokens = 0  # including its marks
        self.num_cached_tokens = 0
        self.prompt_logprobs: list[tuple[float, list[tuple[int, float]]]] | None = None
        self.num_accepted_predictions = 0  # tokens of the client's prediction that became the choice's
        self.num_rejected_predictions = 0  # that were tried and did not
        self.finish_reason: FinishReason | None = None

    def append(self, event: TokenEvent) -> Delta:
        """Take in the next event, and return what has become certain by it."""
        assert self.finish_reason is None, "tokens after the end"
        if self.num_tokens == 0:
            self.num_cached_tokens = event.num_cached_tokens or 0
            self.prompt_logprobs = event.prompt_logprobs
        if self._discard_output:
            self.finish_reason = "length"
            return Delta(finish_reason="length")
        self.num_tokens += 1
        self._count_drafted(event)
        self.finish_reason = event.finish_reason
        read = self._read(event)
        if self._thought is not None:
            self._follow(self._thought, read)
        text, stopped = self._check(read)
        stop_reason: str | int | None = None
        if stopped:
            assert self._stop is not None
            self.finish_reason, stop_reason = "stop", self._stop.matched
        elif event.finish_reason == "stop" and event.token_id in self._stop_token_ids:
            stop_reason = event.token_id
        self._num_out += len(text)
        return Delta(
            text=text,
            entries=self._settled(stopped),
            token_ids=[event.token_id] if self._return_token_ids else [],
            finish_reason=self.finish_reason,
            stop_reason=stop_reason,
            num_tokens=self.num_tokens,
            num_reasoning=self.num_reasoning_tokens,
        )

    def skip(self, events: Sequence[TokenEvent]) -> None:
        """Take in events that came after the one that ended the choice, together with it. They become no tokens:
        drafts among them count as rejected."""
        for num_skipped, event in enumerate(events, 1):
            if event.drafted is not None:
                self._count_drafted(event, num_skipped)
                return

    def _count_drafted(self, event: TokenEvent, num_skipped: int = 0) -> None:
        """Count what became of drafts out of the client's prediction. `num_skipped`: how many tokens of the step, up to
        this event, came after the choice's end."""
        if event.drafted is None or event.drafted[0] != "prediction":
            return
        _, num_accepted, num_rejected = event.drafted
        if num_skipped <= num_accepted:  # else all tokens of the step came after the end
            num_lost = max(0, num_skipped - 1)  # the step's last token was none of the drafts
            self.num_accepted_predictions += num_accepted - num_lost
            self.num_rejected_predictions += num_rejected + num_lost

    def _follow(self, thought: EventReader, text: str) -> None:
        """Count the newest token if it is part of the reasoning.
        What comes before the reasoning begins counts with it."""
        thought.feed(text)
        if thought.has_reasoned:
            self.num_reasoning_tokens = self.num_tokens
        if thought.is_past_reasoning:
            self._thought = None

    def _read(self, event: TokenEvent) -> str:
        """The text that the event completes."""
        if event.finish_reason == "stop" and not self._include_stop:
            text = self._detokenizer.flush()
            if self._end_has_logprob:
                self._note(event, self._num_read + len(text))
        else:
            self._note(event, self._num_read)
            text = self._detokenizer.append(event.token_id)
            if event.finish_reason is not None:
                text += self._detokenizer.flush()
        self._num_read += len(text)
        return text

    def _note(self, event: TokenEvent, offset: int) -> None:
        """Keep the log probabilities of a token, if they were asked for, until its text, which begins at `offset`, is
        given on."""
        num_top = self.spec.params.logprobs
        if num_top is None:
            return
        assert event.logprob is not None, "a token came without its logprob"
        top = (event.top_logprobs or [])[:num_top]
        entry = TokenEntry(token_id=event.token_id, logprob=event.logprob, top=top, offset=offset)
        self._waiting.append(entry)

    def _check(self, text: str) -> tuple[str, bool]:
        """Look for a stop string. Returns the text that is certain, and whether one was found.
        Stop strings count from `min_tokens` on."""
        if self._stop is None or self.num_tokens < self.spec.params.min_tokens:
            return text, False
        certain, stopped = self._stop.append(text)
        if self.finish_reason is not None and not stopped:
            certain += self._stop.flush()
        return certain, stopped

    def _settled(self, stopped: bool) -> list[TokenEntry]:
        """Take the entries of tokens whose text begins in what has been given on. At the end all are taken, unless a
        stop string cut the rest off."""
        ended = self.finish_reason is not None and not stopped
        settled: list[TokenEntry] = []
        while self._waiting and (ended or self._waiting[0].offset < self._num_out):
            settled.append(self._waiting.popleft())
        return settled
