"""The goodput benchmark counts in four ways, and finds under each where it falls; on drawn requests."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import split_options
from benchmarks.report.goodput import goodput_headline, goodput_tables
from benchmarks.scheduling.goodput import BASELINES
from benchmarks.scheduling.goodput_comparison import Comparison, bounds
from benchmarks.scheduling.goodput_counting import (
    Count,
    Counts,
    DecidedError,
    Promise,
    tenant_of,
)
from benchmarks.scheduling.goodput_kept import Kept, TimeUpError
from benchmarks.scheduling.goodput_search import Bracket, Goal, Search, Spread, bracketed
from benchmarks.scheduling.goodput_setting import (
    LIMITS,
    REQUESTS,
    Layout,
    Setting,
    candidates,
    counted,
    play,
    with_limits,
)
from cluster.simulation.records import Gaps, RequestRecord
from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass
from cluster.slo.countings import COUNTINGS, LEAST, Counting, length_groups

SPLIT = Layout(num_prefill=1, num_decode=1)
REQUESTS_90: Goal = ("tpot", "requests")
TOKENS: Goal = ("tpot", "tokens")
PROMISES: dict[Promise, SloClass] = {"tpot": SloClass(name="x", tpot_s=0.1), "gap": SloClass(name="x", gap_s=0.1)}


def _setting(stretch: float = 0.0) -> Setting:
    return Setting(trace="azure", path=None, num_workers=2, num_requests=150, stretch=stretch, noise=0.0)


def _share(setting: Setting, router: str, load: float, counting: Counting = "requests") -> float:
    counts = Counts(setting.requests(1, load), setting.promises)
    play(setting, router, _tuned(router), load, 1, counts.see)
    return counts.results()["tpot", counting].share


def _tuned(router: str) -> Layout:
    return replace(SPLIT, limits=next(iter(LIMITS.get(router, [""]))))


# --- what counts ---


def _hundred(long: int = 0) -> list[TraceRequest]:
    """A hundred of 100 tokens, of which the last `long` have 10,000."""
    return [
        TraceRequest(
            request_id=f"r{k}", arrival_s=float(k), prompt_tokens=10_000 if k >= 100 - long else 100, output_tokens=10
        )
        for k in range(100)
    ]


def _record(request: TraceRequest, *, ttft_s: float = 0.5, tpot_s: float = 0.02, p99_s: float = 0.02) -> RequestRecord:
    return RequestRecord(
        request_id=request.request_id,
        slo=SloClass(name="x", ttft_s=1.0),
        first_arrival_s=request.arrival_s,
        arrival_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        first_token_s=request.arrival_s + ttft_s,
        end_s=request.arrival_s + ttft_s + 9 * tpot_s,
        gaps=Gaps(num=9, p99_s=p99_s),
    )


def _turned_away(request: TraceRequest) -> RequestRecord:
    record = _record(request)
    record.num_rejections, record.first_token_s, record.end_s = 1, None, None
    return record


def _serves(requests: list[TraceRequest], records: list[RequestRecord]) -> dict[tuple[Promise, Counting], Count]:
    counts = Counts(requests, PROMISES)
    for record in records:
        counts.see(record)
    return counts.results()


def test_who_refuses_the_longest_tenth_serves_by_requests_alone() -> None:
    requests = _hundred(long=10)
    found = _serves(requests, [_record(r) if r.prompt_tokens == 100 else _turned_away(r) for r in requests])
    assert {counting: found["tpot", counting].serves for counting in COUNTINGS} == {
        "requests": True,
        "most requests": False,
        "tokens": False,
        "everyone": False,
    }
    assert found["tpot", "requests"].share == 0.9
    assert found["tpot", "tokens"].share == pytest.approx(9900 / 110_000, abs=0.01)
    assert found["tpot", "everyone"].share < 0.5
    assert "10000 tokens" in found["tpot", "everyone"].least
    assert found["tpot", "everyone"].misses == {"turned away": 10}


def test_a_stall_is_late_by_its_gap_and_not_by_its_mean() -> None:
    requests = _hundred()
    found = _serves(requests, [_record(r, p99_s=0.5) for r in requests])
    assert {found["tpot", counting].share for counting in COUNTINGS} == {1.0}
    assert {found["gap", counting].share for counting in COUNTINGS} == {0.0}
    slow = _serves(requests, [_record(r, tpot_s=0.11, p99_s=0.09) for r in requests])
    assert (slow["tpot", "requests"].share, slow["gap", "requests"].share) == (0.0, 1.0)
    late = _serves(requests, [_record(r, ttft_s=2.0, p99_s=0.5) for r in requests])
    misses = [each["gap", "requests"].misses for each in (found, slow, late)]
    assert misses == [{"gaps": 100}, {}, {"first token": 100}]
    assert slow["tpot", "requests"].misses == {"mean": 100}


def test_who_came_back_is_a_miss_all_the_same() -> None:
    requests = _hundred()
    records = [_record(r) for r in requests]
    for record in records[:20]:
        record.num_rejections = 1  # and then it was served in time
    assert _serves(requests, records)["tpot", "requests"].share == 0.8


def test_it_ends_once_every_counting_is_decided() -> None:
    requests = _hundred()
    counts = Counts(requests, PROMISES, stops=True)
    for request in requests[:20]:
        counts.see(_turned_away(request))  # 20 of 100 may be missed by the group, if they are of one that large
    assert not any(count.serves for count in counts.results().values())
    with pytest.raises(DecidedError):
        for request in requests[20:]:
            counts.see(_turned_away(request))
    served = Counts(requests, PROMISES, stops=True)
    with pytest.raises(DecidedError):
        for request in requests:
            served.see(_record(request))
    assert all(count.serves for count in served.results().values())


def test_groups_of_length_hold_enough_requests() -> None:
    assert [len(group) for _, group in length_groups(_hundred())] == [17, 16, 17, 17, 16, 17]
    many = [r for _ in range(10) for r in _hundred()]
    assert [len(group) for _, group in length_groups(many)] == [100] * 10 + [20]
    assert min(len(group) for _, group in length_groups(many)) >= LEAST


def test_turns_of_a_conversation_have_one_tenant_and_tenants_are_unlike() -> None:
    def turn(conversation: int, number: int) -> TraceRequest:
        return TraceRequest(
            request_id=f"{conversation} {number}",
            arrival_s=0.0,
            prompt_tokens=5000,
            output_tokens=1,
            content=(0, conversation, *range(10_000 * conversation, 10_000 * conversation + number)),
        )

    names = [[tenant_of(turn(conversation, number)) for number in range(3)] for conversation in range(1, 2000)]
    assert all(len(set(turns)) == 1 for turns in names)
    sizes = sorted((sum(turns[0] == name for turns in names) for name in {turns[0] for turns in names}), reverse=True)
    assert len(sizes) == 8
    assert sizes[0] / sizes[-1] == pytest.approx(8, rel=0.35)
    assert tenant_of(turn(7, 1), seed=1) in {turns[0] for turns in names}


# --- one setting ---


@pytest.mark.parametrize("router", ["legato", "legato-auto", "legato-strict", *BASELINES])
def test_an_idle_cluster_serves_all_in_time(router: str) -> None:
    """Apart from whom a limit on length is there to turn away: drawn prompts have up to 14,000 tokens."""
    share = _share(_setting(), router, 0.1, "most requests")
    assert share == 1.0 or (router == "length-limit" and share > 0.8)


def test_targets_follow_lengths_where_that_is_asked_for() -> None:
    plain, stretched = _setting(), _setting(2.0)
    assert {c.ttft_s for c in plain.slo().classes} == {2.0}
    by_length = [c.ttft_s for c in stretched.slo().classes]
    assert by_length[0] == 2.0
    assert by_length == sorted(by_length, key=lambda ttft_s: ttft_s or 0.0)
    assert by_length[-1] == pytest.approx(2.0 * plain.cost.prefill_s(131_072, 0.0, 2048))
    names = {request.slo_class for request in stretched.requests(1, 1.0)}
    assert names <= {c.name for c in stretched.slo().classes}


@pytest.mark.parametrize("router", ["legato", "mooncake", "dynamo", "llm-d", "cache-aware", "distserve"])
def test_every_router_may_do_without_prefill_workers_and_choose_its_steps(router: str) -> None:
    options = candidates(router, 8)
    assert sorted({option.num_prefill for option in options}) == [0, 2, 4, 5, 6]
    whole = {(option.budget, option.is_paced) for option in options if option.num_prefill == 0}
    assert whole == {(2048, True), (2048, False), (512, False), (256, False)}


def test_who_is_automatic_has_nothing_to_choose() -> None:
    assert candidates("legato-auto", 8) == [Layout(num_prefill=0, num_decode=8)]


def test_a_routers_own_limits_are_a_choice_of_its_own() -> None:
    tuned = with_limits("mooncake", candidates("mooncake", 8)[0])
    assert len({option.limits for option in tuned}) == 6
    assert with_limits("legato", SPLIT) == [SPLIT]
    assert {option.num_prefill for option in candidates("colocated", 8)} == {0}


def test_a_tighter_tpot_is_met_by_fewer() -> None:
    tight = replace(_setting(), tpot_s=0.006)  # less than a step takes
    assert {c.tpot_s for c in tight.slo().classes} == {0.006}
    assert _share(tight, "round-robin", 0.1) < _share(_setting(), "round-robin", 0.1)


def test_a_gap_is_promised_in_the_place_of_a_mean() -> None:
    setting = replace(_setting(), tpot_s=None, gap_s=0.05)
    assert {(c.tpot_s, c.gap_s) for c in setting.slo().classes} == {(None, 0.05)}
    assert list(setting.promises) == ["gap"]


@pytest.mark.parametrize("load", [2.0, 40.0])
@pytest.mark.parametrize("router", ["round-robin", "legato", "mooncake"])
def test_what_is_decided_early_is_what_the_end_says(router: str, load: float) -> None:
    setting = replace(_setting(), gap_s=0.1)
    whole = Counts(setting.requests(1, load), setting.promises)
    play(setting, router, _tuned(router), load, 1, whole.see)
    early = counted(setting, router, _tuned(router), load, 1).results()
    assert {goal: count.serves for goal, count in early.items()} == {
        goal: count.serves for goal, count in whole.results().items()
    }


def test_nobody_serves_much_more_than_the_workers_have_time_for() -> None:
    everyone, cheapest = bounds(_setting(), 1)
    assert everyone < cheapest
    assert _share(_setting(), "legato", 3.0 * cheapest) < 0.9


# --- the search ---


def test_the_load_found_is_served_and_a_multiple_of_it_is_not() -> None:
    search = Search(setting=_setting(), first=1, kept=Kept())
    coarse = search.highest("round-robin", SPLIT, 1, REQUESTS_90, 0)
    found = search.highest("round-robin", SPLIT, 1, REQUESTS_90, 1)
    assert coarse.low <= found.low < found.high <= coarse.high
    assert search.counts("round-robin", SPLIT, found.low, 1)[REQUESTS_90].serves
    assert not search.counts("round-robin", SPLIT, found.high, 1)[REQUESTS_90].serves


@pytest.mark.parametrize("bound", [0.3, 2.0, 50.0])
def test_the_highest_load_lies_just_below_the_bound(bound: float) -> None:
    found = bracketed(lambda load: load <= bound, 2.0, 1.5).halved(lambda load: load <= bound, 4)
    assert 0.95 * bound < found.low <= bound < found.high


def test_a_search_ends_where_every_load_is_served() -> None:
    assert bracketed(lambda load: True, 2.0, 1.5).low > 1e4


def test_nothing_is_found_where_no_load_is_served() -> None:
    assert bracketed(lambda load: False, 2.0, 1.5).halved(lambda load: False, 4) == Bracket(0.0, 0.0)


def test_countings_share_their_simulations(tmp_path: Path) -> None:
    """The second one is found with those of the first, and a third search makes none at all."""
    file = tmp_path / "kept.jsonl"
    search = Search(setting=_setting(), first=1, kept=Kept(file))
    search.highest("round-robin", SPLIT, 1, REQUESTS_90, 1)
    first = len(file.read_text().splitlines())
    search.highest("round-robin", SPLIT, 1, TOKENS, 1)
    second = len(file.read_text().splitlines()) - first
    assert second < first
    again = Search(setting=_setting(), first=1, kept=Kept(file))
    for goal in (REQUESTS_90, TOKENS):
        again.highest("round-robin", SPLIT, 1, goal, 1)
    assert len(file.read_text().splitlines()) == first + second


def test_who_is_tuned_serves_as_much_as_any_candidate() -> None:
    setting = replace(_setting(), num_requests=60, tpot_s=0.02)
    search = Search(setting=setting, first=1, kept=Kept())
    tuned, _ = search.tuned("llm-d", REQUESTS_90)
    best = search.highest("llm-d", tuned, 1, REQUESTS_90, 0).low
    for option in candidates("llm-d", 2):
        assert best >= search.highest("llm-d", option, 1, REQUESTS_90, 0).low


def test_a_layout_is_looked_for_below_a_load_that_none_serves() -> None:
    setting = replace(_setting(), num_requests=60, tpot_s=0.0072)
    search = Search(setting=setting, first=1, kept=Kept())
    tuned, _ = search.tuned("colocated", REQUESTS_90)
    assert not search.counts("colocated", tuned, search.begin, 1)[REQUESTS_90].serves
    assert search.highest("colocated", tuned, 1, REQUESTS_90, 0).low > 0


def test_a_large_cluster_takes_over_the_shares_that_suit_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Setting] = []

    def ranked(search: Search, *_: object) -> list[tuple[Layout, float]]:
        looked_at.append(search.setting)
        return [(Layout(num_prefill=6, num_decode=2), 3.0)]

    monkeypatch.setattr(Search, "_ranked", ranked)
    large = replace(_setting(), num_workers=64, num_requests=9_600)
    tuned, load = Search(setting=large, first=1, kept=Kept()).tuned("least-tokens", REQUESTS_90)
    assert (tuned, load) == (Layout(num_prefill=48, num_decode=16), 24.0)
    assert looked_at == [replace(large, num_workers=8, num_requests=REQUESTS["azure", "8b"])]


def test_a_layout_may_be_given() -> None:
    large = replace(_setting(), num_workers=16, num_requests=9_600)
    given = {"legato": Layout(num_prefill=2, num_decode=6)}
    tuned, _ = Search(setting=large, first=1, kept=Kept(), given=given).tuned("legato", REQUESTS_90)
    assert tuned == Layout(num_prefill=4, num_decode=12)


def test_what_was_found_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    first = Kept(file).find({"of": 1, "other": "x"}, lambda: {"load": 2.5})
    again = Kept(file).find({"other": "x", "of": 1}, lambda: {"load": 7.0})
    assert first == again
    assert again["load"] == 2.5
    assert again["commit"]
    assert Kept(file).find({"of": 2, "other": "x"}, lambda: {"load": 7.0})["load"] == 7.0


def test_when_time_is_up_what_was_found_is_told_and_nothing_is_begun(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    Kept(file).find({"of": 1}, lambda: {"load": 2.5})
    late = Kept(file, time_s=0.0)
    assert late.find({"of": 1}, lambda: {"load": 7.0})["load"] == 2.5
    with pytest.raises(TimeUpError):
        late.find({"of": 2}, lambda: {"load": 7.0})


# --- what is told ---


def test_a_comparison_is_told_as_tables() -> None:
    comparison = Comparison(
        setting=replace(_setting(), num_requests=60, tpot_s=0.012),
        tuning=1,
        slices=(2,),
        seeds=2,
        steps=0,
        variants=("legato-auto", "legato"),
        baselines=("round-robin", "colocated"),
        countings=("requests", "everyone"),
        with_overload=True,
        kept=Kept(),
        given=dict.fromkeys(("legato", "round-robin"), SPLIT),
    )
    results = {
        "targets": "TTFT 2 s",
        "countings": {"requests": 0.9, "everyone": 0.8},
        "headline": "everyone",
        "settings": [comparison.run()],
    }
    text = goodput_tables(results)
    assert "| 80% of each length and tenant | 90% of the requests |" in text
    assert "a mean of 12 ms between tokens" in text
    assert "median [least–most] of 2 runs" in text
    assert "| round-robin |" in text
    assert "| times legato | " in text
    assert "what it lacks at the next load" in text
    assert "used up at" in " ".join(text.split())
    assert "of them in time" in text
    assert len(goodput_headline(results)) == 1


def test_a_spread_has_a_middle() -> None:
    assert Spread.of([3.0, 1.0, 2.0]) == Spread(1.0, 2.0, 3.0)


def test_options_of_a_part_follow_behind_two_dashes() -> None:
    assert split_options(["goodput", "--", "--model", "70b"]) == (["goodput"], ["--model", "70b"])
    assert split_options(["--patience", "3"]) == (["--patience", "3"], [])
