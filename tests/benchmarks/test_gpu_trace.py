"""The arithmetic on a profiler's trace, on small traces that were written by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu.speed.trace import Activity, LostMarksError, common, read_trace, share_beside, step_times, union


def _event(name: str, began_us: float, lasted_us: float, category: str = "kernel", stream: object = 7) -> Any:
    return {"ph": "X", "cat": category, "name": name, "ts": began_us, "dur": lasted_us, "pid": 0, "tid": stream}


def _read(tmp_path: Path, *events: Any) -> list[Activity]:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"schemaVersion": 1, "traceEvents": list(events)}))
    return read_trace(path)


def test_only_what_the_device_does_is_read_in_its_order(tmp_path: Path) -> None:
    found = _read(
        tmp_path,
        _event("later", 20, 5),
        {"ph": "M", "name": "process_name"},
        _event("cudaGraphLaunch", 0, 9, "cuda_runtime"),
        {**_event("instant", 3, 0), "ph": "i"},
        _event("Memcpy HtoD", 10, 2.5, "gpu_memcpy", "stream 13"),
    )
    assert [(a.name, a.began_us, a.ended_us) for a in found] == [("Memcpy HtoD", 10.0, 12.5), ("later", 20.0, 25.0)]


def test_time_in_several_intervals_counts_once() -> None:
    assert union([(5, 9), (0, 2), (1, 3), (9, 10)]) == [(0, 3), (5, 10)]
    assert common([(0, 3), (5, 10)], [(2, 6), (7, 8), (9, 20)]) == [(2, 3), (5, 6), (7, 8), (9, 10)]


def test_how_much_ran_beside_something_else(tmp_path: Path) -> None:
    copies = _read(tmp_path, _event("copy", 0, 10, "gpu_memcpy"), _event("copy", 20, 10, "gpu_memcpy"))
    compute = _read(tmp_path, _event("a", 5, 10), _event("b", 8, 10), _event("c", 25, 1))
    assert share_beside(copies, compute) == pytest.approx(6 / 20)
    assert share_beside([], compute) == 0.0


def test_what_a_device_waits_between_steps_is_told_from_pauses_within_one(tmp_path: Path) -> None:
    """Steps of 100 us: a mark, a wait of 30 us for the host, two kernels 2 us apart, on another stream a copy."""
    events = []
    for start in range(0, 600, 100):
        events += [
            _event("fill<complex<double>>", start, 2),
            _event("gemm", start + 32, 30),
            _event("attention", start + 64, 36),
            _event("Memcpy DtoH", start + 70, 10, "gpu_memcpy", 9),
        ]
    found = step_times(_read(tmp_path, *events), "complex<double>", fewest=4, longest_pause_us=5, spare=1)
    assert len(found) == 3
    for step in found:
        assert step.lasted_us == pytest.approx(100)
        assert step.idle_us == pytest.approx(32)
        assert step.waited_us == pytest.approx(30)


def test_a_step_that_is_prepared_in_time_waits_for_nothing(tmp_path: Path) -> None:
    events = [event for at in range(0, 50, 10) for event in (_event("mark", at, 1), _event("gemm", at + 1, 9))]
    found = step_times(_read(tmp_path, *events), "mark", fewest=5, longest_pause_us=5, spare=0)
    assert [step.idle_us for step in found] == [0.0] * 4


def test_a_trace_that_lost_marks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LostMarksError, match=r"has 2 marks 'mark' of 4; .* gemm, mark"):
        step_times(
            _read(tmp_path, _event("mark", 0, 1), _event("gemm", 1, 2), _event("mark", 3, 1)),
            "mark",
            fewest=4,
            longest_pause_us=5,
            spare=1,
        )
