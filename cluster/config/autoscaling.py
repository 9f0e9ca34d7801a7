"""How a pool's number of workers follows the demand: the branch `autoscaling` of a pool's settings."""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from cluster.config.fields import Settings


class AutoscalingSettings(Settings):
    min_replicas: int = Field(1, ge=0, description="Never fewer workers than this.")
    max_replicas: int = Field(ge=1, description="Never more workers than this.")
    target_utilisation: float = Field(
        0.7, gt=0, le=1, description="Share of their time that predicted demand should keep the workers busy."
    )
    start_s: float = Field(
        30.0, ge=0, description="What a new worker takes until it serves; demand is predicted so far ahead."
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
        if self.min_replicas == 0:
            raise ValueError(
                "min_replicas is 0, and a pool without workers hears of nothing that would let it grow again: use 1"
            )
        return self
