"""The index of workers' blocks, under channels that lose, repeat and reorder."""

from __future__ import annotations

import gc
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cluster.scheduler.block_index import BlockIndex, PrefixReach
from engine.kv.block_pool import BlockPool
from kv_transfer.messages import decode, encode
from kv_transfer.messages.blocks import BlockChange, BlockEvents, BlockIndexRequest, BlockIndexSnapshot
from kv_transfer.messages.fields import Tier
from kv_transfer.tiers import block_events
from kv_transfer.tiers.block_events import BlockEventLog
from tests.cluster.scheduler.block_index_tools import LAYER_GROUPS, digest_of, log_with_pool, store_columns
from tests.support.thoroughness import examples

TIERS: tuple[Tier, ...] = ("device", "host", "disk")


def _whole_columns(pool: BlockPool, numbers: range) -> set[bytes]:
    return {
        digest_of(number)
        for number in numbers
        if all(pool.find((digest_of(number), group)) is not None for group in range(LAYER_GROUPS))
    }


def _index_after(*messages: BlockEvents | BlockIndexSnapshot) -> BlockIndex:
    index = BlockIndex()
    for message in messages:
        _hear(index, message, 0.0)
    return index


def _hear(index: BlockIndex, message: BlockEvents | BlockIndexSnapshot, now: float) -> BlockIndexRequest | None:
    if isinstance(message, BlockEvents):
        return index.on_events(message, now)
    return index.on_snapshot(message, now)


class ChannelMachine(RuleBasedStateMachine):
    """One worker with three tiers, whose messages are lost, doubled and reordered, and who may restart."""

    numbers = range(12)

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.index = BlockIndex()
        self.wire: list[BlockEvents | BlockIndexSnapshot] = []
        self.delivered: list[BlockEvents | BlockIndexSnapshot] = []
        self.asked = False
        self.start_worker()
        self.deliver_all()

    @rule()
    def start_worker(self) -> None:
        """Also a restart: a new life under the same name."""
        self.log = BlockEventLog("worker", layer_groups=LAYER_GROUPS)
        self.pools = {tier: BlockPool(5 + 3 * number) for number, tier in enumerate(TIERS)}
        for tier, pool in self.pools.items():
            self.log.watch(tier, pool)
        self.wire += self.log.snapshot()

    @rule(tier=st.sampled_from(TIERS), numbers=st.lists(st.sampled_from(numbers), max_size=2, unique=True))
    def store(self, tier: Tier, numbers: list[int]) -> None:
        store_columns(self.pools[tier], numbers)

    @rule(tier=st.sampled_from(TIERS), number=st.sampled_from(numbers))
    def store_half_a_column(self, tier: Tier, number: int) -> None:
        store_columns(self.pools[tier], [number], groups=1)

    @rule(tier=st.sampled_from(TIERS), number=st.sampled_from(numbers), seconds=st.sampled_from([0.1, 3.0]))
    def change_and_report(self, tier: Tier, number: int, seconds: float) -> None:
        store_columns(self.pools[tier], [number])
        self.report(seconds)

    @rule(tier=st.sampled_from(TIERS))
    def forget(self, tier: Tier) -> None:
        self.pools[tier].drop_cached()
        self.report(0.1)

    @rule()
    def send_a_snapshot_unasked(self) -> None:
        self.wire += self.log.snapshot()

    def report(self, seconds: float) -> None:
        self.now += seconds
        if self.asked:
            self.asked = False
            self.wire += self.log.snapshot()
        self.wire += self.log.take()

    @rule(data=st.data())
    def deliver_some(self, data: st.DataObject) -> None:
        """Some of what is under way and of what has arrived before, in any order; the rest is lost."""
        candidates = [*self.wire, *self.delivered[-12:]]
        positions = st.lists(st.integers(0, max(0, len(candidates) - 1)), max_size=8 if candidates else 0)
        self.wire = [candidates[position] for position in data.draw(positions)]
        self.deliver_all()

    @rule()
    def deliver_all(self) -> None:
        for message in self.wire:
            received = decode(encode(message))
            assert isinstance(received, BlockEvents | BlockIndexSnapshot)
            self.asked = _hear(self.index, received, self.now) is not None or self.asked
        self.delivered += self.wire
        self.wire.clear()

    @precondition(lambda self: self.wire)
    @rule(data=st.data())
    def lose_one(self, data: st.DataObject) -> None:
        del self.wire[data.draw(st.integers(0, len(self.wire) - 1))]

    @rule()
    def lose_the_worker(self) -> None:
        self.index.forget("worker")

    @rule()
    def be_quiet(self) -> None:
        """Two reports that nothing disturbs: one to find a gap, one for the answer."""
        for _ in range(2):
            self.report(3.0)
            self.deliver_all()
        for tier, pool in self.pools.items():
            assert self.index.columns("worker", tier) == _whole_columns(pool, self.numbers)
        assert not self.asked

    @invariant()
    def what_is_not_known_is_not_claimed(self) -> None:
        if self.index.num_columns("worker") is None:
            assert self.index.longest_prefix(b"".join(map(digest_of, self.numbers))) == {}

    @invariant()
    def the_report_counts_what_is_known(self) -> None:
        for report in self.index.report():
            assert report.in_step is (self.index.num_columns("worker") is not None)
            counted = {tier: len(self.index.columns("worker", tier)) for tier in TIERS}
            assert report.columns == (counted if report.in_step else {})

    def teardown(self) -> None:
        self.be_quiet()


class SmallMessagesMachine(ChannelMachine):
    """The same with snapshots of many parts and events of few changes."""

    def __init__(self) -> None:
        self._patch = pytest.MonkeyPatch()
        self._patch.setattr(block_events, "MAX_HASHES", 1)
        self._patch.setattr(block_events, "MAX_EVENT_CHANGES", 2)
        super().__init__()

    def teardown(self) -> None:
        super().teardown()
        self._patch.undo()


_SETTINGS = settings(
    max_examples=examples(300), stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestChannel = ChannelMachine.TestCase
TestChannel.settings = _SETTINGS
TestSmallMessages = SmallMessagesMachine.TestCase
TestSmallMessages.settings = _SETTINGS


def test_the_report_tells_of_gaps_and_of_what_was_done_about_them() -> None:
    log, pool = log_with_pool()
    index = _index_after(*log.snapshot())
    assert [(r.in_step, r.num_gaps, r.num_snapshots_taken) for r in index.report()] == [(True, 0, 1)]
    store_columns(pool, [1])
    log.take()  # lost
    for now in (1.0, 2.0):
        index.on_events(log.take()[0], now)
    (report,) = index.report()
    assert (report.in_step, report.columns) == (False, {})
    assert (report.num_gaps, report.num_snapshots_asked, report.num_snapshots_taken) == (1, 1, 1)
    _hear(index, log.snapshot()[0], 2.1)
    (report,) = index.report()
    assert (report.in_step, report.columns) == (True, {"device": 1, "host": 0, "disk": 0})
    assert report.num_snapshots_taken == 2


def test_a_column_is_stored_with_its_last_group_and_removed_with_its_first() -> None:
    log, pool = log_with_pool()
    lease = pool.lease(2)
    pool.publish(lease, lease.blocks[0], (digest_of(1), 0))
    assert [e.changes for e in log.take()] == [[]]
    pool.publish(lease, lease.blocks[1], (digest_of(1), 1))
    [events] = log.take()
    assert events.changes == [BlockChange(tier="device", stored=digest_of(1), removed=b"")]
    pool.release(lease)
    pool.lease(7)  # six free blocks, and one of the column's
    [events] = log.take()
    assert events.changes == [BlockChange(tier="device", stored=b"", removed=digest_of(1))]
    assert events.first_id == 1


def test_what_comes_and_goes_between_two_reports_is_not_told() -> None:
    log, pool = log_with_pool()
    store_columns(pool, [1])
    pool.drop_cached()
    assert log.take() == [BlockEvents(worker_id="worker", epoch=7, first_id=0, changes=[])]


def test_a_pool_that_held_something_before_it_was_watched_is_told_whole() -> None:
    pool = BlockPool(4)
    store_columns(pool, [1, 2])
    log = BlockEventLog("worker", layer_groups=LAYER_GROUPS)
    log.watch("host", pool)
    index = _index_after(*log.snapshot())
    assert index.columns("worker", "host") == {digest_of(1), digest_of(2)}
    assert index.num_columns("worker") == 2


def test_a_tier_has_one_source() -> None:
    log, _ = log_with_pool()
    with pytest.raises(AssertionError, match="device tier is being watched"):
        log.watch("device", BlockPool(1))


def test_a_listener_is_told_at_once_when_many_changes_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(block_events, "MANY_CHANGES", 3)
    log, pool = log_with_pool()
    calls: list[int] = []
    log.on_many = lambda: calls.append(1)
    store_columns(pool, [1, 2])
    assert not calls
    store_columns(pool, [3])
    assert len(calls) == 1


def test_a_listener_that_missed_anothers_snapshot_notices() -> None:
    log, pool = log_with_pool()
    index = _index_after(*log.snapshot())
    store_columns(pool, [1])
    log.snapshot()  # for somebody else
    [events] = log.take()
    assert index.on_events(events, 0.0) == BlockIndexRequest(worker_id="worker")


def _parts(next_id: int, epoch: int = 7) -> list[BlockIndexSnapshot]:
    return [
        BlockIndexSnapshot(
            worker_id="worker",
            epoch=epoch,
            next_id=next_id,
            part=part,
            num_parts=3,
            tier="device",
            hashes=digest_of(100 * next_id + part),
        )
        for part in range(3)
    ]


def test_a_snapshot_counts_only_when_it_is_whole() -> None:
    first, second, third = _parts(1)
    index = BlockIndex()
    assert index.on_snapshot(first, 0.0) is None
    assert index.on_snapshot(third, 0.0) == BlockIndexRequest(worker_id="worker")  # where is the second?
    assert index.on_snapshot(third, 0.0) is None
    assert index.on_snapshot(second, 0.0) is None
    assert index.num_columns("worker") is None
    answers = [index.on_snapshot(part, 9.0) for part in (first, second, first, second, third, second)]
    assert (answers, index.num_columns("worker")) == ([None] * 6, 3)  # a part that comes twice does no harm


def test_a_new_life_is_known_by_its_snapshot_however_few_changes_it_has_seen() -> None:
    index = _index_after(*_parts(next_id=50))
    assert index.columns("worker", "device") == {digest_of(5000 + part) for part in range(3)}
    for part in _parts(next_id=0, epoch=8):
        assert index.on_snapshot(part, 0.0) is None
    assert index.columns("worker", "device") == {digest_of(part) for part in range(3)}


def test_a_lost_request_is_repeated_but_not_at_every_message() -> None:
    log, _ = log_with_pool()
    index = BlockIndex()
    [events] = log.take()
    answers = [index.on_events(events, now) is not None for now in (0.0, 1.0, 1.9, 2.1, 3.0, 4.5)]
    assert answers == [True, False, False, True, False, True]


def test_the_longest_prefix_by_tier() -> None:
    index = BlockIndex()
    held: dict[str, dict[Tier, list[int]]] = {
        "a": {"device": [0, 1, 5], "host": [0, 1, 2, 3], "disk": [4]},
        "b": {"device": [1, 2], "host": [3]},  # without the first column the others are of no use
        "c": {"disk": [0], "device": [1]},
        "d": {},
    }
    for worker_id, tiers in held.items():
        log = BlockEventLog(worker_id, layer_groups=1)
        for tier, numbers in tiers.items():
            observer = log.observer(tier)
            for number in numbers:
                observer.stored(number, (digest_of(number), 0))
        for part in log.snapshot():
            assert index.on_snapshot(part, 0.0) is None
    found = index.longest_prefix(b"".join(map(digest_of, range(8))))
    assert found == {"a": PrefixReach(device=2, host=4, disk=6), "c": PrefixReach(device=0, host=0, disk=2)}
    assert index.longest_prefix(b"") == {}


def test_the_garbage_collector_does_not_look_through_what_is_indexed() -> None:
    column = b"looked for by gc"
    index = _index_after(replace(_parts(0)[0], num_parts=1, hashes=column))
    assert index.columns("worker", "device") == {column}
    gc.collect()
    assert not any(column in found for found in gc.get_objects() if issubclass(type(found), dict))
