"""What the gateway's report tells people: all that was measured, and of older reports what they have."""

from __future__ import annotations

from typing import Any

from benchmarks.report.table import gateway_tables
from benchmarks.serving.late_tokens import arrivals_of

SPREAD = {"median": 1.2, "min": -0.5, "max": 2.0, "repeats": 5}
GAPS = {"p50": 20.0, "p99": 24.4, "samples": 9}
CLOCK = {"within_2_ms": 998, "p50_ms": 0.14, "p99_ms": 0.76, "max_ms": 1.1, "min_ms": -1.8}
OLD: dict[str, Any] = {"app_alone": [], "whole_gateway": []}
BOARD: list[dict[str, Any]] = [{"viewers": 32, "streams": 50, "core_percent": SPREAD, "more_core_percent": SPREAD}]
BOARD[0] |= {"late_ms": {"p50": 1.1, "p99": 2.5, "samples": 9}, "gap_ms": GAPS}
TIMELINES = {"retried": 139, "preempted": 38, "client": CLOCK, "socket": CLOCK, "reads_late": CLOCK}


def test_the_board_and_timelines_are_told() -> None:
    told = gateway_tables({**OLD, "board": BOARD, "timelines": TIMELINES})
    assert "| 32 | 50 | 1.2 [-0.5–2] | 1.2 [-0.5–2] | 1.1 / 2.5 | 20 / 24.4 |" in told
    assert "| its socket | 998 | 0.14 / 0.76 | -1.8 / 1.1 |" in told
    assert "139 were tried again, 38 preempted." in told


def test_older_reports_lack_them() -> None:
    assert "board" not in gateway_tables(OLD)


def test_of_a_read_its_last_token_has_a_stamp() -> None:
    """The ids of a token may come in two reads, and two tokens in one."""
    reads = [
        (1.0, b'head {"token_ids":[7]} x'),
        (2.0, b'{"token_ids":[8'),
        (3.0, b']}{"token_ids":[9,10]} '),
        (4.0, b"end"),
    ]
    assert arrivals_of(reads) == [(0, 1.0), (3, 3.0)]
