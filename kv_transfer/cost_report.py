"""A worker's cost model in the words of its snapshots."""

from __future__ import annotations

from engine.step_costs import StepCosts
from kv_transfer.messages import StepCostReport


def cost_report(costs: StepCosts) -> StepCostReport | None:
    """None as long as the worker has none."""
    cost = costs.cost()
    if cost is None:
        return None
    return StepCostReport(
        base_s=cost.base_s,
        prefill_token_s=cost.prefill_token_s,
        prefill_pair_s=cost.prefill_pair_s,
        decode_s=cost.decode_s,
        context_token_s=cost.context_token_s,
        prefill_error=costs.error("prefill"),
        decode_error=costs.error("decode"),
    )
