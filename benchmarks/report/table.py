"""The stored reports as one page for people: `benchmarks/results/README.md`. Measures nothing, judges nothing.

A cell is `median [min-max]` of the repeats.
"""

from __future__ import annotations

import json
from collections.abc import Callable

from benchmarks.common.part import ROOT, Json
from benchmarks.report.cells import IN_TIME_COLUMNS, Report, gap_tail, in_time, promised, spread, table, tail
from benchmarks.report.goodput import (
    GOODPUT,
    OLD,
    decisions_headline,
    decisions_table,
    goodput_headline,
    goodput_tables,
    swing_headline,
    swing_table,
)
from benchmarks.report.peers import peers_headline, peers_tables


def gateway_tables(results: Report) -> str:
    alone: list[list[object]] = [
        [row["streams"], spread(row["tokens_per_s"]), spread(row["cpu_us_per_token"]), row["tokens_per_read"]]
        for row in results["app_alone"]
    ]
    steady: list[list[object]] = [
        [row["streams"], f"{row['beat_ms']:g}", spread(row["cpu_us_per_token"]), spread(row["tpot_ms"]), gap_tail(row)]
        for row in results["whole_gateway"]
    ]
    flood: list[list[object]] = [
        [row["streams"], spread(row["tokens_per_s"]), spread(row["cpu_us_per_token"]), row["tokens_per_event"]]
        for row in results.get("flood", [])
    ]
    first: list[list[object]] = [[row["beside"], tail(row["ttft_ms"])] for row in results.get("first_token", [])]
    cost = "CPU us per token"
    tables = [
        table(["HTTP app alone: streams", "tokens/s on one core", cost, "tokens per read"], alone),
        table(["whole gateway: streams", "beat, ms", cost, "TPOT at the client, ms", "gaps P50 / P99"], steady),
        table(["at full speed: streams", "tokens/s on one core", cost, "tokens per event"], flood),
        table(["beside streams of 20 ms a token", "added to a first token, ms, P50 / P99"], first),
    ]
    if "board" in results:  # older reports have neither
        tables.append(_board(results["board"]))
    if "timelines" in results:
        tables.append(_timelines(results["timelines"]))
    return "\n".join(tables)


def _board(found: list[Report]) -> str:
    rows: list[list[object]] = [
        [
            row["viewers"],
            row["streams"],
            spread(row["core_percent"]),
            spread(row["more_core_percent"]),
            tail(row["late_ms"]),
            gap_tail(row),
        ]
        for row in found
    ]
    columns = [
        "board: viewers",
        "streams of 20 ms a token",
        "% of a core",
        "more than without",
        "from the worker's beat to the client's socket, ms, P50 / P99",
        "gaps P50 / P99",
    ]
    return table(columns, rows)


def _timelines(found: Report) -> str:
    rows: list[list[object]] = [
        [
            where,
            clock["within_2_ms"],
            f"{clock['p50_ms']:g} / {clock['p99_ms']:g}",
            f"{clock['min_ms']:g} / {clock['max_ms']:g}",
        ]
        for where, clock in (("its socket", found["socket"]), ("its reading", found["client"]))
    ]
    columns = ["timelines: the client's clock, by", "within 2 ms", "client minus timeline, ms, P50 / P99", "min / max"]
    return table(columns, rows) + f"\n{found['retried']} were tried again, {found['preempted']} preempted.\n"


def gateway_headline(results: Report) -> Json:
    return {"cpu_us_per_token": results["whole_gateway"][1]["cpu_us_per_token"]["median"]}


def shown_table(results: Report) -> str:
    """Reports from before processes were told apart have the clock's figures only."""
    rates: list[list[object]] = [
        [
            row["shown"],
            spread(row["output_tokens_per_s"]),
            row.get("fewer_percent", row.get("cost_of_medians_percent")),
            row.get("allowed_tokens_per_s", "–"),
            row.get("fewer_allowed_percent", "–"),
            "yes" if row["reaches_aim"] else "no",
        ]
        for row in results["rows"]
    ]
    columns = [f"shown; {results['streams']} streams, {results['load']}", "output tokens/s by the clock", "% fewer"]
    columns += ["by processor time", "% fewer", results["aim"]]
    tables = [table(columns, rates)]
    for told, name in (("of a core while idle, %", "idle_core_percent"), ("ms a token beside that", "token_ms")):
        if name in results["rows"][0]:
            spent: list[list[object]] = [[row["shown"], *row[name].values()] for row in results["rows"]]
            tables.append(table([told, *results["rows"][0][name]], spent))
    return "\n".join(tables)


def shown_headline(results: Report) -> Json:
    return {
        row["shown"]: row.get("fewer_allowed_percent", row.get("cost_of_medians_percent")) for row in results["rows"]
    }


def startup_table(results: Report) -> str:
    rows: list[list[object]] = [[name, spread(seconds)] for name, seconds in results["seconds"].items()]
    return f"{results['config']}, {results['cpus']} CPUs, all caches warm.\n\n" + table(["phase", "seconds"], rows)


def startup_headline(results: Report) -> Json:
    return {"first_token_s": results["seconds"]["total"]["median"]}


HONESTY = ("simulator_honesty", "simulator_honesty_colocated", "simulator_honesty_automatic")


def honesty_tables(results: Report) -> str:
    rows: list[list[object]] = [
        [row["what"], f"{row['measured']:g}", f"{row['simulated']:g}", f"{row['error']:+.1%}"]
        for row in results["rows"]
    ]
    overheads, prediction = results["overheads"], results["prediction"]
    told = (
        f"{results['judged']} of {results['requests']} requests within {results['duration_s']:g} s. Measured on lone "
        f"requests before: {1e3 * overheads['gateway_s']:.1f} ms of HTTP and gateway, "
        f"{1e3 * overheads['handoff_s']:.1f} ms of hand-off.\n"
    )
    predicted = (
        f"TTFT as predicted at placement ({prediction['requests']} requests): off by {prediction['median']:.1%} in the "
        f"median, {prediction['p90']:.1%} at P90.\n"
    )
    columns = [results.get("layout", "one prefill and one decode worker"), "measured", "simulated", "error"]
    answers = results.get("answers", {})
    by_tpot, by_gaps = in_time(answers)
    kept = f"Requests / output tokens in time by TTFT and TPOT: {by_tpot}; by TTFT and gaps: {by_gaps}.\n"
    return "\n".join([table(columns, rows), told, predicted, *([promised(answers) + kept] if answers else [])])


def honesty_headline(results: Report) -> Json:
    return {
        "errors": {row["what"]: row["error"] for row in results["rows"]},
        "prediction": {name: results["prediction"][name] for name in ("median", "p90")},
    }


def offload_tables(results: Report) -> str:
    decode: list[list[object]] = [
        [
            row["host_groups"],
            spread(row["tpot_ms"]),
            row["over_device"],
            f"{row['undisturbed']['over_device']} ({row['undisturbed']['steps']})",
            row["computed_and_waited_over_device"],
            spread(row["copied_ms"]),
            spread(row["waited_ms"]),
        ]
        for row in results["decode"]["rows"]
    ]
    prefill: list[list[object]] = [
        [
            row["prompt_tokens"],
            row["ring"],
            spread(row["device_ms"]),
            spread(row["copied_ms"]),
            spread(row["waited_ms"]),
            f"{row['waited_share_of_copying']:.1%}",
            spread(row["slower_ms"]),
            spread(row["more_compute_ms"]),
            f"{row['slower_share_of_prefill']:.1%}",
        ]
        for row in results["prefill"]["rows"]
    ]
    decode_columns = [
        "groups in host memory",
        "TPOT, ms",
        "over the device's",
        "undisturbed (steps)",
        "computed + waited",
    ]
    prefill_columns = ["prompt tokens", "ring", "on the device, ms", "copied, ms", "waited, ms", "waited of copied"]
    return (
        f"Decode: {results['decode']['load']}.\n\n"
        + table([*decode_columns, "copied, ms", "waited, ms"], decode)
        + f"\nPrefill: {results['prefill']['load']}.\n\n"
        + table([*prefill_columns, "longer by, ms", "more CPU time, ms", "longer by"], prefill)
    )


def offload_headline(results: Report) -> Json:
    half = next(row for row in results["decode"]["rows"] if row["host_groups"] == "every other")
    waited = [row["waited_share_of_copying"] for row in results["prefill"]["rows"] if row["ring"] == "2 slots"]
    return {"decode_half_over_device": half["over_device"], "prefill_largest_waited_share": max(waited)}


def quantisation_table(results: Report) -> str:
    columns = ["weights", "MB", "perplexity", "top-1 as bfloat16, %", "one stream, tokens/s", "of bfloat16's"]
    columns += ["prefill 512, tokens/s", "8 concurrent, output tokens/s"]
    rows: list[list[object]] = []
    for name, quality in results["quality"].items():
        speed = results["speed"][name]
        rows.append(
            [
                name,
                results["weight_megabytes"][name],
                quality["perplexity"],
                quality["top1_agreement_percent"],
                spread(speed["single_decode_tokens_per_s"]),
                speed["single_speedup"],
                spread(speed["prefill_512_tokens_per_s"]),
                spread(speed["concurrent_8_tokens_per_s"]),
            ]
        )
    head = f"{results['model']}, {results['threads']} threads; a text of {results['text_tokens']} tokens.\n\n"
    return head + table(columns, rows)


def quantisation_headline(results: Report) -> Json:
    return {
        name: {"perplexity": row["perplexity"], "single_speedup": results["speed"][name]["single_speedup"]}
        for name, row in results["quality"].items()
    }


def speculation_table(results: Report) -> str:
    columns = ["work", "at once", "times", "by steps in turns", "tokens/s", "without drafts", "tokens a step"]
    columns += ["drafted", "accepted"]
    rows = [
        [
            row["work"],
            row["streams"],
            row["times"],
            row.get("by_steps", {}).get("times", ""),
            spread(row["tokens_per_s"]),
            spread(row["without_tokens_per_s"]),
            row["tokens_per_step"],
            row["drafted"],
            row["accepted"],
        ]
        for row in results["rows"]
    ]
    head = f"{results['model']}, bfloat16, {results['threads']} threads, {results['output_tokens']} tokens each.\n\n"
    return head + table(columns, rows)


def speculation_headline(results: Report) -> Json:
    return {f"{row['work']}, {row['streams']} at once": row["times"] for row in results["rows"]}


RESULTS = ROOT / "benchmarks" / "results"


def write_table() -> None:
    """Write the page from whatever is stored: each part keeps the commit and the time that it was measured at. A `note`
    in a stored report says what has changed since; the next measurement replaces it."""
    stored = _stored()
    sections = [_section(part, report) for part, report in stored.items()]
    sections.append(f"## goodput: what was stored before\n\n{OLD}")
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
    note = f"{report['note']}\n\n" if "note" in report else ""
    return f"## {part}\n\n{where}\n\n{note}{body}"


def _engine(results: Report) -> str:
    single, ceiling = results["single_stream"], results["ceiling"]
    rows: list[list[object]] = [
        [
            f"one stream {single['load']}: {name}",
            spread(single["legato"][key]),
            spread(single["hugging_face"][key]),
            up,
        ]
        for name, key, up in (
            ("TTFT, ms", "ttft_ms", single["speedup"]["ttft"]),
            ("TPOT, ms", "tpot_ms", single["speedup"]["tpot"]),
        )
    ]
    rows += _beside_hugging_face(results)
    bound = (
        f"Memory reads at {ceiling['memory_read_gb_per_s']} GB/s, so one stream could decode at most "
        f"{ceiling['single_stream_bound_tokens_per_s']} tokens/s; bfloat16 products at "
        f"{ceiling['matmul_bf16_tflops']} TFLOP/s.\n"
    )
    return table(["bf16, 2 threads", "Legato", "Hugging Face", "times as fast"], rows) + "\n" + bound


def _experts(results: Report) -> str:
    columns = [f"{results['model']}; bf16, 2 threads", "Legato", "Hugging Face", "times as fast"]
    return table(columns, _beside_hugging_face(results))


def _beside_hugging_face(results: Report) -> list[list[object]]:
    rows: list[list[object]] = [
        [
            f"{row['concurrent']} concurrent {row['load']}: output tokens/s",
            spread(row["legato"]["output_tokens_per_s"]),
            spread(row["hugging_face"]["output_tokens_per_s"]),
            row["speedup"],
        ]
        for row in results["concurrent"]
    ]
    rows += [
        [
            f"prefill {row['prompt_tokens']}: tokens/s",
            spread(row["legato_tokens_per_s"]),
            spread(row["hugging_face_tokens_per_s"]),
            row["speedup"],
        ]
        for row in results["prefill"]
    ]
    return rows


def _cluster(results: Report) -> str:
    rows: list[list[object]] = []
    for shape in results["shapes"]:
        for row in shape["rows"]:
            http, local = row["http"], row["in_process"]
            rows.append(
                [
                    shape["shape"],
                    row["concurrent"],
                    spread(http["output_tokens_per_s"]),
                    spread(local["output_tokens_per_s"]),
                    f"{row['share_of_in_process']:.0%}",
                    tail(http["ttft_ms"]),
                    tail(http["tpot_ms"]),
                    gap_tail(http),
                    *in_time(http),
                    tail(local["tpot_ms"]),
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
        "gaps",
        *IN_TIME_COLUMNS,
        "in-process TPOT",
    ]
    shown = table(columns, rows) + f"\nHugging Face `generate` in the same run, output tokens/s: {peers}.\n"
    return shown + promised(results["shapes"][0]["rows"][0]["http"])


def _handoff(results: Report) -> str:
    rows: list[list[object]] = [
        [
            row["transport"],
            row["situation"],
            row["prompt_tokens"],
            f"{row['kv_bytes'] / 1e6:.1f}",
            spread(row["prefill_ms"]),
            spread(row["exposed_ms"]),
            f"{row['exposed_share_of_prefill']:.1%}",
            f"{row['hidden_share_of_bytes']:.0%}",
            spread(row["gb_per_s"]),
        ]
        for row in results["rows"]
    ]
    columns = ["transport", "situation", "prompt tokens", "KV, MB", "prefill, ms", "exposed, ms", "of prefill"]
    digest = results["digest"]
    cost = f"{digest['gb_per_s']} GB/s on slabs of {digest['slab_bytes']} bytes, at each end"
    shown = table([*columns, "bytes hidden", "GB/s, ticket to verified"], rows)
    return f"{shown}\nDigest ({digest['name']}): {cost}.\n"


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
    return table([*columns, "log-probability differs by, median / max"], rows)


def _grammars(results: Report) -> str:
    rows: list[list[object]] = [
        [f"{row['temperature']:g}", spread(row["without"]), spread(row["with"]), f"{row['lost']:.1%}"]
        for row in results["rows"]
    ]
    shown = table(["temperature", "tokens/s without", "under a schema", "lost"], rows)
    compiling = results["compile"]
    times = table(
        ["compiling, ms", "P50", "P90", "P99", "most"], [[by, *ms.values()] for by, ms in compiling["ms"].items()]
    )
    return (
        f"{shown}\n{results['streams']}. JSONSchemaBench: {compiling['served']} of {compiling['schemas']} served; all:"
        f" with those that are refused.\n\n{times}"
    )


def _eviction(results: Report) -> str:
    rows: list[list[object]] = [
        [f"{value:.1%}" if isinstance(value, float) else value for value in row.values()] for row in results["rows"]
    ]
    shown = table(["blocks found, of all: capacity", *list(results["rows"][0])[1:]], rows)
    costs = ", ".join(f"{name} {spread(cost)}" for name, cost in results["us_per_block"].items())
    return (
        f"{shown}\nTrace {results['trace']}: {results['prompts']} prompts, {results['blocks']} full blocks; "
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
                    tail(cell["ttft_ms"]),
                    tail(cell["tpot_ms"]),
                    gap_tail(cell),
                    *in_time(cell),
                    cell["output_tokens_per_s"],
                    *([""] * len(_LAYERKV_RATIOS) if setting == "off" else [row[name] for name in _LAYERKV_RATIOS]),
                ]
            )
    columns = ["requests/s", "LayerKV", "requests", "mean TTFT, ms", "TTFT P50 / P99", "TPOT P50 / P99", "gaps"]
    columns += [*IN_TIME_COLUMNS, "tokens/s"]
    shown = table([*columns, "mean TTFT times lower", "P99 TPOT, ratio", "tokens/s, ratio"], rows)
    from benchmarks.report.plots import plot_layerkv

    plot_layerkv(results, RESULTS / "layerkv.svg")
    return (
        f"{shown}\nLoad {results['load']}; the device holds {results['device_holds_sequences']} sequences at their full"
        f" length. {promised(results['rows'][0]['on'])}\n\n"
        "![TTFT and TPOT against load](layerkv.svg)\n"
    )


def _prefix(results: Report) -> str:
    rows: list[list[object]] = [
        [tier, spread(cell), results["times_lower"].get(tier, ""), results["aims_times_lower"].get(tier, "")]
        for tier, cell in results["ttft_ms"].items()
    ]
    return table([f"{results['prompt']}: prefix found in", "TTFT, ms", "times lower than a miss", "aim"], rows)


def _gaps(results: Report) -> str:
    told = {"promised": f"{results['promised_gap_ms']} ms", "nothing": "nothing"}
    rows: list[list[object]] = [
        [what, tail(results[name]["gap_ms"]), results[name]["prompt_tokens_per_s"]] for name, what in told.items()
    ]
    shown = table([f"{results['load']}: promised gap", "gaps P50 / P99, ms", "prompt tokens/s"], rows)
    return f"{shown}\nPrompts at {results['prompts_share']:g} of their speed with nothing promised.\n"


def _adapters(results: Report) -> str:
    streams, cold = results["streams"], results["cold"]
    rows: list[list[object]] = [[name, spread(streams[name])] for name in ("base", "adapters")]
    shown = table([streams["load"], "output tokens/s"], rows)
    rows = [
        [what, *(spread(found[name]) for name in ("cold_ms", "warm_ms", "later_ms"))] for what, found in cold.items()
    ]
    later = table(["an adapter that is not in memory", "TTFT, ms", "of its next request", "later"], rows)
    return f"{shown}\nWith adapters {streams['share']:g} of the model's tokens/s.\n\n{later}"


def _transports(results: Report) -> str:
    names = list(results["rows"][0])
    return table(["GB/s: " + names[0], *names[1:]], ([row[name] for name in names] for row in results["rows"]))


def _speedups(results: Report) -> Json:
    return {f"speedup at {row['concurrent']}": row["speedup"] for row in results["concurrent"]}


def _cluster_headline(results: Report) -> Json:
    return {f"{shape['shape']}, share at 32": shape["rows"][-1]["share_of_in_process"] for shape in results["shapes"]}


def _handoff_headline(results: Report) -> Json:
    idle = [row["exposed_share_of_prefill"] for row in results["rows"] if row["situation"] == "decode idle"]
    return {"largest_exposed_share": max(idle), "smallest_exposed_share": min(idle)}


_TABLES: dict[str, Callable[[Report], str]] = {
    "engine": _engine,
    "experts": _experts,
    "quantisation": quantisation_table,
    "speculation": speculation_table,
    "draft_model": speculation_table,
    "cluster": _cluster,
    "handoff": _handoff,
    "gateway": gateway_tables,
    "startup": startup_table,
    "sampling": _sampling,
    "grammars": _grammars,
    "transports": _transports,
    "eviction": _eviction,
    "layerkv": _layerkv,
    "gaps": _gaps,
    "adapters": _adapters,
    "prefix": _prefix,
    "offload": offload_tables,
    "shown": shown_table,
    **dict.fromkeys(HONESTY, honesty_tables),
    **dict.fromkeys(GOODPUT, goodput_tables),
    "decisions": decisions_table,
    "model_swing": swing_table,
    "peers": peers_tables,
}
_HEADLINES: dict[str, Callable[[Report], Json]] = {
    "engine": _speedups,
    "experts": _speedups,
    "quantisation": quantisation_headline,
    "speculation": speculation_headline,
    "draft_model": speculation_headline,
    "cluster": _cluster_headline,
    "handoff": _handoff_headline,
    "gateway": gateway_headline,
    "startup": startup_headline,
    "sampling": lambda results: {"bf16_same_alone_and_batched": results["bfloat16"][0]["identical"]},
    "grammars": lambda results: {
        "lost": [row["lost"] for row in results["rows"]],
        "compile_p99_ms": {by: ms["p99"] for by, ms in results["compile"]["ms"].items()},
    },
    "eviction": lambda results: {"hit_rates at an eighth": results["rows"][3]},
    "layerkv": lambda results: {
        f"{row['rate']} requests/s": {name: row[name] for name in _LAYERKV_RATIOS} for row in results["rows"]
    },
    "gaps": lambda results: {
        "promised_p99_gap_ms": results["promised"]["gap_ms"]["p99"],
        "prompts_share": results["prompts_share"],
    },
    "adapters": lambda results: {
        "streams_share": results["streams"]["share"],
        "cold_later_ms": {what: found["later_ms"]["median"] for what, found in results["cold"].items()},
    },
    "prefix": lambda results: {"times_lower": results["times_lower"]},
    "offload": offload_headline,
    "shown": shown_headline,
    **dict.fromkeys(HONESTY, honesty_headline),
    **dict.fromkeys(GOODPUT, goodput_headline),
    "decisions": decisions_headline,
    "model_swing": swing_headline,
    "peers": peers_headline,
    "transports": lambda results: {"largest_slab": results["rows"][-1]},
}
