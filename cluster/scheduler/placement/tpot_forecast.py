"""How long a newcomer's tokens will take on each decode worker, and what those who decode there lose by it.

`forecast_decode` is the arithmetic behind a pair's score. Newcomer and co-batched sequences advance together, a token
each, so what they share is counted in such steps: who is still there when it joins, and for how many of its steps. A
worker that has several tokens of a step (speculation) takes as much less time for each: only a gap between tokens is as
long as the step. What takes
memory or attention is told at the pace of an empty step, who is still there at the true one: so one more co-batched
sequence never makes the prediction better.

Prompts that the worker computes, too, make steps longer only as far as all who decode there can bear (see
`filter.forecast_prompt`). So targets are judged by steps without prompts, which are what decodes do to each other; but
a request without targets is not to use up what others have saved.

Arrays are `[workers, slots]`, or `[moments, workers, slots]` where they depend on when the newcomer joins.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.worker_table import RESIDUAL_STEP, Fact, Floats, Rows, Slot, WorkerTable
from kv_transfer.messages.scheduling import Place

_MIN_RELATIVE_ERROR: Final = 0.05  # nobody predicts better, whatever a fit says of itself
_KV_SPREAD: Final = 0.03  # of the predicted peak, as a share of the memory
_LOGISTIC: Final = 1.702  # makes the logistic function close to the normal distribution's


@dataclass(frozen=True, slots=True)
class DecodeForecast:
    """What becomes of decoding, by the moment that the newcomer joins, and by candidate. `room_s`: by candidate only,
    until the worker's memory has room for the prompt; `kv_share`: of the memory, at the peak of the newcomer's life;
    `slo_loss`: by how much the log-probabilities of the others' targets fall, all together.

    `tpot_s`, `gap_s`: of the newcomer, in the mean and at most, where only decodes hold it up; `gap_s` only if somebody
    was promised one, else 0.
    """

    tpot_s: Floats
    gap_s: Floats
    room_s: Floats
    kv_share: Floats
    slo_loss: Floats


@dataclass(frozen=True, slots=True)
class _CoBatched:
    """The sequences that a newcomer would decode beside. `[workers, slots]`: `live`, whether the slot is taken;
    `emitted`, `left`: tokens by now, and still to come; `ends`: its last one, in steps from now; `held`: with the
    prompt's; `kept`: of these, those that take memory.

    `[moments, workers, slots]`, as they will be when the newcomer joins: `offset`, `shared`: its steps before they are
    there, and those that they share with it; `grown`: at most so many tokens come before it joins; `leaves_at`: its
    step, at the latest.
    """

    live: NDArray[np.bool_]
    emitted: Floats
    left: Floats
    ends: Floats
    held: Floats
    kept: Floats
    offset: Floats
    shared: Floats
    grown: Floats
    leaves_at: Floats


def forecast_decode(
    table: WorkerTable, workers: Rows, query: Place, num_output: float, lead_s: Floats, added_s: Floats, now: float
) -> DecodeForecast:
    """What `score.predict` knows of the decode workers. `workers`, `added_s`, by candidate: its row, and the seconds
    that its prompt adds to the worker's steps and that others are not to notice, else 0; `lead_s`, by moment: from now
    until the newcomer joins; `num_output`: tokens that it will probably put out.

    Which prefill worker computes the prompt makes no difference here: candidates that are alike are forecast once."""
    workers, added_s, same = _distinct(workers, added_s)
    facts = table.facts[:, workers]
    slots = table.slots[:, workers, : max(1, int(facts[Fact.BOOKED].max(initial=0.0)))]
    others = _co_batched(facts, slots, table.residuals, num_output, lead_s, now)
    share = others.shared / num_output
    decodes = share.sum(axis=2) + facts[Fact.EXTRA_DECODES]
    context = (share * (others.held + others.grown + others.shared / 2)).sum(axis=2) + facts[Fact.EXTRA_CONTEXT]
    base_s, decode_s, context_token_s = facts[Fact.BASE_S], facts[Fact.DECODE_S], facts[Fact.CONTEXT_TOKEN_S]
    num_tokens = facts[Fact.TOKENS_PER_STEP]
    before_s = (base_s + decode_s * decodes + context_token_s * context) / num_tokens
    own_s = (decode_s + context_token_s * (query.num_tokens + num_output / 2)) / num_tokens
    slo_loss = _tpot_loss(facts, slots, others, before_s, own_s, added_s, now)
    gap_s = np.zeros_like(before_s)
    if query.gap_s is not None or (slots[Slot.GAP_TARGET_S][others.live] < np.inf).any():
        there = others.shared > 0.0
        fullest = there.sum(axis=2) + facts[Fact.EXTRA_DECODES]
        longest = (there * (others.held + others.left)).sum(axis=2) + facts[Fact.EXTRA_CONTEXT]
        without_s = base_s + decode_s * fullest + context_token_s * longest
        gap_s = without_s + decode_s + context_token_s * (query.num_tokens + num_output)
        slo_loss = slo_loss + _gap_loss(facts, slots, there, without_s, gap_s)
    return DecodeForecast(
        tpot_s=(before_s + own_s)[:, same],
        gap_s=gap_s[:, same],
        room_s=_room_s(facts, others, query.num_tokens + 1, now)[same],
        kv_share=_kv_share(facts, others, query.num_tokens, num_output)[:, same],
        slo_loss=slo_loss[:, same],
    )


def forecast_delay(table: WorkerTable, workers: Rows, added_s: Floats, lead_s: Floats, now: float) -> Floats:
    """How much the sequences lose that decode where a prompt is computed for another worker: by how much the
    log-probabilities of their targets fall, all together. `workers`, `added_s`: by candidate, its row and how long the
    prompt keeps the others there; `lead_s`: by moment, from now until the prompt is computed."""
    workers, added_s, same = _distinct(workers, added_s)
    facts = table.facts[:, workers]
    slots = table.slots[:, workers, : max(1, int(facts[Fact.BOOKED].max(initial=0.0)))]
    others = _co_batched(facts, slots, table.residuals, 1.0, lead_s, now)
    before_s, own_s = np.zeros((len(lead_s), len(workers))), np.zeros(len(workers))
    return _tpot_loss(facts, slots, others, before_s, own_s, added_s, now)[:, same]


def log_probability(predicted_s: Floats | float, target_s: float, relative_error: Floats | float) -> Floats:
    """The log-probability of meeting the target, with an error of the prediction around the target. 0 without a target
    (inf)."""
    if target_s == np.inf:
        return np.zeros_like(predicted_s)
    return -np.logaddexp(0.0, _steepness(relative_error) * (predicted_s / target_s - 1.0))


def log_fit_probability(kv_share: Floats | float) -> Floats:
    """The log-probability that the memory suffices up to the end."""
    return -np.logaddexp(0.0, (kv_share - 1.0) / _KV_SPREAD)


def _steepness(relative_error: Floats | float) -> Floats:
    """How steeply the probability of being in time falls around the target."""
    return _LOGISTIC / np.maximum(relative_error, _MIN_RELATIVE_ERROR)


def _distinct(workers: Rows, added_s: Floats) -> tuple[Rows, Floats, Rows]:
    """The candidates that differ, by row and seconds, and for each candidate which of those it is like."""
    numbers: dict[tuple[int, float], int] = {}
    same = [numbers.setdefault(key, len(numbers)) for key in zip(workers.tolist(), added_s.tolist(), strict=True)]
    rows, seconds = zip(*numbers, strict=True)
    return np.array(rows), np.array(seconds), np.array(same)


def _co_batched(
    facts: Floats, slots: Floats, residuals: Floats, num_output: float, lead_s: Floats, now: float
) -> _CoBatched:
    """Forecast the sequences that decode on these workers when the newcomer joins. No cases are needed: of an empty
    slot all facts are 0, of a sequence that has not begun JOINED_STEP is infinite, and of one that has, FIRST_AT is
    over."""
    step_s = np.maximum(facts[Fact.STEP_S], 1e-9)[:, None]
    fastest_s = np.maximum(facts[Fact.BASE_S] / facts[Fact.TOKENS_PER_STEP], 1e-9)[:, None]
    steps = facts[Fact.STEPS][:, None] + np.maximum(now - facts[Fact.AS_OF], 0.0)[:, None] / step_s
    output, most = slots[Slot.OUTPUT], slots[Slot.MAX_OUTPUT]
    emitted = np.minimum(np.maximum(steps - slots[Slot.JOINED_STEP], 0.0), most)
    age = emitted / np.maximum(output, 1.0) / RESIDUAL_STEP
    left = np.minimum(output * residuals[np.minimum(age, len(residuals) - 1.0).astype(np.intp)], most - emitted)
    begins_s = np.maximum(slots[Slot.FIRST_AT] - now, 0.0)
    early_s = lead_s[:, None, None] - begins_s
    until_join_s = np.maximum(early_s, 0.0)
    until_lead_s = until_join_s - early_s
    held = slots[Slot.TOKENS] + emitted
    decodes = slots[Slot.JOINED_STEP] < np.inf  # what the worker reported is of these
    stays, offset = left - np.minimum(until_join_s / step_s, left), until_lead_s / step_s
    return _CoBatched(
        live=output > 0.0,
        emitted=emitted,
        left=left,
        ends=begins_s / step_s + left,
        held=held,
        kept=held * (1.0 - facts[Fact.SHARED][:, None] * decodes),
        offset=offset,
        shared=np.maximum(np.minimum(stays, num_output - offset), 0.0),
        grown=np.minimum(until_join_s / fastest_s, left),
        leaves_at=stays + until_lead_s / fastest_s,
    )


def _tpot_loss(
    facts: Floats, slots: Floats, others: _CoBatched, before_s: Floats, own_s: Floats, added_s: Floats, now: float
) -> Floats:
    """How much the log-probabilities of the others' TPOT targets fall, by moment and worker. Not the probabilities:
    their loss would vanish where everyone is late already, and a worker in trouble must never look like the place for
    more. Each is weighed by how probable it was, when it was placed, that it meets its targets (`Slot.WEIGHT`).

    `before_s`, by moment and worker: of each token, without the newcomer. By worker: `own_s`, what it adds to each that
    it shares; `added_s`, what its prompt adds once to those who are there by then."""
    target_s = np.where(others.live, slots[Slot.TPOT_TARGET_S], np.inf)
    if not (target_s < np.inf).any():
        return np.zeros_like(before_s)
    step_s = np.maximum(facts[Fact.STEP_S] / facts[Fact.STRETCH], before_s)[:, :, None]
    spent_s = np.where(others.emitted > 0.0, now - slots[Slot.FIRST_AT], 0.0)
    total = np.maximum(others.emitted + others.left, 1.0)
    tpot_s = (spent_s + others.left * step_s) / total
    delay_s = others.shared * own_s[:, None]
    if added_s.any():
        delay_s += added_s[:, None] * ((others.offset == 0.0) & (others.left > 0.0))
    steepness = _steepness(facts[Fact.RELATIVE_ERROR])[:, None]
    # Without a target both sides are the same.
    lost = np.logaddexp(0.0, steepness * ((tpot_s + delay_s / total) / target_s - 1.0)) - np.logaddexp(
        0.0, steepness * (tpot_s / target_s - 1.0)
    )
    loss: Floats = (lost * slots[Slot.WEIGHT]).sum(axis=2)
    return loss


def _gap_loss(facts: Floats, slots: Floats, there: NDArray[np.bool_], without_s: Floats, with_s: Floats) -> Floats:
    """How much the log-probabilities of the others' gap targets fall. `without_s`, `with_s`: the longest step of
    decodes alone, without and with the newcomer. Only sequences that are `there` then count."""
    target_s = np.where(slots[Slot.GAP_TARGET_S] > 0.0, slots[Slot.GAP_TARGET_S], np.inf)
    steepness = _steepness(facts[Fact.RELATIVE_ERROR])[:, None]
    lost = np.logaddexp(0.0, steepness * (with_s[:, :, None] / target_s - 1.0)) - np.logaddexp(
        0.0, steepness * (without_s[:, :, None] / target_s - 1.0)
    )
    loss: Floats = (lost * there * slots[Slot.WEIGHT]).sum(axis=2)
    return loss


def _kv_share(facts: Floats, others: _CoBatched, num_tokens: int, num_output: float) -> Floats:
    """The share of the memory that is taken at the worst of three moments of the newcomer's life. Memory is theirs from
    their placement on, in whole blocks: half of one more than their tokens need."""
    half, at = facts[Fact.BLOCK_SIZE] / 2, np.array([0.0, num_output / 2, num_output])[:, None, None, None]
    grown = np.minimum(others.grown + np.maximum(at - others.offset, 0.0), others.left)
    held = np.where(others.live & (others.leaves_at >= at), others.kept + grown + half[:, None], 0.0)
    peak = (held.sum(axis=3) + num_tokens + at[..., 0] + half).max(axis=0)
    extra = (1.0 - facts[Fact.SHARED]) * facts[Fact.EXTRA_CONTEXT]
    share: Floats = (peak + extra) / np.maximum(facts[Fact.KV_TOKENS], 1.0)
    return share


def _room_s(facts: Floats, others: _CoBatched, num_tokens: int, now: float) -> Floats:
    """Seconds until enough of those who decode have left, for the newcomer's tokens and for itself; inf where not even
    an empty worker has the room. Whole blocks, and for each one more, which a worker keeps for its growth. Prompts that
    the worker computes for others leave when its queue is done."""
    block = np.maximum(facts[Fact.BLOCK_SIZE], 1.0)
    held = np.where(others.live, (np.ceil(others.kept / block[:, None]) + 1.0) * block[:, None], 0.0)
    needed = np.ceil(num_tokens / block) * block
    lent = facts[Fact.LENT_TOKENS]
    extra = (1.0 - facts[Fact.SHARED]) * facts[Fact.EXTRA_CONTEXT]
    lacking = held.sum(axis=1) + lent + extra + needed - facts[Fact.KV_TOKENS]
    too_many = facts[Fact.BOOKED] + facts[Fact.EXTRA_DECODES] + 1.0 - facts[Fact.MAX_SEQUENCES]
    if max(lacking.max(), too_many.max()) <= 0.0:
        return np.zeros_like(lacking)
    drained = np.maximum(facts[Fact.DRAINED_AT] - now, 0.0) / np.maximum(facts[Fact.STEP_S], 1e-9)
    ends = np.column_stack([np.where(others.live, others.ends, np.inf), drained])
    held, live = np.column_stack([held, lent]), np.column_stack([others.live, np.zeros_like(lent, dtype=bool)])
    order = ends.argsort(axis=1, kind="stable")
    freed = np.take_along_axis(held, order, axis=1).cumsum(axis=1)
    gone = np.take_along_axis(live, order, axis=1).cumsum(axis=1)
    enough = (freed >= lacking[:, None]) & (gone >= too_many[:, None])
    steps = np.take_along_axis(ends, order, axis=1)[np.arange(len(order)), enough.argmax(axis=1)]
    at_once = (lacking <= 0.0) & (too_many <= 0.0)
    return np.where(at_once, 0.0, np.where(enough.any(axis=1), steps * facts[Fact.STEP_S], np.inf))
