"""The decision: pairs, decode alone, hits, exclusions; the same for the same state, and never better for more load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cluster.scheduler.block_index import PrefixReach
from cluster.scheduler.placement.filter import filter_workers
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.pick import Action, Candidates, Decision, bind, pick, rank
from cluster.scheduler.placement.policy import DecisionPolicy
from engine.cost_model.step_cost import StepCost
from kv_transfer.worker.cost_report import stated_report
from tests.cluster.scheduler.placement.placement_world import book, costed_snapshot, decoding, ledger_of, query_of
from tests.support.clusters.worker_reports import worker_info, worker_snapshot

POLICY = DecisionPolicy()
NO_HITS: Mapping[str, PrefixReach] = {}


def _decide(ledger: Ledger, request_id: str = "new", now: float = 0.0, **changes: Any) -> Decision:
    reach = changes.pop("reach", NO_HITS)
    query = query_of(request_id, **changes)
    return pick(ledger, POLICY, query, filter_workers(ledger, POLICY, query, reach, now), now)[0]


def _where(decision: Decision) -> tuple[str | None, str]:
    assert decision.action is Action.PLACE, str(decision)
    return decision.best.prefill, decision.best.decode


def _found(ledger: Ledger, **changes: object) -> Candidates:
    query = query_of("new", **changes)
    found = rank(ledger, POLICY, query, filter_workers(ledger, POLICY, query, NO_HITS, 0.0), 0.0)
    assert found is not None
    return found


# --- who gets it ---


def test_nobody_is_to_hand_over_to_a_worker_that_it_cannot_reach() -> None:
    ledger = ledger_of("p1", "p2", "d1", "d2", "d3")
    for name in ("d2", "d3"):
        decoding(ledger, f"on {name}", decode=name)
    assert _where(_decide(ledger))[1] == "d1"
    for name in ("p1", "p2"):
        ledger.heartbeat(costed_snapshot(name, 2, unreachable=["d1", "gone"]), 1.0)
    pairs = {(row.prefill, row.decode) for row in _decide(ledger, now=1.0).rows}
    assert {("p1", "d2"), (None, "d1")} <= pairs and not {("p1", "d1"), ("p2", "d1")} & pairs
    ledger.heartbeat(costed_snapshot("p1", 3), 2.0)
    assert _where(_decide(ledger, now=2.0)) == ("p1", "d1")
    ledger.unregister("p2", 3.0)
    assert not ledger.table.unreachable


def test_prefill_workers_that_reach_nobody_are_in_nobody_s_way() -> None:
    """They have nothing to do, so that they would be done first."""
    cut_off = [f"p{number}" for number in range(10, 30)]
    ledger = ledger_of(*cut_off, "p9", "d1", "d2")
    book(ledger, "there", prefill="p9", decode="d2", num_tokens=5000)
    for name in cut_off:
        ledger.heartbeat(costed_snapshot(name, 2, unreachable=["d1", "d2"]), 1.0)
    computing = {row.prefill for row in _decide(ledger, now=1.0).rows}
    assert "p9" in computing and not computing & {*cut_off}


def test_beside_many_that_cannot_be_reached_the_others_are_found() -> None:
    names = [f"d{number}" for number in range(10, 30)]
    ledger = ledger_of("p1", *names)
    decoding(ledger, "there", decode="d29", num_tokens=5000)
    ledger.heartbeat(costed_snapshot("p1", 2, unreachable=names[:-1]), 1.0)
    pairs = {(row.prefill, row.decode) for row in _decide(ledger, now=1.0).rows}
    assert ("p1", "d29") in pairs


def test_who_leaves_the_room_that_is_asked_for_goes_before_who_is_better_and_does_not() -> None:
    """With a pair the first token would come after 1.5 s, with the decode worker alone after 1.01 s."""
    ledger = ledger_of("p1", "d1")
    book(ledger, "queued", prefill_s=0.5, tpot_s=None)
    query = query_of("new", tpot_s=None)
    found = filter_workers(ledger, POLICY, query, NO_HITS, 0.0)
    whole, less = (pick(ledger, POLICY, query, found, 0.0, share=share)[0] for share in (1.0, 0.6))
    assert _where(whole) == ("p1", "d1")
    assert _where(less) == (None, "d1")


def test_what_was_placed_counts_for_the_next() -> None:
    ledger = ledger_of("p1", "p2", "d1", "d2")
    for request_id in "ab":
        decision = _decide(ledger, request_id, tpot_s=0.02)
        bind(ledger, decision)
    prefills, decodes = zip(*((b.computing, b.decode) for b in ledger.bookings()), strict=True)
    assert (sorted(prefills), sorted(decodes)) == (["p1", "p2"], ["d1", "d2"])


def test_a_long_prompt_stays_away_from_those_who_decode_against_the_clock() -> None:
    ledger = ledger_of("p1", "d1")
    decoding(ledger, "a", tpot_s=0.02)
    assert _where(_decide(ledger)) == ("p1", "d1")


def test_decode_alone_where_it_hurts_nobody_and_prefill_is_busy() -> None:
    ledger = ledger_of("p1", "d1", "d2")
    book(ledger, "a", prefill_s=10.0)
    assert _where(_decide(ledger)) == (None, "d2")  # nobody will be handed over there


def test_decode_alone_must_bring_more_than_the_pair() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", prefill_s=0.5)  # at once there, and a little later here
    assert _where(_decide(ledger)) == ("p1", "d1")


def test_a_promised_gap_is_part_of_being_in_time() -> None:
    """A step of the newcomer alone takes 12 ms: promised as a mean or as a gap, it counts alike; as both, twice."""
    ledger = ledger_of("d1")
    tight, loose = (_decide(ledger, tpot_s=None, gap_s=gap_s).best.slo_probability for gap_s in (0.0115, 10.0))
    both, tpot = (_decide(ledger, tpot_s=0.0115, gap_s=gap_s).best.slo_probability for gap_s in (0.0115, None))
    assert tight < 0.6 < 0.9 < loose
    assert both < 0.9 * tpot < 0.6


def test_the_newcomer_avoids_whom_it_would_make_late() -> None:
    """d1 runs two requests with room to spare, d2 one that is close to its target."""
    ledger = ledger_of("p1", "d1", "d2")
    for request_id in "ab":
        decoding(ledger, request_id, tpot_s=0.1)
    decoding(ledger, "close", decode="d2", tpot_s=0.0125)
    decision = _decide(ledger, tpot_s=0.1)
    assert _where(decision)[1] == "d1"
    assert decision.best.slo_loss < 0.001


def test_what_will_have_joined_by_then_counts() -> None:
    ledger = ledger_of("p1", "p2", "d1", "d2")
    for number in range(5):  # nothing decodes yet, but they are on their way to d1
        book(ledger, f"r{number}", prefill="p1", prefill_s=0.1)
    assert _where(_decide(ledger, tpot_s=0.015)) == ("p2", "d2")


def test_a_prefix_is_worth_a_queue_as_long_as_it_saves_more() -> None:
    ledger = ledger_of("p1", "p2", "d1")
    reach = {"p1": PrefixReach(device=50, host=50, disk=50)}  # 800 of the 1000 tokens
    book(ledger, "a", prefill_s=0.5)
    decision = _decide(ledger, reach=reach)
    assert (_where(decision), decision.best.cached_tokens, decision.uncached_tokens) == (("p1", "d1"), 800, 200)
    book(ledger, "b", prefill_s=0.5)
    assert _where(_decide(ledger, reach=reach))[0] == "p2"


def test_exclusions_preferences_and_drains() -> None:
    ledger = ledger_of("p1", "p2", "d1", "d2")
    assert _where(_decide(ledger, exclude=("p1", "d1"), attempt=1)) == ("p2", "d2")
    assert _where(_decide(ledger, exclude=("p1", "p2", "d1", "d2"), attempt=1))[0] is None
    assert _decide(ledger, prefer_decode="d2", attempt=1).best.decode == "d2"
    assert _decide(ledger, prefer_decode="gone", attempt=1).best.decode == "d1"
    for worker_id in ("p1", "d1"):
        ledger.heartbeat(costed_snapshot(worker_id, 2, draining=True), 0.0)
    assert {(r.prefill, r.decode) for r in _decide(ledger).rows} == {("p2", "d2"), (None, "d2")}
    assert _decide(ledger, prefer_decode="d1", attempt=1).best.decode == "d1"


def test_only_what_fits_together_is_paired() -> None:
    ledger = ledger_of("d1")
    ledger.register(worker_info("p1", compatibility="other"), costed_snapshot("p1"), 0.0)
    ledger.register(worker_info("p2", max_model_len=999), costed_snapshot("p2"), 0.0)
    assert _where(_decide(ledger)) == (None, "d1")
    assert _decide(ledger, num_tokens=9_990, max_new_tokens=11).action is Action.IMPOSSIBLE
    ledger.register(worker_info("p3", max_model_len=1_000), costed_snapshot("p3"), 0.0)
    assert _where(_decide(ledger, num_tokens=1_000)) == ("p3", "d1")
    assert _where(_decide(ledger, num_tokens=1_001)) == (None, "d1")


def test_an_adapter_is_worth_a_queue_as_long_as_loading_it_takes() -> None:
    """Of who computes the prompt: who decodes has that time to load it."""
    ledger = ledger_of("p1", "p2", "d1", "d2")
    for worker_id in ("p1", "p2", "d1", "d2"):
        adapters = ["known"] if worker_id == "p2" else []
        ledger.heartbeat(costed_snapshot(worker_id, 2, adapters=adapters, adapter_load_s=0.5), 0.0)
    plain, unknown = _decide(ledger), _decide(ledger, adapter="unknown")
    assert _where(plain) == _where(unknown) == ("p1", "d1")
    assert unknown.best.ttft_s == pytest.approx(plain.best.ttft_s + 0.5)
    book(ledger, "a", prefill="p2", prefill_s=0.4)
    assert _where(_decide(ledger, adapter="known"))[0] == "p2"
    book(ledger, "b", prefill="p2", prefill_s=0.2)
    assert _where(_decide(ledger, adapter="known"))[0] == "p1"


def test_who_cannot_meet_its_targets_anywhere_is_not_placed() -> None:
    ledger = ledger_of("p1", "d1")
    assert _decide(ledger, ttft_s=0.5).action is Action.DEFER
    assert _decide(ledger, tpot_s=0.005).action is Action.DEFER
    assert _decide(ledger, ttft_s=0.5, attempt=1).action is Action.PLACE
    assert _decide(ledger, now=5.0, waited_s=1.8).action is Action.DEFER


def test_batch_takes_what_is_left() -> None:
    ledger = ledger_of("p1", "d1", "d2")
    batch: dict[str, Any] = {"ttft_s": None, "tpot_s": None}
    decoding(ledger, "close", tpot_s=0.013)
    assert _where(_decide(ledger, **batch))[1] == "d2"
    decoding(ledger, "close too", decode="d2", tpot_s=0.013)
    assert _decide(ledger, **batch).action is Action.DEFER
    ledger.ended("close", 0.0)
    book(ledger, "long", decode="d2", prefill_s=5.0)
    assert _where(_decide(ledger, **batch)) == (None, "d1")  # nobody decodes there


def test_different_machines_are_told_apart() -> None:
    ledger = ledger_of("p1", "d1")
    fast = StepCost(base_s=0.002, prefill_token_s=1e-4, prefill_pair_s=0.0, decode_s=1e-4, context_token_s=1e-7)
    for worker_id in ("p2", "d2"):
        ledger.register(worker_info(worker_id), worker_snapshot(worker_id, step_cost=stated_report(fast)), 0.0)
    assert _where(_decide(ledger)) == ("p2", "d2")


# --- what it was made from ---


def test_a_decision_reads_as_a_table() -> None:
    ledger = ledger_of("p1", "d1")
    text = str(_decide(ledger, tenant="acme", slo_class="interactive"))
    lines = text.splitlines()
    assert "acme" in lines[0]
    assert "PLACE" in lines[0]
    assert {"TTFT", "TPOT", "gain", "loss"} <= set(lines[1].split())
    assert lines[2].startswith("p1") or lines[2].startswith("(decode alone)")
    assert len({len(line) for line in lines[1:]}) == 1


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["place", "place", "place", "first", "end", "beat"]),
        st.integers(0, 30),
        st.integers(1, 4000),
        st.floats(0.0, 0.5),
    ),
    min_size=5,
    max_size=40,
)


def _replay(events: list[tuple[str, int, int, float]], order: list[str]) -> list[str]:
    ledger, now, log = ledger_of(*order), 0.0, []
    for count, (kind, number, tokens, dt) in enumerate(events):
        now += dt
        if kind == "place":
            decision = _decide(ledger, f"r{number}", now, num_tokens=tokens, tpot_s=0.03, ttft_s=6.0)
            log.append(repr(decision))
            if decision.action is Action.PLACE:
                bind(ledger, decision)
        elif kind == "first":
            ledger.first_token(f"r{number}", now)
        elif kind == "end":
            ledger.ended(f"r{number}", now, tokens)
        else:
            worker_id = order[number % len(order)]
            ledger.heartbeat(costed_snapshot(worker_id, count + 2, queued_prefill_tokens=tokens), now)
    return log


@settings(max_examples=25, deadline=None)
@given(EVENTS)
def test_a_recorded_log_replays_to_the_same_decisions(events: list[tuple[str, int, int, float]]) -> None:
    order = ["p1", "p2", "d1", "d2", "d3"]
    assert _replay(events, order) == _replay(events, order)


def test_workers_that_are_alike_are_taken_by_name_whatever_came_first() -> None:
    for order in (["p1", "p2", "d1", "d2"], ["d2", "p2", "d1", "p1"]):
        assert _decide(ledger_of(*order)).best == _decide(ledger_of("p1", "p2", "d1", "d2")).best


# --- load ---

REQUESTS = st.lists(
    st.tuples(
        st.sampled_from(["p1", "p2"]),
        st.sampled_from(["d1", "d2"]),
        st.integers(1, 3000),
        st.integers(1, 400),
        st.booleans(),
        st.sampled_from([0.013, 0.02, 0.05, None]),
    ),
    max_size=12,
)
NEWCOMERS = st.tuples(st.integers(1, 3000), st.sampled_from([0.5, 2.0, 6.0]), st.sampled_from([0.013, 0.02, 0.05]))


def _loaded(requests: list[tuple[str, str, int, int, bool, float | None]]) -> Ledger:
    ledger = ledger_of("p1", "p2", "d1", "d2", num_blocks=1500)
    for number, (prefill, decode, tokens, output, joined, tpot_s) in enumerate(requests):
        book(
            ledger,
            f"r{number}",
            prefill=prefill,
            decode=decode,
            prefill_s=tokens / 1000,
            num_tokens=tokens,
            max_new_tokens=output,
            tpot_s=tpot_s,
        )
        if joined:
            ledger.first_token(f"r{number}", 0.0)
    return ledger


def _gains(found: Candidates) -> dict[tuple[int, int], float]:
    """Of prompts that are not split: where they would be depends on the load."""
    predicted, gains = found.predicted, found.scores.slo_gain[0].tolist()
    candidates = zip(predicted.computing.tolist(), predicted.decode.tolist(), predicted.prompt.split_at, strict=True)
    return {(i, j): gain for (i, j, split_at), gain in zip(candidates, gains, strict=True) if not split_at}


def _computed_by(found: Candidates) -> int:
    return int(found.predicted.computing[found.order[0]])


@settings(deadline=None)
@given(REQUESTS, NEWCOMERS, st.sampled_from(["d1", "d2"]), st.integers(1, 3000), st.integers(1, 400))
def test_more_load_on_a_decode_worker_never_makes_it_more_attractive(
    requests: list[tuple[str, str, int, int, bool, float | None]],
    newcomer: tuple[int, float, float],
    decode: str,
    tokens: int,
    output: int,
) -> None:
    ledger = _loaded(requests)
    wanted: dict[str, Any] = {"num_tokens": newcomer[0], "ttft_s": newcomer[1], "tpot_s": newcomer[2]}
    before, row = _gains(_found(ledger, **wanted)), ledger.table.row(decode)
    decoding(ledger, "more", prefill="p1", decode=decode, num_tokens=tokens, max_new_tokens=output)
    after = _gains(_found(ledger, **wanted))
    assert all(after[pair] <= before[pair] + 1e-9 for pair in before if pair[1] == row)


@settings(deadline=None)
@given(REQUESTS, NEWCOMERS, st.sampled_from(["p1", "p2"]), st.floats(0.01, 3.0))
def test_more_work_on_a_prefill_worker_never_moves_requests_to_it(
    requests: list[tuple[str, str, int, int, bool, float | None]],
    newcomer: tuple[int, float, float],
    prefill: str,
    work_s: float,
) -> None:
    ledger = _loaded(requests)
    wanted: dict[str, Any] = {"num_tokens": newcomer[0], "ttft_s": newcomer[1], "tpot_s": newcomer[2]}
    before, row = _found(ledger, **wanted), ledger.table.row(prefill)
    ledger.heartbeat(costed_snapshot(prefill, 2, queued_prefill_tokens=int(1000 * work_s) + 40_000), 0.0)
    after = _found(ledger, **wanted)
    if _computed_by(before) != row:
        assert _computed_by(after) != row


@settings(deadline=None)
@given(REQUESTS, NEWCOMERS, st.integers(1, 3000), st.integers(1, 400))
def test_more_load_everywhere_never_turns_a_no_into_a_yes(
    requests: list[tuple[str, str, int, int, bool, float | None]],
    newcomer: tuple[int, float, float],
    tokens: int,
    output: int,
) -> None:
    ledger = _loaded(requests)
    wanted: dict[str, Any] = {"num_tokens": newcomer[0], "ttft_s": newcomer[1], "tpot_s": newcomer[2]}
    before = _decide(ledger, **wanted).action
    for decode in ("d1", "d2"):
        decoding(ledger, f"more-{decode}", decode=decode, num_tokens=tokens, max_new_tokens=output)
    assert before is Action.PLACE or _decide(ledger, **wanted).action is not Action.PLACE


def test_a_policy_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(ValueError, match="between 0 and 1"):
        DecisionPolicy(min_gain=2.0)
    with pytest.raises(ValueError, match="at least one worker"):
        DecisionPolicy(num_exact=0)


# --- one pool ---


ONE_POOL = DecisionPolicy(one_pool=True)


def _ranked_in_one_pool(
    ledger: Ledger, now: float = 0.0, **changes: object
) -> tuple[Candidates, list[tuple[str, str]]]:
    """All candidates, and who computes and who decodes, best first."""
    query, ids = query_of("new", **changes), ledger.table.ids
    found = rank(ledger, ONE_POOL, query, filter_workers(ledger, ONE_POOL, query, NO_HITS, now), now)
    assert found is not None
    rows = zip(found.predicted.computing[found.order], found.predicted.decode[found.order], strict=True)
    return found, [(ids[computing], ids[decode]) for computing, decode in rows]


def test_decode_workers_compute_for_each_other_only_in_one_pool() -> None:
    ledger = ledger_of("d1", "d2", "d3")
    ids = ledger.table.ids
    apart = _found(ledger)
    assert {(ids[i], ids[j]) for i, j in zip(apart.predicted.computing, apart.predicted.decode, strict=True)} == {
        (d, d) for d in ids
    }
    _, pairs = _ranked_in_one_pool(ledger)
    assert sorted(pairs) == [(i, j) for i in ids for j in ids]
    assert pairs[0][0] == pairs[0][1], "nothing moves for nothing"


def test_a_worker_of_the_pool_that_has_become_a_prefill_worker_computes_for_those_that_are_left() -> None:
    ledger = ledger_of("p1", "d1", "d2")
    _, pairs = _ranked_in_one_pool(ledger)
    assert sorted(pairs) == [(i, j) for i in ("d1", "d2", "p1") for j in ("d1", "d2")]


def test_a_prompt_computed_for_another_takes_longer_beside_decodes_and_without_targets_costs_them_chances() -> None:
    ledger = ledger_of("d1", "d2")
    for name in "ab":
        decoding(ledger, name, prefill=None, decode="d1", tpot_s=0.02)
    found, pairs = _ranked_in_one_pool(ledger, tpot_s=0.02)
    work_s = dict(zip(pairs, found.predicted.prompt.work_s[found.order].tolist(), strict=True))
    assert work_s["d1", "d2"] > 2.0 * work_s["d2", "d2"], "the prompt waits for who decodes on d1"
    assert pairs[0] == ("d2", "d2")
    found, pairs = _ranked_in_one_pool(ledger, ttft_s=None, tpot_s=None)
    loss = dict(zip(pairs, found.predicted.slo_loss[0][found.order].tolist(), strict=True))
    assert loss["d1", "d2"] > 0.1 > loss["d2", "d2"], "who decodes on d1 waits for the prompt"
    assert pairs[0] == ("d2", "d2")


def test_where_targets_are_tight_prompts_go_where_nobody_decodes_and_tokens_where_nothing_is_computed() -> None:
    """And where they are not, whoever computes a prompt goes on with it."""
    ledger = ledger_of("d1", "d2")
    for number in range(4):
        decoding(ledger, f"r{number}", prefill=None, decode="d1", num_tokens=20, tpot_s=0.02)
    book(ledger, "prompt", prefill=None, decode="d2", num_tokens=1500, prefill_s=1.5, tpot_s=10.0)
    assert _ranked_in_one_pool(ledger, tpot_s=0.02, ttft_s=30.0)[1][0] == ("d2", "d1")
    computing, decode = _ranked_in_one_pool(ledger, tpot_s=10.0, ttft_s=30.0)[1][0]
    assert computing == decode


def test_nobody_computes_for_others_without_room_for_the_prompt() -> None:
    ledger = ledger_of("d1", "d2", num_blocks=100)
    size = ledger.info("d1").block_size
    decoding(ledger, "large", prefill=None, decode="d1", num_tokens=90 * size)
    assert ("d1", "d2") not in _ranked_in_one_pool(ledger, num_tokens=20 * size)[1]
    assert ("d2", "d1") in _ranked_in_one_pool(ledger, num_tokens=20 * size)[1]
