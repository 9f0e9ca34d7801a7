"""The goodput benchmark finds where attainment falls, on drawn requests, and targets that follow lengths."""

from __future__ import annotations

import pytest

from benchmarks.goodput import ATTAINMENT, Setting, attainment, highest_load
from engine.roofline import H100_SXM, LLAMA_3_1_8B, roofline_cost


def _setting(stretch: float = 0.0) -> Setting:
    return Setting(trace="azure", path=None, per_pool=1, num_requests=150, first=(1,), steps=2, stretch=stretch)


def test_the_load_found_is_served_and_a_multiple_of_it_is_not() -> None:
    setting = _setting()
    load = highest_load(setting, "round-robin", 1)
    assert load > 0.0
    assert attainment(setting, "round-robin", load, 1) >= ATTAINMENT
    assert attainment(setting, "round-robin", 8 * load, 1) < ATTAINMENT


@pytest.mark.parametrize("router", ["legato", "legato-strict"])
def test_an_idle_cluster_serves_all_in_time(router: str) -> None:
    assert attainment(_setting(), router, 0.1, 1) == 1.0


def test_targets_follow_lengths_where_that_is_asked_for() -> None:
    cost = roofline_cost(LLAMA_3_1_8B, H100_SXM)
    assert {c.ttft_s for c in _setting().slo(cost).classes} == {2.0}
    by_length = [c.ttft_s for c in _setting(2.0).slo(cost).classes]
    assert by_length[0] == 2.0
    assert by_length == sorted(by_length, key=lambda ttft_s: ttft_s or 0.0)
    assert by_length[-1] == pytest.approx(2.0 * cost.prefill_s(131_072, 0.0, 2048))
    names = {request.slo_class for request in _setting(2.0).requests(1, 1.0)}
    assert names <= {c.name for c in _setting(2.0).slo(cost).classes}
