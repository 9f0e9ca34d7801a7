"""What a gateway keeps of requests that run and that ended: bounded, found by id, told by version."""

from __future__ import annotations

import time
from array import array

from cluster.gateway.recent_requests import RecentRequests, waterfall
from cluster.gateway.timeline import Attempt, RequestTimeline
from cluster.slo.classes import RequestTerms, SloClass
from cluster.slo.report import SloOutcome
from engine.sampling.params import SamplingParams
from kv_transfer.messages.requests import RequestSpec


def began(recent: RecentRequests, name: str, num_choices: int = 1, slo: SloClass | None = None) -> RequestTimeline:
    terms = RequestTerms() if slo is None else RequestTerms(slo=slo)
    timeline = RequestTimeline(endpoint="/v1/completions", terms=terms)
    params = SamplingParams(max_tokens=10, seed=0)
    specs = [
        RequestSpec(
            request_id=f"{name}-{index}",
            attempt=0,
            prompt_token_ids=[1, 2],
            params=params,
        )
        for index in range(num_choices)
    ]
    timeline.parsed(specs, 2, name)
    recent.began(timeline)
    return timeline


def served(recent: RecentRequests, name: str, num_tokens: int = 3) -> RequestTimeline:
    timeline = began(recent, name)
    (sequence,) = timeline.sequences
    sequence.prefix_hashes = b"x" * 16
    sequence.attempts.append(Attempt(number=0, asked_at=time.monotonic(), prefill="p0", decode="d0"))
    sequence.token_times = array("d", [time.monotonic()] * num_tokens)
    timeline.sent([0])
    sequence.ended("finished")
    timeline.ended()
    timeline.outcome, timeline.slo_outcome, timeline.num_generated_tokens = "finished", SloOutcome.FINISHED, num_tokens
    recent.ended(timeline)
    return timeline


def names(timelines: list[RequestTimeline]) -> list[str]:
    return [timeline.request_id for timeline in timelines]


def test_the_newest_first_and_no_more_than_asked() -> None:
    recent = RecentRequests()
    began(recent, "cmpl-a")
    for name in ("cmpl-b", "cmpl-c"):
        served(recent, name)
    assert names(recent.newest(10)) == ["cmpl-c", "cmpl-b", "cmpl-a"]
    assert names(recent.newest(2)) == ["cmpl-c", "cmpl-b"]


def test_what_has_changed_since() -> None:
    """What runs is told again each time: its tokens come without a word."""
    recent = RecentRequests()
    served(recent, "cmpl-a")
    before = recent.version
    assert names(recent.newest(10, before)) == []
    running = began(recent, "cmpl-b")
    assert recent.version > before and names(recent.newest(10, before)) == ["cmpl-b"]
    assert names(recent.newest(10, recent.version)) == ["cmpl-b"]
    before = recent.version
    recent.ended(running)
    assert recent.version > before and names(recent.newest(10, before)) == ["cmpl-b"]
    assert names(recent.newest(10, recent.version)) == []


def test_found_by_the_id_of_the_answer_or_of_a_choice() -> None:
    recent = RecentRequests()
    one, other = began(recent, "cmpl-a", num_choices=2), served(recent, "cmpl-b")
    assert recent.find("cmpl-a") is recent.find("cmpl-a-1") is one
    assert recent.find("cmpl-b") is recent.find("cmpl-b-0") is other
    assert recent.find("cmpl") is recent.find("cmpl-c") is recent.find("") is None


def test_bounded_in_number_and_in_bytes() -> None:
    recent = RecentRequests(max_ended=3, max_bytes=20_000)
    held = began(recent, "cmpl-held")
    for number in range(5):
        assert served(recent, f"cmpl-{number}").sequences[0].prefix_hashes == b"", "they may be as long as the prompt"
    assert names(recent.newest(10)) == ["cmpl-4", "cmpl-3", "cmpl-2", "cmpl-held"] and len(recent) == 4
    served(recent, "cmpl-long", num_tokens=1_900)
    assert names(recent.newest(10)) == ["cmpl-long", "cmpl-4", "cmpl-held"]
    served(recent, "cmpl-longer", num_tokens=3_000)
    assert names(recent.newest(10)) == ["cmpl-held"], "one that is larger than all may be is not kept"
    served(recent, "cmpl-5")
    assert names(recent.newest(10)) == ["cmpl-5", "cmpl-held"] and recent.find("cmpl-held") is held


def test_facts() -> None:
    recent = RecentRequests()
    timeline = began(recent, "cmpl-a", slo=SloClass(name="chat", ttft_s=100.0))
    running = recent.facts(timeline)
    assert (running["outcome"], running["tokens"], running["kept_promise"]) == ("running", 0, None)
    assert list(running["seconds"]) == ["parse", "admit"] and running["workers"] == []
    assert abs(running["started_at"] + running["total_s"] - time.time()) < 60
    timeline.sequences[0].token_times.append(time.monotonic())
    assert recent.facts(timeline)["tokens"] == 1
    done = recent.facts(served(recent, "cmpl-b"))
    assert (done["outcome"], done["tokens"], done["workers"]) == ("finished", 3, ["p0", "d0"])
    assert abs(sum(done["seconds"].values()) - done["total_s"]) < 1e-6


def test_the_waterfall_is_a_picture_of_the_parts() -> None:
    recent = RecentRequests()
    timeline = served(recent, "cmpl-a")
    sequence, arrived = timeline.sequences[0], timeline.arrived_at
    timeline.parsed_at = arrived
    attempt = Attempt(number=0, asked_at=arrived, placed_at=arrived + 1, started_at=arrived + 1, decode="d0")
    attempt.failed_at, attempt.cause, attempt.failed_worker = arrived + 2, "hung", "d0"
    again = Attempt(number=1, asked_at=arrived + 2, placed_at=arrived + 2, started_at=arrived + 2, decode="d1")
    sequence.attempts, sequence.token_times = [attempt, again], array("d", [arrived + 3, arrived + 4])
    sequence.sent_at, timeline.ended_at = arrived + 3, arrived + 4
    text = waterfall(recent.details(timeline))
    bar = "█" * 12
    assert text.splitlines()[:2] == [
        "cmpl-a  /v1/completions  class default",
        "finished, kept its promise: first byte after 3.000 s, 3 tokens, 4.000 s in all",
    ]
    assert text.splitlines()[3:] == [
        f"place        0.000     1.000 s │{bar}{' ' * 36}│",
        f"queue        1.000     1.000 s │{' ' * 12}{bar}{' ' * 24}│ d0",
        f"prefill      2.000     1.000 s │{' ' * 24}{bar}{' ' * 12}│ d1  attempt 1",
        f"decode       3.000     1.000 s │{' ' * 36}{bar}│ d1  attempt 1",
    ]


def test_drafts_are_told_by_choice_and_drafter() -> None:
    recent = RecentRequests()
    timeline = served(recent, "cmpl-a")
    assert recent.facts(timeline)["drafted_tokens"] == 0 and "drafts" not in waterfall(recent.details(timeline))
    (sequence,) = timeline.sequences
    for drafter, num_accepted, num_rejected in (("prediction", 3, 1), ("lookup", 0, 2), ("prediction", 2, 0)):
        sequence.drafted(drafter, num_accepted, num_rejected)
    details = recent.details(timeline)
    assert (details["drafted_tokens"], details["accepted_tokens"]) == (8, 5)
    by_drafter = {"prediction": {"drafted": 6, "accepted": 5}, "lookup": {"drafted": 2, "accepted": 0}}
    assert details["of_choices"][0]["drafts"] == by_drafter
    assert "3 tokens (of 8 drafts 5 right)" in waterfall(details)
