"""All workers, looked at coarsely for one request: who could do it, and how soon its prompt would be computed there.

A few vector operations, none of which depends on the request's targets; which pairs deserve a closer look. Decides
nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.block_index import PrefixReach
from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.prediction import PromptForecast, forecast_prompt
from cluster.placement.query import Query
from cluster.placement.worker_table import Floats, Row, Rows, WorkerTable

_COARSE_FACTS = (
    *(Row.BASE_S, Row.DECODE_S, Row.CONTEXT_TOKEN_S),
    *(Row.BOOKED, Row.EXTRA_DECODES, Row.BOOKED_CONTEXT, Row.EXTRA_CONTEXT, Row.KV_TOKENS),
)


@dataclass(frozen=True, slots=True)
class Survey:
    """`rows`: of the prefill workers that could compute the prompt, then of the decode workers that could do the rest,
    each by worker id. `prompt` goes with them. `shortest_s` and `shortest_tpot_s`: TTFT and TPOT on the fastest, were
    nobody else there; inf without any.
    """

    rows: Rows
    num_prefills: int
    prompt: PromptForecast
    shortest_s: float
    shortest_tpot_s: float

    @property
    def decodes(self) -> Rows:
        return self.rows[self.num_prefills :]


def survey(
    ledger: Ledger, policy: DecisionPolicy, query: Query, reach: Mapping[str, PrefixReach], now: float
) -> Survey:
    table, (prefills, decodes) = ledger.table, eligible(ledger.table, query)
    rows = np.concatenate([prefills, decodes])
    tiers = (policy.host_token_s, policy.disk_token_s)
    prompt = forecast_prompt(table, rows, query.num_tokens, _reach_tokens(ledger, reach)[:, rows], tiers, now)
    shortest_s = float((prompt.load_s + prompt.prefill_s).min(initial=np.inf)) + ledger.overhead.seconds
    facts = table.rows[:, decodes]
    alone_s = facts[Row.BASE_S] + facts[Row.DECODE_S] + facts[Row.CONTEXT_TOKEN_S] * query.num_tokens
    return Survey(rows, len(prefills), prompt, shortest_s, float(alone_s.min(initial=np.inf)))


def eligible(table: WorkerTable, query: Query) -> tuple[Rows, Rows]:
    """Rows of the prefill and the decode workers that could do it, each by worker id."""
    prefills, decodes = table.pools()
    computes = _without(table, _staying(table, _long_enough(table, prefills, query.num_tokens)), query)
    holds = _long_enough(table, decodes, query.num_tokens + query.max_new_tokens)
    if query.prefer_decode is not None and query.prefer_decode in table:
        preferred = holds[holds == table.row(query.prefer_decode)]  # draining or not: it holds a reservation
        if len(preferred):
            return computes, preferred
    staying = _staying(table, holds)
    wanted = _without(table, staying, query)
    return computes, wanted if len(wanted) else staying


def could_ever(table: WorkerTable, query: Query) -> bool:
    """Whether it may fit once workers are there, or are not leaving: not if those that are there are all too small."""
    _, decodes = table.pools()
    return bool(len(_long_enough(table, decodes, query.num_tokens + query.max_new_tokens))) or not len(decodes)


def shortlist(table: WorkerTable, policy: DecisionPolicy, query: Query, found: Survey) -> tuple[Rows, Rows]:
    """The pairs to be looked at closely, as indexes of the survey's rows: of each group that can hand over to each
    other, the best few of either pool; and for decode alone those few, and those who would have the prompt computed
    first."""
    ready_s = found.prompt.wait_s + found.prompt.load_s + found.prompt.prefill_s
    kinds = table.rows[Row.COMPATIBILITY, found.rows]
    step_s, num_prefills = _coarse_step_s(table, found.decodes, query), found.num_prefills
    is_one = bool((kinds == kinds[-1]).all())
    computing, decode = [], []
    for kind in kinds[-1:] if is_one else np.unique(kinds[num_prefills:]):
        indexes = np.arange(len(kinds)) if is_one else np.flatnonzero(kinds == kind)
        split = num_prefills if is_one else int(indexes.searchsorted(num_prefills))
        there, here = indexes[:split], indexes[split:]
        emptiest = _first(here, step_s[here - num_prefills], policy.num_exact)
        first = _first(here, ready_s[here], 2)
        alone = np.array(sorted({*emptiest.tolist(), *first.tolist()}), dtype=np.intp)
        soonest = _first(there, ready_s[there], policy.num_exact)
        computing += [soonest.repeat(len(emptiest)), alone]
        decode += [np.concatenate([emptiest] * len(soonest)) if len(soonest) else soonest, alone]
    return np.concatenate(computing), np.concatenate(decode)


def _long_enough(table: WorkerTable, rows: Rows, num_tokens: int) -> Rows:
    return _where(rows, table.rows[Row.MAX_MODEL_LEN, rows] >= num_tokens)


def _staying(table: WorkerTable, rows: Rows) -> Rows:
    return _where(rows, table.rows[Row.DRAINING, rows] == 0.0)


def _without(table: WorkerTable, rows: Rows, query: Query) -> Rows:
    if not query.exclude:
        return rows
    return _where(rows, np.array([table.ids[row] not in query.exclude for row in rows.tolist()], dtype=np.bool_))


def _where(rows: Rows, kept: NDArray[np.bool_]) -> Rows:
    return rows if kept.all() else rows[kept]


def _reach_tokens(ledger: Ledger, reach: Mapping[str, PrefixReach]) -> Floats:
    tokens = np.zeros((3, len(ledger.table.ids)))
    if reach:
        rows = ledger.table.rows_of(reach)
        held = [[r.device for r in reach.values()], [r.host for r in reach.values()], [r.disk for r in reach.values()]]
        known = rows >= 0
        columns = np.array(held, dtype=np.float64)[:, known]
        tokens[:, rows[known]] = columns * ledger.table.rows[Row.BLOCK_SIZE, rows[known]]
    return tokens


def _first(indexes: Rows, score: Floats, count: int) -> Rows:
    """Of equals the first: they come in the order of the workers' names."""
    if len(indexes) > count:
        good = (score <= np.partition(score, count)[count]).nonzero()[0]
        indexes, score = indexes[good], score[good]
    return indexes[score.argsort(kind="stable")[:count]]


def _coarse_step_s(table: WorkerTable, rows: Rows, query: Query) -> Floats:
    """With everyone who is booked, whenever they come and go; late where the prompts alone fill the memory."""
    base_s, decode_s, token_s, booked, more, tokens, more_tokens, capacity = (
        table.rows[fact, rows] for fact in _COARSE_FACTS
    )
    context = tokens + more_tokens + query.num_tokens
    step_s = base_s + decode_s * (booked + more + 1) + token_s * context
    coarse: Floats = np.where(context > capacity, 1000.0 * step_s, step_s)
    return coarse
