"""Score: what a request's placement on each of a few candidates would bring, now or later, and what that is worth.

The second stage of a decision (see the package). A candidate is a pair (prefill, decode), or a decode worker alone, or,
where these are one pool, a pair of decode workers.
`predict` says what would happen, whatever the targets; `score` what that is worth to those who have some. `pick` calls
both for now, and for a row of moments to come.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.filter import PromptForecast
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.tpot_forecast import (
    DecodeForecast,
    forecast_decode,
    forecast_delay,
    log_fit_probability,
    log_probability,
)
from cluster.scheduler.placement.worker_table import PROMPTS_OVER_S, Fact, Floats, Rows, WorkerTable
from kv_transfer.messages.scheduling import NO_TARGET, Place


@dataclass(frozen=True, slots=True)
class PlacementForecast:
    """What would be, whatever the targets. `later_s`, by moment: when it is placed, from now.

    By candidate: `computing` computes the prompt and `decode` decodes. `is_decode_alone`: these are the same worker;
    `in_decode_pool`: the prompt is computed by a decode worker, this one or another.
    By moment and candidate: `start_s`, from now until the prompt's computation begins; `forecast`, of decoding;
    `slo_loss`, of all others, on both workers; `idle_share`, of the pool that computes the prompt (see `_idle_shares`),
    for requests without targets, and 0 for others."""

    later_s: Floats
    computing: Rows
    decode: Rows
    is_decode_alone: NDArray[np.bool_]
    in_decode_pool: NDArray[np.bool_]
    prompt: PromptForecast
    start_s: Floats
    forecast: DecodeForecast
    slo_loss: Floats
    idle_share: Floats


@dataclass(frozen=True, slots=True)
class Score:
    """What a predicted placement is worth, by moment and candidate. `slo_probability`: of meeting all targets;
    `slo_gain`: expected requests that meet theirs, after minus before; `leaves_room`: those who have targets, and those
    who will come, hardly notice."""

    ttft_s: Floats
    slo_probability: Floats
    slo_gain: Floats
    leaves_room: NDArray[np.bool_]


_UNASKED: Final = np.zeros((1, 1))


def predict(
    ledger: Ledger,
    query: Place,
    computing: Rows,
    decode: Rows,
    prompt: PromptForecast,
    later_s: Floats,
    now: float,
) -> PlacementForecast:
    """Predict the placement with each candidate at each of these moments, `later_s` from now. `prompt`: by
    candidate."""
    table = ledger.table
    if query.is_pooled:
        return _predict_pooled(ledger, query, computing, prompt, later_s, now)
    num_output = ledger.lengths.expect(query.tenant, query.slo_class, query.max_new_tokens)
    is_decode_alone, in_decode_pool = computing == decode, computing >= table.num_prefills
    lead_s = _join_times(prompt.wait_s, prompt.work_s, is_decode_alone | (prompt.split_at > 0.0), later_s)
    noticed_s = np.zeros(len(decode)) if query.has_targets else prompt.added_s * is_decode_alone
    forecast = forecast_decode(table, decode, query, num_output, lead_s, noticed_s, now)
    start_s = np.maximum(later_s[:, None], prompt.wait_s)
    if forecast.room_s.any():  # else there is room everywhere
        computed_s = start_s + prompt.work_s
        is_kept = ~in_decode_pool & (forecast.room_s > computed_s) & (forecast.room_s < np.inf)
        if is_kept.any():  # its second token waits for room
            stall_s = np.where(is_kept, forecast.room_s - computed_s, 0.0)
            forecast = replace(
                forecast, tpot_s=forecast.tpot_s + stall_s / num_output, gap_s=np.maximum(forecast.gap_s, stall_s)
            )
        start_s = _start_times(prompt.wait_s, forecast.room_s, is_decode_alone, ~in_decode_pool, later_s)
    slo_loss = forecast.slo_loss
    if not query.has_targets and (elsewhere := in_decode_pool & ~is_decode_alone).any():
        slo_loss = slo_loss.copy()
        slo_loss[:, elsewhere] += forecast_delay(table, computing[elsewhere], prompt.added_s[elsewhere], lead_s, now)
    idle_share = _UNASKED if query.has_targets else _idle_shares(table, in_decode_pool, later_s, now)
    return PlacementForecast(
        later_s=later_s,
        computing=computing,
        decode=decode,
        is_decode_alone=is_decode_alone,
        in_decode_pool=in_decode_pool,
        prompt=prompt,
        start_s=start_s,
        forecast=forecast,
        slo_loss=slo_loss,
        idle_share=idle_share,
    )


def _predict_pooled(
    ledger: Ledger, query: Place, computing: Rows, prompt: PromptForecast, later_s: Floats, now: float
) -> PlacementForecast:
    """Predict the placement of an embedding: nobody decodes, and no memory is held beyond the prompt's computation.
    Where that is in a decode worker, others there wait for it, which only a request without targets is charged with, as
    in `predict`."""
    table, in_decode_pool = ledger.table, computing >= ledger.table.num_prefills
    is_decode_alone = np.ones_like(in_decode_pool)
    nothing = np.zeros((len(later_s), len(computing)))
    slo_loss = nothing.copy()
    if in_decode_pool.any() and not query.has_targets:
        lead_s = _join_times(prompt.wait_s, prompt.work_s, is_decode_alone, later_s)
        slo_loss[:, in_decode_pool] = forecast_delay(
            table, computing[in_decode_pool], prompt.added_s[in_decode_pool], lead_s, now
        )
    forecast = DecodeForecast(
        tpot_s=nothing, gap_s=nothing, room_s=np.zeros(len(computing)), kv_share=nothing, slo_loss=slo_loss
    )
    start_s = np.maximum(later_s[:, None], prompt.wait_s)
    idle_share = _UNASKED if query.has_targets else _idle_shares(table, in_decode_pool, later_s, now)
    return PlacementForecast(
        later_s=later_s,
        computing=computing,
        decode=computing,
        is_decode_alone=is_decode_alone,
        in_decode_pool=in_decode_pool,
        prompt=prompt,
        start_s=start_s,
        forecast=forecast,
        slo_loss=slo_loss,
        idle_share=idle_share,
    )


def score(
    ledger: Ledger, policy: DecisionPolicy, query: Place, predicted: PlacementForecast, waited_s: float | Floats
) -> Score:
    """Score a predicted placement. `waited_s`: how long the client has waited by now, or will have by each moment's
    now."""
    prompt, later_s, forecast = predicted.prompt, predicted.later_s, predicted.forecast
    ttft_s = waited_s + predicted.start_s + prompt.work_s + ledger.overhead.seconds
    slo_probability = _slo_probability(ledger.table, query, predicted, ttft_s)
    # Who has no room yet is bound to nobody yet.
    early = forecast.room_s > later_s[:, None] + policy.max_room_s
    own = slo_probability if query.has_targets else 0.0
    slo_gain = np.where(early & (query.attempt == 0), -1.0, own - predicted.slo_loss)
    if query.has_targets:
        room = np.ones(slo_gain.shape, dtype=bool)  # nobody asks
    else:
        wait_s = predicted.start_s - later_s[:, None]
        computing_s = prompt.work_s - prompt.adapter_s
        room = _leaves_room(policy, computing_s, wait_s, predicted.slo_loss, predicted.idle_share)
    return Score(ttft_s, slo_probability, slo_gain, room)


def _slo_probability(table: WorkerTable, query: Place, predicted: PlacementForecast, ttft_s: Floats) -> Floats:
    """The probability of meeting all targets, and of the memory sufficing."""
    errors, forecast = table.facts[Fact.RELATIVE_ERROR], predicted.forecast
    promises = (
        (ttft_s, query.ttft_target_s, predicted.computing),
        (forecast.tpot_s, query.tpot_target_s, predicted.decode),
        (forecast.gap_s, query.gap_target_s, predicted.decode),
    )
    in_time = sum(
        log_probability(seconds, target_s, errors[workers])
        for seconds, target_s, workers in promises
        if target_s < NO_TARGET
    )
    probability: Floats = np.exp(in_time + log_fit_probability(forecast.kv_share))
    return probability


def _join_times(wait_s: Floats, work_s: Floats, others: NDArray[np.bool_], later_s: Floats) -> Floats:
    """Seconds from now until the newcomer decodes, by moment; the same for all candidates: were it each one's own, a
    longer queue would make a crowded decode worker look better. By candidate: `wait_s`, until its queue is done;
    `work_s`, of its prompt; `others`: it decodes alone, or a part alone, and counts only where there are no pairs."""
    ready_s = wait_s + work_s
    soonest = (ready_s if others.all() else np.where(others, np.inf, ready_s)).argmin()
    joins_s: Floats = np.maximum(later_s, wait_s[soonest]) + work_s[soonest]
    return joins_s


def _start_times(
    wait_s: Floats, room_s: Floats, is_decode_alone: NDArray[np.bool_], takes_late: NDArray[np.bool_], later_s: Floats
) -> Floats:
    """Seconds from now until the prompt's computation begins, by moment and candidate. It is computed where it decodes,
    or queues elsewhere: in a prefill worker at once, which can keep it until there is room (`takes_late`), in a decode
    worker only when there is."""
    later_s = later_s[:, None]
    queues_s = np.where(is_decode_alone, 0.0, np.maximum(wait_s - later_s, 0.0))
    due_s = np.maximum(later_s, wait_s)
    reserved_s = np.where(room_s > later_s, room_s + queues_s, np.maximum(due_s, room_s))
    return np.where(takes_late & (room_s < np.inf), due_s, reserved_s)


def _idle_shares(table: WorkerTable, in_decode_pool: NDArray[np.bool_], later_s: Floats, now: float) -> Floats:
    """The idle share of the pool that computes the prompt, by moment and candidate: of the workers that take requests,
    those that have no prompts to compute by then, or that had none lately if these are fewer."""
    takes = table.facts[Fact.DRAINING] == 0.0
    of_prefill, of_decode = (
        _idle_share(table.facts[Fact.DRAINED_AT, pool][takes[pool]] - now, busy, later_s)[:, None]
        for pool, busy in zip(table.pools(), table.busy_shares(now), strict=True)
    )
    return np.where(in_decode_pool, of_decode, of_prefill)


def _idle_share(left_s: Floats, busy: float, later_s: Floats) -> Floats:
    """Of a pool, by moment. `left_s`, by worker: to compute the prompts that it has; `busy`: its share lately."""
    now_s = np.searchsorted(np.sort(left_s), later_s, side="right") / max(1, len(left_s))
    share: Floats = np.minimum(now_s, 1.0 - busy * np.exp(-later_s / PROMPTS_OVER_S))
    return share


def _leaves_room(
    policy: DecisionPolicy, computing_s: Floats, wait_s: Floats, slo_loss: Floats, idle_share: Floats
) -> NDArray[np.bool_]:
    quiet = (slo_loss <= policy.batch_slo_loss) & (wait_s <= policy.batch_queue_s)
    return quiet & ((computing_s <= policy.batch_queue_s) | (idle_share >= policy.batch_idle))
