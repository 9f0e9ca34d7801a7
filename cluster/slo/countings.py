"""What "so much is served in time" may mean: four countings of the same requests, always told side by side.

| counting | what has to be in time |
|---|---|
| `requests` | 90 % of the requests: who turns the longest tenth away loses nothing |
| `most requests` | 98 % of the requests: near what a promise about P99 says |
| `tokens` | 90 % of the tokens, of prompts and answers together: what the work is, and what is paid for |
| `everyone` | 80 % of each group's requests, whoever is counted last: the headline |

Groups are of length and of tenant. Of length: tenths of the requests by their prompts' tokens, the shortest first, and
once more the longest fiftieth; as many parts as leave 15 requests to each. Of tenant: those of 15 requests and more.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final, Literal, Protocol, TypeVar, get_args

from cluster.slo.classes import SloClass

Counting = Literal["requests", "most requests", "tokens", "everyone"]
COUNTINGS: Final[tuple[Counting, ...]] = get_args(Counting)
HEADLINE: Final[Counting] = "everyone"
SHARES: Final[Mapping[Counting, float]] = {"requests": 0.9, "most requests": 0.98, "tokens": 0.9, "everyone": 0.8}
TOLD: Final[Mapping[Counting, str]] = {
    "requests": "{share:.0%} of the requests",
    "most requests": "{share:.0%} of the requests",
    "tokens": "{share:.0%} of the tokens",
    "everyone": "{share:.0%} of each length and tenant",
}
LEAST: Final = 15  # requests that a group has at least
UNPROMISED_GAP: Final = 2.0  # gaps that nobody promised are judged by the TPOT target times this
_PARTS: Final = 10
_LONGEST: Final = 0.02
_ROUNDING: Final = 1e-9


class _HasLength(Protocol):
    @property
    def prompt_tokens(self) -> int: ...


T = TypeVar("T", bound=_HasLength)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRequest:
    """What a client saw of one request, in seconds. `ttft_s` None: it was not served when it first came, and the other
    times mean nothing. `tpot_s`, `gap_p99_s` None: there were too few tokens, or nobody noted them."""

    slo: SloClass
    prompt_tokens: int
    output_tokens: int
    tenant: str = ""
    ttft_s: float | None
    tpot_s: float | None
    gap_p99_s: float | None

    @property
    def keeps_tpot(self) -> bool:
        """Whether the first token and the mean time per token were in time."""
        return self.ttft_s is not None and self.slo.meets_ttft(self.ttft_s) and self.slo.meets_tpot(self.tpot_s)

    @property
    def keeps_gap(self) -> bool:
        """Whether the first token and the gaps were in time.
        Where no gap was promised, `UNPROMISED_GAP` times the TPOT target counts."""
        slo = self.slo
        if slo.gap_s is None and slo.tpot_s is not None:
            slo = replace(slo, gap_s=UNPROMISED_GAP * slo.tpot_s)
        return self.ttft_s is not None and slo.meets_ttft(self.ttft_s) and slo.meets_gap_p99(self.gap_p99_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """The share that was served in time, by counting. Under `everyone` it is that of the group with the smallest, whose
    name is `least`."""

    shares: Mapping[Counting, float]
    least: str

    def is_enough(self, counting: Counting) -> bool:
        return self.shares[counting] >= SHARES[counting] - _ROUNDING


def count(requests: Sequence[MeasuredRequest]) -> dict[str, Shares]:
    """The shares in time of at least one request, once by its first token and mean time per token, and once by its
    first token and its gaps."""
    return {
        "TTFT and TPOT": _shares(requests, lambda r: r.keeps_tpot),
        "TTFT and gaps": _shares(requests, lambda r: r.keeps_gap),
    }


def _shares(requests: Sequence[MeasuredRequest], is_met: Callable[[MeasuredRequest], bool]) -> Shares:
    def share(of: Sequence[MeasuredRequest], weight: Callable[[MeasuredRequest], int] = lambda r: 1) -> float:
        return round(sum(weight(r) for r in of if is_met(r)) / sum(map(weight, of)), 4)

    of_requests = share(requests)
    by_group = {name: share(group) for name, group in _groups(requests)}
    least = min(by_group, key=lambda name: by_group[name])
    return Shares(
        shares={
            "requests": of_requests,
            "most requests": of_requests,
            "tokens": share(requests, lambda r: r.prompt_tokens + r.output_tokens),
            "everyone": by_group[least],
        },
        least=least,
    )


def table_rows(promises: Mapping[str, Shares]) -> list[list[str]]:
    """The lines of a table of `promises`: a title line, then a row for each promise, with a column for each counting,
    the headline first."""
    order = sorted(COUNTINGS, key=lambda counting: counting != HEADLINE)
    rows = [["served in time by", *(TOLD[counting].format(share=SHARES[counting]) for counting in order), "the least"]]
    for words, found in promises.items():
        told = [f"{'yes' if found.is_enough(c) else 'no'}, {found.shares[c]:.1%}" for c in order]
        rows.append([words, *told, found.least])
    return rows


def _groups(requests: Sequence[MeasuredRequest]) -> Iterable[tuple[str, Sequence[MeasuredRequest]]]:
    """Yields all groups of length and of tenant, each with its name."""
    of_tenant: defaultdict[str, list[MeasuredRequest]] = defaultdict(list)
    for request in requests:
        of_tenant[request.tenant].append(request)
    yield from length_groups(requests)
    if len(of_tenant) > 1:
        yield from ((f"tenant {name}", group) for name, group in sorted(of_tenant.items()) if len(group) >= LEAST)


def length_groups(requests: Sequence[T]) -> list[tuple[str, Sequence[T]]]:
    """The groups of length, each with its name: tenths by prompt tokens, and once more the longest fiftieth."""
    by_length = sorted(requests, key=lambda r: r.prompt_tokens)
    total = len(by_length)
    parts = max(1, min(_PARTS, total // LEAST))
    bounds = [round(total * part / parts) for part in range(parts + 1)]
    groups = [by_length[first:last] for first, last in pairwise(bounds)]
    longest = round(_LONGEST * total)
    if longest >= LEAST:
        groups.append(by_length[total - longest :])
    return [(f"{group[0].prompt_tokens} to {group[-1].prompt_tokens} tokens", group) for group in groups if group]
