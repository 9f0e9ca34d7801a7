"""The comparison's report: pieces of different times in one, each figure compared only within its piece."""

from __future__ import annotations

import copy
import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.peers import stored as stored_module
from benchmarks.peers.aims import AIMS, Aim
from benchmarks.peers.pieces import PART, PIECES, chosen, in_order, peers
from benchmarks.peers.report import latest, merged, piece_of, together
from benchmarks.peers.stored import Stored, results
from benchmarks.peers.works import GROUPS, ONE_STREAM, WORKS
from benchmarks.report.peers import peers_headline, peers_tables

EIGHT = "8 concurrent 256 -> 128"
Report = dict[str, Any]


def run(commit: str) -> Report:
    return {
        "piece": "bf16",
        "rounds": 2,
        "date": f"day of {commit}",
        "commit": commit,
        "uncommitted_changes": False,
        "load_average_before": 0.1,
        "load_average_after": 2.0,
        "duration_s": 60,
        "machine": {"measured": 9, "of_these_disturbed": 1, "repeated": 0},
    }


def wave(rate: float, tpot_ms: float) -> Report:
    return {"output_tokens_per_s": rate, "all_ttft_ms": [900.0, 1000.0], "all_tpot_ms": [tpot_ms, tpot_ms + 1]}


def recorded() -> list[Report]:
    return [
        {"run": run("abc")},
        *({"peer": "legato", "work": EIGHT, "round": n, "figures": wave(300.0 + n, 20.0)} for n in range(3)),
        *({"peer": "openvino", "work": EIGHT, "round": n, "figures": wave(200.0 + n, 30.0)} for n in range(3)),
        {"peer": "vllm", "work": None, "round": None, "reason": "no room"},
    ]


def piece(commit: str, **rates: float) -> Report:
    """One stream's rates by peer."""
    records = [
        {"peer": peer, "work": ONE_STREAM, "round": 0, "figures": {"decode_tokens_per_s": rate}}
        for peer, rate in rates.items()
    ]
    return piece_of([{"run": run(commit)}, *records], {peer: f"{peer} of {commit}" for peer in rates})


def aim(others: tuple[str, ...], least: float = 1.0) -> Aim:
    return Aim(work=ONE_STREAM, figure="decode_tokens_per_s", ours=("legato",), others=others, least=least)


def test_the_report_sets_medians_with_their_range_beside_each_other(tmp_path: Path) -> None:
    told = {"legato": "ours", "openvino": "theirs", "vllm": "theirs too", "transformers": "not asked"}
    found = results([piece_of(recorded(), told)])
    page = peers_tables(found)
    assert "| legato | 301 [300–302] | 900 / 1000 | 20 / 21 | 1 |" in page
    assert "| openvino | 201 [200–202] | 900 / 1000 | 30 / 31 | 1 |" in page
    assert "| vllm | everything | no room |" in page and "not asked" not in page
    assert "| 1 | bf16 | day of abc | abc | 2 | 0.1 / 2 | 1 of 9 | 60 |" in page
    rate, ttft, tpot = (row["by"]["legato"] for row in found["aims"] if row["work"] == EIGHT and "legato" in row["by"])
    assert (rate["best"], rate["ratio"], rate["reached"]) == ("openvino", 1.5, True)
    assert rate["not_beside"] == ["llama.cpp", "vllm", "transformers"]
    assert (ttft["ratio"], tpot["ratio"]) == (1.0, pytest.approx(31 / 21, abs=0.01))
    headline = peers_headline(found)
    assert headline == {"reached": 3, "aims": len(AIMS), "not_measured": len(AIMS) - 3}
    assert "| 1.5 (openvino, not beside llama.cpp, vllm, transformers) | not measured | not measured |" in page
    from benchmarks.report.plots import plot_peers

    plot_peers(latest(found["pieces"]), tmp_path / "peers.svg")
    assert (tmp_path / "peers.svg").read_text().startswith("<?xml")


def test_what_is_measured_again_replaces_what_was_there() -> None:
    old, new = piece("old", legato=80.0, vllm=50.0), piece("new", legato=90.0, vllm=45.0, openvino=60.0)
    before = copy.deepcopy(old)
    assert merged([old], new) == [new]
    assert old == before


def test_a_piece_stays_while_somebody_is_compared_in_it() -> None:
    old, new = piece("old", legato=80.0, openvino=60.0), piece("new", legato=40.0, vllm=25.0)
    kept = merged([old], new)
    assert kept == [old, new]
    assert {name: number for name, (number, _) in latest(kept)[ONE_STREAM].items()} == {
        "legato": 2,
        "openvino": 1,
        "vllm": 2,
    }
    # The second hour was half as fast for everybody: 40 beside the first one's 60 would say nothing.
    assert [
        cell["decode_tokens_per_s"]["median"] for cell in together(kept, ONE_STREAM, ["legato", "openvino"]) or []
    ] == [
        80.0,
        60.0,
    ]
    judged = aim(("openvino", "vllm", "llama.cpp")).judge(kept)["by"]
    assert judged == {
        "legato": {"ratio": 1.33, "best": "openvino", "reached": True, "not_beside": ["llama.cpp"]},
    }


def test_a_failure_is_told_until_it_is_tried_again() -> None:
    failed = piece_of(
        [
            {"run": run("old")},
            {"peer": "vllm", "work": None, "round": 0, "reason": "no room"},
            {"peer": "legato", "work": EIGHT, "round": 0, "reason": "too slow"},
        ],
        {"vllm": "", "legato": ""},
    )
    well = piece("new", vllm=50.0)
    assert [piece["failures"] for piece in merged([failed], well)] == [failed["failures"][1:], []]
    assert "| legato | " + EIGHT + " | too slow |" in peers_tables(results(merged([failed], well)))
    assert merged([failed], piece_of(recorded(), {"legato": "", "openvino": "", "vllm": ""}))[0]["failures"] != []


@pytest.mark.parametrize(("ours", "reached"), [(0.0, True), (1.0, False)])
def test_an_aim_without_a_peer_is_a_bound(ours: float, reached: bool) -> None:
    bound = Aim(
        work=ONE_STREAM, figure="decode_tokens_per_s", ours=("legato",), others=(), least=0, less_is_better=True
    )
    assert bound.judge([piece("abc", legato=ours)])["by"] == {"legato": {"value": ours, "reached": reached}}


def test_an_aim_is_missed_where_one_peer_is_too_near() -> None:
    pieces = [piece("abc", legato=100.0, vllm=50.0, openvino=90.0)]
    judged: Any = aim(("vllm", "openvino"), least=1.2).judge(pieces)["by"]
    assert (judged["legato"]["best"], judged["legato"]["reached"]) == ("openvino", False)
    assert aim(("llama.cpp",)).judge(pieces)["by"] == {"legato": None}


def test_pieces_are_stored_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pages: list[int] = []
    monkeypatch.setattr(stored_module, "write_table", lambda: pages.append(1))
    Stored(tmp_path, "peers").add(piece("old", legato=80.0, openvino=60.0))
    again = Stored(tmp_path, "peers")
    again.add(piece("new", legato=40.0, vllm=25.0))
    report = json.loads((tmp_path / "peers.json").read_text())
    assert report["commit"] == "new" and report["duration_s"] == 120 and len(pages) == 2
    assert [piece["run"]["commit"] for piece in report["results"]["pieces"]] == ["old", "new"]
    assert again.results == report["results"]
    for commit in ("one", "two"):
        Stored(tmp_path, "peers_part").add(piece(commit, legato=40.0))
    assert [
        p["run"]["commit"] for p in json.loads((tmp_path / "peers_part.json").read_text())["results"]["pieces"]
    ] == ["two"]
    assert len(pages) == 2


def test_the_pieces_ask_for_all_that_is_aimed_at() -> None:
    """Every aim's work is asked of all who are compared there, in one piece."""
    group = {work.name: work.group for work in WORKS}
    for wanted, ours in ((some, ours) for some in AIMS for ours in some.ours):
        for other in wanted.others or (ours,):
            assert any(
                {ours, other} <= set(piece.peers) and group.get(wanted.work, piece.groups[0]) in piece.groups
                for piece in PIECES
            ), (wanted.work, ours, other)
    known = {peer.name: peer for peer in peers()}
    for some in PIECES:
        assert all(set(some.groups) & set(known[name].works) for name in some.peers)
    assert set(itertools.chain.from_iterable(piece.groups for piece in PIECES)) == set(GROUPS)


def test_a_part_of_a_piece_can_be_chosen() -> None:
    assert chosen((), (), ()) == list(PIECES)
    (some,) = chosen(("bf16",), ("vllm", "legato"), ("one_stream",))
    assert (some.name, some.peers, some.groups) == ("bf16", ("legato", "vllm"), ("one_stream",))
    (apart,) = chosen((), ("vllm",), ())
    assert (apart.name, apart.peers, apart.groups) == (PART, ("vllm",), GROUPS)
    assert [peer.name for peer in in_order(some)] == ["legato", "vllm"]
