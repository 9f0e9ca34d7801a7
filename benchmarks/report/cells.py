"""Cells and tables in Markdown, from numbers as `benchmarks.common.part` reports them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

Report = dict[str, Any]


def table(columns: list[str], rows: Iterable[list[object]]) -> str:
    lines: list[list[object]] = [[*columns], ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def spread(cell: Report) -> str:
    """Median and range of repeats."""
    return f"{cell['median']:g} [{cell['min']:g}–{cell['max']:g}]"


def tail(cell: Report) -> str:
    """Percentiles."""
    return f"{cell['p50']:g} / {cell['p99']:g}"


# Reports from before gaps were measured lack what these two show.


def gap_tail(cell: Report) -> str:
    return tail(cell["gap_ms"]) if "gap_ms" in cell else "–"


def in_time(cell: Report) -> list[object]:
    """Two cells, requests / output tokens in time: by TTFT and TPOT, and by TTFT and gaps."""
    if "in_time" not in cell:
        return ["–", "–"]
    kept = (cell["in_time"][by] for by in ("ttft_and_tpot", "ttft_and_gap"))
    return [f"{share['requests']:.0%} / {share['tokens']:.0%}" for share in kept]


IN_TIME_COLUMNS = ["in time by TTFT, TPOT: requests / tokens", "by TTFT, gaps"]


def promised(cell: Report) -> str:
    """What "in time" was judged by."""
    if "in_time" not in cell:
        return ""
    targets = cell["in_time"]
    return (
        f"In time: TTFT {targets['ttft_ms']:g} ms; TPOT {targets['tpot_ms']:g} ms, or 99 of 100 of a request's gaps"
        f" within {targets['gap_ms']:g} ms.\n"
    )
