"""Between what crosses the wire and what the engine holds: requests to sequences, sampled tokens to events."""

from __future__ import annotations

from engine.drafting.drafter import Drafted
from engine.sequence import FinishReason, SampledToken, Sequence, TokenLogprobs
from kv_transfer.messages.requests import RequestSpec, TokenEvent

NUM_ALONE = 2
"""Tokens for which a suspect computes alone: as many may have been on their way from the worker that it was on."""


def sequence_of(request: RequestSpec, *, hands_over: bool = False) -> Sequence:
    """A new sequence for this attempt of the request; owns its list of output tokens. Where the request is split, the
    worker that `hands_over` has the first part of it, and the one that decodes has all."""
    is_part = hands_over and request.is_split
    prompt, output = request.prompt_token_ids, request.output_token_ids
    if is_part:
        prompt, output = prompt[: request.split_at], output[: max(0, request.split_at - len(prompt))]
    return Sequence(
        request_id=request.request_id,
        attempt=request.attempt,
        params=request.params,
        prompt_token_ids=prompt,
        output_token_ids=list(output),
        num_prior_output=len(output),
        pooling=request.pooling,
        is_part=is_part,
        cache_salt=request.prefix_salt,
        prediction_token_ids=request.prediction_token_ids,
        tpot_s=request.tpot_s,
        gap_s=request.gap_s,
        num_alone=NUM_ALONE if request.alone else 0,
    )


def token_event(
    seq: Sequence,
    index: int,
    token: SampledToken,
    finish: FinishReason | None,
    prompt_logprobs: list[TokenLogprobs] | None,
    drafted: Drafted | None = None,
) -> TokenEvent:
    """The `index`-th output token of `seq` as the gateway sees it. The attempt's first one says what went before it."""
    chosen, is_first = token.logprobs, index == seq.num_prior_output
    return TokenEvent(
        request_id=seq.request_id,
        attempt=seq.attempt,
        index=index,
        token_id=token.token_id,
        finish_reason=finish,
        logprob=None if chosen is None else chosen.logprob,
        top_logprobs=None if chosen is None else chosen.top,
        num_cached_tokens=seq.num_cached if is_first else None,
        waited_s=seq.waited_s if is_first else None,
        drafted=drafted,
        prompt_logprobs=None if prompt_logprobs is None else [(p.logprob, p.top) for p in prompt_logprobs],
    )


def embedding_event(seq: Sequence) -> TokenEvent:
    """The vector that was asked for in place of tokens, as the gateway sees it: all that there is of `seq`."""
    return TokenEvent(
        request_id=seq.request_id,
        attempt=seq.attempt,
        index=0,
        token_id=0,
        finish_reason="stop",
        num_cached_tokens=seq.num_cached,
        waited_s=seq.waited_s,
        embedding=seq.embedding.astype("<f4").tobytes(),
    )
