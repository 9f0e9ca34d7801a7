"""The benchmark of decisions asks a scheduler that knows prefixes, and counts every answer once."""

from __future__ import annotations

import json
from itertools import count

from benchmarks.report.goodput import decisions_table
from benchmarks.report.table import RESULTS
from benchmarks.scheduling.decisions import build, simulated, timed_decisions
from cluster.scheduler.placement.admission import AdmissionOutcome


def test_every_decision_is_timed_once_and_some_are_turned_away() -> None:
    ticks = count()
    taken = timed_decisions(20, 2000, 40, clocks=[lambda: float(next(ticks))])
    assert sum(map(len, taken.values())) == 40
    assert {seconds for times in taken.values() for seconds in times} == {(1.0,)}
    assert taken[AdmissionOutcome.PLACED]
    assert taken[AdmissionOutcome.REJECTED]


def test_the_blocks_are_spread_over_the_workers_and_a_prefix_is_common() -> None:
    ledger, index = build(20, 2000)
    assert len(ledger.table) == 20
    assert sum(index.num_columns(info.worker_id) or 0 for info, _ in ledger.workers()) == 2000
    common = b"".join((0).to_bytes(8, "little") + block.to_bytes(8, "little") for block in range(100))
    assert len(index.longest_prefix(common)) == 20


def test_as_many_requests_as_asked_for_are_simulated() -> None:
    report = simulated(None, 8, 40)
    assert (report["requests"], report["num_requests"]) == ("drawn", 40)
    assert report["in_time"] == 1.0


def test_what_is_stored_can_be_read_as_a_table() -> None:
    stored = json.loads((RESULTS / "decisions.json").read_text(encoding="utf-8"))["results"]
    written = decisions_table(stored)
    assert all(f"| {outcome} |" in written for outcome in ("placed", "waiting", "rejected"))
    assert f"{stored['simulated']['cpu_s']:g} s of CPU time" in written
