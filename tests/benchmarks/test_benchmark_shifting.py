"""Kinds of requests that take turns: each goes on where it stopped, at its own share of what the workers can do; and
requests of one moment, drawn apart."""

from __future__ import annotations

import argparse
from dataclasses import replace
from itertools import groupby, pairwise

import pytest

from benchmarks.scheduling.goodput_comparison import bounds
from benchmarks.scheduling.goodput_counting import Counts
from benchmarks.scheduling.goodput_setting import Layout, Setting, play
from benchmarks.scheduling.model_swing import unbunched
from benchmarks.scheduling.shifting import LONGEST_ANSWER, Exchanged, Shifting, measure
from cluster.simulation.workload.traces import TraceRequest

TPOT_S = 0.03
LONG = Setting(trace="mooncake", path=None, num_workers=2, num_requests=40, tpot_s=TPOT_S)
SHORT = Exchanged(trace="azure", path=None, num_workers=2, num_requests=60, tpot_s=TPOT_S)
MIX = Shifting(
    trace="mooncake",
    path=None,
    num_workers=2,
    num_requests=0,
    tpot_s=TPOT_S,
    kinds={"long": (LONG, 1), "short": (SHORT, 2)},
    num_pieces=4,
    piece_s=15.0,
)


def test_prompts_and_answers_are_exchanged() -> None:
    plain = Setting(trace="azure", path=None, num_requests=60)
    for was, now in zip(plain.requests(2, 1.0), SHORT.requests(2, 1.0), strict=True):
        assert (now.prompt_tokens, now.output_tokens) == (was.output_tokens, min(was.prompt_tokens, LONGEST_ANSWER))
        assert now.slo_class in {slo_class.name for slo_class in SHORT.slo().classes}


def test_kinds_take_turns_and_go_on_where_they_stopped() -> None:
    requests = list(MIX.requests(0, 0.5))
    assert [kind for kind, _ in groupby(requests, MIX.kind)] == ["long", "short", "long", "short"]
    assert all(before.arrival_s <= after.arrival_s for before, after in pairwise(requests))
    assert all(MIX.kind(r) == ("long", "short")[int(r.arrival_s // MIX.piece_s) % 2] for r in requests)
    assert len({r.request_id for r in requests}) == len(requests), "who comes again has another name"
    for name, (kind, first) in MIX.kinds.items():
        own = [r for r in kind.requests(first, 0.5 * bounds(kind, first)[0]) if r.arrival_s < 2 * MIX.piece_s]
        played = [r for r in requests if MIX.kind(r) == name][: len(own)]
        assert [(r.prompt_tokens, r.output_tokens) for r in played] == [(r.prompt_tokens, r.output_tokens) for r in own]


def test_each_kind_has_groups_of_its_own() -> None:
    """Who serves none of the few long prompts does not serve a tenth of all too little, but all of a kind."""
    counts = Counts(MIX.requests(0, 0.5), MIX.promises, kind=MIX.kind)
    play(MIX, "legato-auto", Layout(num_prefill=0, num_decode=2), 0.5, 0, counts.see)
    assert counts.results()["tpot", "everyone"].least.split()[0] in MIX.kinds


def test_what_was_found_is_told_for_each_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.scheduling.shifting.shifting", lambda *_: MIX)
    told = measure(
        argparse.Namespace(
            mooncake=None,
            azure=None,
            tpot_ms=30.0,
            pieces=4,
            piece_s=15.0,
            keep=None,
            time_s=99.0,
            prefill=[4],
            load=[0.1, 0.2],
        )
    )
    assert set(told["rows"]) == {"legato-auto", "legato 4+4"}
    assert told["highest_load"] == {"legato-auto": 0.2, "legato 4+4": 0.2}
    assert (told["best_fixed"], told["ratio"]) == ("legato 4+4", 1.0)


def test_requests_of_one_moment_are_drawn_apart_and_all_others_stay() -> None:
    """A slowed trace that tells time in steps would else come as few large bursts."""
    times = [0.0, 0.0, 0.0, 3.0, 4.5, 6.0, 6.0]
    stamped = [
        TraceRequest(request_id=f"r{number}", arrival_s=at, prompt_tokens=1 + number, output_tokens=1)
        for number, at in enumerate(times)
    ]
    apart = list(unbunched(iter(stamped)))
    came = [request.arrival_s for request in apart]
    assert [replace(request, arrival_s=0.0) for request in apart] == [replace(r, arrival_s=0.0) for r in stamped]
    assert came == sorted(came) and len(set(came[:3])) == 3 and came[0] > 0.0 and came[2] < 3.0
    assert came[3:] == times[3:], "also the last ones, which nobody follows"
    assert came == [request.arrival_s for request in unbunched(stamped)]
    assert came[:3] != [request.arrival_s for request in unbunched(stamped, seed=1)][:3]
