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

from typing import Final

import numpy as np

from cluster.scheduler.placement.filter import Filtered, PromptForecast
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.worker_table import Fact, Floats, Rows, WorkerTable
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
    i, j, num_tokens = computing[first], decode[first], float(query.num_tokens)
    cached, (wait_s, other_s) = prompt.cached_tokens[first], found.prompt.wait_s[np.array([i, j])]
    (token_s, other_token_s), (pair_s, other_pair_s) = _added_s(ledger.table, np.array([i, j]), query.num_tokens)

    def up_to(tokens: Floats | float, token_s: Floats, pair_s: Floats) -> Floats:
        seconds: Floats = tokens * (token_s + pair_s * tokens / 2)
        return seconds

    before_s = up_to(cached, token_s, pair_s)
    all_s = up_to(num_tokens, other_token_s, other_pair_s)
    left_s = _IN_TIME * query.ttft_target_s - query.waited_s - ledger.overhead.seconds
    with np.errstate(all="ignore"):
        equal = _root(pair_s / 2, token_s, -before_s - (other_s - wait_s))
        latest = _root((pair_s - other_pair_s) / 2, token_s - other_token_s, wait_s - before_s + all_s - left_s)
    latest = np.where(wait_s > 0.0, latest, np.nan)  # else nobody there needs the time
    block = np.maximum(ledger.table.facts[Fact.BLOCK_SIZE, j], 1.0)
    at = np.ceil(np.array([equal, latest]) / block) * block
    least = np.maximum(_LEAST_PART * num_tokens, block)
    which, chosen = ((at - cached >= least) & (num_tokens - at >= least)).nonzero()  # never where a root is no number
    if not len(chosen):
        return computing, decode, prompt
    at = at[which, chosen]
    first_s = up_to(at, token_s[chosen], pair_s[chosen]) - before_s[chosen]
    rest_s = all_s[chosen] - up_to(at, other_token_s[chosen], other_pair_s[chosen])
    begun_s = np.maximum(first_s, (other_s - wait_s)[chosen])  # the rest is
    parts = prompt.at(first[chosen])
    parts.work_s[:] = parts.adapter_s + begun_s + rest_s
    parts.split_at[:], parts.first_s[:], parts.rest_s[:] = at, first_s, rest_s
    return (
        np.concatenate([computing, i[chosen]]),
        np.concatenate([decode, j[chosen]]),
        prompt.and_then(parts),
    )


def _added_s(table: WorkerTable, rows: Rows, num_tokens: int) -> tuple[Floats, Floats]:
    """Seconds that a prompt takes on these workers for each of its tokens, and for each pair of them, beside those who
    decode there."""
    facts = table.facts[:, rows]
    step_s = facts[Fact.STEP_S] * facts[Fact.TOKENS_PER_STEP] / facts[Fact.STRETCH]
    full_s = facts[Fact.CHUNK_LEFT] * (facts[Fact.PREFILL_TOKEN_S] + facts[Fact.PREFILL_PAIR_S] * num_tokens / 2)
    pace = 1.0 + step_s / np.maximum(np.minimum(facts[Fact.ROOM_S], full_s), 1e-9)  # for each that it adds to steps
    return pace * facts[Fact.PREFILL_TOKEN_S], pace * facts[Fact.PREFILL_PAIR_S]


def _root(square: Floats, linear: Floats, constant: Floats) -> Floats:
    """Where `square` x^2 + `linear` x + `constant` passes 0, the root next to that of the line alone; NaN without
    one."""
    beyond = np.sqrt(linear * linear - 4.0 * square * constant)
    root: Floats = -2.0 * constant / (linear + np.copysign(beyond, linear))
    return root
