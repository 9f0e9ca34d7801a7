"""Retry-After: no more work in any second than is done in one, and each client known again for a while."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.placement import retry_after
from cluster.scheduler.placement.retry_after import (
    MAX_RETRY_AFTER_S,
    PlacementPace,
    ReservedWork,
    RetryAfterCalendar,
)

_FREE = [0.0]  # of a worker that has nothing to compute

# --- the calendar ---


def test_long_work_far_off_does_not_put_off_short_work() -> None:
    calendar = ReservedWork()
    assert calendar.reserve(90.0, 30.0, per_s=4.0, free_at=_FREE) == 90.0
    assert calendar.reserve(2.5, 1.0, per_s=4.0, free_at=_FREE) == 2.5
    assert calendar.reserve(2.5, 1.0, per_s=4.0, free_at=_FREE) == 2.5, "there is room for both in that second"
    assert calendar.reserve(91.0, 1.0, per_s=4.0, free_at=_FREE) == 97.5, "30 seconds of work take 7.5"


def test_workers_give_no_room_while_they_compute_what_they_have() -> None:
    """Overload begins, and two of four workers are busy for a while with what came before anybody was turned away."""
    calendar = ReservedWork()
    told = [calendar.reserve(1.0, 1.0, per_s=1.0, free_at=[0.0, 0.0, 4.0, 8.0]) for _ in range(5)]
    assert told == pytest.approx([1.0, 3.0, 4.0 + 1.0 / 3.0, 5.0 + 2.0 / 3.0, 7.0])


def test_one_worker_gives_room_though_all_are_busy() -> None:
    """The time from which on a client may come was foreseen for one of them."""
    calendar = ReservedWork()
    told = [calendar.reserve(1.0, 0.5, per_s=2.0, free_at=[50.0, 60.0]) for _ in range(3)]
    assert told == pytest.approx([1.0, 1.5, 2.0])


def test_what_was_reserved_for_the_past_is_forgotten() -> None:
    calendar = ReservedWork()
    for at in range(100):
        calendar.reserve(float(at), 1.0, per_s=1.0, free_at=_FREE)
    calendar.forget(98.5)
    assert len(calendar.taken_s) == 2


@given(
    st.lists(st.tuples(st.floats(0.0, 50.0), st.floats(0.001, 20.0)), max_size=60),
    st.sampled_from([0.3, 1.0, 7.5]),
    st.lists(st.floats(0.0, 60.0), min_size=1, max_size=5).map(sorted),
)
def test_no_second_is_given_more_than_is_done_in_it(
    wanted: list[tuple[float, float]], per_s: float, free_at: list[float]
) -> None:
    calendar = ReservedWork()
    for earliest, work_s in wanted:
        at = calendar.reserve(earliest, work_s, per_s, free_at)
        assert at >= earliest
        # By then all workers are free, and whoever is before it has been done with or did not fill the time.
        assert at <= max(earliest, free_at[-1]) + sum(work for _, work in wanted) / per_s + 2.0
    assert sum(calendar.taken_s.values()) == pytest.approx(sum(work for _, work in wanted))
    for second, taken_s in calendar.taken_s.items():
        num_free = sum(free <= second + 1 for free in free_at)
        assert taken_s <= per_s * max(1, num_free) / len(free_at) + 1e-9


@given(
    st.lists(
        st.tuples(
            st.sampled_from([0.0, 1.0, 5000.0]),
            st.sampled_from([0.0, 0.3, 1e9, 1e300]),
            st.sampled_from([0.0, 3e3, 1e12]),
        ),
        max_size=12,
    ),
    st.lists(st.sampled_from([0.0, 1e4, 1e15]), min_size=1, max_size=3).map(sorted),
)
def test_nobody_is_told_of_a_time_beyond_an_hour_nor_is_any_work_kept_there(
    asked: list[tuple[float, float, float]], free_at: list[float]
) -> None:
    calendar, now = RetryAfterCalendar(), 0.0
    for number, (passed_s, work_s, in_s) in enumerate(asked):
        now += passed_s
        at = calendar.reserve(number, now + in_s, work_s, free_at, now)
        assert now + min(in_s, MAX_RETRY_AFTER_S) <= at <= now + MAX_RETRY_AFTER_S
        assert len(calendar._work.taken_s) <= MAX_RETRY_AFTER_S + 2


@given(
    st.lists(
        st.tuples(
            st.floats(0.0, 400.0),
            st.sampled_from([0.3, 7.0, 150.0]),
            st.sampled_from([0.5, 1.0, 2.0]),
            st.lists(st.floats(0.0, 200.0), min_size=1, max_size=3).map(sorted),
        ),
        max_size=25,
    )
)
def test_runs_that_are_passed_over_have_no_room(asked: list[tuple[float, float, float, list[float]]]) -> None:
    """As if each second were looked at, also where the pace or the workers change."""
    calendar, latest = ReservedWork(), 500.0
    for earliest, work_s, per_s, free_at in asked:
        taken_s = dict(calendar.taken_s)
        rooms = {
            second: per_s * max(1, sum(free <= second + 1 for free in free_at)) / len(free_at)
            for second in range(int(earliest), int(latest))
        }
        first = next((second for second, room_s in rooms.items() if taken_s.get(second, 0.0) < room_s), None)
        at = calendar.reserve(earliest, work_s, per_s, free_at, latest)
        assert at == (latest if first is None else max(earliest, first + taken_s.get(first, 0.0) / rooms[first]))
        left_s = sum(max(0.0, room_s - taken_s.get(second, 0.0)) for second, room_s in rooms.items())
        assert sum(calendar.taken_s.values()) == pytest.approx(sum(taken_s.values()) + min(work_s, left_s))


def test_a_calendar_that_is_full_for_an_hour_is_not_looked_through_second_by_second(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It took most of the 2 ms that a decision may take."""
    seconds: list[int] = []

    def room_s(bucket: int, per_s: float, free_at: Sequence[float]) -> float:
        seconds.append(bucket)
        return per_s

    monkeypatch.setattr(retry_after, "_room_s", room_s)
    calendar = ReservedWork()
    calendar.reserve(10.5, 1e6, 1.0, _FREE, 3610.5)
    for _ in range(3):
        seconds.clear()
        assert calendar.reserve(10.5, 1.0, 1.0, _FREE, 3610.5) == 3610.5
    assert len(seconds) < 3 * retry_after.RUN
    assert calendar.reserve(10.5, 1.0, 2.0, _FREE, 3610.5) == 10.5, "the pace has doubled"


# --- the pace ---


def test_work_is_reserved_as_fast_as_it_is_placed_under_overload() -> None:
    pace = PlacementPace()
    assert pace.per_s(8) == 8.0, "before anything is known"
    for step in range(1000):
        pace.placed(0.3)
        pace.turned_away(step / 10, 8)
    assert pace.per_s(8) == pytest.approx(4.0, rel=0.02), "3 of 20 seconds' contention, 8 of five"


def test_what_is_placed_while_there_is_room_for_all_says_nothing() -> None:
    pace = PlacementPace()
    for step in range(100):
        pace.placed(0.01)
        pace.turned_away(10.0 * step, 8)
    assert pace.per_s(8) == 8.0


def test_the_pace_of_workers_that_have_left_is_gone_with_them() -> None:
    pace = PlacementPace()
    for step in range(1000):
        pace.placed(0.4)
        pace.turned_away(step / 10, 8)
    assert pace.per_s(8) == pytest.approx(4.8, rel=0.02), "4 of 20 seconds' contention, 8 of five"
    pace.turned_away(100.0, 2)
    assert pace.per_s(2) == pytest.approx(1.2, rel=0.02), "of a quarter of them a quarter"
    pace.turned_away(100.1, 8)
    assert pace.per_s(8) == pytest.approx(4.8, rel=0.02), "and they are replaced"


# --- clients ---


def test_clients_are_known_again_while_they_are_expected() -> None:
    calendar = RetryAfterCalendar()
    first = calendar.reserve("a", 210.0, 8.0, 4 * _FREE, 200.0)
    second = calendar.reserve("b", 210.0, 1.0, 4 * _FREE, 200.0)
    assert first == 210.0
    assert second == pytest.approx(210.0 + 4.0 / 0.6), "0.15 of four workers' time, and half are expected"
    assert calendar.reserve("c", 205.0, 1.0, 4 * _FREE, 200.0) == 205.0
    calendar.served("c", 201.0)
    assert calendar.reserve("b", 205.0, 1.0, 4 * _FREE, 201.0) == second, "too early: it keeps its turn"
    assert not calendar.match("a", 205.0)
    assert not calendar.is_due(205.0)
    assert calendar.match("a", 210.0)
    assert calendar.is_due(210.0)
    calendar.served("a", 210.0)
    calendar.served("a", 210.0)
    assert not calendar.match("a", 210.0)
    assert not calendar.is_due(215.5)
    assert calendar.is_due(216.0)
    assert not calendar.is_due(220.0)
    assert len(calendar) == 0


def test_where_nobody_returns_nobody_is_sent_ever_further_away() -> None:
    calendar = RetryAfterCalendar()
    waits = []
    for number in range(6000):  # ten minutes of three times what eight workers can do
        now = number / 10
        calendar.placed(0.8)
        waits.append(calendar.reserve(number, now + 2.0, 1.6, 8 * _FREE, now) - now)
    assert max(waits[1000:]) < 20.0
    assert max(waits[3000:]) <= max(waits[:3000]) + 1.0


def test_clients_that_retry_on_a_backoff_of_their_own_and_give_up_send_nobody_further_away() -> None:
    """As above, with two more visits of each before its time. They are no returns: nobody comes at its time."""
    calendar = RetryAfterCalendar()
    waits = []
    for number in range(3000):
        now = number / 10
        calendar.placed(0.8)
        waits.append(calendar.reserve(number, now + 2.0, 1.6, 8 * _FREE, now) - now)
        for before in (1, 3):
            if number >= before:
                calendar.reserve(number - before, now + 2.0, 1.6, 8 * _FREE, now)
    assert max(waits[1000:]) < 20.0
    assert calendar.return_rate < 0.01


def test_who_asks_again_and_again_before_its_time_takes_the_room_of_one() -> None:
    calendar = RetryAfterCalendar()
    told = [calendar.reserve("a", 8.0 + now / 10, 8.0, 4 * _FREE, now / 10) for now in range(60)]
    assert told == [8.0 + now / 10 for now in range(60)], "not before there is room, nor behind its own work"
    assert sum(calendar._work.taken_s.values()) == 4.0, "once, and half are expected"


def test_who_is_served_before_its_time_does_not_need_the_room_that_was_kept_for_it() -> None:
    calendar = RetryAfterCalendar()
    for number in range(60):
        calendar.reserve(number, number + 20.0, 0.1, 8 * _FREE, float(number))
        calendar.served(number, number + 0.5)
    assert calendar.return_rate < 0.01
    assert len(calendar) == 0


@pytest.mark.parametrize("num_early", [1, 50])
def test_who_comes_at_its_time_has_come_back_however_often_it_came_before(num_early: int) -> None:
    calendar = RetryAfterCalendar()
    for start in range(0, 6000, 100):  # ten at once, so that what each teaches falls between what others do
        clients = [(start, number) for number in range(10)]
        told = {client: calendar.reserve(client, start + 30.0, 0.1, 8 * _FREE, float(start)) for client in clients}
        for step in range(num_early):
            told = {
                client: calendar.reserve(client, start + 30.0, 0.1, 8 * _FREE, start + step / 2) for client in clients
            }
        for client, at in sorted(told.items(), key=lambda item: item[1]):
            assert calendar.match(client, at)
            calendar.served(client, at)
            assert 0.0 <= calendar.return_rate <= 1.0
    assert calendar.return_rate > 0.99


def test_a_visit_before_its_time_is_another_client_s_where_many_ask_the_same() -> None:
    calendar = RetryAfterCalendar()
    for number in range(60):
        at = calendar.reserve("a", number + 20.0, 0.1, 8 * _FREE, float(number), told_apart=False)
        if number % 2:
            calendar.served("a", number + 0.5, told_apart=False)
    assert at > 78.0 and calendar.return_rate == 0.5


def test_clients_that_never_return_keep_nobody_out() -> None:
    calendar = RetryAfterCalendar()
    for number in range(60):
        calendar.reserve(number, 2.0 * number + 1.0, 0.1, 8 * _FREE, 2.0 * number)
    calendar.is_due(1000.0)
    assert calendar.return_rate < 0.01
    for number in range(60):
        at = calendar.reserve(number, 2002.0 + 2.0 * number, 0.1, 8 * _FREE, 2000.0 + 2.0 * number)
        at = calendar.reserve(number, at + 100.0, 0.1, 8 * _FREE, at)  # it came back, in vain: that is not its fault
        calendar.served(number, at)
    assert calendar.return_rate > 0.99
