"""Which adapters are loaded: told as stories of sequences that want them, begin and end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path

from engine.model.adapters import AdapterPool, AdapterSlot, Need
from kernels.adapters import Adapter


@dataclass(eq=False, slots=True)
class User:
    adapter: AdapterSlot | None
    need: Need = Need.SOON


@dataclass(slots=True)
class Story:
    """A pool, and the sequences that use it; loading is done as soon as it is begun."""

    max_loaded: int
    users: list[User] = field(default_factory=list)
    loads: list[str] = field(default_factory=list)
    pool: AdapterPool = field(init=False)

    def __post_init__(self) -> None:
        self.pool = AdapterPool(lambda digest, folder: Adapter((), 10), self.max_loaded)

    def comes(self, name: str, *, need: Need = Need.SOON) -> User:
        user = User(self.pool.want(name, Path(name)), need)
        self.users.append(user)
        self.load()
        return user

    def goes(self, user: User) -> None:
        self.users.remove(user)
        self.load()

    def load(self) -> None:
        while (slot := self.pool.next_load((user, user.need) for user in self.users)) is not None:
            self.loads.append(slot.digest)
            self.pool.has_loaded(slot, self.pool.load(slot.digest, slot.folder))
            self.pool.check()


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


def test_one_that_nobody_waits_for_any_more_is_never_loaded() -> None:
    story = Story(max_loaded=1)
    running = story.comes("a", need=Need.NOW)
    story.goes(story.comes("b"))
    assert story.pool.num_waiting == 0
    story.goes(running)
    assert story.loads == ["a"]


def test_one_that_cannot_be_loaded_is_another_one_when_it_is_wanted_again() -> None:
    pool = AdapterPool(lambda digest, folder: Adapter((), 10), 1)
    first = User(pool.want("a", Path("a")))
    slot = pool.next_load([(first, Need.SOON)])
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
    slot = story.pool.next_load([(first, Need.NOW), (running, Need.LATER)])
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
