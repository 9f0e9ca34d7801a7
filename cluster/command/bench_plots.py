"""What clients of `legato bench` saw, as an SVG file. Needs matplotlib, which serving does not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np

from cluster.command.bench import Sent
from cluster.load.timing import MS
from cluster.slo.classes import SloClass

matplotlib.use("svg")
from matplotlib import pyplot as plt


def plot(answered: Sequence[Sent], promise: SloClass, path: Path) -> None:
    """First tokens over time, and how TTFT, TPOT and gaps are distributed, each beside its target."""
    figure, panels = plt.subplots(2, 2, figsize=(11, 7), layout="constrained")
    ttft, tpot, gaps = panels[0][1], panels[1][0], panels[1][1]
    timings = [sent.timing for sent in answered if sent.timing is not None]
    panels[0][0].plot([sent.sent_s for sent in answered], [timing.ttft_s / MS for timing in timings], ".", markersize=4)
    panels[0][0].set(xlabel="sent, s", ylabel="TTFT, ms")
    for axes, name, values, target_s in (
        (ttft, "TTFT", [timing.ttft_s for timing in timings], promise.ttft_s),
        (tpot, "TPOT", [timing.tpot_s for timing in timings if timing.num_tokens > 1], promise.tpot_s),
        (gaps, "gap", [gap_s for timing in timings for gap_s in timing.gaps_s], promise.gap_s),
    ):
        ordered = np.sort(np.array(values)) / MS
        if len(ordered):
            axes.step(ordered, np.arange(1, len(ordered) + 1) / len(ordered), where="post")
        if target_s is not None:
            axes.axvline(target_s / MS, color="tab:red", linestyle="--", label="target")
            axes.legend(fontsize="small")
        axes.set(xlabel=f"{name}, ms", ylabel="share of all", ylim=(0, 1.02))
    for axes in panels.flat:
        axes.grid(visible=True, alpha=0.3)
    figure.savefig(path, format="svg", metadata={"Date": None})
    plt.close(figure)
