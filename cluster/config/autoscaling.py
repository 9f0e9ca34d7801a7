"""How a pool's number of workers follows the demand: the branch `autoscaling` of a pool's settings."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from cluster.config.fields import Settings


class AutoscalingSettings(Settings):
    policy: Literal["slo", "load"] = Field(
        "slo",
        description="What the number follows: `slo`, the predicted demand and the error budgets of the SLO classes;"
        " `load`, how much waits or runs now.",
    )
    min_replicas: int = Field(1, ge=0, description="Never fewer workers than this.")
    max_replicas: int = Field(ge=1, description="Never more workers than this.")
    target_utilisation: float = Field(
        0.7, gt=0, le=1, description="Of `slo`: share of their time that predicted demand should keep the workers busy."
    )
    start_s: float = Field(
        30.0, ge=0, description="Of `slo`: what a new worker takes until it serves; demand is predicted so far ahead."
    )
    target_per_replica: float | None = Field(
        None,
        gt=0,
        description="Of `load`: what one worker should carry; for prefill waiting prompt tokens, for decode sequences.",
    )
    look_back_s: float = Field(5.0, gt=0, description="Of `load`: it is averaged over this long.")
    upscale_delay_s: float = Field(
        2.0, ge=0, description="Of `load`: it must be high for this long before workers are added; `slo` adds at once."
    )
    downscale_delay_s: float = Field(
        60.0, gt=0, description="Fewer workers must have been enough for this long before one ends."
    )

    @model_validator(mode="after")
    def _check_range(self) -> Self:
        if self.min_replicas > self.max_replicas:
            raise ValueError(
                f"min_replicas is {self.min_replicas} and max_replicas {self.max_replicas}; "
                "lower the first or raise the second"
            )
        return self

    @model_validator(mode="after")
    def _check_policy(self) -> Self:
        if self.policy == "load" and self.target_per_replica is None:
            raise ValueError("policy is load, which needs a target_per_replica; give one, or use policy: slo")
        if self.policy == "slo" and self.target_per_replica is not None:
            raise ValueError(
                "target_per_replica is of policy: load and means nothing to policy: slo, which has target_utilisation;"
                " leave it out, or say policy: load"
            )
        if self.policy == "slo" and self.min_replicas == 0:
            raise ValueError(
                "min_replicas is 0, and a pool without workers hears of nothing that would let it grow again: use 1"
            )
        return self
