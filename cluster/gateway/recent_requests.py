"""The requests that a gateway is answering and those that it answered last, for operators to look at.

Holds the requests' own timelines and nothing beside them: what `/cluster/requests` and the board show is read from
those when somebody looks. `Api.following` says when a request begins and ends; a token costs nothing here. Who shows
changes asks for `version` now and then, and for what has changed since.
"""

from __future__ import annotations

from dataclasses import asdict
from heapq import nlargest
from typing import Any, Final, NamedTuple

from cluster.gateway.timeline import Drafts, RequestTimeline, SequenceTimeline

MAX_ENDED: Final = 1_000
MAX_BYTES: Final = 16 * 2**20
_REQUEST_BYTES: Final = 1_024  # roughly, a timeline without its sequences
_SEQUENCE_BYTES: Final = 512  # one sequence without its tokens and attempts
_ATTEMPT_BYTES: Final = 256
_BAR: Final = 48  # characters


class _Kept(NamedTuple):
    timeline: RequestTimeline
    version: int  # that of `RecentRequests` when the request began or ended
    num_bytes: int = 0


class RecentRequests:
    """The requests that one gateway is answering, and the newest that it has answered. Belongs to its event loop.

    At most `max_ended` requests that ended are kept, in at most `max_bytes`;
    `gateway.max_concurrent` bounds those that run."""

    def __init__(self, max_ended: int = MAX_ENDED, max_bytes: int = MAX_BYTES) -> None:
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._running: dict[str, _Kept] = {}
        self._ended: dict[str, _Kept] = {}  # the oldest first
        self._num_bytes = 0
        self.version = 0  # grows with each request that begins or ends

    def __len__(self) -> int:
        return len(self._running) + len(self._ended)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def began(self, timeline: RequestTimeline) -> None:
        self.version += 1
        self._running[timeline.request_id] = _Kept(timeline, self.version)

    def ended(self, timeline: RequestTimeline) -> None:
        """Note that a request has ended. Nobody else reads its timeline any more, so the hashes of its prompt's blocks,
        which may be long, are dropped."""
        self._running.pop(timeline.request_id, None)
        for sequence in timeline.sequences:
            sequence.prefix_hashes = b""
        self.version += 1
        kept = _Kept(timeline, self.version, _num_bytes(timeline))
        self._ended[timeline.request_id] = kept
        self._num_bytes += kept.num_bytes
        while len(self._ended) > self._max_ended or self._num_bytes > self._max_bytes:
            oldest = self._ended.pop(next(iter(self._ended)))
            self._num_bytes -= oldest.num_bytes

    def newest(self, limit: int, since: int = 0) -> list[RequestTimeline]:
        """The timelines of at most `limit` requests that run or have ended since version `since`,
        the latest arrivals first."""
        found = [kept.timeline for kept in self._running.values()]
        for kept in reversed(self._ended.values()):
            if kept.version <= since:
                break
            found.append(kept.timeline)
        return nlargest(limit, found, key=lambda timeline: timeline.arrived_at)

    def find(self, request_id: str) -> RequestTimeline | None:
        """The request of that name: the id of an answer, or of one of its choices, as logs and decisions have it. Else
        the newest request that its client called so. None: there is none."""
        for name in (request_id, request_id.rpartition("-")[0]):
            if (kept := self._running.get(name) or self._ended.get(name)) is not None:
                return kept.timeline
        newest = (kept.timeline for known in (self._running, self._ended) for kept in reversed(known.values()))
        return next((timeline for timeline in newest if request_id and timeline.given_id == request_id), None)

    def facts(self, timeline: RequestTimeline) -> dict[str, Any]:
        """What to know of a request at a glance, as JSON values. Times are seconds, `started_at` since 1970."""
        seconds: dict[str, float] = {}
        for part in timeline.parts():
            seconds[part.name] = seconds.get(part.name, 0.0) + part.seconds
        drafts = Drafts.total(timeline.sequences)
        return {
            "id": timeline.request_id,
            "model": timeline.model,
            "endpoint": timeline.endpoint,
            "slo_class": timeline.terms.slo.name,
            "started_at": timeline.arrived_at + timeline.since_1970_s,
            "outcome": "running" if timeline.request_id in self._running else timeline.outcome,
            "kept_promise": timeline.kept_promise,
            "prompt_tokens": timeline.num_prompt_tokens,
            "cached_tokens": timeline.num_cached_tokens,
            "tokens": timeline.num_tokens,
            "drafted_tokens": drafts.drafted,
            "accepted_tokens": drafts.accepted,
            "choices": len(timeline.sequences),
            "attempts": sum(len(sequence.attempts) for sequence in timeline.sequences),
            "workers": timeline.workers,
            "ttft_s": timeline.ttft_s,
            "tpot_s": timeline.tpot_s,
            "gap_p99_s": timeline.gap_p99_s,
            "total_s": timeline.total_s,
            "seconds": seconds,
        }

    def details(self, timeline: RequestTimeline, choice: int | None = None) -> dict[str, Any]:
        """The request's `facts`, its targets and choices, and where the time of one choice went: `parts`, which sum to
        `total_s`. `choice` None: the one whose first byte was sent first."""
        slo = timeline.terms.slo
        shown = timeline.sequences.index(timeline.first or timeline.sequences[0]) if choice is None else choice
        return {
            **self.facts(timeline),
            "promised": {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "gap_s": slo.gap_s},
            "choice": shown,
            "parts": [asdict(part) for part in timeline.parts(shown)],
            "of_choices": [_choice(sequence) for sequence in timeline.sequences],
        }


def _num_bytes(timeline: RequestTimeline) -> int:
    """About how much memory a timeline takes, in bytes."""
    return _REQUEST_BYTES + sum(
        _SEQUENCE_BYTES + _ATTEMPT_BYTES * len(sequence.attempts) + 8 * len(sequence.token_times)
        for sequence in timeline.sequences
    )


def _choice(sequence: SequenceTimeline) -> dict[str, Any]:
    """What to know of one choice, as JSON values: how it ended, its times, and what each attempt of it brought."""
    stops = [attempt.num_before for attempt in sequence.attempts[1:]] + [len(sequence.token_times)]
    return {
        "end": sequence.end or "running",
        "tokens": len(sequence.token_times),
        "ttft_s": sequence.ttft_s,
        "tpot_s": sequence.tpot_s,
        "gap_p99_s": sequence.gap_p99_s,
        "preemptions": len(sequence.preemptions),
        "drafts": {drafter: drafts._asdict() for drafter, drafts in sequence.drafts.items()},
        "attempts": [
            {
                "number": attempt.number,
                "prefill": attempt.prefill,
                "decode": attempt.decode,
                "predicted_ttft_s": attempt.predicted_ttft_s,
                "tokens": stop - attempt.num_before,
                "failed": attempt.cause or None,
                "failed_worker": attempt.failed_worker,
            }
            for attempt, stop in zip(sequence.attempts, stops, strict=False)
        ],
    }


def waterfall(details: dict[str, Any]) -> str:
    """Draw what `RecentRequests.details` gives as text: a line for each part, with a bar where it lies in time."""
    total_s, parts = details["total_s"], details["parts"]
    kept = {True: ", kept its promise", False: ", missed its promise", None: ""}[details["kept_promise"]]
    ttft_s = details["ttft_s"]
    num_drafts = details["drafted_tokens"]
    guessed = f" (of {num_drafts} drafts {details['accepted_tokens']} right)" if num_drafts else ""
    first = "no byte was sent" if ttft_s is None else f"first byte after {ttft_s:.3f} s"
    lines = [
        f"{details['id']}  {details['endpoint']}  class {details['slo_class']}",
        f"{details['outcome']}{kept}: {first}, {details['tokens']} tokens{guessed}, {total_s:.3f} s in all",
        "",
    ]
    for part in parts:
        start = int(_BAR * part["start_s"] / total_s)
        stop = max(start + 1, round(_BAR * (part["start_s"] + part["seconds"]) / total_s))
        bar = (" " * start + "█" * (stop - start))[:_BAR]
        attempt = f"attempt {part['attempt']}" if part["attempt"] else ""
        notes = "  ".join(note for note in (part["worker"], attempt, part["cause"]) if note)
        times = f"{part['start_s']:9.3f} {part['seconds']:9.3f} s"
        lines.append(f"{part['name']:9}{times} │{bar:{_BAR}}│ {notes}".rstrip())
    return "\n".join(lines) + "\n"
