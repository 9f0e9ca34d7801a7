"""The tables of `benchmarks.engine.offload`, and the two numbers that aims are set for."""

from __future__ import annotations

from benchmarks.common.summary import Json
from benchmarks.report.cells import Report, spread, table


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
