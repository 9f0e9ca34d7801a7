"""The peers' report as Markdown. Measures nothing, judges nothing."""

from __future__ import annotations

from typing import Any

from benchmarks.cells import Report, spread, table, tail
from benchmarks.summary import Json

_TITLES = {
    "decode_tokens_per_s": "decode tokens/s",
    "ttft_ms": "TTFT, ms",
    "tokens_per_s": "tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "all_ttft_ms": "TTFT P50 / P99, ms",
    "all_tpot_ms": "TPOT P50 / P99, ms",
    "all_gaps_ms": "gap between tokens P50 / P99, ms",
    "first_ttft_ms": "first TTFT, ms",
    "seconds": "seconds",
    "guidellm_tokens_per_s": "output tokens/s by guidellm",
}


def peers_tables(results: Report) -> str:
    parts = [_work(work, cells) for work, cells in results["works"].items()]
    parts += [_aims(results["aims"]), _failures(results["failures"]), _told(results["peers"])]
    return "\n".join(part for part in parts if part)


def peers_headline(results: Report) -> Json:
    return {"reached": sum(row["reached"] for row in results["aims"]), "aims": len(results["aims"])}


def _work(work: str, cells: Report) -> str:
    """A row for each peer; a work's figures are the same for all."""
    if work == "the same answer in company":
        return _company(work, cells)
    figures = list(next(iter(cells.values())))
    rows: list[list[object]] = [[name, *(_cell(cell.get(key)) for key in figures)] for name, cell in cells.items()]
    return table([work, *(_TITLES.get(key, key) for key in figures)], rows)


def _cell(figure: Any) -> str:
    if figure is None:
        return "–"
    return tail(figure) if "p99" in figure else spread(figure)


def _company(work: str, cells: Report) -> str:
    rows: list[list[object]] = [
        [name, *(f"{cell[f'{kind}_changed']['max']:g} of {cell[kind]['max']:g}" for kind in ("greedy", "seeded"))]
        for name, cell in cells.items()
    ]
    return table([f"{work}: answers that change", "greedy", "seeded"], rows)


def _aims(rows: list[Report]) -> str:
    if not rows:
        return ""
    lines: list[list[object]] = [
        [
            row["work"],
            _TITLES.get(row["figure"], row["figure"].removeprefix("all_")),
            row["ours"],
            row["best"] or "–",
            f"{row['ratio']:g}",
            f"{row['aim']:g}",
            "yes" if row["reached"] else "**no**",
        ]
        for row in rows
    ]
    columns = ["aim", "figure", "of", "beside the best peer", "times as good (or the figure itself)", "aim", "reached"]
    return table(columns, lines)


def _failures(records: list[Report]) -> str:
    """One row for each peer, work and reason."""
    found = dict.fromkeys((record["peer"], record["work"] or "everything", record["reason"]) for record in records)
    rows: list[list[object]] = [[peer, work, reason.replace("|", "/")] for peer, work, reason in found]
    return table(["not measured", "what", "why"], rows) if rows else ""


def _told(peers: dict[str, str]) -> str:
    return "".join(f"* **{name}**: {told}\n" for name, told in peers.items())
