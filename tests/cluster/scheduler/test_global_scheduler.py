"""The global scheduler: who gets a request, who is turned away, and what is forgotten when."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cluster.scheduler.placement.admission import AdmissionOutcome, AdmissionPolicy
from cluster.scheduler.placement.ledger import REPLACED_S
from cluster.scheduler.scheduler import GlobalScheduler, SchedulerPolicy
from engine.kv.prefix import block_hashes
from kv_transfer.messages.blocks import BlockEvents, BlockIndexSnapshot
from kv_transfer.messages.scheduling import Unplaceable
from tests.cluster.scheduler.scheduler_world import (
    TARGETS,
    measured,
    place,
    placed,
    refused,
    scheduler_of,
    small_info,
    small_snapshot,
)
from tests.support.clusters.worker_reports import REPORT, worker_info, worker_snapshot

# --- who gets it ---


def test_placements_count_at_once() -> None:
    scheduler = scheduler_of("p1", "p2", "d1", "d2")
    one, two = placed(scheduler, "r1"), placed(scheduler, "r2")
    assert {one.prefill, two.prefill} == {"p1", "p2"}
    assert {one.decode, two.decode} == {"d1", "d2"}


def test_a_long_prompt_weighs_more_than_several_short_ones() -> None:
    scheduler = scheduler_of("p1", "p2", "d1")
    busy = placed(scheduler, "long", num_tokens=500).prefill
    assert all(placed(scheduler, f"r{n}").prefill != busy for n in range(4))


def test_what_a_worker_reports_counts_once() -> None:
    """As soon as a snapshot must include a placement, the placement itself is no longer added."""
    scheduler = scheduler_of("p1", "p2", "d1")
    busy = placed(scheduler, "r1", now=1.0, num_tokens=300).prefill
    assert busy is not None
    other = "p2" if busy == "p1" else "p1"
    scheduler.heartbeat(small_snapshot(busy, 2, queued_prefill_tokens=300), 2.0)
    scheduler.heartbeat(small_snapshot(busy, 3, queued_prefill_tokens=50), 3.0)
    scheduler.heartbeat(small_snapshot(other, 2, queued_prefill_tokens=120), 3.0)
    assert placed(scheduler, "r2", now=3.0).prefill == busy


def test_older_snapshots_are_ignored() -> None:
    scheduler = scheduler_of("p1", "p2", "d1")
    assert scheduler.heartbeat(small_snapshot("p1", 5, queued_prefill_tokens=900), 1.0)
    assert scheduler.heartbeat(small_snapshot("p1", 4, queued_prefill_tokens=0), 2.0)
    assert scheduler.heartbeat(small_snapshot("p1", 5, queued_prefill_tokens=0), 2.0)
    assert placed(scheduler).prefill == "p2"


def test_a_worker_that_is_not_known_has_to_register() -> None:
    scheduler = scheduler_of("d1")
    assert not scheduler.heartbeat(small_snapshot("p1", 7), 1.0)
    assert placed(scheduler).prefill is None


def test_a_silent_worker_is_dropped_and_can_come_back() -> None:
    scheduler = scheduler_of("p1", "d1", stale_after_s=5.0)
    scheduler.heartbeat(small_snapshot("d1", 2), 4.0)
    assert scheduler.expire(5.0) == []
    assert scheduler.expire(5.5) == ["p1"]
    assert placed(scheduler).prefill is None
    assert not scheduler.heartbeat(small_snapshot("p1", 9), 6.0)
    scheduler.register(small_info("p1"), small_snapshot("p1", 10), 6.0)
    assert placed(scheduler).prefill == "p1"


def test_a_lost_worker_gets_nothing() -> None:
    scheduler = scheduler_of("p1", "p2", "d1")
    assert scheduler.unregister("p1", 0.0)
    assert not scheduler.unregister("p1", 0.0)
    assert all(placed(scheduler, f"r{n}").prefill == "p2" for n in range(3))


def test_draining_workers_get_nothing() -> None:
    scheduler = scheduler_of("p1", "p2", "d1", "d2")
    for worker_id in ("p1", "d1"):
        scheduler.heartbeat(small_snapshot(worker_id, 2, draining=True), 1.0)
    for n in range(3):
        answer = placed(scheduler, f"r{n}")
        assert (answer.prefill, answer.decode) == ("p2", "d2")
    assert placed(scheduler, "held", attempt=1, prefer_decode="d1").decode == "d2"
    scheduler.heartbeat(small_snapshot("d2", 2, draining=True), 1.0)
    assert refused(scheduler, "late").retry_after_s is not None


def test_what_is_held_up_goes_elsewhere_only_where_there_is_room() -> None:
    """It would lose its KV for another queue; and where one has the room, it is the next one's no more."""
    scheduler = scheduler_of("d1", "d2")
    homes = {}
    for name in ("held up", "other"):
        homes[name] = placed(scheduler, name, num_tokens=800, max_new_tokens=200).decode
        scheduler.first_token(name, 0.0)
    assert homes["held up"] != homes["other"]
    asked = {"num_tokens": 801, "max_new_tokens": 199, "exclude": [homes["held up"]], "stays": True}
    asked |= {"ttft_s": 1.0, "waited_s": 60.0}  # it has begun: that its target is missed keeps it nowhere
    assert refused(scheduler, "held up", now=0.5, **asked).retry_after_s is not None
    assert [b.query.request_id for b in scheduler.ledger.booked_on(homes["held up"])] == ["held up"], "it stays there"
    scheduler.ended("other", 0.6)
    scheduler.heartbeat(small_snapshot(homes["other"], 2, blocks_available=40), 0.7)
    refused(scheduler, "held up", now=0.7, **asked)  # the worker knows better: it is not done with it
    scheduler.heartbeat(small_snapshot(homes["other"], 3, blocks_available=50), 0.75)
    refused(scheduler, "held up", now=0.75, **asked | {"num_tokens": 800})  # for its tokens, and for no other one
    scheduler.heartbeat(small_snapshot(homes["other"], 4), 0.8)
    logged, heard = scheduler.log.newest(10), list[int]()
    scheduler.on_verdict = lambda query, verdict, now, has_waited: heard.append(query.attempt)
    assert placed(scheduler, "held up", now=0.8, **asked).decode == homes["other"]
    assert not heard and scheduler.log.newest(10) == logged, "it counts once: when it asks where the next attempt goes"
    assert not scheduler.ledger.booked_on(homes["held up"])
    placed(scheduler, "third", now=0.8, num_tokens=800, max_new_tokens=200)
    scheduler.first_token("third", 0.8)
    refused(scheduler, "held up", now=0.9, **asked | {"exclude": [homes["other"]]})


def test_workers_that_just_failed_the_request_are_avoided() -> None:
    scheduler = scheduler_of("p1", "p2", "d1", "d2")
    answer = placed(scheduler, attempt=1, exclude=["p1", "d1"])
    assert (answer.prefill, answer.decode) == ("p2", "d2")


def test_an_excluded_decode_is_better_than_none_and_an_excluded_prefill_is_not() -> None:
    scheduler = scheduler_of("p1", "d1")
    answer = placed(scheduler, attempt=1, exclude=["p1", "d1"])
    assert (answer.prefill, answer.decode) == (None, "d1")


def test_the_decode_that_holds_a_reservation_is_kept() -> None:
    scheduler = scheduler_of("p1", "d1", "d2")
    for n in range(4):
        placed(scheduler, f"r{n}")
    assert placed(scheduler, attempt=1, prefer_decode="d2").decode == "d2"
    assert placed(scheduler, attempt=2, prefer_decode="d1").decode == "d1"
    assert placed(scheduler, attempt=3, prefer_decode="gone").decode in ("d1", "d2")


def test_what_does_not_fit_together_is_not_paired() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (small_info("p1", compatibility="other"), small_info("d1")):
        scheduler.register(info, small_snapshot(info.worker_id), 0.0)
    assert placed(scheduler).prefill is None
    scheduler.register(small_info("p2"), small_snapshot("p2", queued_prefill_tokens=5000), 0.0)
    assert placed(scheduler).prefill == "p2"


def test_a_prefill_worker_must_hold_the_prompt() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (small_info("p1", max_model_len=99), small_info("d1")):
        scheduler.register(info, small_snapshot(info.worker_id), 0.0)
    assert placed(scheduler, num_tokens=100).prefill is None
    assert placed(scheduler, num_tokens=99, max_new_tokens=800).prefill == "p1"


def test_short_prompts_are_computed_by_decode_where_the_policy_says_so() -> None:
    scheduler = scheduler_of("p1", "d1", local_prefill_below=50)
    assert placed(scheduler, num_tokens=49).prefill is None
    assert placed(scheduler, num_tokens=50).prefill == "p1"


def test_where_memory_is_short_the_larger_gets_more() -> None:
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (small_info("small", num_blocks=100), small_info("large", num_blocks=400)):
        scheduler.register(info, small_snapshot(info.worker_id), 0.0)
    decodes = [placed(scheduler, f"r{n}").decode for n in range(50)]
    assert 8 <= decodes.count("small") <= 13, "120 tokens each, and the small one holds 1600"


# --- who is turned away ---


def test_without_a_decode_worker_there_is_a_time_to_come_back() -> None:
    assert (refused(scheduler_of("p1")).retry_after_s or 0.0) > 0.0


def test_what_no_worker_can_hold_never_comes_back() -> None:
    scheduler = scheduler_of("p1", "d1")
    answer = refused(scheduler, num_tokens=990, max_new_tokens=11)
    assert answer.retry_after_s is None
    assert "1000" in answer.reason
    scheduler.register(small_info("big", max_model_len=2000), small_snapshot("big"), 0.0)
    assert placed(scheduler, num_tokens=990, max_new_tokens=11).decode == "big"


def test_what_only_a_worker_can_hold_that_is_gone_is_told_to_come_back_until_it_must_have_been_replaced() -> None:
    """And what has begun, for ever: it would end otherwise, in the middle of its stream."""
    scheduler, long = scheduler_of("d1"), {"num_tokens": 990, "max_new_tokens": 11}
    scheduler.register(small_info("big", max_model_len=2000), small_snapshot("big"), 0.0)
    assert placed(scheduler, "r", **long).decode == "big"
    scheduler.unregister("big", 1.0)
    for now in (1.0, 1.0 + REPLACED_S):
        answer = refused(scheduler, "new", now, **long)
        assert (answer.retry_after_s, "1000" in answer.reason) == (1.0, True)
    assert refused(scheduler, "longer", 1.0, num_tokens=2000, max_new_tokens=1).retry_after_s is None
    late = 2.0 + REPLACED_S
    assert refused(scheduler, "new", late, **long).retry_after_s is None
    assert refused(scheduler, "r", late, attempt=1, **long).retry_after_s == 1.0
    scheduler.register(small_info("big.1", max_model_len=2000), small_snapshot("big.1"), late)
    assert placed(scheduler, "r", late, attempt=1, **long).decode == "big.1"


def test_too_long_a_queue_turns_away_and_says_for_how_long() -> None:
    scheduler = scheduler_of("p1", "d1", admission=AdmissionPolicy(max_queued_tokens=1000))
    slow = replace(REPORT, base_s=0.0, prefill_token_s=0.01)
    waits = []
    for number, queued in enumerate((1500, 3000, 9000), 2):
        scheduler.heartbeat(small_snapshot("p1", number, queued_prefill_tokens=queued, step_cost=slow), float(number))
        waits.append(refused(scheduler).retry_after_s)
    assert waits == [pytest.approx(seconds, rel=0.01) for seconds in (5.0, 20.0, 80.0)]
    scheduler.heartbeat(small_snapshot("p1", 9, queued_prefill_tokens=1000), 9.0)
    assert placed(scheduler).prefill == "p1"


def test_a_worker_whose_speed_is_unknown_does_not_send_clients_away_for_hours() -> None:
    scheduler = scheduler_of("p1", "d1", admission=AdmissionPolicy(max_queued_tokens=1000))
    scheduler.heartbeat(small_snapshot("p1", 2, queued_prefill_tokens=20_000), 1.0)
    assert 1.0 <= (refused(scheduler).retry_after_s or 0.0) <= 60.0


def test_unreported_placements_make_the_queue_too_long_as_well() -> None:
    scheduler = scheduler_of("p1", "d1", admission=AdmissionPolicy(max_queued_tokens=250))
    for n in range(3):
        placed(scheduler, f"r{n}")
    assert "300 prompt tokens" in refused(scheduler, "r3").reason


def test_who_is_turned_away_for_a_long_queue_leaves_no_trace() -> None:
    """Else workers that refuse look busier with each refusal, and pools grow by clients that come back."""
    scheduler = scheduler_of("p1", "d1", admission=AdmissionPolicy(max_queued_tokens=1000))
    heard: list[AdmissionOutcome] = []
    scheduler.on_verdict = lambda query, verdict, now, has_waited: heard.append(verdict.outcome)
    scheduler.heartbeat(small_snapshot("p1", 2, queued_prefill_tokens=9000), 1.0)
    before = scheduler.ledger.table.facts.copy()
    for n in range(3):
        assert "9000 prompt tokens are waiting" in refused(scheduler, f"r{n}", 1.0).reason
    assert heard == [AdmissionOutcome.REJECTED] * 3 and not len(scheduler.ledger)
    assert (scheduler.ledger.table.facts == before).all()


def test_what_has_begun_is_never_turned_away_for_load() -> None:
    scheduler = scheduler_of("p1", "d1", admission=AdmissionPolicy(max_queued_tokens=10))
    scheduler.heartbeat(small_snapshot("p1", 2, queued_prefill_tokens=9000), 1.0)
    assert refused(scheduler)
    assert placed(scheduler, attempt=1).decode == "d1"


# --- what is forgotten ---


def test_an_ended_request_weighs_nothing() -> None:
    scheduler = scheduler_of("p1", "p2", "d1", "d2")
    first = placed(scheduler, "r1")
    scheduler.ended("r1", 1.0)
    scheduler.ended("never heard of", 1.0)
    assert len(scheduler.ledger) == 0
    assert placed(scheduler, "r2", 1.0) == replace(first, request_id="r2")


def test_a_request_that_is_placed_again_weighs_once() -> None:
    scheduler = scheduler_of("p1", "p2", "d1", "d2")
    for attempt in range(4):
        placed(scheduler, "r1", attempt=attempt)
    assert len(scheduler.ledger) == 1


# --- what it is told decides ---


def test_the_worker_that_reports_the_lower_cost_gets_more() -> None:
    scheduler = measured("p1", "p2", "d1")
    scheduler.heartbeat(worker_snapshot("p2", 2, step_cost=replace(REPORT, prefill_token_s=0.00025)), 0.5)
    prefills = [placed(scheduler, f"r{n}", 1.0, num_tokens=1000).prefill for n in range(10)]
    assert prefills.count("p2") == 8


def test_steps_are_as_long_as_workers_say() -> None:
    """Chunks of 100 tokens cost ten steps, and who holds one sequence at most takes no second one."""
    scheduler = GlobalScheduler(SchedulerPolicy())
    for info in (worker_info("p1", chunk_tokens=100), worker_info("d1", max_num_seqs=1), worker_info("d2")):
        scheduler.register(info, worker_snapshot(info.worker_id, step_cost=REPORT), 0.0)
    decodes = [placed(scheduler, f"r{n}", num_tokens=1000, max_new_tokens=900).decode for n in range(3)]
    assert decodes == ["d1", "d2", "d2"]
    assert scheduler.log.newest(3)[-1].verdict.decision.best.prefill_s == pytest.approx(1.0 + 10 * 0.01)


def test_a_cached_prefix_draws_a_request_while_the_queue_there_is_short() -> None:
    scheduler = measured("p1", "p2", "d1")
    hashes = b"".join(block_hashes(list(range(992)), 16))
    for worker_id, held in (("p1", b""), ("p2", hashes)):
        part = BlockIndexSnapshot(
            worker_id=worker_id, epoch=1, next_id=0, part=0, num_parts=1, tier="device", hashes=held
        )
        assert scheduler.update_blocks(part, 0.0) is None
    prefills = [placed(scheduler, f"r{n}", num_tokens=1000, prefix_hashes=hashes).prefill for n in range(3)]
    assert prefills == ["p2"] * 3
    placed(scheduler, "long", num_tokens=3000, exclude=["p1"])
    assert placed(scheduler, "r4", num_tokens=1000, prefix_hashes=hashes).prefill == "p1"
    gap = BlockEvents(worker_id="p2", epoch=1, first_id=7, changes=[])
    request = scheduler.update_blocks(gap, 1.0)
    assert request is not None and request.worker_id == "p2"


def test_what_a_request_has_waited_already_counts() -> None:
    patient, late = measured("p1", "d1"), measured("p1", "d1")
    for scheduler in (patient, late):  # on an idle cluster nobody is turned away
        placed(scheduler, "other", num_tokens=10)
    assert placed(patient, num_tokens=1000, **TARGETS).prefill == "p1"
    answer = late.place(place("r", num_tokens=1000, **TARGETS, waited_s=1.9), 0.0)
    assert isinstance(answer, Unplaceable)
    assert answer.retry_after_s is not None
