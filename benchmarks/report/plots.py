"""Curves against load as SVG files beside the reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("svg")
from matplotlib import pyplot as plt

plt.rcParams["svg.hashsalt"] = "legato"  # the same curves are the same file


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
