"""The peers' report as Markdown. Measures nothing, judges nothing."""

from __future__ import annotations

from typing import Any

from benchmarks.common.part import Json
from benchmarks.peers.report import latest, told
from benchmarks.report.cells import Report, spread, table, tail

_TITLES = {
    "decode_tokens_per_s": "decode tokens/s",
    "ttft_ms": "TTFT, ms",
    "tpot_ms": "TPOT, ms",
    "tokens_per_s": "tokens/s",
    "output_tokens_per_s": "output tokens/s",
    "all_ttft_ms": "TTFT P50 / P99, ms",
    "all_tpot_ms": "TPOT P50 / P99, ms",
    "all_gaps_ms": "gap between tokens P50 / P99, ms",
    "first_ttft_ms": "first TTFT, ms",
    "seconds": "seconds",
    "guidellm_output_tokens_per_s": "by GuideLLM: output tokens/s",
    "guidellm_ttft_ms": "TTFT, ms",
    "guidellm_tpot_ms": "TPOT, ms",
    "differs_percent": "tokens/s differ by, %",
    "all_ttft_ms P99": "TTFT P99",
    "all_tpot_ms P99": "TPOT P99",
    "all_gaps_ms P99": "gap between tokens P99",
    "drafts_tokens_per_s": "decode tokens/s with drafts",
    "plain_tokens_per_s": "without",
    "times": "times",
    "changed": "answers that change",
    "answers": "of",
    "greedy_changed": "greedy answers that change",
    "seeded_changed": "seeded answers that change",
}
_SETTINGS = ("over HTTP", "1 prefill + 1 decode, over HTTP", "in the process")
ELSEWHERE = (
    "Measured by parts of `make bench`: what the gateway costs ([gateway](#gateway)), where a start's seconds go "
    "([startup](#startup)), how good weights of 8 and 4 bits are (`python -m benchmarks quantisation`).\n"
)


def peers_tables(results: Report) -> str:
    pieces = results["pieces"]
    parts = [_pieces(pieces), _aims(results["aims"]), ELSEWHERE]
    parts += [_work(work, cells) for work, cells in latest(pieces).items()]
    parts += [_failures([failure for piece in pieces for failure in piece["failures"]]), _told(told(pieces))]
    return "\n".join(part for part in parts if part)


def peers_headline(results: Report) -> Json:
    """For each aim, the configuration that comes closest to it."""
    judged = [[found for found in row["by"].values() if found] for row in results["aims"]]
    return {
        "reached": sum(any(found["reached"] for found in row) for row in judged),
        "aims": len(judged),
        "not_measured": sum(not row for row in judged),
    }


def _pieces(pieces: list[Report]) -> str:
    rows: list[list[object]] = [[number, *_ran(piece["run"])] for number, piece in enumerate(pieces, 1)]
    columns = ["", "piece", "begun", "commit", "rounds", "load before / after", "disturbed", "seconds"]
    return table(columns, rows)


def _ran(run: Report) -> list[object]:
    machine = run.get("machine")
    return [
        run["piece"],
        run["date"],
        run["commit"] + (" with changes" if run["uncommitted_changes"] else ""),
        run["rounds"],
        f"{run['load_average_before']:g} / {run.get('load_average_after') or 0:g}",
        f"{machine['of_these_disturbed']} of {machine['measured']}" if machine else "–",
        run.get("duration_s") or "–",
    ]


def _work(work: str, cells: dict[str, tuple[int, Report]]) -> str:
    """A row for each peer, with the piece that it is of; a work's figures are the same for all."""
    if "greedy_changed" in next(iter(cells.values()))[1]:
        return _company(work, cells)
    figures = list(next(iter(cells.values()))[1])
    rows: list[list[object]] = [
        [name, *(_cell(found.get(key)) for key in figures), number] for name, (number, found) in cells.items()
    ]
    return table([work, *(_TITLES.get(key, key) for key in figures), "piece"], rows)


def _cell(figure: Any) -> str:
    if figure is None:
        return "–"
    return tail(figure) if "p99" in figure else spread(figure)


def _company(work: str, cells: dict[str, tuple[int, Report]]) -> str:
    rows: list[list[object]] = [
        [name, *(f"{cell[f'{kind}_changed']['max']:g} of {cell[kind]['max']:g}" for kind in ("greedy", "seeded")), at]
        for name, (at, cell) in cells.items()
    ]
    return table([f"{work}: answers that change", "greedy", "seeded", "piece"], rows)


def _aims(rows: list[Report]) -> str:
    """Ratios with the peer that is hardest to reach; bold where the aim is missed."""
    lines: list[list[object]] = [
        [row["work"], row["weights"], _TITLES.get(row["figure"], row["figure"]), _aim(row), *_by_setting(row["by"])]
        for row in rows
    ]
    return table(["aim", "weights", "figure", "at least (times the peer)", *_SETTINGS], lines)


def _aim(row: Report) -> str:
    return f"{row['aim']:g}" if row["beside"] else f"at most {row['aim']:g}"


def _by_setting(by: dict[str, Report | None]) -> list[str]:
    cells = dict.fromkeys(_SETTINGS, "")
    for name, found in by.items():
        cells[_setting(name)] = _judged(found)
    return list(cells.values())


def _setting(name: str) -> str:
    return _SETTINGS[1 if name.endswith("-1p1d") else 2 if name.endswith("-in-process") else 0]


def _judged(found: Report | None) -> str:
    if found is None:
        return "not measured"
    if "value" in found:
        return f"{found['value']:g}" if found["reached"] else f"**{found['value']:g}**"
    number = f"{found['ratio']:g}" if found["reached"] else f"**{found['ratio']:g}**"
    without = f", not beside {', '.join(found['not_beside'])}" if found["not_beside"] else ""
    return f"{number} ({found['best']}{without})"


def _failures(records: list[Report]) -> str:
    """One row for each peer, work and reason."""
    found = dict.fromkeys((record["peer"], record["work"] or "everything", record["reason"]) for record in records)
    rows: list[list[object]] = [[peer, work, reason.replace("|", "/")] for peer, work, reason in found]
    return table(["not measured", "what", "why"], rows) if rows else ""


def _told(peers: dict[str, str]) -> str:
    return "".join(f"* **{name}**: {words}\n" for name, words in peers.items())
