"""The report of `simulator_honesty` as tables, and the numbers that aims are set for."""

from __future__ import annotations

from benchmarks.common.summary import Json
from benchmarks.report.cells import Report, table


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
    columns = ["one prefill and one decode worker", "measured", "simulated", "error"]
    return "\n".join([table(columns, rows), told, predicted])


def honesty_headline(results: Report) -> Json:
    return {
        "errors": {row["what"]: row["error"] for row in results["rows"]},
        "prediction": {name: results["prediction"][name] for name in ("median", "p90")},
    }
