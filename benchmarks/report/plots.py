"""Plots beside the reports, as SVG files: curves against load, and bars of peers with the range of the repeats.

Who plots imports it then: matplotlib takes a second or two.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

plt.rcParams["svg.hashsalt"] = "legato"  # the same figures are the same file


def plot_layerkv(results: dict[str, Any], path: Path) -> None:
    """TTFT (mean, P99) and TPOT (P50, P99) over the rate of requests, LayerKV off and on."""
    rows = results["rows"]
    rates = [row["rate"] for row in rows]
    figure, (ttft, tpot) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for setting, color in (("off", "tab:red"), ("on", "tab:blue")):
        cells = [row[setting] for row in rows]
        ttft.plot(rates, [c["mean_ttft_ms"] / 1000 for c in cells], "o-", color=color, label=f"LayerKV {setting}, mean")
        ttft.plot(rates, [c["ttft_ms"]["p99"] / 1000 for c in cells], "x--", color=color, label=f"{setting}, P99")
        tpot.plot(rates, [c["tpot_ms"]["p50"] for c in cells], "o-", color=color, label=f"LayerKV {setting}, P50")
        tpot.plot(rates, [c["tpot_ms"]["p99"] for c in cells], "x--", color=color, label=f"{setting}, P99")
    ttft.set(yscale="log", xlabel="requests/s", ylabel="TTFT, s", title=results["load"])
    tpot.set(ylim=(0, None), xlabel="requests/s", ylabel="TPOT, ms", title="time per output token")
    for axes in (ttft, tpot):
        axes.grid(visible=True, alpha=0.3)
        axes.legend()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


# (work, figure, title)
_RATES = (
    ("one stream 128 -> 128", "decode_tokens_per_s", "one stream, tokens/s"),
    ("prefill 512", "tokens_per_s", "prefill 512, tokens/s"),
    ("prefill 2048", "tokens_per_s", "prefill 2,048, tokens/s"),
    ("prefill 8000", "tokens_per_s", "prefill 8,000, tokens/s"),
    ("8 concurrent 256 -> 128", "output_tokens_per_s", "8 concurrent, output tokens/s"),
    ("32 concurrent 256 -> 128", "output_tokens_per_s", "32 concurrent, output tokens/s"),
    ("8 concurrent 256 -> 128", "all_tpot_ms", "8 concurrent: TPOT, ms, to P99"),
    ("32 concurrent 256 -> 128", "all_tpot_ms", "32 concurrent: TPOT, ms, to P99"),
    ("32 concurrent 256 -> 128", "all_ttft_ms", "32 concurrent: TTFT, ms, to P99"),
)


def plot_peers(works: dict[str, dict[str, tuple[int, Any]]], path: Path) -> None:
    """Plot each peer's last figures, as `merged.latest` has them; nothing where nothing of it was measured."""
    shown = [(work, figure, title) for work, figure, title in _RATES if work in works]
    if not shown:
        return
    num_rows = -(-len(shown) // 3)
    figure, grid = plt.subplots(num_rows, 3, figsize=(15, 3.2 * num_rows), layout="constrained", squeeze=False)
    for axes in grid.flat[len(shown) :]:
        axes.set_visible(False)
    for axes, (work, key, title) in zip(grid.flat, shown, strict=False):
        _bars(axes, {name: cell[key] for name, (_, cell) in works[work].items() if key in cell}, title)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _bars(axes: Any, cells: dict[str, dict[str, float]], title: str) -> None:
    names = list(cells)
    middles = [cell.get("median", cell.get("p50", 0.0)) for cell in cells.values()]
    lows = [middle - cell.get("min", middle) for middle, cell in zip(middles, cells.values(), strict=True)]
    highs = [
        cell.get("max", cell.get("p99", middle)) - middle for middle, cell in zip(middles, cells.values(), strict=True)
    ]
    colors = ["tab:blue" if name.startswith("legato") else "tab:gray" for name in names]
    axes.barh(names, middles, xerr=[lows, highs], color=colors, capsize=3)
    axes.invert_yaxis()
    axes.set_title(title)
    axes.grid(visible=True, axis="x", alpha=0.3)
