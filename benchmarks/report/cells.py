"""Cells and tables in Markdown, from numbers as `benchmarks.common.summary` reports them."""

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
