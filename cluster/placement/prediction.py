"""What a placement would bring, in predicted seconds: for the newcomer, and for everyone who decodes beside it.

Vectorised over candidates; reads the `WorkerTable`, changes nothing. Newcomer and neighbours advance one token per
step, so what they share is counted in steps: who is still there when it joins, and for how many of its steps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.placement.query import Query
from cluster.placement.worker_table import RESIDUAL_STEP, Floats, Row, Rows, Slot, WorkerTable

MIN_RELATIVE_ERROR: Final = 0.05  # nobody predicts better, whatever a fit says of itself
_KV_SPREAD: Final = 0.03  # of the predicted peak, as a share of the memory
_LOGISTIC: Final = 1.702  # makes the logistic function close to the normal distribution's


@dataclass(frozen=True, slots=True)
class PromptForecast:
    """By candidate worker. `wait_s`: of its queue; `load_s`: of the hits that lie in lower tiers; `added_s`: of
    `prefill_s`, what decoding neighbours notice."""

    cached_tokens: Floats
    uncached_tokens: Floats
    wait_s: Floats
    load_s: Floats
    prefill_s: Floats
    added_s: Floats

    def at(self, index: NDArray[np.intp]) -> PromptForecast:
        return PromptForecast(
            *(self.cached_tokens[index], self.uncached_tokens[index], self.wait_s[index]),
            *(self.load_s[index], self.prefill_s[index], self.added_s[index]),
        )


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """By the moment that the newcomer joins, and by worker. `room_s`: by worker only, until its memory has room for the
    prompt; `kv_share`: of the memory, at the peak of the newcomer's life; `harm`: by how much the log-probabilities of
    the others' targets fall, all together."""

    tpot_s: Floats
    room_s: Floats
    kv_share: Floats
    harm: Floats

    def at(self, index: list[int]) -> DecodeForecast:
        return DecodeForecast(self.tpot_s[:, index], self.room_s[index], self.kv_share[:, index], self.harm[:, index])


def forecast_prompt(
    table: WorkerTable, num_tokens: int, reach: Floats, tier_token_s: tuple[float, float], now: float
) -> PromptForecast:
    """On every worker. `reach[3, rows]`: leading tokens held on the device, down to host memory, down to disk. Loads as
    far down as it pays; `tier_token_s`: seconds per token brought up from host memory and from disk."""
    facts = table.rows[:, : len(table)]
    step_s = facts[Row.STEP_S] / facts[Row.STRETCH]
    # Each that decodes takes a token of the step's budget.
    chunk = np.maximum(facts[Row.CHUNK_TOKENS] - facts[Row.BOOKED], 1.0)
    depths = 3 if (reach[2] > reach[0]).any() else 1
    cached = np.minimum(reach[:depths], num_tokens - 1.0)
    uncached = num_tokens - cached
    load_s = np.zeros_like(cached)
    if depths > 1:
        load_s[1] = (cached[1] - cached[0]) * tier_token_s[0]
        load_s[2] = load_s[1] + (cached[2] - cached[1]) * tier_token_s[1]
    added_s = uncached * (facts[Row.PREFILL_TOKEN_S] + facts[Row.PREFILL_PAIR_S] * (cached + (uncached + 1) / 2))
    prefill_s = added_s + np.maximum(np.ceil(uncached / chunk), 1.0) * step_s
    best = 0 if depths == 1 else ((load_s + prefill_s).argmin(axis=0), np.arange(len(table)))
    return PromptForecast(
        cached_tokens=cached[best],
        uncached_tokens=uncached[best],
        wait_s=np.maximum(facts[Row.DRAINED_AT] - now, 0.0),
        load_s=load_s[best],
        prefill_s=prefill_s[best],
        added_s=added_s[best],
    )


@dataclass(frozen=True, slots=True)
class _Neighbours:
    """`[workers, slots]`: `emitted`, `left`: tokens by now, and still to come; `held`: with the prompt's.

    `[moments, workers, slots]`, as they will be when the newcomer joins: `offset`, `shared`: its steps before they are
    there, and those that they share with it; `grown`: at most so many tokens come before it joins; `leaves_at`: its
    step, at the latest.

    What takes memory or attention is told at the pace of an empty step, who is still there at the true one:
    so one more neighbour never makes the prediction better."""

    live: NDArray[np.bool_]
    emitted: Floats
    left: Floats
    held: Floats
    offset: Floats
    shared: Floats
    grown: Floats
    leaves_at: Floats


def forecast_decode(
    table: WorkerTable, rows: Rows, query: Query, num_output: float, lead_s: Floats, added_s: Floats, now: float
) -> DecodeForecast:
    """`lead_s`, by moment: from now until the newcomer joins; `added_s`, by worker: of its prompt, where the same one
    computes it, else 0.

    Prompts that the worker has still to compute when the newcomer joins make it wait between its tokens."""
    facts = table.rows[:, rows]
    used = max(1, int(facts[Row.BOOKED].max(initial=0.0)))
    slots = table.slots[:, rows, :used]
    near = _neighbours(facts, slots, table.residuals, num_output, lead_s, now)
    share = near.shared / num_output
    context = share * (near.held + near.grown + near.shared / 2)
    decodes = share.sum(axis=2) + facts[Row.EXTRA_DECODES]
    before_s = facts[Row.STRETCH] * (
        facts[Row.BASE_S]
        + facts[Row.DECODE_S] * decodes
        + facts[Row.CONTEXT_TOKEN_S] * (context.sum(axis=2) + facts[Row.EXTRA_CONTEXT])
    )
    own_s = facts[Row.STRETCH] * (
        facts[Row.DECODE_S] + facts[Row.CONTEXT_TOKEN_S] * (query.num_tokens + num_output / 2)
    )
    prompts_s = np.where(added_s > 0.0, 0.0, np.maximum(facts[Row.DRAINED_AT] - now - lead_s[:, None], 0.0))
    return DecodeForecast(
        tpot_s=before_s + own_s + prompts_s / num_output,
        room_s=_room_s(facts, near, query.num_tokens + 1),
        kv_share=_kv_share(facts, near, query.num_tokens, num_output),
        harm=_harm(facts, slots, near, before_s, own_s, added_s, now),
    )


def log_probability(predicted_s: Floats, target_s: float, relative_error: Floats) -> Floats:
    """Of meeting the target, with an error of the prediction around the target. 0 without a target (inf)."""
    if target_s == np.inf:
        return np.zeros_like(predicted_s)
    return -np.logaddexp(0.0, _doubt(relative_error) * (predicted_s / target_s - 1.0))


def fit_probability(kv_share: Floats) -> Floats:
    """Of the memory sufficing up to the end."""
    return np.exp(-np.logaddexp(0.0, (kv_share - 1.0) / _KV_SPREAD))


def _doubt(relative_error: Floats) -> Floats:
    """How steeply the probability of being in time falls around the target."""
    return _LOGISTIC / np.maximum(relative_error, MIN_RELATIVE_ERROR)


def _neighbours(
    facts: Floats, slots: Floats, residuals: Floats, num_output: float, lead_s: Floats, now: float
) -> _Neighbours:
    """Of an empty slot all facts are 0, of who has not begun JOINED_STEP is infinite, of who has, FIRST_AT is over:
    what follows from that needs no cases."""
    step_s = np.maximum(facts[Row.STEP_S], 1e-9)[:, None]
    fastest_s = np.maximum(facts[Row.BASE_S], 1e-9)[:, None]
    steps = facts[Row.STEPS][:, None] + np.maximum(now - facts[Row.AS_OF], 0.0)[:, None] / step_s
    output, most = slots[Slot.OUTPUT], slots[Slot.MAX_OUTPUT]
    emitted = np.minimum(np.maximum(steps - slots[Slot.JOINED_STEP], 0.0), most)
    age = emitted / np.maximum(output, 1.0) / RESIDUAL_STEP
    left = np.minimum(output * residuals[np.minimum(age, len(residuals) - 1.0).astype(np.intp)], most - emitted)
    early_s = lead_s[:, None, None] - np.maximum(slots[Slot.FIRST_AT] - now, 0.0)
    until_join_s = np.maximum(early_s, 0.0)
    until_lead_s = until_join_s - early_s
    stays, offset = left - np.minimum(until_join_s / step_s, left), until_lead_s / step_s
    return _Neighbours(
        live=output > 0.0,
        emitted=emitted,
        left=left,
        held=slots[Slot.TOKENS] + emitted,
        offset=offset,
        shared=np.maximum(np.minimum(stays, num_output - offset), 0.0),
        grown=np.minimum(until_join_s / fastest_s, left),
        leaves_at=stays + until_lead_s / fastest_s,
    )


def _harm(
    facts: Floats, slots: Floats, near: _Neighbours, before_s: Floats, own_s: Floats, added_s: Floats, now: float
) -> Floats:
    """The loss in log-probability, not in probability: it does not vanish where everyone is late already, so that a
    worker in trouble never looks like the place for more; each weighed by how good its chance was once."""
    step_s = np.maximum(facts[Row.STEP_S], before_s)[:, :, None]
    spent_s = np.where(near.emitted > 0.0, now - slots[Slot.FIRST_AT], 0.0)
    total = np.maximum(near.emitted + near.left, 1.0)
    tpot_s = (spent_s + near.left * step_s) / total
    delay_s = near.shared * own_s[:, None] + added_s[:, None] * ((near.offset == 0.0) & (near.left > 0.0))
    target_s = np.where(near.live, slots[Slot.TPOT_TARGET_S], np.inf)
    doubt = _doubt(facts[Row.RELATIVE_ERROR])[:, None]
    # Without a target both sides are the same.
    lost = np.logaddexp(0.0, doubt * ((tpot_s + delay_s / total) / target_s - 1.0)) - np.logaddexp(
        0.0, doubt * (tpot_s / target_s - 1.0)
    )
    harm: Floats = (lost * slots[Slot.WEIGHT]).sum(axis=2)
    return harm


def _kv_share(facts: Floats, near: _Neighbours, num_tokens: int, num_output: float) -> Floats:
    """At the worst of three moments of the newcomer's life. Memory is theirs from their placement on, in whole blocks:
    half of one more than their tokens need."""
    half, at = facts[Row.BLOCK_SIZE] / 2, np.array([0.0, num_output / 2, num_output])[:, None, None, None]
    grown = np.minimum(near.grown + np.maximum(at - near.offset, 0.0), near.left)
    held = np.where(near.live & (near.leaves_at >= at), near.held + grown + half[:, None], 0.0)
    peak = (held.sum(axis=3) + num_tokens + at[..., 0] + half).max(axis=0)
    share: Floats = (peak + facts[Row.EXTRA_CONTEXT]) / np.maximum(facts[Row.KV_TOKENS], 1.0)
    return share


def _room_s(facts: Floats, near: _Neighbours, num_tokens: int) -> Floats:
    """Until enough of those who decode have left, for its tokens and for itself; inf where not even an empty worker has
    the room. Whole blocks, and for each one more, which a worker keeps for its growth."""
    block = np.maximum(facts[Row.BLOCK_SIZE], 1.0)
    held = np.where(near.live, (np.ceil(near.held / block[:, None]) + 1.0) * block[:, None], 0.0)
    needed = np.ceil(num_tokens / block) * block
    lacking = held.sum(axis=1) + facts[Row.EXTRA_CONTEXT] + needed - facts[Row.KV_TOKENS]
    too_many = facts[Row.BOOKED] + facts[Row.EXTRA_DECODES] + 1.0 - facts[Row.MAX_SEQUENCES]
    if max(lacking.max(), too_many.max()) <= 0.0:
        return np.zeros_like(lacking)
    ends = np.where(near.live, near.left, np.inf)
    order = ends.argsort(axis=1, kind="stable")
    freed = np.take_along_axis(held, order, axis=1).cumsum(axis=1)
    left = np.take_along_axis(near.live, order, axis=1).cumsum(axis=1)
    enough = (freed >= lacking[:, None]) & (left >= too_many[:, None])
    steps = np.take_along_axis(ends, order, axis=1)[np.arange(len(order)), enough.argmax(axis=1)]
    at_once = (lacking <= 0.0) & (too_many <= 0.0)
    return np.where(at_once, 0.0, np.where(enough.any(axis=1), steps * facts[Row.STEP_S], np.inf))
