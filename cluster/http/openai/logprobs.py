"""Log probabilities in the two shapes of OpenAI's API.

A token whose bytes are no UTF-8 by themselves is written `bytes:\\xf0\\x9f`; its exact bytes stand beside it in the
chat shape. Probability zero, whose logarithm JSON cannot carry, is written -9999.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from cluster.http.openai.choice import TokenEntry
from engine.text.tokenizer import IncrementalDetokenizer, Tokenizer

LOWEST_LOGPROB: Final = -9999.0

Top = Sequence[tuple[int, float]]


def token_text(token_bytes: bytes) -> str:
    """How a single token is written."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def chat_logprobs(entries: Sequence[TokenEntry], tokenizer: Tokenizer) -> dict[str, Any] | None:
    """`choices[].logprobs` of chat completions; None where no token's are due."""
    if not entries:
        return None
    content = [
        {
            **_chat_token(entry.token_id, entry.logprob, tokenizer),
            "top_logprobs": [_chat_token(token_id, logprob, tokenizer) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
    token_bytes = tokenizer.token_bytes(token_id)
    return {"token": token_text(token_bytes), "logprob": _finite(logprob), "bytes": list(token_bytes)}


class CompletionLogprobs:
    """`choices[].logprobs` of text completions, filled token by token: four lists of the same length."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[str] = []
        self._logprobs: list[float | None] = []
        self._tops: list[dict[str, float] | None] = []
        self._offsets: list[int] = []

    def add_prompt(self, token_ids: list[int], known: Sequence[tuple[float, Top]]) -> None:
        """The echoed prompt's tokens; the model has no opinion of the first, `known` are those after it."""
        opinions: list[tuple[float | None, Top]] = [(None, ()), *known]
        offsets = text_offsets(token_ids, self._tokenizer)
        for token_id, (logprob, top), offset in zip(token_ids, opinions, offsets, strict=True):
            self._add(token_id, logprob, top, offset)

    def add(self, entries: Sequence[TokenEntry], base_offset: int) -> None:
        """Generated tokens; `base_offset` is the length of the text before the first generated character."""
        for entry in entries:
            self._add(entry.token_id, entry.logprob, entry.top, base_offset + entry.offset)

    def _add(self, token_id: int, logprob: float | None, top: Top, offset: int) -> None:
        text = token_text(self._tokenizer.token_bytes(token_id))
        self._tokens.append(text)
        self._offsets.append(offset)
        if logprob is None:
            self._logprobs.append(None)
            self._tops.append(None)
            return
        self._logprobs.append(_finite(logprob))
        tops = {text: _finite(logprob)}
        for other, other_logprob in top:
            tops.setdefault(token_text(self._tokenizer.token_bytes(other)), _finite(other_logprob))
        self._tops.append(tops)

    def as_json(self) -> dict[str, Any] | None:
        if not self._tokens:
            return None
        return {
            "tokens": self._tokens,
            "token_logprobs": self._logprobs,
            "top_logprobs": self._tops,
            "text_offset": self._offsets,
        }


def text_offsets(token_ids: list[int], tokenizer: Tokenizer) -> Iterator[int]:
    """Where in their text each token begins, in characters; parts of one character share its offset."""
    detokenizer = IncrementalDetokenizer(tokenizer, [])
    offset = 0
    for token_id in token_ids:
        yield offset
        offset += len(detokenizer.append(token_id))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
