"""A budget of reasoning: after so many tokens between its two marks the closing one is all that may come; under a
grammar that does not allow it there, as within a character, where it does next.

A function of the request and of its output tokens alone, as all that decides about a token, so a sequence that goes on
elsewhere needs nothing else. Each mark is one token; `cluster.http.openai.tools` refuses a budget where it is several.
"""

from __future__ import annotations

from typing import Final

from engine.sequence import TokensSoFar

_OPENS_WITHIN: Final = 4  # tokens: a model that reasons begins with that, but for space


def must_close(row: TokensSoFar) -> bool:
    """Whether the closing mark is all that may come next. Under a grammar, only asked where that allows the mark."""
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
