"""One gateway's account of promises: reads the timelines of its requests and knows how things stand.

Every `PERIOD_S`, and whenever somebody asks, what is new goes into the gateway's own tracker, and out to the others.
What they tell in turn goes, with its own, into a tracker of the whole cluster; without a scheduler to pass such news on
the cluster is this gateway alone. The HTTP side says which requests to follow; `/slo` and Prometheus read the figures.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal

from cluster.errors import ApiError, GenerationError, OverloadedError, RequestTooLargeError, UnreadError
from cluster.gateway.timeline import Attempt, RequestTimeline
from cluster.slo.classes import NO_TARGETS, RequestTerms, SloClass, SloConfig
from cluster.slo.report import Counts, SeriesKey, Served, SloOutcome, SloReport
from cluster.slo.tracker import SeriesSnapshot, SloTracker
from kv_transfer.messages.requests import RequestSpec

PERIOD_S: Final = 1.0
# So long before its time somebody is back on time: clients round seconds, and clocks differ. Half the wait at most.
EARLY_S: Final = 1.0
_MAX_TURNED_AWAY: Final = 10_000  # clients and questions that are remembered
Scope = Literal["gateway", "cluster"]


@dataclass(slots=True)
class _Reader:
    """How much of one request's timeline has been counted: tokens of each sequence, and whether the first byte has."""

    timeline: RequestTimeline
    num_tokens: list[int]
    has_first: bool = False


class SloAccount:
    """One gateway's account of how promises are kept, at this gateway and in the whole cluster. Times are of this
    process's monotonic clock."""

    def __init__(self, classes: SloConfig = NO_TARGETS, *, models: Iterable[str]) -> None:
        """`models`: the names of those that are served. Each class is counted by model (`RequestTerms.model`)."""
        now = time.monotonic()
        self.classes = classes
        self._news = SloReport()
        self._readers: dict[int, _Reader] = {}  # of the requests that are being answered
        self._trackers: dict[Scope, SloTracker] = {
            "gateway": SloTracker(classes, now_s=now),
            "cluster": SloTracker(classes, now_s=now),
        }
        self._counts = {
            SeriesKey(slo_class.name, model, ""): Counts() for model in models for slo_class in classes.classes
        }
        self._turned_away: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # see `_is_repeated`
        self._publish: Callable[[SloReport], None] | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self, publish: Callable[[SloReport], None]) -> None:
        """Settle every `PERIOD_S` from now on, and give each report to `publish` once."""
        self._publish = publish
        self._task = asyncio.create_task(self._run(), name="slo-account")

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def follow(self, timeline: RequestTimeline) -> None:
        """Count what happens to this request from now on, until `ended` is called with it."""
        self._readers[id(timeline)] = _Reader(timeline, [0] * len(timeline.sequences))

    def ended(self, timeline: RequestTimeline) -> None:
        """Count how a followed request ended. Call it once, whatever way the request ended."""
        reader = self._readers.pop(id(timeline))
        requests, timeline.requests = timeline.requests, ()
        if timeline.slo_outcome is None:
            return
        if timeline.slo_outcome is SloOutcome.REJECTED:
            if self._is_repeated(timeline, requests):
                timeline.slo_outcome = SloOutcome.REPEATED
        elif self._turned_away:
            self._turned_away.pop(_question(timeline, requests), None)
        self._count_news([reader])
        slowest = timeline.slowest
        self._news.ended(
            self._served(timeline.terms, slowest.attempt),
            timeline.slo_outcome,
            e2e_s=timeline.total_s,
            ttft_s=timeline.ttft_s,
            tpot_s=slowest.tpot_s,
            gap_p99_s=timeline.gap_p99_s,
            num_tokens=timeline.num_generated_tokens,
        )

    @contextmanager
    def admitting(self, terms: RequestTerms) -> Iterator[None]:
        """Count a request that an error inside the block ends, before it can be followed. The error goes on."""
        try:
            yield
        except ApiError as error:
            outcome = slo_outcome_of(error)
            if outcome is not None:
                self._news.ended(self._served(terms, None), outcome, e2e_s=time.monotonic() - terms.arrived_at)
            raise

    def on_report(self, report: bytes) -> None:
        """Count the report of another gateway into the cluster's tracker."""
        self._trackers["cluster"].on_report(time.monotonic(), report, "another gateway")

    def publish_news(self) -> None:
        """Count what is new into both trackers, and publish it."""
        self._count_news(self._readers.values())
        report, self._news = self._news, SloReport()
        if not report.tallies:
            return
        for tracker in self._trackers.values():
            tracker.absorb(time.monotonic(), report)
        for key in self._counts.keys() & report.tallies.keys():
            self._counts[key] = Counts.total((self._counts[key], report.tallies[key].counts))
        if self._publish is not None:
            self._publish(report)

    def counts(self) -> Mapping[SeriesKey, Counts]:
        """The counts of this gateway's requests since the start, by class and model."""
        self.publish_news()
        return self._counts

    def totals(self, scope: Scope) -> Iterator[SeriesSnapshot]:
        """Yields how each class of each model stands now, over all workers. Those without news are included. Each takes
        some tenths of a millisecond to reckon, between which other tasks may have their turn."""
        self.publish_news()
        for key in list(self._counts):
            yield self._trackers[scope].snapshot(time.monotonic(), key)

    def workers(self, scope: Scope) -> Iterator[SeriesSnapshot]:
        """Yields how each class stands now on each worker that there is news of, as `totals` does."""
        self.publish_news()
        return self._trackers[scope].workers(time.monotonic())

    def _is_repeated(self, timeline: RequestTimeline, requests: Sequence[RequestSpec]) -> bool:
        """Whether the same client was told for the same question to come back, and comes before that: else one that
        tries again and again would use up the budget of all. Remembers whoever is told now. Clients without a name are
        not told apart, and each counts."""
        question = _question(timeline, requests)
        if question is None or timeline.retry_after_s is None:
            return False
        told_at, until = self._turned_away.get(question, (math.inf, math.inf))
        if told_at <= timeline.arrived_at < until - min(EARLY_S, (until - told_at) / 2):
            return True
        told_at = timeline.arrived_at + timeline.total_s
        self._turned_away[question] = told_at, told_at + timeline.retry_after_s
        self._turned_away.move_to_end(question)
        if len(self._turned_away) > _MAX_TURNED_AWAY:
            self._turned_away.popitem(last=False)
        return False

    def _count_news(self, readers: Iterable[_Reader]) -> None:
        """Add what came since the last call to the next report.
        All gaps of one worker are added at once, which is quickest."""
        gaps: dict[tuple[SloClass, str, str | None], list[float]] = {}
        for reader in readers:
            timeline = reader.timeline
            if not reader.has_first and (first := timeline.first) is not None and first.ttft_s is not None:
                reader.has_first = True
                served = self._served(timeline.terms, first.first_attempt)
                self._news.first_byte(served, ttft_s=first.ttft_s, queue_s=first.queue_s)
            for index, sequence in enumerate(timeline.sequences):
                start = reader.num_tokens[index]
                if len(sequence.token_times) > start:
                    reader.num_tokens[index] = len(sequence.token_times)
                    for decode, some in sequence.gaps(start):
                        gaps.setdefault((timeline.terms.slo, timeline.terms.model, decode), []).extend(some)
        for (slo, model, decode), all_gaps in gaps.items():
            self._news.gaps(Served(slo=slo, model=model, decode=decode), all_gaps)

    def _served(self, terms: RequestTerms, attempt: Attempt | None) -> Served:
        if attempt is None:
            return Served(slo=terms.slo, model=terms.model)
        return Served(slo=terms.slo, model=terms.model, prefill=attempt.prefill, decode=attempt.decode)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(PERIOD_S)
            self.publish_news()


def _question(timeline: RequestTimeline, requests: Sequence[RequestSpec]) -> Hashable:
    """A key that is the same whenever the same client asks the same again. None: it cannot be told. It takes a
    millisecond for each 100,000 tokens, so only what may need it asks."""
    if not timeline.terms.tenant or not requests:
        return None
    terms, max_tokens = timeline.terms, timeline.sequences[0].max_tokens
    return (terms.tenant, terms.slo.name, terms.model, max_tokens, _hash_of_prompts(requests))


def _hash_of_prompts(requests: Sequence[RequestSpec]) -> int:
    """A hash of all prompts, each with what keeps its prefixes apart. Choices of one prompt share its list of tokens,
    which may be long, and is hashed once."""
    by_list = {id(request.prompt_token_ids): request for request in requests}
    hashes = {key: hash((tuple(one.prompt_token_ids), one.prefix_salt)) for key, one in by_list.items()}
    return hash(tuple(hashes[id(request.prompt_token_ids)] for request in requests))


def slo_outcome_of(error: ApiError) -> SloOutcome | None:
    """What an error means for a request's promise. None: nothing, because what was asked for cannot be done."""
    if isinstance(error, UnreadError):
        return SloOutcome.CANCELLED
    if isinstance(error, OverloadedError):
        return SloOutcome.REJECTED
    if isinstance(error, GenerationError) and not isinstance(error, RequestTooLargeError):
        return SloOutcome.FAILED
    return None
