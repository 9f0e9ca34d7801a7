"""The stored reports as one page for people: `benchmarks/results/README.md`. Measures nothing, judges nothing.

A cell is `median [min-max]` of the repeats.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.common.provenance import ROOT
from benchmarks.common.summary import Json
from benchmarks.report.cells import Report
from benchmarks.report.cells import spread as _spread
from benchmarks.report.cells import table as _table
from benchmarks.report.cells import tail as _tail
from benchmarks.report.gateway import gateway_headline, gateway_tables, startup_headline, startup_table
from benchmarks.report.goodput import (
    GOODPUT,
    decisions_headline,
    decisions_table,
    goodput_headline,
    goodput_overview,
    goodput_tables,
)
from benchmarks.report.honesty import honesty_headline, honesty_tables
from benchmarks.report.offload import offload_headline, offload_tables
from benchmarks.report.peers import peers_headline, peers_tables
from benchmarks.report.plots import plot_layerkv
from benchmarks.report.quantisation import quantisation_headline, quantisation_table

RESULTS = ROOT / "benchmarks" / "results"


def write_table() -> None:
    """From whatever is stored: each part keeps the commit and the time that it was measured at."""
    stored = _stored()
    sections = [_section(part, report) for part, report in stored.items()]
    measured = [stored[part]["results"] for part in GOODPUT if part in stored and stored[part]["status"] == "ok"]
    sections.append(f"## goodput: beside the bounds\n\n{goodput_overview(measured)}")
    parts = "Parts: " + " · ".join(f"[{part}](#{part})" for part in stored) + "."
    (RESULTS / "README.md").write_text("\n".join(["# Results", "", _HEAD, "", parts, "", *sections]), encoding="utf-8")


def headline() -> Json:
    """The few numbers that aims are set for, by part."""
    return {part: _status(part, report) for part, report in _stored().items()}


_HEAD = (
    "Written by `make bench`; what each number means is told in [`../README.md`](../README.md). Cells are "
    "median [min–max]. The JSON files hold the rest. Compare only what was measured in one run."
)


def _stored() -> dict[str, Report]:
    reports = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))}
    return {part: report for part, report in reports.items() if part in _TABLES}


def _status(part: str, report: Report) -> Json:
    if report["status"] != "ok":
        return {"status": report["status"], "reason": report["reason"]}
    return {"status": "ok", "commit": report["commit"], **_HEADLINES[part](report["results"])}


def _section(part: str, report: Report) -> str:
    versions = report["versions"]
    where = (
        f"Commit {report['commit']}{' with uncommitted changes' if report['uncommitted_changes'] else ''}, "
        f"{report['date']}, {report['device']}, {report['cpus']} CPUs, torch {versions['torch']}, transformers "
        f"{versions['transformers']}, ray {versions['ray']}; load average {report['load_average_before']} before, "
        f"{report['load_average_after']} after; {report['duration_s']} s."
    )
    body = _TABLES[part](report["results"]) if report["status"] == "ok" else f"No numbers: {report['reason']}\n"
    return f"## {part}\n\n{where}\n\n{body}"


def _engine(results: Report) -> str:
    single, ceiling = results["single_stream"], results["ceiling"]
    rows: list[list[object]] = [
        [
            f"one stream {single['load']}: {name}",
            _spread(single["legato"][key]),
            _spread(single["hugging_face"][key]),
            up,
        ]
        for name, key, up in (
            ("TTFT, ms", "ttft_ms", single["speedup"]["ttft"]),
            ("TPOT, ms", "tpot_ms", single["speedup"]["tpot"]),
        )
    ]
    rows += [
        [
            f"{row['concurrent']} concurrent {row['load']}: output tokens/s",
            _spread(row["legato"]["output_tokens_per_s"]),
            _spread(row["hugging_face"]["output_tokens_per_s"]),
            row["speedup"],
        ]
        for row in results["concurrent"]
    ]
    rows += [
        [
            f"prefill {row['prompt_tokens']}: tokens/s",
            _spread(row["legato_tokens_per_s"]),
            _spread(row["hugging_face_tokens_per_s"]),
            row["speedup"],
        ]
        for row in results["prefill"]
    ]
    bound = (
        f"Memory reads at {ceiling['memory_read_gb_per_s']} GB/s, so one stream could decode at most "
        f"{ceiling['single_stream_bound_tokens_per_s']} tokens/s; bfloat16 products at "
        f"{ceiling['matmul_bf16_tflops']} TFLOP/s.\n"
    )
    return _table(["bf16, 2 threads", "Legato", "Hugging Face", "times as fast"], rows) + "\n" + bound


def _cluster(results: Report) -> str:
    rows: list[list[object]] = []
    for shape in results["shapes"]:
        for row in shape["rows"]:
            http, local = row["http"], row["in_process"]
            rows.append(
                [
                    shape["shape"],
                    row["concurrent"],
                    _spread(http["output_tokens_per_s"]),
                    _spread(local["output_tokens_per_s"]),
                    f"{row['share_of_in_process']:.0%}",
                    _tail(http["ttft_ms"]),
                    _tail(http["tpot_ms"]),
                    _tail(local["tpot_ms"]),
                ]
            )
    peers = ", ".join(
        f"{row['output_tokens_per_s']['median']:g} at {row['concurrent']}" for row in results["hugging_face"]
    )
    columns = [
        "cluster, 256 -> 128",
        "concurrent",
        "output tokens/s over HTTP",
        "in-process",
        "share",
        "TTFT P50 / P99, ms",
        "TPOT P50 / P99, ms",
        "in-process TPOT",
    ]
    return _table(columns, rows) + f"\nHugging Face `generate` in the same run, output tokens/s: {peers}.\n"


def _handoff(results: Report) -> str:
    rows: list[list[object]] = [
        [
            row["transport"],
            row["situation"],
            row["prompt_tokens"],
            f"{row['kv_bytes'] / 1e6:.1f}",
            _spread(row["prefill_ms"]),
            _spread(row["exposed_ms"]),
            f"{row['exposed_share_of_prefill']:.1%}",
            f"{row['hidden_share_of_bytes']:.0%}",
            _spread(row["gb_per_s"]),
        ]
        for row in results["rows"]
    ]
    columns = ["transport", "situation", "prompt tokens", "KV, MB", "prefill, ms", "exposed, ms", "of prefill"]
    digest = results["digest"]
    cost = f"{digest['gb_per_s']} GB/s on slabs of {digest['slab_bytes']} bytes, at each end"
    table = _table([*columns, "bytes hidden", "GB/s, ticket to verified"], rows)
    return f"{table}\nDigest ({digest['name']}): {cost}.\n"


def _sampling(results: Report) -> str:
    rows: list[list[object]] = [
        [
            dtype,
            row["compared"],
            f"{row['identical']} of {row['sequences']}",
            row["differences_per_1000_tokens"],
            f"{row['logprob_difference']['median']:g} / {row['logprob_difference']['max']:g}",
        ]
        for dtype in ("float32", "bfloat16")
        for row in results[dtype]
    ]
    columns = ["dtype", f"compared; {results['sequences']}", "sequences the same", "differences per 1000 tokens"]
    return _table([*columns, "log-probability differs by, median / max"], rows)


def _eviction(results: Report) -> str:
    rows: list[list[object]] = [
        [f"{value:.1%}" if isinstance(value, float) else value for value in row.values()] for row in results["rows"]
    ]
    table = _table(["blocks found, of all: capacity", *list(results["rows"][0])[1:]], rows)
    costs = ", ".join(f"{name} {_spread(cost)}" for name, cost in results["us_per_block"].items())
    return (
        f"{table}\nTrace {results['trace']}: {results['prompts']} prompts, {results['blocks']} full blocks; "
        f"{results['distinct_blocks']} distinct blocks; kept for ever, {results['infinite_hit_rate']:.1%} are found. "
        f"CPU of the whole pool per block asked for, us: {costs}.\n"
    )


_LAYERKV_RATIOS = ("mean_ttft_times_lower", "p99_tpot_ratio", "throughput_ratio")


def _layerkv(results: Report) -> str:
    rows: list[list[object]] = []
    for row in results["rows"]:
        for setting in ("off", "on"):
            cell = row[setting]
            rows.append(
                [
                    row["rate"],
                    setting,
                    cell["requests"],
                    f"{cell['mean_ttft_ms']:g}",
                    _tail(cell["ttft_ms"]),
                    _tail(cell["tpot_ms"]),
                    cell["output_tokens_per_s"],
                    *([""] * len(_LAYERKV_RATIOS) if setting == "off" else [row[name] for name in _LAYERKV_RATIOS]),
                ]
            )
    columns = ["requests/s", "LayerKV", "requests", "mean TTFT, ms", "TTFT P50 / P99", "TPOT P50 / P99", "tokens/s"]
    table = _table([*columns, "mean TTFT times lower", "P99 TPOT, ratio", "tokens/s, ratio"], rows)
    plot_layerkv(results, RESULTS / "layerkv.svg")
    return (
        f"{table}\nLoad {results['load']}; the device holds {results['device_holds_sequences']} sequences at their full"
        " length.\n\n![TTFT and TPOT against load](layerkv.svg)\n"
    )


def _prefix(results: Report) -> str:
    rows: list[list[object]] = [
        [tier, _spread(cell), results["times_lower"].get(tier, ""), results["aims_times_lower"].get(tier, "")]
        for tier, cell in results["ttft_ms"].items()
    ]
    return _table([f"{results['prompt']}: prefix found in", "TTFT, ms", "times lower than a miss", "aim"], rows)


def _transports(results: Report) -> str:
    names = list(results["rows"][0])
    return _table(["GB/s: " + names[0], *names[1:]], ([row[name] for name in names] for row in results["rows"]))


def _cluster_headline(results: Report) -> Json:
    return {f"{shape['shape']}, share at 32": shape["rows"][-1]["share_of_in_process"] for shape in results["shapes"]}


def _handoff_headline(results: Report) -> Json:
    idle = [row["exposed_share_of_prefill"] for row in results["rows"] if row["situation"] == "decode idle"]
    return {"largest_exposed_share": max(idle), "smallest_exposed_share": min(idle)}


_TABLES: dict[str, Callable[[Report], str]] = {
    "engine": _engine,
    "quantisation": quantisation_table,
    "cluster": _cluster,
    "handoff": _handoff,
    "gateway": gateway_tables,
    "startup": startup_table,
    "sampling": _sampling,
    "transports": _transports,
    "eviction": _eviction,
    "layerkv": _layerkv,
    "prefix": _prefix,
    "offload": offload_tables,
    "simulator_honesty": honesty_tables,
    **dict.fromkeys(GOODPUT, goodput_tables),
    "decisions": decisions_table,
    "peers": peers_tables,
}
_HEADLINES: dict[str, Callable[[Report], Json]] = {
    "engine": lambda results: {f"speedup at {row['concurrent']}": row["speedup"] for row in results["concurrent"]},
    "quantisation": quantisation_headline,
    "cluster": _cluster_headline,
    "handoff": _handoff_headline,
    "gateway": gateway_headline,
    "startup": startup_headline,
    "sampling": lambda results: {"bf16_same_alone_and_batched": results["bfloat16"][0]["identical"]},
    "eviction": lambda results: {"hit_rates at an eighth": results["rows"][3]},
    "layerkv": lambda results: {
        f"{row['rate']} requests/s": {name: row[name] for name in _LAYERKV_RATIOS} for row in results["rows"]
    },
    "prefix": lambda results: {"times_lower": results["times_lower"]},
    "offload": offload_headline,
    "simulator_honesty": honesty_headline,
    **dict.fromkeys(GOODPUT, goodput_headline),
    "decisions": decisions_headline,
    "peers": peers_headline,
    "transports": lambda results: {"largest_slab": results["rows"][-1]},
}
