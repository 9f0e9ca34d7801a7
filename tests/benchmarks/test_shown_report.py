"""What showing costs, of turns: by what is shown, beside the cluster that shows nothing."""

from __future__ import annotations

from benchmarks.common.cluster_cpu import Usage, spent_s
from benchmarks.report.table import shown_table
from benchmarks.serving.shown import Turn, told


def _turns(rates: list[float], idle: float, gateway_s: float, steps_s: float, dashboard: float) -> list[Turn]:
    """Of a thousand tokens `gateway_s` and `steps_s` are what they take beside what is spent all the time."""
    at_rest = {"workers beside steps": 0.0, "gateway": idle, "dashboard": dashboard}
    return [
        Turn(
            rate,
            {
                "steps": steps_s,
                "workers beside steps": 0.25,
                "gateway": gateway_s + 1000 / rate * idle,
                "dashboard": 1000 / rate * dashboard,
            },
            at_rest,
        )
        for rate in rates
    ]


def test_what_the_processors_time_allows_is_told_beside_the_clocks() -> None:
    """Of two cores: (2 - 0.1) / (4.25 + 0.5) is 400 tokens a second, and (2 - 0.15) / (4.25 + 0.75) 370."""
    turns = {
        "nothing": _turns([100.0, 200.0, 300.0], 0.1, 0.5, 4.0, 0.0),
        "metrics": _turns([99.0, 197.0, 306.0], 0.1, 0.5, 4.5, 0.3),
        "metrics, one at the board": _turns([95.0, 190.0, 276.0], 0.15, 0.75, 3.5, 0.0),
    }
    shown = shown_table(told(turns, num_cores=2))
    assert "| nothing | 200 [100–300] | 0.0 | 400.0 | 0.0 | yes |" in shown
    assert "| metrics | 197 [99–306] | 1.5 | 400.0 | 0.0 | yes |" in shown, "a dashboard's own are counted apart"
    assert "| metrics, one at the board | 190 [95–276] | 5.0 | 370.0 | 7.5 | no |" in shown
    assert "| of a core while idle, % | workers beside steps | gateway | dashboard |" in shown
    assert "| metrics | 0.0 | 10.0 | 30.0 |" in shown
    assert "| ms a token beside that | steps | workers beside steps | gateway | dashboard |" in shown


def test_a_workers_busiest_thread_computes() -> None:
    before = {1: Usage("workers beside steps", 5.0, {11: 4.0, 12: 1.0}), 2: Usage("gateway", 1.0, {})}
    after = {
        1: Usage("workers beside steps", 9.5, {11: 4.5, 12: 4.0, 13: 1.0}),
        2: Usage("gateway", 1.5, {}),
        3: Usage("scheduler", 0.25, {}),
    }
    spent = spent_s(before, after)
    assert {who: s for who, s in spent.items() if s} == {
        "steps": 3.0,
        "workers beside steps": 1.5,
        "gateway": 0.5,
        "scheduler": 0.25,
    }
