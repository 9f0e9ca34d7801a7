"""What was decided lately, for operators to read."""

from __future__ import annotations

import json

from tests.cluster.scheduler.scheduler_world import TARGETS, measured, placed


def test_who_is_late_on_an_idle_cluster_too_is_not_taken_for_one_without_targets() -> None:
    scheduler = measured("p1", "d1")
    placed(scheduler, "unattainable", num_tokens=5000, **TARGETS)
    placed(scheduler, "none", num_tokens=100)
    none, unattainable = scheduler.log.newest(2)
    assert (none.is_unattainable, unattainable.is_unattainable) == (False, True)
    assert unattainable.request.ttft_s == 2.0
    line = json.loads(unattainable.as_json(0.0))
    assert (line["unattainable"], line["ttft_s"], line["outcome"]) == (True, 2.0, "placed")
    assert "unattainable" in str(unattainable)


def test_a_decision_can_be_read() -> None:
    scheduler = measured("p1", "p2", "d1")
    placed(scheduler, num_tokens=1000, **TARGETS, gap_s=0.5, now=5.0)
    [logged] = scheduler.log.newest(10)
    line = json.loads(logged.as_json(1e9))
    assert (line["time"], line["gap_s"]) == (1e9 + 5.0, 0.5)
    assert "TPOT 50 ms, gap 500 ms: PLACE" in str(logged)
    assert {row["prefill"] for row in line["candidates"]} == {"p1", "p2", None}
    assert all(name in str(logged) for name in ("p1", "p2", "(decode alone)", "PLACED"))


def test_the_log_keeps_the_newest() -> None:
    scheduler = measured("p1", "d1", log_size=3)
    for n in range(5):
        placed(scheduler, f"r{n}")
    assert [entry.request_id for entry in scheduler.log.newest(2)] == ["r4", "r3"]
    assert [entry.request_id for entry in scheduler.log.newest(9)] == ["r4", "r3", "r2"]
