"""The goodput benchmark finds where attainment falls, on drawn requests, and targets that follow lengths."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.__main__ import split_options
from benchmarks.report.goodput import goodput_headline, goodput_overview, goodput_tables
from benchmarks.scheduling.goodput_comparison import Comparison, bounds
from benchmarks.scheduling.goodput_kept import Kept
from benchmarks.scheduling.goodput_search import Bracket, Search, Suited, bracketed
from benchmarks.scheduling.goodput_setting import (
    ATTAINMENT,
    REQUESTS,
    Layout,
    ModelName,
    Setting,
    TooManyMissedError,
    attainment,
    fitting_budget,
    layouts,
    play,
)
from engine.cost_model.step_cost import StepWork

SPLIT = Layout(num_prefill=1, num_decode=1)


def _setting(stretch: float = 0.0) -> Setting:
    return Setting(trace="azure", path=None, num_workers=2, num_requests=150, stretch=stretch)


def test_the_load_found_is_served_and_a_multiple_of_it_is_not() -> None:
    search, suited = Search(setting=_setting(), first=1, kept=Kept()), Suited(layout=SPLIT, load=3.0)
    coarse = search.coarsely("round-robin", suited, 1).load
    found = search.finely("round-robin", SPLIT, 1, coarse, 1).load
    assert coarse.low <= found.low < found.high <= coarse.high
    assert attainment(_setting(), "round-robin", SPLIT, found.low, 1) >= ATTAINMENT
    assert attainment(_setting(), "round-robin", SPLIT, found.high, 1) < ATTAINMENT


@pytest.mark.parametrize("bound", [0.3, 2.0, 50.0])
def test_the_highest_load_lies_just_below_the_bound(bound: float) -> None:
    found = bracketed(lambda load: load <= bound, 2.0, 1.5).halved(lambda load: load <= bound, 4)
    assert 0.95 * bound < found.low <= bound < found.high


def test_a_search_ends_where_every_load_is_served() -> None:
    assert bracketed(lambda load: True, 2.0, 1.5).low > 1e4


def test_nothing_is_found_where_no_load_is_served() -> None:
    assert bracketed(lambda load: False, 2.0, 1.5).halved(lambda load: False, 4) == Bracket(0.0, 0.0)


@pytest.mark.parametrize("router", ["legato", "legato-fair", "legato-split", "legato-strict"])
def test_an_idle_cluster_serves_all_in_time(router: str) -> None:
    assert attainment(_setting(), router, SPLIT, 0.1, 1) == 1.0


def test_targets_follow_lengths_where_that_is_asked_for() -> None:
    plain, stretched = _setting(), _setting(2.0)
    assert {c.ttft_s for c in plain.slo().classes} == {2.0}
    by_length = [c.ttft_s for c in stretched.slo().classes]
    assert by_length[0] == 2.0
    assert by_length == sorted(by_length, key=lambda ttft_s: ttft_s or 0.0)
    assert by_length[-1] == pytest.approx(2.0 * plain.cost.prefill_s(131_072, 0.0, 2048))
    names = {request.slo_class for request in stretched.requests(1, 1.0)}
    assert names <= {c.name for c in stretched.slo().classes}


def test_layouts_share_out_the_workers() -> None:
    cost = _setting().cost
    assert [option.num_prefill for option in layouts("legato", 8, cost)] == [0, 2, 4, 5, 6]
    assert [option.num_prefill for option in layouts("mooncake", 8, cost)] == [2, 4, 5, 6]
    assert [option.num_prefill for option in layouts("legato-split", 8, cost)] == [2, 4, 5, 6]
    assert {(option.num_prefill, option.num_decode) for option in layouts("colocated", 8, cost)} == {(0, 8)}
    assert [option.budget for option in layouts("colocated", 8, cost)] == [512, 2048]


@pytest.mark.parametrize(
    ("model", "tpot_s", "budgets"),
    [("8b", 0.03, [256, 512, 2048]), ("8b", 0.05, [256, 512, 1280, 2048]), ("70b", 0.1, [256, 512, 768, 2048])],
)
def test_where_a_large_step_misses_the_tpot_smaller_ones_may_be_chosen_too(
    model: ModelName, tpot_s: float, budgets: list[int]
) -> None:
    cost = replace(_setting(), model=model).cost
    assert [option.budget for option in layouts("colocated", 8, cost, tpot_s)] == budgets
    assert {(option.num_prefill, option.budget) for option in layouts("legato", 4, cost, tpot_s)} == {
        (count, budget) for count in range(4) for budget in budgets
    }
    assert {option.budget for option in layouts("mooncake", 8, cost, tpot_s)} == {2048}


def test_a_step_is_as_large_as_the_tpot_lets_it_be() -> None:
    cost = replace(_setting(), model="70b").cost
    budget = fitting_budget(cost, 0.1)
    assert cost.step_s(StepWork.of_prefill(budget, 0)) <= 0.1 < cost.step_s(StepWork.of_prefill(budget + 256, 0))
    assert fitting_budget(cost, 0.001) == 256
    assert fitting_budget(cost, 10.0) == 2048


def test_a_tighter_tpot_is_met_by_fewer() -> None:
    tight = replace(_setting(), tpot_s=0.006)  # less than a step takes
    assert {c.tpot_s for c in tight.slo().classes} == {0.006}
    assert attainment(tight, "round-robin", SPLIT, 0.1, 1) < attainment(_setting(), "round-robin", SPLIT, 0.1, 1)


def test_a_layout_is_looked_for_below_a_load_that_none_serves() -> None:
    setting = replace(_setting(), num_requests=60, tpot_s=0.012)
    search = Search(setting=setting, first=1, kept=Kept())
    found = search.look("colocated")
    assert attainment(setting, "colocated", found.layout, search.begin, 1) < ATTAINMENT
    assert attainment(setting, "colocated", found.layout, found.load, 1) >= ATTAINMENT


def test_a_large_cluster_takes_over_the_shares_that_suit_a_small_one(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at: list[Setting] = []

    def look(search: Search, router: str) -> Suited:
        looked_at.append(search.setting)
        return Suited(layout=Layout(num_prefill=6, num_decode=2), load=3.0)

    monkeypatch.setattr(Search, "look", look)
    large = replace(_setting(), num_workers=64, num_requests=14_400)
    suited = Search(setting=large, first=1, kept=Kept()).suited("least-tokens")
    assert suited == Suited(layout=Layout(num_prefill=48, num_decode=16), load=24.0)
    assert looked_at == [replace(large, num_workers=8, num_requests=REQUESTS["azure", "8b"])]


def test_a_layout_may_be_given() -> None:
    large = replace(_setting(), num_workers=16, num_requests=14_400)
    given = {"legato": Layout(num_prefill=2, num_decode=6)}
    suited = Search(setting=large, first=1, kept=Kept(), given=given).suited("legato")
    assert suited.layout == Layout(num_prefill=4, num_decode=12)


@pytest.mark.parametrize("router", ["round-robin", "legato", "mooncake"])
def test_a_simulation_ends_early_only_where_too_many_are_missed(router: str) -> None:
    loads = [2.0, 40.0]
    shares = [play(_setting(), router, SPLIT, load, 1).summary.overall.attainment for load in loads]
    assert shares[0] >= ATTAINMENT > shares[-1]
    for load, share in zip(loads, shares, strict=True):
        assert attainment(_setting(), router, SPLIT, load, 1) == (share if share >= ATTAINMENT else 0.0)


def test_too_many_missed_ends_a_simulation() -> None:
    with pytest.raises(TooManyMissedError):
        play(_setting(), "round-robin", SPLIT, 40.0, 1, allowed_misses=5)


def test_nobody_serves_much_more_than_the_workers_have_time_for() -> None:
    everyone, cheapest = bounds(_setting(), 1)
    assert everyone < cheapest
    assert attainment(_setting(), "legato", SPLIT, 3.0 * cheapest, 1) < ATTAINMENT


def test_what_was_found_is_found_again(tmp_path: Path) -> None:
    file = tmp_path / "kept.jsonl"
    first = Kept(file).find({"of": 1, "other": "x"}, lambda: {"load": 2.5})
    again = Kept(file).find({"other": "x", "of": 1}, lambda: {"load": 7.0})
    assert first == again
    assert again["load"] == 2.5
    assert again["commit"]
    assert Kept(file).find({"of": 2, "other": "x"}, lambda: {"load": 7.0})["load"] == 7.0


def test_a_comparison_is_told_as_tables() -> None:
    comparison = Comparison(
        setting=replace(_setting(), num_requests=60, tpot_s=0.012),
        slices=(1, 2),
        steps=1,
        variants=("legato",),
        baselines=("round-robin",),
        with_overload=True,
        kept=Kept(),
    )
    results = {"targets": "90 %", "stretch": 0.0, "load": "times", "settings": [comparison.run()]}
    text = goodput_tables(results)
    assert "round-robin" in text
    assert "3 times" in text
    assert "used up" in text
    assert goodput_headline(results)


def test_beside_what_is_served_stands_what_could_be() -> None:
    line = {
        "trace": "azure",
        "source": "trace",
        "model": "8b",
        "workers": 8,
        "requests": 100,
        "resolution": 0.05,
        "routers": {"legato": _served(12.0), "mooncake": _served(10.0)},
        "best_baseline": "mooncake",
        "ratio": {"legato": 1.2},
        "bounds": [[8.0, 11.0], [8.0, 13.0]],
        "spans_s": [360.0, 360.0],
    }
    row = goodput_overview([{"settings": [line]}, {"settings": [{"stored": "before bounds were"}]}]).splitlines()[-1]
    assert "| 100 requests in 30 s |" in row
    assert "| **1.20** | 12.00 | 1.20 | is 1.08 times the bound |" in row


def _served(load: float) -> dict[str, list[float]]:
    return {"highest_load": [load, load]}


def test_options_of_a_part_follow_behind_two_dashes() -> None:
    assert split_options(["goodput", "--", "--model", "70b"]) == (["goodput"], ["--model", "70b"])
    assert split_options(["--patience", "3"]) == (["--patience", "3"], [])
