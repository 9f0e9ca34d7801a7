"""Simulations as SVG files: what requests saw over time, or against load. Needs matplotlib, which serving does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

import matplotlib
import numpy as np

from cluster.simulation.records import RequestRecord, Summary

matplotlib.use("svg")
from matplotlib import pyplot as plt
from matplotlib.axes import Axes

_MOST_BINS: Final = 60
_REQUESTS_PER_BIN: Final = 20  # on average, so that a P95 means something
_QUANTILES: Final = ((0.5, "-"), (0.95, "--"))


def plot_over_time(runs: Mapping[str, Sequence[RequestRecord]], path: Path) -> None:
    """TTFT, TPOT and goodput of each run, by the time at which requests first arrived."""
    records = next(iter(runs.values()))
    edges = _edges(records)
    _, (ttft, tpot, good) = plt.subplots(3, 1, figsize=(9, 9), sharex=True, layout="constrained")
    offered = np.histogram([r.first_arrival_s for r in records], edges)[0]
    good.stairs(offered / np.diff(edges), edges, color="tab:gray", alpha=0.6, label="offered")
    for index, (name, run) in enumerate(runs.items()):
        color = f"C{index}"
        _quantiles(ttft, edges, run, lambda r: r.ttft_s, name, color)
        _quantiles(tpot, edges, run, lambda r: None if r.tpot_s is None else 1000 * r.tpot_s, name, color)
        met = np.histogram([r.first_arrival_s for r in run if r.is_met], edges)[0]
        good.stairs(met / np.diff(edges), edges, color=color, label=name)
    ttft.set(ylabel="TTFT, s", yscale="log")
    tpot.set(ylabel="TPOT, ms", ylim=(0, None))
    good.set(ylabel="requests/s in time", xlabel="arrival, s", ylim=(0, None))
    _save(path, (ttft, tpot, good))


def plot_over_load(runs: Mapping[str, Sequence[tuple[float, Summary]]], path: Path) -> None:
    """P50 and P95 of TTFT and TPOT, and goodput, of each run against its factor on the load."""
    _, (ttft, tpot, good) = plt.subplots(1, 3, figsize=(13, 4), layout="constrained")
    for index, (name, points) in enumerate(runs.items()):
        loads, color = [load for load, _ in points], f"C{index}"
        cells = [summary.overall for _, summary in points]
        for axes, label, times, factor in (
            (ttft, name, [c.ttft for c in cells], 1),
            (tpot, name, [c.tpot for c in cells], 1000),
        ):
            axes.plot(loads, [factor * t.p50 for t in times], "o-", color=color, label=f"{label}, P50")
            axes.plot(loads, [factor * t.p95 for t in times], "x--", color=color, label=f"{label}, P95")
        good.plot(loads, [cell.goodput for cell in cells], "o-", color=color, label=name)
    offered = [(load, summary.offered_per_s) for load, summary in next(iter(runs.values()))]
    good.plot(*zip(*offered, strict=True), ":", color="tab:gray", label="offered")
    ttft.set(ylabel="TTFT, s", yscale="log", xlabel="load")
    tpot.set(ylabel="TPOT, ms", ylim=(0, None), xlabel="load")
    good.set(ylabel="requests/s in time", ylim=(0, None), xlabel="load")
    _save(path, (ttft, tpot, good))


def _edges(records: Sequence[RequestRecord]) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    first, last = records[0].first_arrival_s, records[-1].first_arrival_s
    num_bins = min(_MOST_BINS, max(1, len(records) // _REQUESTS_PER_BIN))
    return np.linspace(first, max(last, first + 1e-3), num_bins + 1)


def _quantiles(
    axes: Axes,
    edges: np.ndarray[tuple[int], np.dtype[np.float64]],
    records: Sequence[RequestRecord],
    value_of: Callable[[RequestRecord], float | None],
    name: str,
    color: str,
) -> None:
    """A gap where nobody was served."""
    bins: list[list[float]] = [[] for _ in edges[1:]]
    for record in records:
        value = value_of(record)
        if value is not None:
            index = int(np.searchsorted(edges, record.first_arrival_s, side="right")) - 1
            bins[min(index, len(bins) - 1)].append(value)
    middles = (edges[1:] + edges[:-1]) / 2
    for quantile, style in _QUANTILES:
        values = [float(np.quantile(held, quantile)) if held else np.nan for held in bins]
        axes.plot(middles, values, style, color=color, label=f"{name}, P{100 * quantile:.0f}")


def _save(path: Path, panels: Sequence[Axes]) -> None:
    for axes in panels:
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    plt.savefig(path, format="svg", metadata={"Date": None})
    plt.close()
