"""Split: after which token of a prompt the worker that decodes goes on with it, where another one begins it.

Part of the first stage of a decision (see the package): `with_splits` adds candidates to the shortlist's. A request
with a TTFT target may be handed over whole, computed where it decodes, or be split between the two; with a split at `s`
its first token comes after

    T(s) = max(wait[i] + first(s), wait[j]) + rest(s)

`first`, `rest`: seconds that the tokens before `s` take on i, and those from there on on j. Both are quadratic in `s`,
so the two points worth a look have closed forms. At the *equal finish* i is done just when j comes to the rest: before
it, more on i costs nobody anything. The *latest finish* is the earliest point from which j, by the room that its steps
have beside its decodes, brings the first token in time: i, and all who queue there, are rid of the rest. T is the least
at the equal finish, or at one of the ends; so a split later than that is for those who come next."""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from cluster.scheduler.placement.filter import Filtered, PromptForecast
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.worker_table import Fact, Floats, Rows
from kv_transfer.messages.scheduling import Place

_IN_TIME: Final = 0.5  # of the TTFT target: whoever comes before it on either worker makes it later than predicted
_LEAST_PART: Final = 1 / 16  # of the prompt: less on either worker is not worth a hand-over


def with_splits(
    ledger: Ledger, query: Place, found: Filtered, pairs: tuple[Rows, Rows], first: Rows
) -> tuple[Rows, Rows, PromptForecast]:
    """The candidates of `pairs`, and behind them those of the pairs numbered `first` that can be split: who computes
    the prompt, or its first part; who decodes; and the prompt's computation, by candidate."""
    computing, decode = pairs
    prompt = found.prompt.at(computing)
    if not len(first):
        return computing, decode, prompt
    i, j = np.tile(computing[first], 2), np.tile(decode[first], 2)
    forecast, facts, num_tokens = found.prompt, ledger.table.facts, float(query.num_tokens)
    wait_s, other_s = forecast.wait_s[i], forecast.wait_s[j]
    cached, pace, other_pace = forecast.cached_tokens[i], forecast.pace[i], forecast.pace[j]
    token_s, pair_s = pace * facts[Fact.PREFILL_TOKEN_S, i], pace * facts[Fact.PREFILL_PAIR_S, i]
    other_token_s = other_pace * facts[Fact.PREFILL_TOKEN_S, j]
    other_pair_s = other_pace * facts[Fact.PREFILL_PAIR_S, j]

    def up_to(tokens: Floats | float, token_s: Floats, pair_s: Floats) -> Floats:
        seconds: Floats = tokens * (token_s + pair_s * tokens / 2)
        return seconds

    before_s = up_to(cached, token_s, pair_s)
    all_s = up_to(num_tokens, other_token_s, other_pair_s)
    half = len(first)
    left_s = _IN_TIME * query.ttft_target_s - query.waited_s - ledger.overhead.seconds
    equal = _root(pair_s / 2, token_s, -before_s - (other_s - wait_s))
    latest = _root((pair_s - other_pair_s) / 2, token_s - other_token_s, wait_s - before_s + all_s - left_s)
    block = np.maximum(facts[Fact.BLOCK_SIZE, j], 1.0)
    latest = np.where(wait_s > 0.0, latest, np.nan)  # else nobody there needs the time
    at = np.ceil(np.where(np.arange(2 * half) < half, equal, latest) / block) * block
    least = np.maximum(_LEAST_PART * num_tokens, block)
    chosen = np.flatnonzero((at - cached >= least) & (num_tokens - at >= least))  # never where a root is no number
    if not len(chosen):
        return computing, decode, prompt
    i, j, at = i[chosen], j[chosen], at[chosen]
    first_s = up_to(at, token_s[chosen], pair_s[chosen]) - before_s[chosen]
    rest_s = all_s[chosen] - up_to(at, other_token_s[chosen], other_pair_s[chosen])
    begun_s = np.maximum(first_s, (other_s - wait_s)[chosen])  # the rest is
    work_s = forecast.adapter_s[i] + begun_s + rest_s
    parts = replace(forecast.at(i), work_s=work_s, split_at=at, first_s=first_s, rest_s=rest_s)
    return np.concatenate([computing, i]), np.concatenate([decode, j]), prompt.and_then(parts)


def _root(square: Floats, linear: Floats, constant: Floats) -> Floats:
    """Where `square` x^2 + `linear` x + `constant` passes 0, the root next to that of the line alone; NaN without
    one."""
    with np.errstate(all="ignore"):
        beyond = np.sqrt(linear * linear - 4.0 * square * constant)
        root: Floats = -2.0 * constant / (linear + np.copysign(beyond, linear))
    return root
