"""Predictions against hand arithmetic: prompts with hits in each tier, shared steps, memory, losses."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.placement.filter import PromptForecast, filter_workers, forecast_prompt
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.placement.tpot_forecast import (
    DecodeForecast,
    forecast_decode,
    log_fit_probability,
    log_probability,
)
from cluster.scheduler.placement.worker_table import Fact, Slot
from tests.cluster.scheduler.placement.placement_world import book, costed_snapshot, decoding, ledger_of, query_of
from tests.support.clusters.worker_reports import worker_info


def _prompt(
    ledger: Ledger,
    worker_id: str,
    *reach: float,
    num_tokens: int = 1000,
    tiers: tuple[float, float] = (0.0, 0.0),
    now: float = 0.0,
) -> PromptForecast:
    row, everywhere = ledger.table.row(worker_id), np.zeros((3, len(ledger.table)))
    everywhere[:, row] = reach or 0.0
    return forecast_prompt(ledger.table, num_tokens, everywhere, tiers, now).at(np.array([row]))


def _decode(
    ledger: Ledger,
    worker_id: str = "d1",
    *,
    num_output: float = 100.0,
    lead_s: float = 0.0,
    added_s: float = 0.0,
    now: float = 0.0,
    **changes: object,
) -> DecodeForecast:
    rows = np.array([ledger.table.row(worker_id)])
    query = query_of("new", **changes)
    found = forecast_decode(ledger.table, rows, query, num_output, np.array([lead_s]), np.array([added_s]), now)
    return DecodeForecast(found.tpot_s[0], found.gap_s[0], found.room_s, found.kv_share[0], found.slo_loss[0])


# --- prompts ---


def test_a_prompt_waits_for_the_queue_and_is_computed() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", prefill_s=3.0)
    forecast = _prompt(ledger, "p1", now=1.0)
    assert (forecast.wait_s[0], forecast.work_s[0]) == pytest.approx((2.0, 1.01))


def test_chunks_cost_a_step_each() -> None:
    ledger = Ledger()
    ledger.register(worker_info("p1", chunk_tokens=256), costed_snapshot("p1"), 0.0)
    assert _prompt(ledger, "p1").work_s[0] == pytest.approx(1.0 + 4 * 0.01)
    row = ledger.table.row("p1")
    ledger.table.set_cost(row, replace(ledger.table.cost(row), prefill_base_s=0.02))
    ledger.table.predict_step(row, 0.0)
    assert ledger.table.cost(row).prefill_base_s == 0.02
    forecast = _prompt(ledger, "p1")
    assert forecast.work_s[0] == pytest.approx(1.0 + 4 * 0.03), "also what any step with prompts takes"
    assert forecast.added_s[0] == pytest.approx(1.0 + 4 * 0.02)


def test_a_decode_worker_computes_prompts_between_the_tokens_of_others() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "a", tpot_s=None)
    forecast = _prompt(ledger, "d1")
    # A step of 12 ms takes no more of a prompt than makes its own part a twentieth.
    assert (forecast.work_s[0], forecast.added_s[0]) == pytest.approx((1.0 + 1.0 / 19, 1.0))


def test_a_prompt_gets_on_as_fast_as_those_who_decode_there_can_bear() -> None:
    """A pace in the mean; a gap by nearly all steps, which scatter by a tenth."""
    for targets in ({"tpot_s": 0.05}, {"tpot_s": None, "gap_s": 1.45 * 0.05}, {"tpot_s": 0.1, "gap_s": 1.45 * 0.05}):
        ledger = ledger_of("p1", "d1")
        decoding(ledger, "tight", **targets)
        left_s = 0.95 * 0.05 - 0.012  # of each step, beside the one that decodes
        assert _prompt(ledger, "d1").work_s[0] == pytest.approx(1.0 + 0.012 / left_s), targets
        decoding(ledger, "relaxed", tpot_s=1.0)
        left_s = 0.95 * 0.05 - 0.014
        assert _prompt(ledger, "d1").work_s[0] == pytest.approx(1.0 + 0.014 / left_s), "the tightest counts"
        ledger.ended("tight", 0.0)
        assert _prompt(ledger, "d1").work_s[0] == pytest.approx(1.0 + 1.0 / 19), "and no longer than it is there"


def test_who_can_hardly_keep_the_pace_does_not_hold_prompts_up_for_ever() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "late", tpot_s=0.0121)
    assert _prompt(ledger, "d1").work_s[0] == pytest.approx(1.0 + 10.0)


def test_who_could_not_keep_the_pace_alone_holds_nobody_up_and_loses_nothing_by_others() -> None:
    """A step of its own takes 12 ms in the mean, and nearly all up to 17.4. Whatever it was promised: what clients send
    is not for others to pay."""
    found, none = [], {"tpot_s": None, "gap_s": None}
    for changes in ({"tpot_s": 0.001, "gap_s": 0.001}, none | {"gap_s": 0.0144}, none):
        ledger = ledger_of("p1", "d1")
        decoding(ledger, "hasty", **changes)
        found.append((_prompt(ledger, "d1").work_s[0], _decode(ledger).slo_loss[0], ledger.table.has_targets()))
    assert found[0] == found[1] == found[2]
    assert found[0][1:] == (0.0, False)
    kept = ledger_of("p1", "d1")
    decoding(kept, "gap", tpot_s=None, gap_s=0.0185)
    assert kept.table.has_targets() and _prompt(kept, "d1").work_s[0] > found[0][0]


def test_hits_are_brought_up_as_far_down_as_it_pays() -> None:
    ledger = ledger_of("p1")
    cheap = _prompt(ledger, "p1", 100, 400, 900, tiers=(0.0001, 0.0005))
    assert (cheap.cached_tokens[0], cheap.work_s[0]) == pytest.approx((900, 300 * 0.0001 + 500 * 0.0005 + 0.11))
    slow_disk = _prompt(ledger, "p1", 100, 400, 900, tiers=(0.0001, 0.002))
    assert (slow_disk.cached_tokens[0], slow_disk.work_s[0]) == pytest.approx((400, 0.03 + 0.61))
    slow = _prompt(ledger, "p1", 100, 400, 900, tiers=(0.002, 0.002))
    assert (slow.cached_tokens[0], slow.work_s[0]) == pytest.approx((100, 0.91))
    assert _prompt(ledger, "p1", 1000, 1000, 1000).cached_tokens[0] == 999


# --- decode ---


def test_alone_a_newcomer_has_the_worker_for_itself() -> None:
    assert _decode(ledger_of("d1")).tpot_s[0] == pytest.approx(0.010 + 0.001 + 1050e-6)


def test_a_co_batched_sequence_counts_for_the_steps_it_shares() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "a", max_new_tokens=50)
    forecast = _decode(ledger)
    # It is there for 50 of the newcomer's 100 steps, with 1025 tokens on average.
    assert forecast.tpot_s[0] == pytest.approx(0.012050 + 0.5 * (0.001 + 1025e-6))


def test_who_will_have_ended_counts_no_more_and_who_will_have_joined_does() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "leaving", max_new_tokens=50)
    step_s = 0.012
    assert _decode(ledger, lead_s=50 * step_s).tpot_s[0] == pytest.approx(0.012050)
    book(ledger, "joining", prefill_s=1.0)
    assert _decode(ledger, lead_s=1.0).tpot_s[0] == pytest.approx(0.012050 + 0.001 + 1050e-6)
    ledger.ended("leaving", 0.0)
    half = _decode(ledger, lead_s=1.0 - 50 * 0.010).tpot_s[0]  # it joins 50 steps after the newcomer
    assert half == pytest.approx(0.012050 + 0.5 * (0.001 + 1025e-6))


def test_who_puts_out_more_than_expected_is_expected_to_go_on() -> None:
    ledger = ledger_of("p1", "d1")
    for _ in range(8):
        ledger.lengths.observe("t", "", 20)
    decoding(ledger, "long", max_new_tokens=1000)
    late = _decode(ledger, now=200 * 0.012)
    assert late.tpot_s[0] == pytest.approx(0.012050 + 0.2 * (0.001 + 1210e-6), rel=1e-3)


def test_who_has_outlived_the_short_ones_is_expected_to_be_a_long_one() -> None:
    ledger = ledger_of("p1", "d1")
    for number in range(32):
        decoding(ledger, f"r{number}")
        ledger.ended(f"r{number}", 0.0, num_output_tokens=10 if number % 2 else 390)  # 200 in the mean
    decoding(ledger, "one", max_new_tokens=1000)
    young = _decode(ledger, num_output=1000.0).tpot_s[0]
    older = _decode(ledger, num_output=1000.0, now=100 * 0.012).tpot_s[0]  # about 290 are to come
    assert older - 0.012500 == pytest.approx((young - 0.012500) * 1.45, rel=0.1)


def test_memory_counts_at_the_peak_of_the_newcomers_life() -> None:
    ledger = ledger_of("p1", "d1", num_blocks=250)  # 4000 tokens
    decoding(ledger, "a")
    assert _decode(ledger).kv_share[0] == pytest.approx(
        (1000 + 100 + 8 + 1000 + 100 + 8) / 4000
    )  # and half a block each
    decoding(ledger, "short", max_new_tokens=10)
    assert _decode(ledger).kv_share[0] == pytest.approx(
        (3000 + 3 * 8) / 4000
    )  # at first, when the short one is still there


def test_where_there_is_no_room_it_comes_when_others_leave() -> None:
    ledger = ledger_of("p1", "d1", num_blocks=250)
    for request_id, output in (("a", 10), ("b", 60), ("c", 100)):
        decoding(ledger, request_id, max_new_tokens=output)
    step_s = 0.010 + 3 * 0.002
    assert _decode(ledger, num_tokens=900).room_s[0] == 0.0
    assert _decode(ledger, num_tokens=1500).room_s[0] == pytest.approx(10 * step_s)
    assert _decode(ledger, num_tokens=2500).room_s[0] == pytest.approx(60 * step_s)
    assert _decode(ledger, num_tokens=5000).room_s[0] == math.inf


def test_a_prefix_that_several_begin_with_takes_memory_once() -> None:
    ledger = ledger_of("p1", "d1", num_blocks=250)  # 4000 tokens
    for name in "abc":
        decoding(ledger, name, prefill=None)
    assert _decode(ledger, num_tokens=1900).room_s[0] > 0.0, "nothing is known of it yet"
    reported = costed_snapshot("d1", 2, num_running=3, context_tokens=3000, blocks_available=250 - 75)  # 1200 tokens
    ledger.heartbeat(reported, 0.0)
    apart, peak = _decode(ledger, num_tokens=1900), (1200 + 3 * 100 + 1900 + 100 + 4 * 8) / 4000
    assert apart.room_s[0] == 0.0
    assert apart.kv_share[0] == pytest.approx(peak), "all put out 100 tokens more"
    assert apart.tpot_s[0] == pytest.approx(0.010 + 4 * 0.001 + 1e-6 * (3000 + 150 + 1950), rel=0.01), "all is read"
    book(ledger, "d", prefill=None)  # of which no report tells yet
    assert _decode(ledger, num_tokens=1900).room_s[0] > 0.0
    ledger.ended("d", 0.0)
    ledger.heartbeat(replace(reported, sequence_number=3, num_paused=1), 0.0)
    assert _decode(ledger, num_tokens=1900).room_s[0] > 0.0, "some of it rests in host memory"


def test_there_is_room_again_once_prompts_are_computed_that_a_worker_computes_for_others() -> None:
    ledger = ledger_of("d1", "d2", num_blocks=100, block_size=16)
    for name in "ab":
        book(ledger, name, prefill="d1", decode="d2", num_tokens=700, prefill_s=2.0)
    assert _decode(ledger, num_tokens=150).room_s[0] == 0.0
    assert _decode(ledger, num_tokens=700).room_s[0] == pytest.approx(4.0)
    ledger.first_token("a", 2.0)
    assert _decode(ledger, num_tokens=700, now=2.0).room_s[0] == 0.0


def test_the_loss_is_what_the_others_chances_lose() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "a", tpot_s=0.013)
    before, after = log_probability(0.012, 0.013, 0.1), log_probability(0.012 + 0.00205, 0.013, 0.1)
    assert _decode(ledger).slo_loss[0] == pytest.approx(before - after, rel=0.05)
    assert _decode(ledger, "d1", added_s=1.0).slo_loss[0] > 1.0  # of work without targets
    relaxed = ledger_of("p1", "d1")
    decoding(relaxed, "a", tpot_s=0.1)
    batch = ledger_of("p1", "d1")
    decoding(batch, "a", tpot_s=None)
    assert _decode(relaxed).slo_loss[0] < 1e-3
    assert _decode(batch, added_s=100.0).slo_loss[0] == 0.0


# --- probabilities ---


def test_a_prediction_at_the_target_is_met_half_the_time() -> None:
    chances = [math.exp(log_probability(predicted_s, 1.0, 0.1)) for predicted_s in (0.9, 1.0, 1.1)]
    assert chances == pytest.approx([0.846, 0.5, 0.154], abs=0.002)
    assert log_probability(1e9, math.inf, 0.1) == 0.0
    fits = [math.exp(log_fit_probability(kv_share)) for kv_share in (0.0, 0.9, 1.0, 1.5)]
    assert fits == pytest.approx([1.0, 0.966, 0.5, 0.0], abs=1e-3)


# --- several tokens of a step ---


@pytest.mark.parametrize(("reported", "counts"), [(1.0, 1.0), (2.5, 2.5), (0.0, 1.0), (0.5, 1.0), (1e9, 16.0)])
def test_a_worker_that_has_several_tokens_of_a_step_takes_less_time_for_each(reported: float, counts: float) -> None:
    plain, ledger = ledger_of("p1", "d1"), ledger_of("p1", "d1")
    ledger.heartbeat(costed_snapshot("d1", 2, tokens_per_step=2 * reported, drafts_stretch=2.0), 0.0)
    for each in (plain, ledger):
        decoding(each, "a", max_new_tokens=50)
    without, found = (_decode(each, gap_s=1.0) for each in (plain, ledger))
    assert found.tpot_s[0] == pytest.approx(without.tpot_s[0] / counts)
    assert found.gap_s[0] == without.gap_s[0], "a gap is as long as a step"
    assert found.kv_share[0] == without.kv_share[0]
    step_s = [each.table.facts[Fact.STEP_S, each.table.row("d1")] for each in (plain, ledger)]
    assert step_s[1] == pytest.approx(step_s[0] / counts)
    shortest = [filter_workers(each, DecisionPolicy(), query_of(), {}, 0.0).shortest_tpot_s for each in (plain, ledger)]
    assert shortest[1] == pytest.approx(shortest[0] / counts)


def test_who_decodes_there_is_held_to_be_as_far_as_its_tokens_came() -> None:
    ledger = ledger_of("p1", "d1")
    ledger.heartbeat(costed_snapshot("d1", 2, tokens_per_step=4.0), 0.0)
    decoding(ledger, "a", max_new_tokens=1000)
    table, row = ledger.table, ledger.table.row("d1")
    step_s = 0.010 + 0.001 + 0.001
    ledger.heartbeat(costed_snapshot("d1", 3, tokens_per_step=4.0, num_running=1, context_tokens=1400), 100 * step_s)
    assert table.facts[Fact.STEPS, row] - table.slots[Slot.JOINED_STEP, row, 0] == pytest.approx(400)


def test_prompts_have_of_a_step_what_its_tokens_leave() -> None:
    """A step may be as long as its four tokens together may take; and nearly all steps, no longer than a gap."""
    plain, ledger, gap = (ledger_of("p1", "d1") for _ in range(3))
    for each in (ledger, gap):
        each.heartbeat(costed_snapshot("d1", 2, tokens_per_step=4.0), 0.0)
    for each, gap_s in ((plain, None), (ledger, None), (gap, 0.03)):
        decoding(each, "a", tpot_s=0.02, gap_s=gap_s)
    limits_s = [each.table.facts[Fact.LIMIT_S, each.table.row("d1")] for each in (plain, ledger, gap)]
    assert limits_s == pytest.approx([0.95 * 0.02, 0.95 * 0.08, 0.95 * 0.03 / 1.45])
    works_s = [float(_prompt(each, "d1").work_s[0]) for each in (plain, ledger, gap)]
    assert works_s[0] > works_s[2] > works_s[1]


# --- decode workers that compute prompts themselves ---


def test_prompts_of_lately_stretch_the_steps_and_are_forgotten() -> None:
    ledger = ledger_of("p1", "d1")
    table, row = ledger.table, ledger.table.row("d1")
    book(ledger, "a", prefill=None)
    ledger.ended("a", 0.0)
    assert table.facts[Fact.STEP_S, row] == pytest.approx(0.010 / (1.0 - 0.1))  # 1 s of the last 10
    assert _decode(ledger).tpot_s[0] == pytest.approx(0.012050), "but no target is missed by them"
    ledger.heartbeat(costed_snapshot("d1", 2), 100.0)
    assert table.facts[Fact.STEP_S, row] == pytest.approx(0.010, rel=1e-3)
    for name in ("b", "c", "d", "e", "f", "g"):
        book(ledger, name, 100.0, prefill=None, tpot_s=0.02)
    ledger.first_token("b", 100.0)
    assert table.facts[Fact.STEP_S, row] == pytest.approx(0.95 * 0.02), "nor longer than those who decode can bear"


def test_the_longest_gap_is_that_of_a_step_with_everyone_there() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "a", max_new_tokens=50)
    assert _decode(ledger).gap_s[0] == 0.0, "nobody asks"
    newcomer = 0.001 + 1100e-6
    longest = 0.010 + newcomer + 0.001 + 1050e-6
    assert _decode(ledger, gap_s=0.015).gap_s[0] == pytest.approx(longest)
    decoding(ledger, "b", max_new_tokens=50, gap_s=0.0185)
    asked = _decode(ledger)
    assert asked.gap_s[0] == pytest.approx(longest + 0.001 + 1050e-6)
    without_s = asked.gap_s[0] - newcomer
    lost = log_probability(without_s, 0.0185, 0.1) - log_probability(asked.gap_s[0], 0.0185, 0.1)
    assert lost > 0.01
    assert asked.slo_loss[0] == pytest.approx(lost, rel=0.05)


def test_reservations_go_on_while_prompts_wait_there() -> None:
    ledger = ledger_of("p1", "d1")
    for name in ("a", "b"):
        book(ledger, name, prefill=None, prefill_s=1.0)
    assert _decode(ledger).room_s[0] == 0.0


def test_who_exceeds_the_sequences_of_a_worker_waits_for_one_to_end() -> None:
    ledger = Ledger()
    for worker_id in ("p1", "d1"):
        ledger.register(worker_info(worker_id, max_num_seqs=2), costed_snapshot(worker_id), 0.0)
    decoding(ledger, "short", max_new_tokens=50)
    assert _decode(ledger).room_s[0] == 0.0
    decoding(ledger, "long", max_new_tokens=100)
    step_s = 0.012 + 0.002  # two sequences, each with 1000 tokens
    assert _decode(ledger).room_s[0] == pytest.approx(50 * step_s, rel=0.01)


def test_those_who_decode_leave_less_of_each_step_to_prompts() -> None:
    ledger = Ledger()
    for worker_id in ("p1", "d1"):
        ledger.register(worker_info(worker_id, chunk_tokens=11), costed_snapshot(worker_id), 0.0)
    decoding(ledger, "a")
    assert _prompt(ledger, "d1").work_s[0] == pytest.approx(1.0 + 100 * 0.012)
    decoding(ledger, "b")
    assert _prompt(ledger, "d1").work_s[0] == pytest.approx(1.0 + 112 * 0.014, rel=0.01)


OTHERS = st.lists(
    st.tuples(
        st.integers(1, 3000),  # prompt
        st.integers(1, 400),  # output
        st.booleans(),  # decodes already
        st.sampled_from([0.012, 0.02, 0.05, None]),
    ),
    max_size=12,
)


@settings(deadline=None)
@given(OTHERS, st.tuples(st.integers(1, 3000), st.integers(1, 400), st.booleans()), st.floats(0.0, 2.0))
def test_one_more_sequence_never_makes_a_worker_look_better(
    others: list[tuple[int, int, bool, float | None]], more: tuple[int, int, bool], lead_s: float
) -> None:
    ledger = ledger_of("p1", "d1", num_blocks=1500)
    for number, (prompt, output, joined, tpot_s) in enumerate(others):
        book(ledger, f"r{number}", num_tokens=prompt, max_new_tokens=output, tpot_s=tpot_s)
        if joined:
            ledger.first_token(f"r{number}", 0.0)
    before = _decode(ledger, lead_s=lead_s)
    # The new one is last in its queue, so it delays nobody's joining.
    book(ledger, "more", num_tokens=more[0], max_new_tokens=more[1])
    if more[2]:
        ledger.first_token("more", 0.0)
    after = _decode(ledger, lead_s=lead_s)
    assert after.room_s[0] >= before.room_s[0]
    assert after.kv_share[0] >= before.kv_share[0] - 1e-9
    assert after.tpot_s[0] >= before.tpot_s[0] - 1e-12
    assert after.slo_loss[0] >= before.slo_loss[0] - 1e-9
