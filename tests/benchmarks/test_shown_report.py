"""What showing costs, of rounds: by what is shown, beside the cluster that shows nothing."""

from __future__ import annotations

from benchmarks.report.table import shown_table
from benchmarks.serving.shown import told

RATES = {
    "nothing": [100.0, 200.0, 300.0],
    "metrics": [99.0, 197.0, 306.0],
    "metrics, one at the board": [95.0, 190.0, 276.0],
}


def test_the_cost_is_of_each_round_and_of_the_medians() -> None:
    results = told(RATES)
    shown = shown_table(results)
    assert "| metrics | 197 [99–306] | 1 [-2–1.5] | 1.5 | yes |" in shown
    assert "| metrics, one at the board | 190 [95–276] | 5 [5–8] | 5.0 | no |" in shown
