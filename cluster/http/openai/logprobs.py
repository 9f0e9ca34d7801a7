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
CompletionToken = tuple[int, float | None, Top, int]
"""A token's id, its log probability, the likeliest tokens in its place, and where its text begins in the choice's."""


def token_text(token_bytes: bytes) -> str:
    """How a single token is written as text."""
    try:
        return token_bytes.decode("utf-8")
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token_bytes)


def _name(token_id: int, tokenizer: Tokenizer, as_ids: bool) -> str:
    """The name of a token: its text,
    or with `as_ids` what vLLM writes for clients that must tell tokens of the same text apart."""
    return f"token_id:{token_id}" if as_ids else token_text(tokenizer.token_bytes(token_id))


def chat_logprobs(
    entries: Sequence[TokenEntry], tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """`choices[].logprobs` of chat completions; None: there are no entries."""
    if not entries:
        return None
    content = [
        {
            **_chat_token(entry.token_id, entry.logprob, tokenizer, as_ids),
            "top_logprobs": [_chat_token(token_id, logprob, tokenizer, as_ids) for token_id, logprob in entry.top],
        }
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_token(token_id: int, logprob: float, tokenizer: Tokenizer, as_ids: bool) -> dict[str, Any]:
    token_bytes = list(tokenizer.token_bytes(token_id))
    return {"token": _name(token_id, tokenizer, as_ids), "logprob": _finite(logprob), "bytes": token_bytes}


def prompt_logprobs(
    token_ids: list[int], known: Sequence[tuple[float, Top]], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any] | None]:
    """vLLM's `prompt_logprobs`: for each token of a prompt after the first, that token and the `num_top` likeliest, by
    their ids. Only the likeliest have a rank: how many are likelier than a token far behind is not known."""
    told: list[dict[str, Any] | None] = [None]
    for token_id, (logprob, top) in zip(token_ids[1:], known, strict=True):
        ranked = {other: (rank, value) for rank, (other, value) in enumerate(top[:num_top], start=1)}
        of_token = {token_id: ranked.get(token_id, (None, logprob)), **ranked}
        told.append(
            {
                str(other): {
                    "logprob": _finite(value),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer.token_bytes(other)),
                }
                for other, (rank, value) in of_token.items()
            }
        )
    return told


def completion_logprobs(
    tokens: Sequence[CompletionToken], tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any] | None:
    """`choices[].logprobs` of text completions, four lists of the same length; None: there are no tokens."""
    if not tokens:
        return None
    texts = [_name(token_id, tokenizer, as_ids) for token_id, _, _, _ in tokens]
    tops: list[dict[str, float] | None] = []
    for text, (_, logprob, top, _) in zip(texts, tokens, strict=True):
        if logprob is None:
            tops.append(None)
            continue
        named = {text: _finite(logprob)}
        for other, other_logprob in top:
            named.setdefault(_name(other, tokenizer, as_ids), _finite(other_logprob))
        tops.append(named)
    return {
        "tokens": texts,
        "token_logprobs": [None if logprob is None else _finite(logprob) for _, logprob, _, _ in tokens],
        "top_logprobs": tops,
        "text_offset": [offset for _, _, _, offset in tokens],
    }


def prompt_tokens(
    token_ids: list[int],
    known: Sequence[tuple[float, Top]],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    skip_special_tokens: bool = True,
) -> list[CompletionToken]:
    """The tokens of an echoed prompt.
    `known`: the log probabilities of those after the first, of which the model has no opinion."""
    opinions: list[tuple[float | None, Top]] = [(None, ()), *((logprob, top[:num_top]) for logprob, top in known)]
    offsets = text_offsets(token_ids, tokenizer, skip_special_tokens=skip_special_tokens)
    return [(token, *opinion, at) for token, opinion, at in zip(token_ids, opinions, offsets, strict=True)]


def output_tokens(entries: Sequence[TokenEntry], base_offset: int) -> list[CompletionToken]:
    """The tokens that were generated. `base_offset`: the length of the text before the first generated character."""
    return [(entry.token_id, entry.logprob, entry.top, base_offset + entry.offset) for entry in entries]


def text_offsets(token_ids: list[int], tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> Iterator[int]:
    """Yields where in the text of all of them each token begins, in characters.
    Parts of one character share its offset."""
    detokenizer = IncrementalDetokenizer(tokenizer, [], skip_special_tokens=skip_special_tokens)
    offset = 0
    for token_id in token_ids:
        yield offset
        offset += len(detokenizer.append(token_id))


def _finite(logprob: float) -> float:
    return max(logprob, LOWEST_LOGPROB)
