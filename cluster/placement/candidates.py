"""Where a request could go, and what each possibility would bring: pairs (prefill, decode), and decode alone.

All workers are scored coarsely in a few vector operations; the pairs among the best few exactly. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.placement.ledger import Ledger
from cluster.placement.policy import DecisionPolicy
from cluster.placement.prediction import (
    PromptForecast,
    fit_probability,
    forecast_decode,
    log_probability,
)
from cluster.placement.query import Query
from cluster.placement.survey import Survey, shortlist
from cluster.placement.worker_table import PROMPTS_OVER_S, Floats, Row, Rows, WorkerTable

_ASSUMED_TTFT_S = 10.0  # what delays are relative to where there is no target
_ASSUMED_TPOT_S = 0.1
_UNSEEN = 0.1  # of a prompt's work on a decode worker, what those who are to be handed over there lose beside the wait


@dataclass(frozen=True, slots=True)
class Candidates:
    """Columns by candidate; where `computing` is `decode`, the decode worker computes the prompt itself. `chance`: of
    meeting all targets; `gain`: expected requests that meet theirs, after minus before; `delay`: over the targets."""

    computing: Rows
    decode: Rows
    prompt: PromptForecast
    start_s: Floats  # from now until the prompt's computation begins
    ttft_s: Floats
    tpot_s: Floats
    kv_share: Floats
    chance: Floats
    harm: Floats
    gain: Floats
    delay: Floats
    leaves_room: NDArray[np.bool_]  # those who have targets, and those who will come, hardly notice
    order: NDArray[np.intp]  # best first

    def __len__(self) -> int:
        return len(self.decode)


def find_candidates(
    ledger: Ledger, policy: DecisionPolicy, query: Query, found: Survey, now: float
) -> Candidates | None:
    """None where no decode worker is there that could ever do it."""
    if not found.decodes:
        return None
    computing, decode = shortlist(ledger.table, policy, query, found)
    return evaluate(ledger, policy, query, computing, decode, found.prompt.at(computing), now, np.zeros(len(decode)))


def evaluate(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    computing: Rows,
    decode: Rows,
    prompt: PromptForecast,
    now: float,
    later_s: Floats,
    *,
    arrived_later: bool = False,
) -> Candidates:
    """Exactly. `later_s`: as if it were placed so much later; `arrived_later`: and only came then."""
    table, num_output = ledger.table, ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
    work_s = prompt.load_s + prompt.prefill_s
    alone = computing == decode
    # The same moment for all: were it each one's own, a longer queue would make a crowded decode worker look better.
    soonest = np.where(alone & ~alone.all(), np.inf, prompt.wait_s + work_s).argmin()
    lead_s = np.maximum(later_s, prompt.wait_s[soonest]) + work_s[soonest]
    added_s = np.where(alone, prompt.added_s, 0.0)
    firsts, same = _distinct(decode, added_s, lead_s)
    after = forecast_decode(table, decode[firsts], query, num_output, lead_s[firsts], added_s[firsts], now).at(same)
    # The prompt is computed where it decodes, or queues only when the decode worker has room for it.
    queues_s = np.where(alone, 0.0, np.maximum(prompt.wait_s - later_s, 0.0))
    start_s = np.where(
        after.room_s > later_s, after.room_s + queues_s, np.maximum(np.maximum(later_s, prompt.wait_s), after.room_s)
    )
    waited_s = -later_s if arrived_later else max(0.0, now - query.arrived_at)
    ttft_s = waited_s + start_s + work_s + ledger.overhead.seconds
    chance = _chance(table, query, computing, decode, ttft_s, after.tpot_s) * fit_probability(after.kv_share)
    harm = after.harm
    crowding = _crowding(ledger, policy, query, alone, work_s, later_s, now)
    # Who has no room yet is bound to nobody yet.
    early = after.room_s > later_s + policy.max_room_s
    gain = np.where(early & (query.attempt == 0), -1.0, (chance if query.has_targets else 0.0) - harm - crowding)
    if query.has_targets:
        room = np.ones(len(decode), dtype=bool)  # nobody asks
    else:
        room = _leaves_room(policy, work_s, start_s - later_s, harm, _idle_share(table, alone, later_s, now))
    delay = _relative(ttft_s, query.ttft_s, _ASSUMED_TTFT_S) + _relative(after.tpot_s, query.tpot_s, _ASSUMED_TPOT_S)
    # The pair, unless that costs chances: a decode worker that computes no prompts is better for those who come next.
    worth = (gain - policy.alone_gain * alone).round(3)
    barred = np.zeros_like(room) if query.has_targets else ~(room & (chance >= policy.min_gain))
    # Of equals who has least to do: predictions err, and then it is good not to have put everything on one.
    ties = (computing, decode, table.rows[Row.BOOKED, decode])
    order = np.lexsort((*ties, delay, alone, -worth, barred))
    return Candidates(
        *(computing, decode, prompt, start_s, ttft_s, after.tpot_s, after.kv_share),
        *(chance, harm, gain, delay, room, order),
    )


def _crowding(
    ledger: Ledger,
    policy: DecisionPolicy,
    query: Query,
    alone: NDArray[np.bool_],
    work_s: Floats,
    later_s: Floats,
    now: float,
) -> Floats:
    """Requests still to come that the prompt keeps out."""
    demand, table = ledger.demand, ledger.table
    if query.ttft_s == np.inf or demand.ttft_s <= 0.0:
        return np.zeros_like(work_s)
    moments, same = np.unique(later_s, return_inverse=True) if later_s.any() else (later_s[:1], 0)
    there, here = (
        np.maximum((table.rows[Row.DRAINED_AT, pool] - now) - moments[:, None], 0.0).sum(axis=1)[same] / _size(pool)
        for pool in table.pools()
    )
    used = np.minimum(np.where(alone, here, there) / demand.ttft_s, 0.99)
    crowding: Floats = policy.crowding_cost * used / (1.0 - used) * work_s / max(demand.prompt_s, 1e-9)
    return crowding


def _leaves_room(
    policy: DecisionPolicy, work_s: Floats, wait_s: Floats, harm: Floats, idle_share: Floats
) -> NDArray[np.bool_]:
    quiet = (harm <= policy.batch_harm) & (wait_s <= policy.batch_queue_s)
    return quiet & ((work_s <= policy.batch_queue_s) | (idle_share >= policy.batch_idle))


def _idle_share(table: WorkerTable, alone: NDArray[np.bool_], later_s: Floats, now: float) -> Floats:
    """Of the workers of the same role as who computes the prompt, those that have no prompts to compute by then,
    or that had none lately if these are fewer."""
    there, here = (
        np.minimum(
            np.searchsorted(np.sort(table.rows[Row.DRAINED_AT, pool] - now), later_s, side="right") / _size(pool),
            1.0 - table.prompt_share(pool, now).sum() / _size(pool) * np.exp(-later_s / PROMPTS_OVER_S),
        )
        for pool in table.pools()
    )
    share: Floats = np.where(alone, here, there)
    return share


def _distinct(decode: Rows, added_s: Floats, lead_s: Floats) -> tuple[list[int], list[int]]:
    """What decode workers will be like does not depend on which prefill worker computes the prompt: the candidates that
    differ there, and for each candidate which of those it is like."""
    found: dict[tuple[int, float, float], int] = {}
    firsts: list[int] = []
    same: list[int] = []
    for index, key in enumerate(zip(decode.tolist(), added_s.tolist(), lead_s.tolist(), strict=True)):
        if key not in found:
            found[key] = len(firsts)
            firsts.append(index)
        same.append(found[key])
    return firsts, same


def _chance(table: WorkerTable, query: Query, computing: Rows, decode: Rows, ttft_s: Floats, tpot_s: Floats) -> Floats:
    error = table.rows[Row.RELATIVE_ERROR]
    in_time = log_probability(ttft_s, query.ttft_s, error[computing])
    chance: Floats = np.exp(in_time + log_probability(tpot_s, query.tpot_s, error[decode]))
    return chance


def _size(pool: slice) -> int:
    return max(1, int(pool.stop - pool.start))


def _relative(seconds: Floats, target_s: float, assumed_s: float) -> Floats:
    return seconds / (target_s if target_s < np.inf else assumed_s)
