"""What a worker costs per step as long as it reports no cost of its own."""

from __future__ import annotations

from typing import Final

from engine.cost_model.step_cost import ASSUMED_PREFILL_TOKENS_PER_S, StepCost
from kv_transfer.messages.workers import WorkerSnapshot

_ASSUMED_ERROR: Final = 0.5
_ASSUMED_STEP_S: Final = 0.02
# What a sequence adds to a step, and a token of its context, as shares of the step: wrong by as much as you like, but
# with nothing at all, workers would look the same however many decode there.
_DECODE_SHARE: Final = 0.02
_CONTEXT_TOKEN_SHARE: Final = 1e-5


def assumed_cost(snapshot: WorkerSnapshot) -> StepCost:
    """Of a worker that reports none: from its measured rates, as far as it has any."""
    step_s = snapshot.decode_step_s or _ASSUMED_STEP_S
    return StepCost(
        base_s=step_s,
        prefill_token_s=1.0 / (snapshot.prefill_tokens_per_s or ASSUMED_PREFILL_TOKENS_PER_S),
        prefill_pair_s=0.0,
        decode_s=_DECODE_SHARE * step_s,
        context_token_s=_CONTEXT_TOKEN_SHARE * step_s,
        relative_error=_ASSUMED_ERROR,
    )
