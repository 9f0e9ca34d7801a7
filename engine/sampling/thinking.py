"""A budget of reasoning: after so many tokens between its two marks the closing one is all that may come; under a
grammar that does not allow it there, as within a character, where it does next.

A function of the request and of its output tokens alone, as all that decides about a token, so a sequence that goes on
elsewhere needs nothing else. Each mark is one token; `cluster.http.openai.tools` refuses a budget where it is several.
"""

from __future__ import annotations

from typing import Final

from engine.sampling.params import SamplingParams

_OPENS_WITHIN: Final = 4  # tokens: a model that reasons begins with that, but for space


def forced_token(params: SamplingParams, output_token_ids: list[int]) -> int | None:
    """The closing mark, from where it is due on until it has come; None: any token may come."""
    if params.thinking_budget is None:
        return None
    *opening, closing = params.thinking_marks
    start = 0
    if opening:
        beginning = output_token_ids[:_OPENS_WITHIN]
        if opening[0] not in beginning:
            return None
        start = beginning.index(opening[0]) + 1
    is_due = len(output_token_ids) >= start + params.thinking_budget and closing not in output_token_ids[start:]
    return closing if is_due else None
