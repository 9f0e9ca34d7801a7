"""What a worker reports of its cost model, and how the scheduler reads that back."""

from __future__ import annotations

from dataclasses import replace

from engine.cost_model.costs import StepCosts
from engine.cost_model.fit import StepKind, scaled
from engine.cost_model.noise import StepNoise
from engine.cost_model.step_cost import StepCost
from kv_transfer.messages.fields import Role
from kv_transfer.messages.workers import StepCostReport, StepNoiseReport


def cost_report(costs: StepCosts) -> StepCostReport | None:
    """A worker's cost model as its snapshots have it. None as long as the worker has none."""
    cost = costs.cost()
    if cost is None:
        return None
    return replace(
        stated_report(cost),
        prefill_error=costs.error("prefill"),
        decode_error=costs.error("decode"),
        prefill_stretch=costs.stretch("prefill"),
        decode_stretch=costs.stretch("decode"),
        prefill_noise=_noise_report(costs.noise("prefill")),
        decode_noise=_noise_report(costs.noise("decode")),
    )


def stated_report(cost: StepCost) -> StepCostReport:
    """The report of a cost that is given, not measured."""
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
    return scaled(usual, _stretch(role, report))


def observed_steps(role: Role, report: StepCostReport | None) -> tuple[StepCost, dict[StepKind, StepNoise]] | None:
    """What a worker's latest steps cost in the mean, those that its role is there for, and how steps of each kind, of
    which enough are known, scatter around that. For replays: it follows the machine less closely than predictions."""
    cost = reported_cost(role, report)
    if report is None or cost is None:
        return None
    told: dict[StepKind, StepNoiseReport | None] = {"prefill": report.prefill_noise, "decode": report.decode_noise}
    known = {
        kind: StepNoise(ratios=tuple(noise.ratios), correlation=noise.correlation)
        for kind, noise in told.items()
        if noise is not None
    }
    mean = known[role].mean if role in known else _stretch(role, report)
    return scaled(cost, mean / _stretch(role, report)), {kind: noise.over(mean) for kind, noise in known.items()}


def _noise_report(noise: StepNoise) -> StepNoiseReport | None:
    return StepNoiseReport(ratios=list(noise.ratios), correlation=noise.correlation) if noise.ratios else None


def _stretch(role: Role, report: StepCostReport) -> float:
    return report.prefill_stretch if role == "prefill" else report.decode_stretch
