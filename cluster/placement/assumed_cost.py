"""What a worker costs per step as long as it reports no cost of its own."""

from __future__ import annotations

from typing import Final

from engine.step_cost import StepCost
from engine.step_loop import ASSUMED_PREFILL_TOKENS_PER_S
from kv_transfer.messages import WorkerSnapshot

_ASSUMED_ERROR: Final = 0.5


def assumed_cost(snapshot: WorkerSnapshot) -> StepCost:
    """Of a worker that reports none: from its measured rates, as far as it has any."""
    return StepCost(
        base_s=snapshot.decode_step_s,
        prefill_token_s=1.0 / (snapshot.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S),
        prefill_pair_s=0.0,
        decode_s=0.0,
        context_token_s=0.0,
        relative_error=_ASSUMED_ERROR,
    )
