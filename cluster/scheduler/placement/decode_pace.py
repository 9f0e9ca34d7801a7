"""How long a worker's decode steps take, and how many it has done: arithmetic on its row of the `WorkerTable`."""

from __future__ import annotations

from typing import Final

from cluster.scheduler.placement.worker_table import PROMPTS_OVER_S, Row, Slot, WorkerTable
from engine.cost_model.step_cost import StepWork

_MOST_PROMPTS: Final = 0.9  # of its time


def advance(table: WorkerTable, row: int, now: float) -> None:
    """Count the decode steps that were done since."""
    facts = table.rows[:, row]
    if facts[Row.STEP_S] > 0.0:
        facts[Row.STEPS] += max(0.0, now - facts[Row.AS_OF]) / facts[Row.STEP_S]
    facts[Row.AS_OF] = now


def count_prompt(table: WorkerTable, row: int, num_tokens: float, num_cached: float, now: float) -> None:
    """One more prompt was placed there."""
    cost, facts = table.cost(row), table.rows[:, row]
    recent_s = PROMPTS_OVER_S * table.prompt_share(row, now)
    added_s = cost.step_s(StepWork.of_prefill(num_tokens, num_cached)) - cost.base_s
    facts[Row.PROMPTS_S], facts[Row.PROMPTS_AT] = recent_s + added_s, now
    set_step_s(table, row, now)


def set_step_s(table: WorkerTable, row: int, now: float) -> None:
    """With those that decode now, and their contexts, and as much time for prompts as lately."""
    facts, slots = table.rows[:, row], table.slots[:, row, : table.num_used(row)]
    joined = slots[Slot.JOINED_STEP] < float("inf")
    emitted = (facts[Row.STEPS] - slots[Slot.JOINED_STEP])[joined]
    context = (slots[Slot.TOKENS][joined] + emitted).sum() + facts[Row.EXTRA_CONTEXT]
    decodes = joined.sum() + facts[Row.EXTRA_DECODES]
    step_s = facts[Row.BASE_S] + facts[Row.DECODE_S] * decodes + facts[Row.CONTEXT_TOKEN_S] * context
    share = min(_MOST_PROMPTS, table.prompt_share(row, now))
    facts[Row.STRETCH] = 1.0 / (1.0 - share)
    facts[Row.STEP_S] = step_s * facts[Row.STRETCH]
