"""The ledger: what was placed counts at once and once, until it ends; snapshots and first tokens correct it."""

from __future__ import annotations

import math
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from cluster.scheduler.placement.coming_prefixes import num_common
from cluster.scheduler.placement.estimates import OutputLengths
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.worker_table import Fact, Slot
from engine.kv.prefix import block_hashes
from tests.cluster.scheduler.placement.placement_world import (
    COST,
    book,
    costed_snapshot,
    decoding,
    fact_of,
    ledger_of,
    query_of,
)
from tests.support.clusters.worker_reports import worker_info, worker_snapshot


def _drained_at(ledger: Ledger, worker_id: str) -> float:
    return fact_of(ledger, worker_id, Fact.DRAINED_AT)


# --- the queue of prompts ---


def test_a_booking_counts_at_once_and_prompts_follow_each_other() -> None:
    ledger = ledger_of("p1", "d1")
    assert book(ledger, "a", 1.0, prefill_s=2.0).computed_at == 3.0
    assert book(ledger, "b", 1.5, prefill_s=1.0).computed_at == 4.0
    assert _drained_at(ledger, "p1") == 4.0


def test_an_idle_worker_begins_when_it_is_given_work() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 1.0)
    ledger.first_token("a", 1.5)
    assert book(ledger, "b", 9.0).computed_at == 10.0


def test_a_first_token_earlier_or_later_than_predicted_moves_those_behind() -> None:
    for at, expected in ((0.5, 1.5), (3.0, 4.0)):
        ledger = ledger_of("p1", "d1")
        book(ledger, "a"), book(ledger, "b")
        ledger.first_token("a", at)
        assert _drained_at(ledger, "p1") == expected


def test_an_overdue_prompt_delays_those_behind_from_now_on() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 0.0)
    assert book(ledger, "b", 5.0).computed_at == 6.0


def test_a_worker_is_idle_when_its_prompts_are_computed_and_its_answers_have_come() -> None:
    ledger = ledger_of("p1", "d1", "d2")
    assert ledger.idle_at("d1", 4.0) == 4.0
    book(ledger, "a", 0.0, prefill_s=2.0, max_new_tokens=100)
    step_s = COST.base_s + COST.decode_s + 1000 * COST.context_token_s
    decodes_s = 100 * COST.base_s  # nobody decodes there yet
    assert ledger.idle_at("p1", 0.0) == 2.0
    assert ledger.idle_at("d1", 0.0) == pytest.approx(2.0 + decodes_s)
    ledger.first_token("a", 3.0)
    assert ledger.idle_at("d1", 3.0) == pytest.approx(3.0 + 100 * step_s)
    assert ledger.idle_at("d1", 3.0 + 50 * step_s) == pytest.approx(3.0 + 100 * step_s), "half of them have come"
    assert ledger.idle_at("d2", 3.0) == 3.0


def test_a_worker_is_not_idle_soon_for_an_answer_that_is_longer_than_expected_nor_with_unknown_ones() -> None:
    ledger = ledger_of("d1")
    for _ in range(8):
        ledger.lengths.observe("t", "", 100)
    book(ledger, "a", prefill=None, max_new_tokens=4000)
    ledger.first_token("a", 0.0)
    expected_s = ledger.idle_at("d1", 0.0)
    assert 1.0 < expected_s < 10.0
    now = 2 * expected_s
    assert ledger.idle_at("d1", now) >= now + 0.9 * expected_s, "it is as far from its end as one that begins"
    ledger.heartbeat(costed_snapshot("d1", 2, num_running=2), now)
    assert ledger.idle_at("d1", now) == math.inf


def test_a_prompt_in_two_parts_takes_its_time_on_each_worker() -> None:
    ledger = ledger_of("p1", "d1")
    booking = book(ledger, "a", 1.0, prefill_s=2.0, rest_tokens=400, rest_s=1.0)
    assert (_drained_at(ledger, "p1"), _drained_at(ledger, "d1")) == (3.0, 2.0)
    assert ledger.table.slots[Slot.FIRST_AT, ledger.table.row("d1"), booking.slot] == 4.0
    ledger.part_computed("a", 2.5)
    assert (ledger.queue("p1"), ledger.queue("d1")) == ([], ["a"])
    assert (_drained_at(ledger, "p1"), _drained_at(ledger, "d1")) == (2.5, 3.5)
    ledger.part_computed("a", 2.6)  # told twice
    ledger.first_token("a", 3.0)
    assert ledger.queue("d1") == [] and _drained_at(ledger, "d1") == 3.0


def test_a_first_token_says_that_both_parts_are_computed() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 0.0, rest_tokens=400, rest_s=1.0)
    ledger.first_token("a", 1.5)
    assert ledger.queue("p1") == ledger.queue("d1") == []
    assert _drained_at(ledger, "p1") == _drained_at(ledger, "d1") == 1.5


def test_a_cancelled_prompt_leaves_the_queue() -> None:
    ledger = ledger_of("p1", "d1")
    for request_id in "abc":
        book(ledger, request_id)
    ledger.ended("b", 0.5)
    assert _drained_at(ledger, "p1") == 2.0
    ledger.ended("a", 0.5)
    assert _drained_at(ledger, "p1") == 1.5


def test_a_snapshot_tells_what_is_done_of_what_it_knows() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 0.5), book(ledger, "b", 0.5)
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=2000), 1.0)
    book(ledger, "c", 1.5)
    ledger.heartbeat(costed_snapshot("p1", 3, queued_prefill_tokens=1500), 2.0)
    # a and b were there before the snapshot at 1.0, c came after: at least half of a is done, by the clock all of it.
    assert _drained_at(ledger, "p1") == pytest.approx(4.0)


def test_between_the_ends_of_steps_the_clock_tells_what_is_done() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 0.0)
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=1000), 0.4)
    ledger.heartbeat(costed_snapshot("p1", 3, queued_prefill_tokens=1000), 0.8)
    assert _drained_at(ledger, "p1") == pytest.approx(1.0)


def test_a_worker_that_lags_is_no_more_than_a_step_ahead_of_what_it_says() -> None:
    ledger = ledger_of("d1")
    ledger.register(worker_info("p1", chunk_tokens=200), costed_snapshot("p1"), 0.0)
    book(ledger, "a", 0.0)
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=900), 0.9)
    assert _drained_at(ledger, "p1") == pytest.approx(0.9 + 0.7)


def test_what_a_waiting_prompt_will_find_cached_is_no_unknown_work() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 0.0), book(ledger, "b", 0.0, num_cached=900, prefill_s=0.1)
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=2000), 0.5)
    assert _drained_at(ledger, "p1") == pytest.approx(1.1)


def test_work_that_nobody_booked_counts_too() -> None:
    ledger = ledger_of("p1", "d1")
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=3000), 1.0)
    assert _drained_at(ledger, "p1") == pytest.approx(1.0 + 3.01)
    assert book(ledger, "a", 2.0).computed_at == pytest.approx(5.01)
    assert book(ledger, "late", 2.0, prefill_s=0.5).computed_at == pytest.approx(5.51)


def test_older_snapshots_and_unknown_workers_change_nothing() -> None:
    ledger = ledger_of("p1", "d1")
    assert ledger.heartbeat(costed_snapshot("p1", 5, queued_prefill_tokens=1000), 1.0)
    assert ledger.heartbeat(costed_snapshot("p1", 5, queued_prefill_tokens=0), 2.0)
    assert _drained_at(ledger, "p1") == pytest.approx(2.01)
    assert not ledger.heartbeat(worker_snapshot("p9", 5), 1.0)


def test_a_heartbeat_that_says_nothing_of_costs_leaves_what_was_measured() -> None:
    ledger = ledger_of("p1")
    row = ledger.table.row("p1")
    ledger.heartbeat(worker_snapshot("p1", 2), 1.0)
    assert ledger.table.cost(row) == COST
    ledger.register(worker_info("p1"), worker_snapshot("p1"), 2.0)  # another life, of which nothing is known
    assert ledger.table.cost(ledger.table.row("p1")).relative_error == 0.5


def test_prompts_of_lately_are_forgotten_in_time() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "a", 5.0)
    row = ledger.table.row("p1")
    assert ledger.table.prompt_shares(row, 5.0) == pytest.approx(0.1)  # a second of the last ten
    assert ledger.table.prompt_shares(row, 15.0) == pytest.approx(0.1 * np.exp(-1.0))
    assert ledger.table.prompt_shares(ledger.table.row("d1"), 5.0) == 0.0


def test_a_prompt_stretches_its_worker_s_steps_from_its_placement_on() -> None:
    ledger = ledger_of("d1")
    row = ledger.table.row("d1")
    decoding(ledger, "a", prefill=None)
    before_s = ledger.table.facts[Fact.STEP_S, row]
    book(ledger, "b", prefill=None)
    assert ledger.table.facts[Fact.STRETCH, row] == pytest.approx(1.0 / (1.0 - 0.2))  # two of the last ten seconds
    assert ledger.table.facts[Fact.STEP_S, row] > before_s


# --- those who decode ---


def test_decode_steps_are_counted_with_those_who_decode() -> None:
    ledger = ledger_of("p1", "d1")
    assert fact_of(ledger, "d1", Fact.STEP_S) == pytest.approx(0.010)
    decoding(ledger, "a", 1.0)
    assert fact_of(ledger, "d1", Fact.STEP_S) == pytest.approx(0.010 + 0.001 + 0.001)
    decoding(ledger, "b", 2.2)  # 100 steps later
    slots = ledger.table.slots[:, ledger.table.row("d1")]
    assert slots[Slot.JOINED_STEP, 1] - slots[Slot.JOINED_STEP, 0] == pytest.approx(100)
    assert fact_of(ledger, "d1", Fact.STEP_S) == pytest.approx(0.010 + 0.002 + 0.0021)


def test_sequences_of_before_this_scheduler_count_until_they_leave() -> None:
    ledger = ledger_of("d1")
    ledger.heartbeat(costed_snapshot("d1", 2, num_running=3, blocks_available=1900), 1.0)
    assert fact_of(ledger, "d1", Fact.EXTRA_DECODES) == 3
    assert fact_of(ledger, "d1", Fact.EXTRA_CONTEXT) == 1600
    ledger.heartbeat(costed_snapshot("d1", 3, num_running=1, context_tokens=700), 2.0)
    assert (fact_of(ledger, "d1", Fact.EXTRA_DECODES), fact_of(ledger, "d1", Fact.EXTRA_CONTEXT)) == (1, 700)
    ledger.heartbeat(costed_snapshot("d1", 4), 3.0)
    assert fact_of(ledger, "d1", Fact.EXTRA_CONTEXT) == 0


def test_a_lost_worker_takes_its_bookings_along_and_no_others() -> None:
    ledger = ledger_of("p1", "p2", "d1", "d2")
    book(ledger, "queued"), book(ledger, "elsewhere", prefill="p2", decode="d2")
    decoding(ledger, "decoding")
    assert ledger.unregister("p1", 1.0)
    assert [b.query.request_id for b in ledger.bookings()] == ["elsewhere", "decoding"]
    assert ledger.unregister("d1", 1.0)
    assert not ledger.unregister("d1", 1.0)
    assert "elsewhere" in ledger
    assert "decoding" not in ledger


def test_an_attempt_replaces_the_one_before() -> None:
    ledger = ledger_of("p1", "p2", "d1")
    book(ledger, "a")
    book(ledger, "a", attempt=1, prefill="p2")
    assert (len(ledger), _drained_at(ledger, "p1"), _drained_at(ledger, "p2")) == (1, 0.0, 1.0)


def _prefix(*runs: tuple[str, int]) -> bytes:
    """The names of a prompt's 62 blocks, alike as far as runs of so many of them are."""
    tokens = [ord(name) for name, count in runs for _ in range(16 * count)]
    return b"".join(block_hashes(tokens, 16))


PREFIXES = [
    b"",
    _prefix(("s", 40), ("a", 22)),
    _prefix(("s", 40), ("b", 22)),
    _prefix(("s", 20), ("c", 42)),
    _prefix(("s", 20), ("c", 30), ("d", 12)),
    _prefix(("e", 62)),
]


class LedgerRules(RuleBasedStateMachine):
    """Whatever happens in whatever order, each request is where the model says, once."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger = ledger_of("p1", "p2", "d1", "d2")
        self.now = 0.0
        self.number = 1
        self.model: dict[str, tuple[str, str, bool]] = {}  # computing, decode, still in the queue
        self.rests: dict[str, float] = {}  # seconds, of those whose first part is in the queue
        self.brought: dict[str, list[bytes]] = defaultdict(list)  # by worker, what was computed in this life of it

    @rule(dt=st.floats(0.0, 3.0))
    def wait(self, dt: float) -> None:
        self.now += dt

    @rule(
        request_id=st.sampled_from("abcdefghijkl"),
        prefill=st.sampled_from(["p1", "p2", None]),
        decode=st.sampled_from(["d1", "d2"]),
        prefill_s=st.floats(0.01, 3.0),
        rest_s=st.sampled_from([0.0, 0.0, 0.5, 2.0]),
        hashes=st.sampled_from(PREFIXES),
    )
    def book(
        self, request_id: str, prefill: str | None, decode: str, prefill_s: float, rest_s: float, hashes: bytes
    ) -> None:
        rest_s = rest_s if prefill else 0.0
        self.ledger.ended(request_id, self.now)
        num_cached = 16 * self.ledger.coming.reaches(hashes).get(prefill or decode, 0)
        num_cached = min(num_cached, 700 if rest_s else 1000)
        book(
            self.ledger,
            request_id,
            self.now,
            prefill=prefill,
            decode=decode,
            prefill_s=prefill_s,
            rest_tokens=300 if rest_s else 0,
            rest_s=rest_s,
            num_cached=num_cached,
            coming_tokens=num_cached,
            prefix_hashes=hashes,
        )
        self.model.pop(request_id, None)
        self.model[request_id] = (prefill or decode, decode, True)
        self.rests[request_id] = rest_s

    @rule(request_id=st.sampled_from("abcdefghijkl"))
    def part_computed(self, request_id: str) -> None:
        self._computed(request_id, whole=False)
        self.ledger.part_computed(request_id, self.now)
        if request_id in self.model and self.model[request_id][2] and self.rests[request_id]:
            decode = self.model.pop(request_id)[1]
            self.model[request_id] = (decode, decode, True)  # last in its queue
            self.rests[request_id] = 0.0

    @rule(request_id=st.sampled_from("abcdefghijkl"))
    def first_token(self, request_id: str) -> None:
        self._computed(request_id, whole=True)
        self.ledger.first_token(request_id, self.now)
        if request_id in self.model:
            self.model[request_id] = (*self.model[request_id][:2], False)
            self.rests[request_id] = 0.0

    def _computed(self, request_id: str, *, whole: bool) -> None:
        booking = {b.query.request_id: b for b in self.ledger.bookings()}.get(request_id)
        if booking is not None and self.model[request_id][2] and (whole or booking.rest_tokens):
            self.brought[booking.computing].append(booking.brings)
            if booking.rest_tokens and whole:
                self.brought[booking.decode].append(booking.query.prefix_hashes)

    @rule(request_id=st.sampled_from("abcdefghijkl"))
    def ended(self, request_id: str) -> None:
        self.ledger.ended(request_id, self.now, 7)
        self.model.pop(request_id, None)

    @rule(worker=st.sampled_from(["p1", "p2", "d1", "d2"]), queued=st.integers(0, 5000), running=st.integers(0, 9))
    def heartbeat(self, worker: str, queued: int, running: int) -> None:
        self.number += 1
        snapshot = costed_snapshot(worker, self.number, queued_prefill_tokens=queued, num_running=running)
        assert self.ledger.heartbeat(snapshot, self.now)

    @rule(worker=st.sampled_from(["p1", "p2", "d1", "d2"]))
    def restart(self, worker: str) -> None:
        self.number += 1
        self.brought.pop(worker, None)
        self.ledger.register(worker_info(worker), costed_snapshot(worker, self.number), self.now)
        gone = [r for r, (p, d, queued) in self.model.items() if worker == d or (queued and worker == p)]
        for request_id in gone:
            del self.model[request_id]

    @invariant()
    def all_is_counted_once(self) -> None:
        bookings = {b.query.request_id: b for b in self.ledger.bookings()}
        assert bookings.keys() == self.model.keys()
        table = self.ledger.table
        for worker in ("d1", "d2"):
            row = table.row(worker)
            here = [b for r, b in bookings.items() if self.model[r][1] == worker]
            assert (
                sorted(b.slot for b in here)
                == list(range(int(table.facts[Fact.BOOKED, row])))
                == list(range(len(here)))
            )
            assert table.facts[Fact.BOOKED, row] == len(here)
            assert table.facts[Fact.BOOKED_CONTEXT, row] == 1000 * len(here)
            assert (table.slots[Slot.OUTPUT, row] > 0).sum() == len(here)
            joined = table.slots[Slot.JOINED_STEP, row, : len(here)] < np.inf
            assert joined.sum() == sum(not self.model[b.query.request_id][2] for b in here)

    @invariant()
    def steps_are_of_those_who_are_there(self) -> None:
        """Whatever happened last has had them predicted: once more changes only how much prompts stretch them."""
        table, told = self.ledger.table, (Fact.LIMIT_S, Fact.WITH_PROMPTS_S, Fact.ROOM_S, Fact.CHUNK_LEFT)
        for row in range(len(table)):
            before = table.facts[:, row].copy()
            table.predict_step(row, self.now)
            assert table.facts[told, row] == pytest.approx(before[list(told)])
            table.facts[:, row] = before

    @invariant()
    def queues_hold_what_is_not_computed(self) -> None:
        for worker in ("p1", "p2", "d1", "d2"):
            queued = [b for b in self.ledger.bookings() if self.model[b.query.request_id] == (worker, b.decode, True)]
            latest = max((b.computed_at for b in queued), default=None)
            coming_s = sum(self.rests[r] for r, (_, d, is_queued) in self.model.items() if is_queued and d == worker)
            if latest is not None:
                assert _drained_at(self.ledger, worker) >= latest + coming_s - 1e-9 >= 0.0 - 1e-9
            if latest is not None and not coming_s:
                assert _drained_at(self.ledger, worker) == latest
            lent = sum(b.query.num_tokens - b.rest_tokens for b in queued if b.decode != worker)
            assert self.ledger.table.facts[Fact.LENT_TOKENS, self.ledger.table.row(worker)] == lent
            work_s = sum(b.prefill_s for b in queued) + coming_s
            assert _drained_at(self.ledger, worker) <= self.now + work_s + 6.0  # at most 5000 unknown tokens

    @invariant()
    def nobody_counts_on_what_nobody_brings(self) -> None:
        bookings = {b.query.request_id: b for b in self.ledger.bookings()}
        for worker in ("p1", "p2", "d1", "d2"):
            ahead = list(self.brought[worker])
            for request_id in self.ledger.queue(worker):
                booking = bookings[request_id]
                there = max((num_common(brought, booking.query.prefix_hashes) for brought in ahead), default=0)
                assert 0 <= booking.coming_tokens <= booking.cached_tokens
                assert booking.coming_tokens == 0 or booking.cached_tokens <= 16 * there
                ahead.append(booking.brings)
            for hashes in PREFIXES:
                most = max((num_common(one, hashes) for one in ahead), default=0)
                assert self.ledger.coming.reaches(hashes).get(worker, 0) <= most

    def teardown(self) -> None:
        for worker in ("p1", "p2", "d1", "d2"):
            self.ledger.unregister(worker, self.now)
        assert len(self.ledger.coming) == 0


LedgerRules.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestLedgerRules = LedgerRules.TestCase


# --- expected lengths ---


def test_lengths_are_learned_per_tenant_then_class_then_all() -> None:
    lengths = OutputLengths()
    assert lengths.expect("t", "c", 10_000) == 256.0
    assert lengths.expect("t", "c", 7) == 7.0
    for _ in range(8):
        lengths.observe("t", "c", 100)
        lengths.observe("u", "c", 300)
    assert lengths.expect("t", "c", 10_000) == 100.0
    assert lengths.expect("new", "c", 10_000) == 200.0
    assert lengths.expect("new", "other", 10_000) == 200.0
    assert lengths.expect("u", "c", 250) == 250.0


def test_lengths_follow_and_their_memory_is_bounded() -> None:
    lengths = OutputLengths(max_keys=50)
    for number in range(500):
        lengths.observe(f"tenant-{number}", "c", 10)
    for _ in range(300):
        lengths.observe("t", "c", 500)
    assert lengths.expect("t", "c", 1000) == 500.0
    assert lengths.expect("tenant-0", "c", 1000) == 500.0
    assert len(lengths) == 50


def test_what_ends_teaches_what_to_expect() -> None:
    ledger = ledger_of("p1", "d1")
    for number in range(8):
        book(ledger, f"r{number}")
        ledger.ended(f"r{number}", 1.0, num_output_tokens=40)
    booking = book(ledger, "next", max_new_tokens=1000)
    assert ledger.table.slots[Slot.OUTPUT, ledger.table.row("d1"), booking.slot] == 40.0
    assert query_of().has_targets


def test_rows_stay_in_order_and_what_is_known_of_a_worker_moves_with_it() -> None:
    ledger = ledger_of("d2", "p2")
    decoding(ledger, "a", prefill="p2", decode="d2")
    before = ledger.table.facts[:, ledger.table.row("d2")].tolist(), ledger.table.slots[:, 1, 0].tolist()
    for worker_id in ("p1", "d1", "d3"):
        ledger.register(worker_info(worker_id), costed_snapshot(worker_id), 0.0)
    assert ledger.table.ids == ["p1", "p2", "d1", "d2", "d3"]
    assert ledger.table.pools() == (slice(0, 2), slice(2, 5))
    for worker_id in ("p1", "d1"):
        ledger.unregister(worker_id, 0.0)
    assert ledger.table.ids == ["p2", "d2", "d3"]
    assert (ledger.table.facts[:, 1].tolist(), ledger.table.slots[:, 1, 0].tolist()) == before
    assert not ledger.table.facts[:, 3:].any()
    assert ledger.table.facts[Fact.BOOKED, 1] == 1
