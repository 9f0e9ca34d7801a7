"""What a request is promised: classes of service with targets, and which class and targets a request asks for.

    class by default             what OpenAI's clients write into `service_tier`
    interactive                  auto, default, priority, scale, or its name
    batch (without targets)      flex, or its name

OpenAI's own words are always understood: one that no class was given stands for the default class, so that a client
made for OpenAI works with any set of classes. The header `x-slo-class` names a class and goes before `service_tier`;
`x-slo-ttft-ms`, `x-slo-tpot-ms` and `x-slo-gap-ms` set a target for one request: what it is promised is its class with
these targets.
Knows seconds and names; nothing of HTTP servers, placement or how targets are met.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from cluster.errors import InvalidRequestError

CLASS_HEADER: Final = "x-slo-class"
TTFT_HEADER: Final = "x-slo-ttft-ms"
TPOT_HEADER: Final = "x-slo-tpot-ms"
GAP_HEADER: Final = "x-slo-gap-ms"
STANDARD_TIERS: Final = ("auto", "default", "flex", "scale", "priority")  # all that OpenAI's clients know
_MAX_NAME: Final = 64
_MAX_TARGET_S: Final = 86_400.0
GAPS_PER_LATE: Final = 100  # one in so many of a request's gaps may be late: what a promise about their P99 allows


@dataclass(frozen=True, slots=True, kw_only=True)
class SloClass:
    """A class of service. `share`: how many of its requests should meet all targets (0.99 makes them promises about
    P99). A target of None: any time meets it.

    `tpot_s` limits the mean time between a request's tokens, which hides one long stall. `gap_s` limits every gap
    between two of its tokens; one in a hundred may be longer (the P99 of its time between tokens)."""

    name: str
    ttft_s: float | None = None
    tpot_s: float | None = None
    gap_s: float | None = None
    share: float = 0.99
    service_tiers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not 0 < len(self.name) <= _MAX_NAME:
            raise ValueError(f"the name of an SLO class has 1 to {_MAX_NAME} characters, unlike {self.name[:80]!r}")
        if not (self.name.isascii() and self.name.isprintable()) or self.name != self.name.strip():
            raise ValueError(
                f"the name of an SLO class stands in headers, {CLASS_HEADER} of each answer for one, and {self.name!r}"
                " cannot: use printable characters of ASCII, and no blanks around them"
            )
        for target, seconds in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s), ("gap", self.gap_s)):
            if seconds is not None and not 0 < seconds <= _MAX_TARGET_S:
                raise ValueError(
                    f"the {target} target of SLO class {self.name!r} is {seconds} s; give it more than 0 and at most a"
                    " day, or leave it out for none"
                )
        if not 0 < self.share < 1:
            raise ValueError(
                f"share of SLO class {self.name!r} is {self.share}; it lies between 0 and 1, such as 0.99, because a"
                " class that no request may miss has no error budget"
            )

    @property
    def has_targets(self) -> bool:
        return self.ttft_s is not None or self.tpot_s is not None or self.gap_s is not None

    def meets_ttft(self, ttft_s: float) -> bool:
        """Whether the first byte came in time. `ttft_s`: from arrival at the gateway until it was sent."""
        return self.ttft_s is None or ttft_s <= self.ttft_s

    def meets_tpot(self, tpot_s: float | None) -> bool:
        """Whether the tokens came fast enough in the mean. `tpot_s`: mean seconds between a request's tokens; None: it
        had fewer than two, which always is in time."""
        return self.tpot_s is None or tpot_s is None or tpot_s <= self.tpot_s

    def meets_gap_p99(self, gap_p99_s: float | None) -> bool:
        """Whether few enough of a request's gaps were late: one in a hundred at most. `gap_p99_s` is what
        `report.gap_p99` says of them."""
        return self.gap_s is None or gap_p99_s is None or gap_p99_s <= self.gap_s

    def meets(self, ttft_s: float | None, tpot_s: float | None, gap_p99_s: float | None) -> bool:
        """Whether a request was served, and in time. `ttft_s` None: it was not served."""
        is_served_in_time = ttft_s is not None and self.meets_ttft(ttft_s)
        return is_served_in_time and self.meets_tpot(tpot_s) and self.meets_gap_p99(gap_p99_s)


INTERACTIVE: Final = SloClass(name="interactive", ttft_s=2.0, tpot_s=0.1, service_tiers=("priority", "scale"))
BATCH: Final = SloClass(name="batch", service_tiers=("flex",))


@dataclass(frozen=True, slots=True, kw_only=True)
class SloConfig:
    """All classes of service, and the name of the one for requests that ask for none."""

    classes: tuple[SloClass, ...] = (INTERACTIVE, BATCH)
    default: str = INTERACTIVE.name

    def __post_init__(self) -> None:
        names = [slo_class.name for slo_class in self.classes]
        if self.default not in names:
            raise ValueError(f"the default SLO class is {self.default!r}, but there are {_listed(names)}")
        owners: dict[str, str] = {}
        for slo_class in self.classes:
            for word in {slo_class.name, *slo_class.service_tiers}:
                if word in owners:
                    raise ValueError(
                        f"{word!r} means SLO class {owners[word]!r} and SLO class {slo_class.name!r}; names and"
                        " service_tiers must each belong to one class"
                    )
                owners[word] = slo_class.name

    def named(self, name: str) -> SloClass | None:
        return next((slo_class for slo_class in self.classes if slo_class.name == name), None)

    def choose(self, service_tier: str | None, headers: Mapping[str, str]) -> SloClass:
        """The class, with its own targets, of a request with this `service_tier` and these headers (names in lower
        case, or a mapping that ignores case). Raises InvalidRequestError if there is no such class, tier or target."""
        name = headers.get(CLASS_HEADER)
        chosen = self._of_tier(service_tier) if name is None else self._of_header(name)
        return replace(
            chosen,
            ttft_s=_target(headers, TTFT_HEADER, chosen.ttft_s),
            tpot_s=_target(headers, TPOT_HEADER, chosen.tpot_s),
            gap_s=_target(headers, GAP_HEADER, chosen.gap_s),
        )

    def _of_header(self, name: str) -> SloClass:
        chosen = self.named(name)
        if chosen is None:
            names = _listed(slo_class.name for slo_class in self.classes)
            raise InvalidRequestError(
                f"There is no SLO class {name[:_MAX_NAME]!r}; there are {names}.", param=CLASS_HEADER
            )
        return chosen

    def _of_tier(self, service_tier: str | None) -> SloClass:
        default = self.named(self.default)
        assert default is not None, "checked when this was made"
        words = dict.fromkeys(STANDARD_TIERS, default)
        for slo_class in self.classes:
            words |= dict.fromkeys((slo_class.name, *slo_class.service_tiers), slo_class)
        if service_tier is None:
            return default
        if service_tier not in words:
            raise InvalidRequestError(
                f"There is no service tier {service_tier[:_MAX_NAME]!r}; there are {_listed(words)}.",
                param="service_tier",
            )
        return words[service_tier]


NO_TARGETS: Final = SloConfig(classes=(SloClass(name="default"),), default="default")  # where nothing was configured


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTerms:
    """The terms on which a request is served. They go from the HTTP side to the orchestrator, in the request's
    timeline.

    `tier`: what the answer says of `slo`, in `service_tier`. `tenant`: whose request it is; under overload tenants
    share what there is. "" is a tenant, too. `salt`: of its prompts' prefixes, which those with the same one share.
    `model`: whose workers serve it, by the name that promises are counted under. `arrived_at`: when the request reached
    its gateway, in seconds of that process's `time.monotonic()`. `deadline`: when it ends with 504, by the same clock;
    None: when its gateway ends any (`gateway.request_deadline_s`)."""

    slo: SloClass = NO_TARGETS.classes[0]
    tier: str = "default"
    tenant: str = ""
    salt: str = ""
    model: str = ""
    arrived_at: float = field(default_factory=time.monotonic)
    deadline: float | None = None

    @property
    def has_time(self) -> bool:
        """Whether it gives way to others, as a line of a batch does: its deadline is hours away."""
        return self.deadline is not None


def _listed(words: Iterable[str]) -> str:
    return ", ".join(words)


def _target(headers: Mapping[str, str], name: str, default_s: float | None) -> float | None:
    """The target that a header gives in milliseconds, in seconds; `default_s` without that header. Raises
    InvalidRequestError."""
    text = headers.get(name)
    if text is None:
        return default_s
    try:
        seconds = float(text) / 1e3
    except ValueError:
        seconds = math.nan
    if not 0 < seconds <= _MAX_TARGET_S:
        raise InvalidRequestError(
            f"{name} is {text[:_MAX_NAME]!r}; write milliseconds above 0 and at most {_MAX_TARGET_S * 1e3:.0f}.",
            param=name,
        )
    return seconds
