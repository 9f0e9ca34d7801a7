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

from cluster.scheduler.block_index import PrefixReach
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.prediction import PromptForecast, forecast_prompt
from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.worker_scan import eligible, look, shortlist_kind
from cluster.scheduler.placement.worker_table import Floats, Row, Rows, WorkerTable


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
    table, tiers = ledger.table, (policy.host_token_s, policy.disk_token_s)
    wanted, num_prefills = _wanted(table, query), table.num_prefills
    prompt = forecast_prompt(table, query.num_tokens, _reach_tokens(table, reach), tiers, now)
    seconds = (prompt.wait_s, prompt.load_s, prompt.prefill_s)
    ready_s, shortest_s, shortest_tpot_s = look(table.rows, num_prefills, query.num_tokens, *seconds, wanted)
    return Survey(
        prompt=prompt,
        ready_s=ready_s,
        decodes=bool(wanted[num_prefills:].any()),
        shortest_s=shortest_s + ledger.overhead.seconds,
        shortest_tpot_s=shortest_tpot_s,
    )


def could_ever(table: WorkerTable, query: Query) -> bool:
    """Whether it may fit once workers are there, or are not leaving: not if those that are there are all too small."""
    _, decodes = table.pools()
    longest = table.rows[Row.MAX_MODEL_LEN, decodes]
    return not len(longest) or bool(longest.max() >= query.num_tokens + query.max_new_tokens)


def shortlist(table: WorkerTable, policy: DecisionPolicy, query: Query, found: Survey) -> tuple[Rows, Rows]:
    """The pairs to be looked at closely, by row: of each group that can hand over to each other, the best few of either
    pool; and for decode alone those few, and those who would have the prompt computed first."""
    of_kinds = [
        shortlist_kind(table.rows, table.num_prefills, found.ready_s, kind, query.num_tokens, policy.num_exact)
        for kind in table.kinds
    ]
    if len(of_kinds) == 1:
        return of_kinds[0]
    computing, decode = zip(*of_kinds, strict=True)
    return np.concatenate(computing), np.concatenate(decode)


def _wanted(table: WorkerTable, query: Query) -> NDArray[np.bool_]:
    """By row: see `eligible`."""
    excluded = np.array([table.row(worker_id) for worker_id in query.exclude if worker_id in table], dtype=np.intp)
    wish = query.prefer_decode
    preferred = table.row(wish) if wish is not None and wish in table else -1
    sizes = (table.num_prefills, len(table), query.num_tokens, query.max_new_tokens)
    return eligible(table.rows, *sizes, excluded, preferred)


def _reach_tokens(table: WorkerTable, reach: Mapping[str, PrefixReach]) -> Floats:
    tokens = np.zeros((3, len(table)))
    if reach:
        rows = table.rows_of(reach)
        known = rows >= 0
        columns = np.fromiter(chain.from_iterable(reach.values()), np.float64).reshape(-1, 3)[known].T
        tokens[:, rows[known]] = columns * table.rows[Row.BLOCK_SIZE, rows[known]]
    return tokens
