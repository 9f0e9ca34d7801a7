"""All workers, looked at coarsely for one request: who could do it, and how soon its prompt would be computed there.

A few vector operations, none of which depends on the request's targets; which pairs deserve a closer look. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from cluster.block_index import PrefixReach
from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.prediction import PromptForecast, forecast_prompt
from cluster.placement.query import Query
from cluster.placement.worker_table import Floats, Row, Rows, WorkerTable


@dataclass(frozen=True, slots=True)
class Survey:
    """`prompt`: by row of the table. `ready_s`: by row, when the prompt would be computed there; inf for those that may
    not compute it, or of the decode workers, may not do the rest. `decodes`: whether any may. `shortest_s` and
    `shortest_tpot_s`: TTFT and TPOT on the fastest, were nobody else there; inf without any.
    """

    prompt: PromptForecast
    ready_s: Floats
    decodes: bool
    shortest_s: float
    shortest_tpot_s: float


def survey(
    ledger: Ledger, policy: DecisionPolicy, query: Query, reach: Mapping[str, PrefixReach], now: float
) -> Survey:
    table, barred = ledger.table, ~eligible(ledger.table, query)
    _, decodes = table.pools()
    tiers = (policy.host_token_s, policy.disk_token_s)
    prompt = forecast_prompt(table, query.num_tokens, _reach_tokens(table, reach), tiers, now)
    work_s, ready_s = prompt.load_s + prompt.prefill_s, prompt.wait_s + prompt.load_s + prompt.prefill_s
    facts = table.rows[:, decodes]
    alone_s = facts[Row.BASE_S] + facts[Row.DECODE_S] + facts[Row.CONTEXT_TOKEN_S] * query.num_tokens
    work_s[barred], ready_s[barred], alone_s[barred[decodes]] = np.inf, np.inf, np.inf
    return Survey(
        prompt=prompt,
        ready_s=ready_s,
        decodes=not barred[decodes].all(),
        shortest_s=float(work_s.min(initial=np.inf)) + ledger.overhead.seconds,
        shortest_tpot_s=float(alone_s.min(initial=np.inf)),
    )


def eligible(table: WorkerTable, query: Query) -> NDArray[np.bool_]:
    """By row: whether a prefill worker could compute the prompt, whether a decode worker could do the rest."""
    _, decodes = table.pools()
    longest = table.rows[Row.MAX_MODEL_LEN, : len(table)]
    fits = longest >= query.num_tokens
    holds = fits[decodes] = longest[decodes] >= query.num_tokens + query.max_new_tokens
    wanted: NDArray[np.bool_] = fits & (table.rows[Row.DRAINING, : len(table)] == 0.0)
    staying = wanted[decodes].copy()
    wanted[[table.row(worker_id) for worker_id in query.exclude if worker_id in table]] = False
    if query.prefer_decode is not None and query.prefer_decode in table:
        preferred = table.row(query.prefer_decode) - decodes.start
        if preferred >= 0 and holds[preferred]:  # draining or not: it holds a reservation
            wanted[decodes] = np.arange(len(holds)) == preferred
    if not wanted[decodes].any():
        wanted[decodes] = staying
    return wanted


def could_ever(table: WorkerTable, query: Query) -> bool:
    """Whether it may fit once workers are there, or are not leaving: not if those that are there are all too small."""
    _, decodes = table.pools()
    longest = table.rows[Row.MAX_MODEL_LEN, decodes]
    return not len(longest) or bool(longest.max() >= query.num_tokens + query.max_new_tokens)


def shortlist(table: WorkerTable, policy: DecisionPolicy, query: Query, found: Survey) -> tuple[Rows, Rows]:
    """The pairs to be looked at closely, by row: of each group that can hand over to each other, the best few of either
    pool; and for decode alone those few, and those who would have the prompt computed first."""
    prefills, decodes = table.pools()
    kinds, one = table.rows[Row.COMPATIBILITY, : len(table)], len(table.kinds) == 1
    step_s = np.where(found.ready_s[decodes] < np.inf, _coarse_step_s(table, decodes, query), np.inf)
    computing, decode = [], []
    for kind in table.kinds:
        ready_s = found.ready_s if one else np.where(kinds == kind, found.ready_s, np.inf)
        emptiest = decodes.start + _first(
            step_s if one else np.where(kinds[decodes] == kind, step_s, np.inf), policy.num_exact
        )
        first = decodes.start + _first(ready_s[decodes], 2)
        soonest = _first(ready_s[prefills], policy.num_exact)
        alone = np.array(sorted({*emptiest.tolist(), *first.tolist()}), dtype=np.intp)
        computing += [soonest.repeat(len(emptiest)), alone]
        decode += [np.tile(emptiest, len(soonest)), alone]
    return np.concatenate(computing), np.concatenate(decode)


def _reach_tokens(table: WorkerTable, reach: Mapping[str, PrefixReach]) -> Floats:
    tokens = np.zeros((3, len(table)))
    if reach:
        rows = table.rows_of(reach)
        known = rows >= 0
        columns = np.fromiter(chain.from_iterable(reach.values()), np.float64).reshape(-1, 3)[known].T
        tokens[:, rows[known]] = columns * table.rows[Row.BLOCK_SIZE, rows[known]]
    return tokens


def _first(score: Floats, count: int) -> Rows:
    """Whose score is lowest, where it is finite. Of equals the first: they come in the order of the workers' names."""
    left, best = score.copy(), []
    for _ in range(min(count, len(score))):
        lowest = int(left.argmin())
        if left[lowest] == np.inf:
            break
        best.append(lowest)
        left[lowest] = np.inf
    return np.array(best, dtype=np.intp)


def _coarse_step_s(table: WorkerTable, pool: slice, query: Query) -> Floats:
    """With everyone who is booked, whenever they come and go; late where the prompts alone fill the memory."""
    facts = table.rows[:, pool]
    context = facts[Row.BOOKED_CONTEXT] + facts[Row.EXTRA_CONTEXT] + query.num_tokens
    decodes = facts[Row.BOOKED] + facts[Row.EXTRA_DECODES] + 1
    step_s = facts[Row.BASE_S] + facts[Row.DECODE_S] * decodes + facts[Row.CONTEXT_TOKEN_S] * context
    coarse: Floats = np.where(context > facts[Row.KV_TOKENS], 1000.0 * step_s, step_s)
    return coarse
