"""Prompts that find what others in their worker's queue compute: foretold, and taken back where it does not come."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.placement.coming_prefixes import ComingPrefixes, num_common
from cluster.scheduler.placement.filter import filter_workers
from cluster.scheduler.placement.ledger import Ledger
from cluster.scheduler.placement.policy import DecisionPolicy
from engine.kv.prefix import HASH_BYTES, block_hashes
from kv_transfer.messages.scheduling import Placement
from tests.cluster.scheduler.placement.placement_world import COST, book, costed_snapshot, ledger_of, query_of
from tests.cluster.scheduler.scheduler_world import TARGETS, measured, place
from tests.support.clusters.worker_reports import worker_info, worker_snapshot

SHARED = list(range(900))


def named(own: int, num_tokens: int = 1000, num_shared: int = 896) -> bytes:
    """The blocks of a prompt that has its first tokens in common with others, and the rest with nobody."""
    tokens = SHARED[:num_shared] + [10_000 + own] * (num_tokens - num_shared)
    return b"".join(block_hashes(tokens[:-1], 16))


def found(ledger: Ledger, hashes: bytes, worker_id: str = "p1") -> tuple[float, float]:
    """Tokens that a newcomer will find there, and of these, those that are yet to come."""
    query = query_of("newcomer", prefix_hashes=hashes)
    prompt = filter_workers(ledger, DecisionPolicy(), query, {}, 0.0).prompt
    row = ledger.table.row(worker_id)
    return float(prompt.cached_tokens[row]), float(prompt.coming_tokens[row])


def queue_up(ledger: Ledger, name: str, own: int, now: float = 0.0, num_shared: int = 896) -> None:
    """Book a prompt with what it will find, as placement does."""
    hashes = named(own, num_shared=num_shared)
    cached, coming = found(ledger, hashes)
    uncached = 1000 - cached
    book(
        *(ledger, name, now),
        prefill_s=COST.prefill_s(uncached, cached),
        num_cached=int(cached),
        coming_tokens=coming,
        prefix_hashes=hashes,
    )


def uncached(ledger: Ledger) -> dict[str, float]:
    return {booking.query.request_id: booking.uncached_tokens for booking in ledger.bookings()}


# --- the tree ---

_columns = st.lists(st.integers(0, 2), max_size=6)
_prompts = st.lists(st.tuples(st.sampled_from("abc"), _columns), max_size=12)


def _joined(numbers: Sequence[int]) -> bytes:
    return b"".join(block_hashes(list(numbers), 1))


@given(_prompts, st.randoms(use_true_random=False), st.lists(_columns, min_size=1, max_size=5))
def test_a_worker_reaches_as_far_as_the_likest_of_its_prompts(
    prompts: list[tuple[str, list[int]]], order: object, asked: list[list[int]]
) -> None:
    """Whatever came and went in whatever order; and of what went nothing is kept."""
    coming, there = ComingPrefixes(), [(worker, _joined(numbers)) for worker, numbers in prompts]
    for worker, hashes in there:
        coming.add(worker, hashes)
    order.shuffle(there)  # type: ignore[attr-defined]
    while True:
        for hashes in map(_joined, asked):
            expected: dict[str, int] = {}
            for worker, other in there:
                expected[worker] = max(expected.get(worker, 0), num_common(hashes, other))
            assert coming.reaches(hashes) == {worker: reach for worker, reach in expected.items() if reach}
        assert len(coming) <= 2 * len({hashes for _, hashes in there})
        if not there:
            break
        coming.remove(*there.pop())
    assert len(coming) == 0


def test_of_very_many_lengths_a_look_up_tells_some_apart() -> None:
    """And never says too much; whoever has most in common is told of in full."""
    coming, longest = ComingPrefixes(), list(range(1, 101))
    for number in longest:
        coming.add(f"w{number}", _joined(longest[:number]))
    found = coming.reaches(_joined([*longest, 0]))
    assert found.keys() == {f"w{number}" for number in longest}
    assert all(number - 7 < found[f"w{number}"] <= number for number in longest)
    assert found["w100"] == 100
    assert len(set(found.values())) <= 17


def test_common_columns_are_counted_whole() -> None:
    one, other = _joined([1, 2, 3]), _joined([1, 2, 4, 5])
    assert [num_common(one, other), num_common(other, one), num_common(one, one), num_common(one, b"")] == [2, 2, 3, 0]


# --- what the queue brings ---


def test_all_but_the_first_that_begin_alike_find_what_that_one_computes() -> None:
    ledger = ledger_of("p1", "p2", "d1")
    for number, name in enumerate("abc"):
        queue_up(ledger, name, number)
    assert uncached(ledger) == {"a": 1000, "b": 104, "c": 104}
    assert found(ledger, named(9)) == (896.0, 896.0)
    assert found(ledger, named(9), "p2") == (0.0, 0.0), "another worker's queue brings it nothing"
    assert found(ledger, named(9), "d1") == (0.0, 0.0)
    assert found(ledger, named(9, num_shared=160)) == (160.0, 160.0)


def test_what_was_computed_is_counted_on_until_the_worker_has_told_of_its_blocks() -> None:
    ledger = ledger_of("p1", "d1")
    queue_up(ledger, "a", 0)
    ledger.heartbeat(costed_snapshot("p1", 2), 0.5)
    ledger.first_token("a", 1.0)
    assert found(ledger, named(9)) == (896.0, 896.0)
    ledger.heartbeat(costed_snapshot("p1", 3), 1.5)
    assert found(ledger, named(9)) == (896.0, 896.0), "its blocks come right behind this report"
    ledger.heartbeat(costed_snapshot("p1", 4), 2.0)
    assert found(ledger, named(9)) == (0.0, 0.0), "from now on the index knows better"
    assert len(ledger.coming) == 0


@pytest.mark.parametrize("leaves", ["cancelled", "placed elsewhere"])
def test_without_the_first_the_next_one_computes_it_for_the_others(leaves: str) -> None:
    ledger = ledger_of("p1", "p2", "d1")
    for number, name in enumerate("abc"):
        queue_up(ledger, name, number)
    before_s = ledger.table.facts[7, ledger.table.row("p1")]
    if leaves == "cancelled":
        ledger.ended("a", 0.0)
    else:
        book(ledger, "a", 0.0, prefill="p2", attempt=1, prefix_hashes=named(0))
    assert {name: uncached(ledger)[name] for name in "bc"} == {"b": 1000, "c": 104}
    assert before_s == pytest.approx(1.01 + 2 * 0.114)
    assert ledger.table.facts[7, ledger.table.row("p1")] == pytest.approx(1.01 + 0.114)
    ledger.ended("b", 0.0)
    assert uncached(ledger)["c"] == 1000
    ledger.ended("c", 0.0)
    ledger.ended("a", 0.0)
    assert len(ledger.coming) == 0


def test_what_is_there_by_now_is_not_lost_with_who_came_after() -> None:
    ledger = ledger_of("p1", "d1")
    for number, name in enumerate("abc"):
        queue_up(ledger, name, number)
    ledger.first_token("a", 1.0)
    for number in (2, 3, 4):  # the index knows it
        ledger.heartbeat(costed_snapshot("p1", number), float(number))
    ledger.ended("b", 5.0)
    assert uncached(ledger)["c"] == 104


def test_what_was_computed_before_is_not_lost_with_who_came_after_once_it_is_told_of() -> None:
    """`b` and `c` come before the worker has told of what `a` left, and `b` goes after that."""
    ledger = ledger_of("p1", "d1")
    queue_up(ledger, "a", 0)
    ledger.heartbeat(costed_snapshot("p1", 2), 0.5)
    ledger.first_token("a", 1.0)
    for number, name in enumerate("bc", 1):
        queue_up(ledger, name, number, 1.1)
    assert found(ledger, named(9)) == (896.0, 896.0)
    for number in (3, 4):
        ledger.heartbeat(costed_snapshot("p1", number, queued_prefill_tokens=2000), number / 2)
    ledger.ended("b", 2.1)
    assert uncached(ledger)["c"] == 104


def test_a_longer_common_prefix_falls_back_to_a_shorter_one() -> None:
    ledger = ledger_of("p1", "d1")
    queue_up(ledger, "short", 0, num_shared=160)
    queue_up(ledger, "long", 1)
    queue_up(ledger, "like the long one", 2)
    assert uncached(ledger) == {"short": 1000, "long": 840, "like the long one": 104}
    ledger.ended("long", 0.0)
    assert uncached(ledger)["like the long one"] == 840
    assert found(ledger, named(9)) == (896.0, 896.0)


def test_of_a_worker_s_earlier_life_nothing_is_kept() -> None:
    ledger = ledger_of("p1", "d1")
    for number, name in enumerate("abc"):
        queue_up(ledger, name, number)
    ledger.first_token("a", 1.0)
    ledger.register(worker_info("p1"), worker_snapshot("p1"), 2.0)
    assert len(ledger.coming) == 0 and found(ledger, named(9)) == (0.0, 0.0)
    queue_up(ledger, "d", 3, 3.0)
    ledger.unregister("d1", 4.0)
    assert len(ledger.coming) == 0


def test_a_worker_that_keeps_nothing_or_names_its_blocks_otherwise_brings_nothing() -> None:
    for changes in ({"keeps_prefixes": False}, {"block_size": 32, "num_blocks": 1000}):
        ledger = ledger_of("d1")
        ledger.register(worker_info("p1", **changes), costed_snapshot("p1"), 0.0)
        queue_up(ledger, "a", 0)
        assert found(ledger, named(9)) == (0.0, 0.0), changes


def test_an_embedding_s_prompt_brings_nothing_and_a_part_brings_what_it_has() -> None:
    ledger = ledger_of("p1", "d1")
    book(ledger, "vector", decode="p1", prefix_hashes=named(0), max_new_tokens=0, tpot_s=None)
    assert found(ledger, named(9)) == (0.0, 0.0)
    book(ledger, "part", rest_tokens=800, rest_s=0.8, prefix_hashes=named(1))
    assert found(ledger, named(9)) == (192.0, 192.0)
    ledger.part_computed("part", 0.5)
    assert found(ledger, named(9)) == (192.0, 192.0)
    assert found(ledger, named(9), "d1") == (896.0, 896.0), "it has the first part from p1, and computes the rest"


def test_who_leaves_makes_only_those_look_who_begin_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a long queue of many texts, each of which two have in common: else each that leaves costs the square of it,
    and a worker that leaves its cube."""
    num_compared = 0

    def counting(one: bytes, other: bytes) -> int:
        nonlocal num_compared
        num_compared += 1
        return num_common(one, other)

    ledger, num_texts = ledger_of("p1", "d1"), 50
    for number in range(2 * num_texts):
        tokens = [number % num_texts] * 896 + [10_000 + number] * 104
        hashes = b"".join(block_hashes(tokens[:-1], 16))
        cached, coming = found(ledger, hashes)
        book(ledger, f"{number}", num_cached=int(cached), coming_tokens=coming, prefix_hashes=hashes)
    monkeypatch.setattr("cluster.scheduler.placement.ledger.num_common", counting)
    ledger.ended("0", 0.0)
    assert uncached(ledger)[f"{num_texts}"] == 1000
    assert num_compared <= 4 * num_texts
    num_compared = 0
    ledger.unregister("p1", 1.0)
    assert num_compared == 0 and len(ledger.coming) == 0


# --- whom it serves ---


def test_a_burst_behind_one_long_text_is_served() -> None:
    """A prompt takes 1.01 s, and 2 s are asked for."""
    for num_shared, is_served in ((896, True), (0, False)):
        scheduler = measured("p1", "d1")
        burst = [
            place(f"r{n}", num_tokens=1000, prefix_hashes=named(n, num_shared=num_shared), **TARGETS) for n in range(6)
        ]
        answers = [scheduler.place(request, 0.0) for request in burst]
        assert all(isinstance(answer, Placement) for answer in answers) is is_served, answers


def test_what_waiting_prompts_will_find_is_no_queue_that_is_too_long() -> None:
    """A worker reports all tokens of those that have not begun."""
    ledger = ledger_of("p1", "d1")
    for number, name in enumerate("abc"):
        queue_up(ledger, name, number)
    ledger.heartbeat(costed_snapshot("p1", 2, queued_prefill_tokens=3000), 0.1)
    ledger.heartbeat(costed_snapshot("p1", 3, queued_prefill_tokens=3000), 0.2)
    assert ledger.queued_tokens("p1") == 1208
    ledger.heartbeat(costed_snapshot("p1", 4, queued_prefill_tokens=5000), 0.3)
    assert ledger.queued_tokens("p1") == 3208, "what nobody booked"
    assert len(named(0)) == 62 * HASH_BYTES
