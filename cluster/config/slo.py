"""SLO classes as an operator writes them, in milliseconds; `SloSettings.config()` gives what Legato computes with.

slo:
  default: interactive
  classes:
    interactive: {ttft_ms: 2000, tpot_ms: 100, share: 0.99, service_tiers: [priority, scale]}
    batch: {service_tiers: [flex]}
"""

from __future__ import annotations

from typing import Self

from pydantic import Field, model_validator

from cluster.config.fields import Settings
from cluster.slo.classes import BATCH, INTERACTIVE, SloClass, SloConfig


class SloClassSettings(Settings):
    ttft_ms: float | None = Field(
        None, gt=0, description="Most time from a request's arrival to the first byte of its answer; empty: no target."
    )
    tpot_ms: float | None = Field(
        None, gt=0, description="Most time per output token, as a request's mean; empty: no target."
    )
    share: float = Field(0.99, gt=0, lt=1, description="Share of the requests that must meet both targets.")
    service_tiers: tuple[str, ...] = Field(
        (), strict=False, description="Values of OpenAI's `service_tier` that choose this class, besides its name."
    )

    @classmethod
    def of(cls, slo_class: SloClass) -> Self:
        return cls(
            ttft_ms=None if slo_class.ttft_s is None else slo_class.ttft_s * 1e3,
            tpot_ms=None if slo_class.tpot_s is None else slo_class.tpot_s * 1e3,
            share=slo_class.share,
            service_tiers=slo_class.service_tiers,
        )

    def named(self, name: str) -> SloClass:
        return SloClass(
            name=name,
            ttft_s=None if self.ttft_ms is None else self.ttft_ms / 1e3,
            tpot_s=None if self.tpot_ms is None else self.tpot_ms / 1e3,
            share=self.share,
            service_tiers=self.service_tiers,
        )


class SloSettings(Settings):
    classes: dict[str, SloClassSettings] = Field(
        {slo_class.name: SloClassSettings.of(slo_class) for slo_class in (INTERACTIVE, BATCH)},
        description="Classes of service by name.",
    )
    default: str = Field(INTERACTIVE.name, description="Class of requests that ask for none.")

    def config(self) -> SloConfig:
        """In seconds. Raises ValueError where the classes do not fit together."""
        return SloConfig(
            classes=tuple(settings.named(name) for name, settings in self.classes.items()), default=self.default
        )

    @model_validator(mode="after")
    def _check(self) -> Self:
        self.config()
        return self
