"""Arithmetic on a profiler's trace: when a device was busy, how long it waited, what ran beside what.

Reads what `torch.profiler` exports as a Chrome trace. Times are microseconds on the trace's clock.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does."""

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activity:
    """One thing that was done, on one stream of a device or in one thread of the host."""

    name: str
    began_us: float
    ended_us: float
    stream: int

    @property
    def interval(self) -> Interval:
        return self.began_us, self.ended_us


def read_trace(path: Path, categories: Collection[str] = DEVICE_WORK) -> list[Activity]:
    """What a trace holds of these categories, by when it began."""
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    found = [
        Activity(
            name=event["name"],
            began_us=float(event["ts"]),
            ended_us=float(event["ts"]) + float(event["dur"]),
            stream=_number(event.get("tid")),
        )
        for event in events
        if event.get("ph") == "X" and event.get("cat") in categories
    ]
    return sorted(found, key=lambda activity: activity.began_us)


def _number(stream: object) -> int:
    """The number of a stream, as a GPU's events have it; those that say `stream 7` are told apart as well."""
    text = str(stream)
    return int(text) if text.lstrip("-").isdigit() else hash(text)


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The time in these intervals as intervals that do not touch, in order."""
    merged: list[Interval] = []
    for began, ended in sorted(intervals):
        if merged and began <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], ended)
        else:
            merged.append((began, ended))
    return merged


def length(intervals: Iterable[Interval]) -> float:
    """How long intervals that do not overlap are in all."""
    return sum(ended - began for began, ended in intervals)


def common(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """The time that is in both; each is a `union`."""
    shared: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        began, ended = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if began < ended:
            shared.append((began, ended))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return shared


def share_beside(some: Iterable[Activity], others: Iterable[Activity]) -> float:
    """The part of the time in which any of the first ran and any of the others ran too; 0 without any."""
    mine, theirs = (union(activity.interval for activity in group) for group in (some, others))
    return length(common(mine, theirs)) / length(mine) if mine else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """How long it took from one step's mark to the next one's, and how long the device did nothing meanwhile.

    `waited_us`: in pauses that are longer than those between two kernels which were launched together.
    """

    lasted_us: float
    idle_us: float
    waited_us: float


class LostMarksError(ValueError):
    """A trace lacks marks of steps that were taken, and then perhaps other work too."""


def step_times(
    activities: Sequence[Activity], mark: str, *, fewest: int, longest_pause_us: float, spare: int
) -> list[StepTime]:
    """The times of the steps between activities whose name contains `mark`, the first and last `spare` left out.

    Marks are work themselves, tiny. Raises LostMarksError if there are fewer than `fewest`.
    """
    assert fewest >= 2 * spare + 2, "of the steps between so few marks none would be left"
    marks = [activity.began_us for activity in activities if mark in activity.name]
    if len(marks) < fewest:
        names = ", ".join(sorted({activity.name for activity in activities})[:5])
        raise LostMarksError(
            f"the trace has {len(marks)} marks {mark!r} of {fewest}; it has, among others: {names or 'none'}"
        )
    bounds = list(pairwise(marks))[spare : len(marks) - 1 - spare]
    busy = union(activity.interval for activity in activities)
    pauses = [(ended, began) for (_, ended), (began, _) in pairwise(busy)]
    long = [pause for pause in pauses if pause[1] - pause[0] > longest_pause_us]
    return [
        StepTime(
            lasted_us=until - since,
            idle_us=length(common([(since, until)], pauses)),
            waited_us=length(common([(since, until)], long)),
        )
        for since, until in bounds
    ]
