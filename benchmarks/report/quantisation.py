"""The report of `benchmarks.engine.quantisation` as a table, and its headline."""

from __future__ import annotations

from benchmarks.common.summary import Json
from benchmarks.report.cells import Report, spread, table


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
