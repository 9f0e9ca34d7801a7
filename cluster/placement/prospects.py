"""What a request's placement on each of a few candidates would bring, now or later, and what that is worth.

A candidate is a pair (prefill, decode), or a decode worker alone. Decides nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.placement.coarse import mean_queues
from cluster.placement.ledger import Ledger
from cluster.placement.moments import join_times, start_times
from cluster.placement.neighbours import chances
from cluster.placement.policy import DecisionPolicy
from cluster.placement.prediction import DecodeForecast, PromptForecast, forecast_decode
from cluster.placement.query import Query
from cluster.placement.worker_table import PROMPTS_OVER_S, Floats, Row, Rows, WorkerTable


@dataclass(frozen=True, slots=True)
class Prospects:
    """What would be, whatever the targets. `later_s`, by moment: when it is placed, from now.

    By candidate: who computes the prompt, and who decodes; `alone`, where these are the same; `prompt`. By moment and
    candidate: `start_s`, from now until the prompt's computation begins, which takes `work_s` of each candidate;
    `after`, on the decode worker."""

    later_s: Floats
    computing: Rows
    decode: Rows
    alone: NDArray[np.bool_]
    prompt: PromptForecast
    work_s: Floats
    start_s: Floats
    after: DecodeForecast


@dataclass(frozen=True, slots=True)
class Worth:
    """By moment and candidate. `chance`: of meeting all targets; `gain`: expected requests that meet theirs, after
    minus before; `leaves_room`: those who have targets, and those who will come, hardly notice."""

    ttft_s: Floats
    chance: Floats
    gain: Floats
    leaves_room: NDArray[np.bool_]


def foresee(
    ledger: Ledger,
    query: Query,
    computing: Rows,
    decode: Rows,
    prompt: PromptForecast,
    later_s: Floats,
    now: float,
) -> Prospects:
    """As if it were placed at each of these moments, `later_s` from now. `prompt`: by candidate."""
    num_output = ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
    work_s, alone = prompt.load_s + prompt.prefill_s, computing == decode
    lead_s = join_times(prompt.wait_s, work_s, alone, later_s)
    after = forecast_decode(ledger.table, decode, query, num_output, lead_s, prompt.added_s * alone, now)
    start_s = start_times(prompt.wait_s, after.room_s, alone, later_s)
    return Prospects(later_s, computing, decode, alone, prompt, work_s, start_s, after)


def judge(
    ledger: Ledger, policy: DecisionPolicy, query: Query, seen: Prospects, waited_s: float | Floats, now: float
) -> Worth:
    """`waited_s`: how long the client has waited by now, or will have by each moment's now."""
    work_s, later_s, after = seen.work_s, seen.later_s, seen.after
    ttft_s = waited_s + seen.start_s + work_s + ledger.overhead.seconds
    predicted, targets = (ttft_s, after.tpot_s, after.kv_share), (query.ttft_s, query.tpot_s)
    chance = chances(ledger.table.rows, seen.computing, seen.decode, *predicted, *targets)
    harm, crowding = after.harm, _crowding(ledger, policy, query, seen, now)
    # Who has no room yet is bound to nobody yet.
    early = after.room_s > later_s[:, None] + policy.max_room_s
    gain = np.where(early & (query.attempt == 0), -1.0, (chance if query.has_targets else 0.0) - harm - crowding)
    if query.has_targets:
        room = np.ones(gain.shape, dtype=bool)  # nobody asks
    else:
        idle_share = _idle_share(ledger.table, seen, now)
        room = _leaves_room(policy, work_s, seen.start_s - later_s[:, None], harm, idle_share)
    return Worth(ttft_s, chance, gain, room)


def _crowding(ledger: Ledger, policy: DecisionPolicy, query: Query, seen: Prospects, now: float) -> Floats:
    """Requests still to come that the prompt keeps out."""
    demand, table = ledger.demand, ledger.table
    if query.ttft_s == np.inf or demand.ttft_s <= 0.0:
        return np.zeros((1, 1))
    there, here = mean_queues(table.rows, table.num_prefills, len(table), seen.later_s, now)[:, :, None]
    used = np.minimum(np.where(seen.alone, here, there) / demand.ttft_s, 0.99)
    crowding: Floats = policy.crowding_cost * used / (1.0 - used) * seen.work_s / max(demand.prompt_s, 1e-9)
    return crowding


def _leaves_room(
    policy: DecisionPolicy, work_s: Floats, wait_s: Floats, harm: Floats, idle_share: Floats
) -> NDArray[np.bool_]:
    quiet = (harm <= policy.batch_harm) & (wait_s <= policy.batch_queue_s)
    return quiet & ((work_s <= policy.batch_queue_s) | (idle_share >= policy.batch_idle))


def _idle_share(table: WorkerTable, seen: Prospects, now: float) -> Floats:
    """Of the workers of the same role as who computes the prompt, those that have no prompts to compute by then,
    or that had none lately if these are fewer."""
    there, here = (
        np.minimum(
            np.searchsorted(np.sort(table.rows[Row.DRAINED_AT, pool] - now), seen.later_s, side="right") / _size(pool),
            1.0 - table.prompt_share(pool, now).sum() / _size(pool) * np.exp(-seen.later_s / PROMPTS_OVER_S),
        )[:, None]
        for pool in table.pools()
    )
    share: Floats = np.where(seen.alone, here, there)
    return share


def _size(pool: slice) -> int:
    return max(1, int(pool.stop - pool.start))
