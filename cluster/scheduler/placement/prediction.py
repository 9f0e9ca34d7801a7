"""What a placement would bring, in predicted seconds: for the newcomer, and for everyone who decodes beside it.

Vectorised over candidates; reads the `WorkerTable`, changes nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.query import Query
from cluster.scheduler.placement.tpot_forecast import forecast_workers
from cluster.scheduler.placement.worker_scan import forecast_prompts
from cluster.scheduler.placement.worker_table import Floats, Rows, WorkerTable


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


def forecast_prompt(
    table: WorkerTable, num_tokens: int, reach: Floats, tier_token_s: tuple[float, float], now: float
) -> PromptForecast:
    """On every worker. `reach[3, rows]`: leading tokens held on the device, down to host memory, down to disk. Loads as
    far down as it pays; `tier_token_s`: seconds per token brought up from host memory and from disk."""
    return PromptForecast(*forecast_prompts(table.rows, len(table), num_tokens, reach, *tier_token_s, now))


def forecast_decode(
    table: WorkerTable, rows: Rows, query: Query, num_output: float, lead_s: Floats, added_s: Floats, now: float
) -> DecodeForecast:
    """`lead_s`, by moment: from now until the newcomer joins; `added_s`, by worker: of its prompt, where the same one
    computes it, else 0."""
    found, room_s = forecast_workers(
        table.rows, table.slots, table.residuals, rows, query.num_tokens, num_output, lead_s, added_s, now
    )
    return DecodeForecast(found[0], room_s, found[1], found[2])
