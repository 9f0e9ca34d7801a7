"""Which adapters are loaded: told as stories of sequences that want them, begin and end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from engine.model.adapters import TURN_S, AdapterPool, AdapterSlot, Need
from kernels.adapters import Adapter, AdapterLayer


@dataclass(eq=False, slots=True)
class User:
    adapter: AdapterSlot | None
    need: Need = Need.SOON
    accepted_at: float = 0.0

    def is_served(self) -> bool:
        return self.adapter is not None and self.adapter.serves(self)


@dataclass(slots=True)
class Story:
    """A pool, the sequences that use it, and a clock; loading is done as soon as it is begun."""

    max_loaded: int
    users: list[User] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    now: float = 0.0
    pool: AdapterPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 10), self.max_loaded)

    def comes(self, name: str, *, need: Need = Need.SOON) -> User:
        user = User(self.pool.want(name, Path(name)), need, self.now)
        self.users.append(user)
        self.load()
        return user

    def goes(self, user: User) -> None:
        self.users.remove(user)
        self.load()

    def load(self) -> None:
        while (slot := self.pool.next_load(((user, user.need) for user in self.users), self.now)) is not None:
            self.loads.append(slot.digest)
            self.pool.has_loaded(slot, self.pool.load(slot.digest, slot.folder), self.now)
            self.pool.check()

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.load()


def test_one_that_is_loaded_is_not_loaded_again() -> None:
    story = Story(max_loaded=2)
    first, second = story.comes("a"), story.comes("a")
    assert first.adapter is second.adapter
    story.goes(first)
    story.goes(second)
    story.comes("a")
    assert story.loads == ["a"]


def test_the_least_recently_used_makes_way_for_another_one() -> None:
    story = Story(max_loaded=2)
    for name in ("a", "b", "a"):
        story.goes(story.comes(name))
    story.comes("c")
    assert story.pool.loaded == ["a", "c"]
    assert story.pool.num_bytes == 20


def test_nobody_loses_the_one_it_is_computed_with() -> None:
    story = Story(max_loaded=1)
    running = story.comes("a", need=Need.NOW)
    waiting = story.comes("b")
    assert story.pool.loaded == ["a"] and story.pool.num_waiting == 1
    story.goes(running)
    assert story.pool.loaded == ["b"] and waiting.adapter is not None and waiting.adapter.loaded is not None


def test_they_are_loaded_in_the_order_in_which_they_were_wanted() -> None:
    story = Story(max_loaded=1)
    running = story.comes("a", need=Need.NOW)
    for name in ("c", "b", "c"):
        story.comes(name)
    story.goes(running)
    assert story.loads[:2] == ["a", "c"]


def test_who_waits_for_something_else_keeps_nobody_from_theirs() -> None:
    """Two workers' sequences could wait for each other's adapters otherwise."""
    story = Story(max_loaded=1)
    reserved = story.comes("a", need=Need.LATER)
    story.comes("b", need=Need.LATER)
    assert story.loads == ["a"], "they would take each other's place for ever"
    running = story.comes("c", need=Need.NOW)
    assert story.loads == ["a", "c"]
    reserved.need = Need.NOW
    story.goes(running)
    assert story.loads == ["a", "c", "a"], "the one that is needed more comes first"


def test_one_that_others_keep_busy_takes_on_no_more_when_another_has_waited_for_a_turn() -> None:
    """Those that it has, and those that came before the one that waits, go on; who comes later has its turn later."""
    story = Story(max_loaded=1)
    running, before = story.comes("a", need=Need.NOW), story.comes("a")
    story.passes(1.0)
    waiting = story.comes("b")
    story.passes(TURN_S / 2)
    early = story.comes("a", need=Need.NOW)
    story.passes(TURN_S / 2)
    late = story.comes("a")
    assert [user.is_served() for user in (running, before, early, late)] == [True, True, True, False]
    assert story.pool.loaded == ["a"] and story.pool.open == []
    for user in (running, before):
        story.goes(user)
    assert not waiting.is_served(), "another one is computed with the adapter that is there"
    story.goes(early)
    assert waiting.is_served() and not late.is_served()
    story.passes(TURN_S / 2)
    newcomer = story.comes("b", need=Need.NOW)
    assert newcomer.is_served(), "a turn has only begun"
    story.passes(TURN_S)
    assert not story.comes("b").is_served()
    for user in (waiting, newcomer):
        story.goes(user)
    assert late.is_served()
    assert story.loads == ["a", "b", "a"]


def test_where_one_s_sequence_takes_long_another_makes_way() -> None:
    """And who came to it meanwhile goes on when that one has."""
    story = Story(max_loaded=2)
    story.comes("a", need=Need.NOW)
    short = story.comes("b", need=Need.NOW)
    story.passes(TURN_S)
    waiting = story.comes("c")
    story.passes(TURN_S)
    assert story.pool.open == ["b"]
    story.passes(TURN_S)
    assert story.pool.open == []
    of_the_first = story.comes("a")
    assert not of_the_first.is_served()
    story.goes(short)
    assert waiting.is_served() and of_the_first.is_served()
    assert story.loads == ["a", "b", "c"]


def test_what_drains_for_one_that_is_gone_takes_on_others_again() -> None:
    story, opened = Story(max_loaded=1), []
    story.pool.on_open = lambda: opened.append(story.now)
    story.comes("a", need=Need.NOW)
    waiting = story.comes("b")
    story.passes(TURN_S)
    newcomer = story.comes("a")
    assert not newcomer.is_served() and not opened
    story.goes(waiting)
    assert newcomer.is_served()
    assert opened, "nobody else would tell the worker"
    assert story.loads == ["a"]


def test_what_opens_keeps_its_place_for_those_that_came_while_it_drained() -> None:
    """All at once, as while another one was loaded: its last one is through, and who it drained for is gone."""
    story = Story(max_loaded=1)
    story.comes("a", need=Need.NOW)
    story.passes(TURN_S)
    story.comes("b")
    story.passes(TURN_S)
    assert story.pool.open == []
    newcomer = story.comes("a")
    other = User(story.pool.want("c", Path("c")), Need.SOON, story.now)
    story.users = [newcomer, other]
    story.load()
    assert newcomer.is_served()
    story.goes(newcomer)
    assert other.is_served()


def test_nobody_drains_for_one_that_waits_only_until_others_are_loaded() -> None:
    """Loading takes several turns, one after the other; there is a free place, and one whose adapter nobody uses."""
    story = Story(max_loaded=3)
    story.comes("a", need=Need.NOW)
    story.goes(story.comes("unused"))
    story.passes(TURN_S)
    story.users += [User(story.pool.want(name, Path(name)), Need.SOON, story.now) for name in ("b", "c")]
    slot = story.pool.next_load(((user, user.need) for user in story.users), story.now)
    assert slot is not None
    story.now += 3 * TURN_S
    story.pool.has_loaded(slot, story.pool.load(slot.digest, slot.folder), story.now)
    assert story.pool.next_load(((user, user.need) for user in story.users), story.now) is not None
    assert "a" in story.pool.open
    assert story.comes("a").is_served()


def test_nobody_waits_for_ever_while_others_keep_all_places_busy() -> None:
    """Sequences of forty adapters follow each other without a gap, on places for four: at each moment two of an adapter
    are there. Each of them is computed for three turns at most."""
    story, chooser, longest = Story(max_loaded=4), random.Random(3), 0.0
    left: dict[User, float] = {}
    names = [f"adapter {number}" for number in range(40)]
    for name in names * 2:
        story.comes(name)
    for _ in range(4_000):
        story.passes(TURN_S / 8)
        for user in list(story.users):
            if user.is_served():
                user.need = Need.NOW
                left.setdefault(user, chooser.uniform(0.1, 3.0) * TURN_S)
                left[user] -= TURN_S / 8
            if left.get(user, 1.0) <= 0.0:
                assert user.adapter is not None
                story.comes(user.adapter.digest)
                story.goes(user)
            elif user not in left:
                longest = max(longest, story.now - user.accepted_at)
    # Ten share a place, each for its turn and for the three that its last sequence takes.
    assert longest < 10 * (1 + 3) * TURN_S, f"one has waited for {longest:g} s"
    assert len(story.loads) < story.now / TURN_S * 4


def test_one_that_nobody_waits_for_any_more_is_never_loaded() -> None:
    story = Story(max_loaded=1)
    running = story.comes("a", need=Need.NOW)
    story.goes(story.comes("b"))
    assert story.pool.num_waiting == 0
    story.goes(running)
    assert story.loads == ["a"]


def test_one_that_cannot_be_loaded_is_another_one_when_it_is_wanted_again() -> None:
    pool = AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 10), 1)
    first = User(pool.want("a", Path("a")))
    slot = pool.next_load([(first, Need.SOON)], 0.0)
    assert slot is not None
    pool.has_failed(slot)
    assert pool.want("a", Path("a")) is not slot


def test_one_that_waits_is_loaded_from_where_it_was_seen_last() -> None:
    """Equal files in two folders are one adapter, and the first folder may be gone by the time that there is room."""
    story = Story(max_loaded=1)
    running = story.comes("a", need=Need.NOW)
    first, second = (User(story.pool.want("b", Path(folder))) for folder in ("gone", "there"))
    assert first.adapter is second.adapter
    story.users = [first, second]
    slot = story.pool.next_load([(first, Need.NOW), (running, Need.LATER)], 0.0)
    assert slot is second.adapter and slot is not None and slot.folder == Path("there")


def test_of_a_thousand_no_more_are_kept_than_there_is_room_for() -> None:
    """Whoever comes and goes in whatever order, all get theirs, and nothing is left."""
    story, chooser = Story(max_loaded=16), random.Random(5)
    for _ in range(5_000):
        if len(story.users) < 40 and chooser.random() < 0.6:
            story.comes(f"adapter {chooser.randrange(1_000)}")
        elif story.users:
            user = chooser.choice(story.users)
            if user.need is Need.NOW and user.adapter is not None and user.adapter.loaded is not None:
                story.goes(user)
            elif user.need is not Need.NOW:
                user.need = Need(user.need + 1)
    for _ in range(len(story.users)):  # who has its adapter ends at some time
        story.goes(next(user for user in story.users if user.adapter is not None and user.adapter.loaded is not None))
    assert len(story.pool.loaded) == 16
    assert story.pool.num_waiting == 0


def test_for_those_that_wait_for_what_is_not_read_in_time_nothing_is_kept() -> None:
    """Neither its own ones nor those behind it. A turn begins with the reading, however long they waited before."""
    pool = AdapterPool(lambda digest, folder: Adapter(lambda _: AdapterLayer(), 10), 1)
    users = [User(pool.want(name, Path(name)), Need.NOW) for name in ("runs", "next", "behind")]

    def looked_at(now: float) -> AdapterSlot | None:
        return pool.next_load([(user, user.need) for user in users], now)

    runs, *waiting = [user.adapter for user in users if user.adapter is not None]

    def kept_and_stalled() -> list[tuple[bool, bool]]:
        return [(slot.is_overdue, slot.is_stalled) for slot in waiting]

    assert looked_at(0.0) is runs
    pool.has_loaded(runs, pool.load(runs.digest, runs.folder), 0.0)
    assert looked_at(0.0) is None
    assert looked_at(3 * TURN_S) is None and kept_and_stalled() == [(True, False)] * 2
    del users[0]
    began = 4 * TURN_S
    assert looked_at(began) is waiting[0] and pool.stalls_at == began + TURN_S
    assert looked_at(began + TURN_S / 2) is None and kept_and_stalled() == [(True, False)] * 2
    assert looked_at(began + TURN_S) is None and kept_and_stalled() == [(False, True)] * 2
    pool.has_loaded(waiting[0], pool.load("next", Path("next")), began + 2 * TURN_S)
    assert looked_at(began + 2 * TURN_S) is None and kept_and_stalled() == [(False, False), (True, False)]
