"""Compiled: who decodes on a worker, and what it means for them and for a newcomer that it joins them later.

Newcomer and neighbours advance one token per step, so what they share is counted in steps: who is still there when it
joins, and for how many of its steps. What takes memory or attention is told at the pace of an empty step, who is still
there at the true one: so one more neighbour never makes the prediction better.

Reads the `WorkerTable`: `facts[Row]` of one worker, `slots[Slot, i]` of those booked on it. What is called stands
before what calls it, since that is compiled at once.
"""

from __future__ import annotations

import math
from typing import Final, NamedTuple

import numpy as np

from cluster.scheduler.placement.compiled import compiled, part
from cluster.scheduler.placement.worker_table import RESIDUAL_STEP, Floats, Row, Rows, Slot

_MIN_RELATIVE_ERROR: Final = 0.05  # nobody predicts better, whatever a fit says of itself
_KV_SPREAD: Final = 0.03  # of the predicted peak, as a share of the memory
_LOGISTIC: Final = 1.702  # makes the logistic function close to the normal distribution's


class Neighbours(NamedTuple):
    """By slot. `emitted`, `left`: tokens by now, and still to come; `held`: with the prompt's; `spent_s`: on those by
    now.

    As they will be when the newcomer joins: `offset`, `shared`: its steps before they are there, and those that they
    share with it; `grown`: at most so many tokens come before it joins; `leaves_at`: its step, at the latest."""

    emitted: Floats
    left: Floats
    held: Floats
    spent_s: Floats
    offset: Floats
    shared: Floats
    grown: Floats
    leaves_at: Floats


@part
def _as_now(facts: Floats, slots: Floats, residuals: Floats, now: float) -> Neighbours:
    """Of who has not begun, JOINED_STEP is infinite; of who has, FIRST_AT is over: what follows needs no cases."""
    steps = facts[Row.STEPS] + max(now - facts[Row.AS_OF], 0.0) / max(facts[Row.STEP_S], 1e-9)
    num, oldest = slots.shape[1], len(residuals) - 1.0
    emitted, left, held, spent_s = np.empty(num), np.empty(num), np.empty(num), np.empty(num)
    for i in range(num):
        output, most = slots[Slot.OUTPUT, i], slots[Slot.MAX_OUTPUT, i]
        emitted[i] = min(max(steps - slots[Slot.JOINED_STEP, i], 0.0), most)
        age = emitted[i] / max(output, 1.0) / RESIDUAL_STEP
        left[i] = min(output * residuals[int(min(age, oldest))], most - emitted[i])
        held[i] = slots[Slot.TOKENS, i] + emitted[i]
        spent_s[i] = now - slots[Slot.FIRST_AT, i] if emitted[i] > 0.0 else 0.0
    return Neighbours(emitted, left, held, spent_s, np.empty(num), np.empty(num), np.empty(num), np.empty(num))


@part
def _meet(facts: Floats, slots: Floats, near: Neighbours, num_output: float, lead_s: float, now: float) -> None:
    """The newcomer joins after `lead_s`."""
    step_s, fastest_s = max(facts[Row.STEP_S], 1e-9), max(facts[Row.BASE_S], 1e-9)
    for i in range(slots.shape[1]):
        left, early_s = near.left[i], lead_s - max(slots[Slot.FIRST_AT, i] - now, 0.0)
        until_join_s = max(early_s, 0.0)
        until_lead_s = until_join_s - early_s
        stays = left - min(until_join_s / step_s, left)
        near.offset[i] = until_lead_s / step_s
        near.shared[i] = max(min(stays, num_output - near.offset[i]), 0.0)
        near.grown[i] = min(until_join_s / fastest_s, left)
        near.leaves_at[i] = stays + until_lead_s / fastest_s


@part
def _step_s(facts: Floats, near: Neighbours, num_output: float) -> float:
    """Of the newcomer's steps, in the mean, without what it adds itself."""
    decodes, context = facts[Row.EXTRA_DECODES], facts[Row.EXTRA_CONTEXT]
    for i in range(len(near.shared)):
        share = near.shared[i] / num_output
        decodes += share
        context += share * (near.held[i] + near.grown[i] + near.shared[i] / 2)
    step_s = facts[Row.BASE_S] + facts[Row.DECODE_S] * decodes + facts[Row.CONTEXT_TOKEN_S] * context
    return float(facts[Row.STRETCH] * step_s)


@part
def _own_s(facts: Floats, num_tokens: float, num_output: float) -> float:
    own_s = facts[Row.DECODE_S] + facts[Row.CONTEXT_TOKEN_S] * (num_tokens + num_output / 2)
    return float(facts[Row.STRETCH] * own_s)


@part
def _log1p_exp(exponent: float) -> float:
    return max(exponent, 0.0) + math.log1p(math.exp(-abs(exponent)))


@part
def log_probability(predicted_s: float, target_s: float, relative_error: float) -> float:
    """Of meeting the target, with an error of the prediction around the target. 0 without a target (inf)."""
    if target_s == np.inf:
        return 0.0
    doubt = _LOGISTIC / max(relative_error, _MIN_RELATIVE_ERROR)  # how steeply it falls around the target
    return -_log1p_exp(doubt * (predicted_s / target_s - 1.0))


@part
def fit_probability(kv_share: float) -> float:
    """Of the memory sufficing up to the end."""
    return math.exp(-_log1p_exp((kv_share - 1.0) / _KV_SPREAD))


@part
def _harm(facts: Floats, slots: Floats, near: Neighbours, before_s: float, own_s: float, added_s: float) -> float:
    """The loss in log-probability, not in probability: it does not vanish where everyone is late already, so that a
    worker in trouble never looks like the place for more; each weighed by how good its chance was once."""
    step_s, error, harm = max(facts[Row.STEP_S], before_s), facts[Row.RELATIVE_ERROR], 0.0
    for i in range(slots.shape[1]):
        left, target_s = near.left[i], slots[Slot.TPOT_TARGET_S, i]
        if target_s == np.inf:
            continue
        total = max(near.emitted[i] + left, 1.0)
        tpot_s = (near.spent_s[i] + left * step_s) / total
        delay_s = near.shared[i] * own_s + (added_s if near.offset[i] == 0.0 and left > 0.0 else 0.0)
        after = log_probability(tpot_s + delay_s / total, target_s, error)
        harm += (log_probability(tpot_s, target_s, error) - after) * slots[Slot.WEIGHT, i]
    return harm


@part
def _kv_share(facts: Floats, near: Neighbours, num_tokens: float, num_output: float) -> float:
    """At the worst of three moments of the newcomer's life. Memory is theirs from their placement on, in whole blocks:
    half of one more than their tokens need."""
    half, peak = facts[Row.BLOCK_SIZE] / 2, 0.0
    for quarter in (0.0, 0.5, 1.0):
        at = quarter * num_output
        held = num_tokens + at + half
        for i in range(len(near.left)):
            if near.leaves_at[i] >= at:
                grown = min(near.grown[i] + max(at - near.offset[i], 0.0), near.left[i])
                held += near.held[i] + grown + half
        peak = max(peak, held)
    return float((peak + facts[Row.EXTRA_CONTEXT]) / max(facts[Row.KV_TOKENS], 1.0))


@part
def _is_freed(near: Neighbours, block: float, num_steps: float, lacking: float, too_many: float) -> bool:
    """Whether those who will have left after so many steps are enough."""
    freed, gone = 0.0, 0
    for i in range(len(near.left)):
        if near.left[i] <= num_steps:
            freed, gone = freed + (math.ceil(near.held[i] / block) + 1.0) * block, gone + 1
    return freed >= lacking and gone >= too_many


@part
def _room_s(facts: Floats, near: Neighbours, num_tokens: float) -> float:
    """Until enough of those who decode have left, for its tokens and for itself; inf where not even an empty worker has
    the room. Whole blocks, and for each one more, which a worker keeps for its growth."""
    block = max(facts[Row.BLOCK_SIZE], 1.0)
    lacking = facts[Row.EXTRA_CONTEXT] + math.ceil(num_tokens / block) * block - facts[Row.KV_TOKENS]
    for held in near.held:
        lacking += (math.ceil(held / block) + 1.0) * block
    too_many = facts[Row.BOOKED] + facts[Row.EXTRA_DECODES] + 1.0 - facts[Row.MAX_SEQUENCES]
    if lacking <= 0.0 and too_many <= 0.0:
        return 0.0
    # The fewest tokens after which enough will have left: bounds that come closer, at those that lie between them.
    too_few, enough = -1.0, np.inf
    for pivot in near.left:
        if too_few < pivot < enough:
            if _is_freed(near, block, pivot, lacking, too_many):
                enough = pivot
            else:
                too_few = pivot
    return float(enough * facts[Row.STEP_S] if enough < np.inf else np.inf)


@part
def _forecast(
    facts: Floats,
    slots: Floats,
    residuals: Floats,
    num_tokens: float,
    num_output: float,
    lead_s: Floats,
    added_s: float,
    now: float,
    found: Floats,
) -> float:
    """TPOT, share of memory and harm `found[3, moments]` on one worker; returns the seconds until there is room."""
    near, own_s = _as_now(facts, slots, residuals, now), _own_s(facts, num_tokens, num_output)
    for moment in range(len(lead_s)):
        _meet(facts, slots, near, num_output, lead_s[moment], now)
        before_s = _step_s(facts, near, num_output)
        # Prompts that the worker has still to compute when the newcomer joins make it wait between its tokens.
        prompts_s = 0.0 if added_s > 0.0 else max(facts[Row.DRAINED_AT] - now - lead_s[moment], 0.0)
        found[0, moment] = before_s + own_s + prompts_s / num_output
        found[1, moment] = _kv_share(facts, near, num_tokens, num_output)
        found[2, moment] = _harm(facts, slots, near, before_s, own_s, added_s)
    return _room_s(facts, near, num_tokens + 1.0)


@compiled("Tuple((f8[:, :, ::1], f8[::1]))(f8[:, ::1], f8[:, :, ::1], f8[::1], i8[::1], f8, f8, f8[::1], f8[::1], f8)")
def forecast_workers(
    rows: Floats,
    all_slots: Floats,
    residuals: Floats,
    workers: Rows,
    num_tokens: float,
    num_output: float,
    lead_s: Floats,
    added_s: Floats,
    now: float,
) -> tuple[Floats, Floats]:
    """TPOT, share of memory and harm `[3, moments, candidates]`, and seconds until there is room `[candidates]`.

    `workers`, `added_s`, by candidate: as in `forecast_decode`. What a decode worker will be like does not depend on
    which prefill worker computes the prompt: those who are alike are forecast once."""
    found, room_s = np.empty((3, len(lead_s), len(workers))), np.empty(len(workers))
    for index in range(len(workers)):
        like = 0
        while workers[like] != workers[index] or added_s[like] != added_s[index]:
            like += 1
        if like < index:
            room_s[index] = room_s[like]
            for moment in range(len(lead_s)):
                for number in range(3):
                    found[number, moment, index] = found[number, moment, like]
            continue
        facts = rows[:, workers[index]].copy()
        slots = all_slots[:, workers[index], : int(facts[Row.BOOKED])]
        of_worker, added = found[:, :, index], added_s[index]
        room_s[index] = _forecast(facts, slots, residuals, num_tokens, num_output, lead_s, added, now, of_worker)
    return found, room_s


@compiled("f8[:, ::1](f8[:, ::1], i8[::1], i8[::1], f8[:, ::1], f8[:, ::1], f8[:, ::1], f8, f8)")
def chances(
    rows: Floats,
    computing: Rows,
    decode: Rows,
    ttft_s: Floats,
    tpot_s: Floats,
    kv_share: Floats,
    ttft_target_s: float,
    tpot_target_s: float,
) -> Floats:
    """Of meeting both targets, and of the memory sufficing: by moment and candidate, as what is predicted."""
    found = np.empty((len(ttft_s), len(decode)))
    for moment in range(len(ttft_s)):
        for index in range(len(decode)):
            error, other = rows[Row.RELATIVE_ERROR, computing[index]], rows[Row.RELATIVE_ERROR, decode[index]]
            in_time = log_probability(ttft_s[moment, index], ttft_target_s, error)
            in_time += log_probability(tpot_s[moment, index], tpot_target_s, other)
            found[moment, index] = math.exp(in_time) * fit_probability(kv_share[moment, index])
    return found
