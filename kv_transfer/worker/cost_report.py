"""What a worker reports of its cost model, and how the scheduler reads that back."""

from __future__ import annotations

from dataclasses import replace

from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import scaled
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import StepCostReport


def cost_report(costs: StepCosts) -> StepCostReport | None:
    """A worker's cost model as its snapshots have it. None as long as the worker has none."""
    cost = costs.cost()
    if cost is None:
        return None
    prefill, decode = costs.noise("prefill"), costs.noise("decode")
    return replace(
        stated_report(cost),
        prefill_error=costs.error("prefill"),
        decode_error=costs.error("decode"),
        prefill_stretch=costs.stretch("prefill"),
        decode_stretch=costs.stretch("decode"),
        prefill_spread=prefill.spread,
        decode_spread=decode.spread,
        prefill_run_spread=prefill.run_spread,
        decode_run_spread=decode.run_spread,
    )


def stated_report(cost: StepCost) -> StepCostReport:
    """Of a cost that is given, not measured."""
    return StepCostReport(
        base_s=cost.base_s,
        prefill_token_s=cost.prefill_token_s,
        prefill_pair_s=cost.prefill_pair_s,
        decode_s=cost.decode_s,
        context_token_s=cost.context_token_s,
        prefill_base_s=cost.prefill_base_s,
        prefill_error=cost.relative_error,
        decode_error=cost.relative_error,
    )


def reported_cost(role: Role, report: StepCostReport | None) -> StepCost | None:
    """What a worker's steps take in the mean, with the error of those that its role is there for."""
    if report is None:
        return None
    usual = StepCost(
        base_s=report.base_s,
        prefill_token_s=report.prefill_token_s,
        prefill_pair_s=report.prefill_pair_s,
        decode_s=report.decode_s,
        context_token_s=report.context_token_s,
        prefill_base_s=report.prefill_base_s,
        relative_error=report.prefill_error if role == "prefill" else report.decode_error,
    )
    return scaled(usual, report.prefill_stretch if role == "prefill" else report.decode_stretch)


def reported_noise(role: Role, report: StepCostReport | None) -> StepNoise:
    """Of the steps that its role is there for."""
    if report is None:
        return StepNoise()
    if role == "prefill":
        return StepNoise(spread=report.prefill_spread, run_spread=report.prefill_run_spread)
    return StepNoise(spread=report.decode_spread, run_spread=report.decode_run_spread)
