"""The reports of `benchmarks.serving.gateway` and `benchmarks.serving.startup` as tables, and their headlines."""

from __future__ import annotations

from benchmarks.common.summary import Json
from benchmarks.report.cells import Report, spread, table, tail


def gateway_tables(results: Report) -> str:
    alone: list[list[object]] = [
        [row["streams"], spread(row["tokens_per_s"]), spread(row["cpu_us_per_token"]), row["tokens_per_read"]]
        for row in results["app_alone"]
    ]
    steady: list[list[object]] = [
        [row["streams"], f"{row['beat_ms']:g}", spread(row["cpu_us_per_token"]), spread(row["tpot_ms"])]
        for row in results["whole_gateway"]
    ]
    flood: list[list[object]] = [
        [row["streams"], spread(row["tokens_per_s"]), spread(row["cpu_us_per_token"]), row["tokens_per_event"]]
        for row in results.get("flood", [])
    ]
    first: list[list[object]] = [[row["beside"], tail(row["ttft_ms"])] for row in results.get("first_token", [])]
    cost = "CPU us per token"
    return "\n".join(
        (
            table(["HTTP app alone: streams", "tokens/s on one core", cost, "tokens per read"], alone),
            table(["whole gateway: streams", "beat, ms", cost, "TPOT at the client, ms"], steady),
            table(["at full speed: streams", "tokens/s on one core", cost, "tokens per event"], flood),
            table(["beside streams of 20 ms a token", "added to a first token, ms, P50 / P99"], first),
        )
    )


def gateway_headline(results: Report) -> Json:
    return {"cpu_us_per_token": results["whole_gateway"][1]["cpu_us_per_token"]["median"]}


def startup_table(results: Report) -> str:
    rows: list[list[object]] = [[name, spread(seconds)] for name, seconds in results["seconds"].items()]
    return f"{results['config']}, {results['cpus']} CPUs, all caches warm.\n\n" + table(["phase", "seconds"], rows)


def startup_headline(results: Report) -> Json:
    return {"first_token_s": results["seconds"]["total"]["median"]}
