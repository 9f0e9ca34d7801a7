"""Host segments: who owns them, what outlives an owner that is killed, and what is removed when."""

from __future__ import annotations

import fcntl
import itertools
import mmap
import os
import random
import resource
import stat
import time
import uuid
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from engine.kv.block_pool import BlockKey, BlockLease, BlockPool, OutOfBlocksError
from kv_transfer.tiers.host import segment as host_segment
from kv_transfer.tiers.host.index import block_digest
from kv_transfer.tiers.host.peer_segments import PeerSegments
from kv_transfer.tiers.host.segment import HostSegment
from kv_transfer.tiers.host.segment_files import open_segment as open_file
from kv_transfer.tiers.host.segment_files import segment_paths, sweep
from kv_transfer.transports.shared_memory.segment import SegmentError
from tests.processes import host_segment_child
from tests.processes.host_segment_child import (
    BLOCK_BYTES,
    FINGERPRINT,
    NUM_BLOCKS,
    content_of,
    fill,
    hash_of,
    key_of,
    number_of,
    open_segment,
    restored_pool,
    words,
)
from tests.processes.host_segments import SHARED_MEMORY, Worker, scope
from tests.support.forked_child import ForkedChild
from tests.support.host_records import published

__all__ = ["scope"]


def abandoned(scope: str, num_filled: int = 0, folder: Path = SHARED_MEMORY) -> Path:
    """A segment whose owner has gone without a word, in this process for speed."""
    segment = open_segment(folder, scope)
    pool = BlockPool(NUM_BLOCKS, observers=[segment])
    for number in range(num_filled):
        fill(segment, pool, number)
    segment.close(unlink=False)
    return segment.path


def assert_content_matches(segment: HostSegment, restored: list[tuple[int, BlockKey]]) -> None:
    for block, key in restored:
        np.testing.assert_array_equal(words(segment, block), content_of(number_of(key)))


def test_the_blocks_of_a_killed_worker_are_adopted_all_of_them(scope: str) -> None:
    with Worker("hold", scope) as dying:
        path, _ = dying.opened()
    segment = open_segment(SHARED_MEMORY, scope)
    assert (segment.path, segment.adopted) == (path, True)
    restored = segment.restored()
    assert [key for _, key in restored] == [key_of(number) for number in range(NUM_BLOCKS)]  # the oldest first
    assert_content_matches(segment, restored)
    segment.close(unlink=True)


def test_what_the_killed_worker_was_writing_is_lost_and_nothing_else(scope: str) -> None:
    with Worker("tear", scope) as dying:
        dying.opened()
    segment = open_segment(SHARED_MEMORY, scope)
    restored = segment.restored()
    assert [number_of(key) for _, key in restored] == list(range(1, NUM_BLOCKS))
    assert_content_matches(segment, restored)
    segment.close(unlink=True)


def test_a_worker_killed_at_any_moment_leaves_only_whole_blocks(scope: str) -> None:
    for life in itertools.count(1):
        with Worker("rewrite", scope) as dying:
            dying.opened()
            time.sleep(random.uniform(0, 0.05))  # a moment that nobody chose
        segment = open_segment(SHARED_MEMORY, scope)
        restored = segment.restored()
        assert_content_matches(segment, restored)
        segment.close(unlink=False)
        if life >= 6 and restored:  # one of them has lived long enough to publish anything
            break


def test_damaged_bytes_and_a_damaged_record_are_no_content(scope: str) -> None:
    path = abandoned(scope, num_filled=NUM_BLOCKS)
    image = bytearray(path.read_bytes())
    image[image.rindex(content_of(2).tobytes()) + 12345] ^= 1
    image[image.index(key_of(5)[0])] ^= 1  # the content's name in the record
    path.write_bytes(image)
    segment = open_segment(SHARED_MEMORY, scope)
    assert {number_of(key) for _, key in segment.restored()} == set(range(NUM_BLOCKS)) - {2, 5}
    assert published(segment) == {key: block for block, key in segment.restored()}
    segment.close(unlink=True)


def test_two_records_of_the_same_content_are_restored_once(scope: str) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    for block in (3, 1):
        words(segment, block)[:] = content_of(7)
        segment.stored(block, key_of(7))
    assert segment.restored() == [(3, key_of(7))]
    segment.close(unlink=True)


def test_no_two_workers_ever_own_the_same_segment(scope: str) -> None:
    dead = {abandoned(scope)}
    other = open_segment(SHARED_MEMORY, scope)  # adopts the first, so that the next is a second one
    dead.add(abandoned(scope))
    other.close(unlink=False)
    assert len(dead) == 2
    with ExitStack() as stack:
        workers = [stack.enter_context(Worker("adopt", scope)) for _ in range(5)]
        assert [each.told() for each in workers] == ["ready"] * 5
        for each in workers:
            each.tell("go")
        opened = [each.opened() for each in workers]
        assert len({path for path, _ in opened}) == 5
        assert {path for path, adopted in opened if adopted} == dead
        for each in workers:
            each.end()
    assert not segment_paths(SHARED_MEMORY, scope)


def test_a_lock_won_on_a_file_that_has_lost_its_name_counts_for_nothing(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = abandoned(scope)
    flock = fcntl.flock

    def lose_the_name_first(fd: int, operation: int) -> None:
        path.unlink(missing_ok=True)
        flock(fd, operation)

    monkeypatch.setattr(fcntl, "flock", lose_the_name_first)
    segment = open_segment(SHARED_MEMORY, scope)
    assert not segment.adopted
    assert segment.path.exists()
    segment.close(unlink=True)


def test_a_segment_of_another_kind_is_not_adopted(scope: str) -> None:
    path = abandoned(scope)
    others = [
        HostSegment.open(SHARED_MEMORY, scope, "another model", BLOCK_BYTES, NUM_BLOCKS),
        HostSegment.open(SHARED_MEMORY, scope, FINGERPRINT, BLOCK_BYTES * 2, NUM_BLOCKS),
        HostSegment.open(SHARED_MEMORY, scope, FINGERPRINT, BLOCK_BYTES, NUM_BLOCKS + 1),
    ]
    assert not any(other.adopted for other in others)
    assert path.exists()
    for other in others:
        other.close(unlink=True)


def test_two_applications_in_one_folder_do_not_adopt_from_each_other(scope: str) -> None:
    path = abandoned(scope, num_filled=2)
    other = open_segment(SHARED_MEMORY, scope + "00")  # its name begins like the other's
    assert not other.adopted
    assert segment_paths(SHARED_MEMORY, scope) == [path]
    other.close(unlink=True)


def test_a_file_of_another_user_is_neither_adopted_nor_read_nor_removed(
    scope: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = abandoned(scope, num_filled=1)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    neighbours = PeerSegments(SHARED_MEMORY, scope, FINGERPRINT, None, num_groups=1)
    with monkeypatch.context() as context:
        context.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert open_file(path) is None
        assert not neighbours.holds(hash_of(0))
        assert not sweep(SHARED_MEMORY, uuid.uuid4().hex)
        segment = open_segment(SHARED_MEMORY, scope)
        assert not segment.adopted
        segment.close(unlink=True)
    assert path.exists()


@pytest.mark.parametrize("damage", ["truncated", "no header", "a link"])
def test_what_only_has_the_name_of_a_segment_is_none(scope: str, damage: str) -> None:
    path = abandoned(scope, num_filled=1)
    if damage == "truncated":
        os.truncate(path, path.stat().st_size - BLOCK_BYTES)
    elif damage == "no header":
        path.write_bytes(b"")
    else:
        path.unlink()
        path.symlink_to("/etc/passwd")
    assert open_file(path) is None
    segment = open_segment(SHARED_MEMORY, scope)
    assert not segment.adopted
    segment.close(unlink=True)


def test_a_segment_that_does_not_fit_is_refused_with_advice(scope: str) -> None:
    with pytest.raises(SegmentError, match=r"does not fit into /dev/shm, which has \d+ left. Give the host tier less"):
        HostSegment.open(SHARED_MEMORY, scope, FINGERPRINT, 1 << 30, 1 << 20)
    assert not segment_paths(SHARED_MEMORY, scope)


def refusal_under(limit: int, num_bytes: int, scope: str, num_blocks: int) -> str:
    """What a process says that cannot make a segment of so many blocks of a MiB."""
    with ForkedChild(host_segment_child.run_under, limit, num_bytes, SHARED_MEMORY, scope, num_blocks) as process:
        return str(process.told())


def test_a_file_system_that_fills_up_meanwhile_is_an_error_and_no_signal(scope: str) -> None:
    told = refusal_under(resource.RLIMIT_FSIZE, 1 << 20, scope, 4)
    assert "bytes cannot be made in /dev/shm: File too large. Give the host tier less memory" in told
    assert not segment_paths(SHARED_MEMORY, scope)


def test_a_new_segment_that_cannot_be_mapped_leaves_no_file(scope: str) -> None:
    told = refusal_under(resource.RLIMIT_AS, 32 << 20, scope, 64)
    assert "cannot be mapped: [Errno 12] Cannot allocate memory. Give the host tier less memory" in told
    assert not segment_paths(SHARED_MEMORY, scope)


def test_its_memory_is_taken_from_the_start_and_begins_at_a_page(scope: str) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    found = segment.path.stat()
    assert found.st_blocks * 512 >= found.st_size >= NUM_BLOCKS * BLOCK_BYTES
    assert words(segment, 0).ctypes.data % mmap.PAGESIZE == 0
    assert segment.memory.nbytes == NUM_BLOCKS * BLOCK_BYTES
    segment.close(unlink=True)


def test_a_missing_folder_and_a_senseless_scope_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SegmentError, match="nowhere for host KV memory cannot be used: No such file"):
        open_segment(tmp_path / "nowhere", "0" * 32)
    with pytest.raises(SegmentError, match=r"a hex digest of 8 to 128 lower-case digits, not '\.\./x'"):
        open_segment(tmp_path, "../x")
    with pytest.raises(ValueError, match="at least one block"):
        open_segment(tmp_path, "0" * 32, num_blocks=0)


def test_when_room_lacks_what_nobody_owns_goes(scope: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dead = abandoned(scope)
    monkeypatch.setattr(host_segment, "free_bytes", lambda folder: 0 if dead.exists() else 1 << 40)
    # Nobody needs room to adopt.
    adopter = open_segment(SHARED_MEMORY, scope)
    assert adopter.adopted
    with pytest.raises(SegmentError, match="does not fit"):
        open_segment(SHARED_MEMORY, scope, num_blocks=3)  # the only other segment has an owner
    adopter.close(unlink=False)
    smaller = open_segment(SHARED_MEMORY, scope, num_blocks=3)
    assert not dead.exists()
    smaller.close(unlink=True)


def test_sweeping_spares_every_application_that_has_a_live_worker() -> None:
    own, ended, living = (uuid.uuid4().hex for _ in range(3))
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = Path(name)  # of its own: a sweep takes whatever is dead
        of_an_older_version = folder / f"legato-kv-{ended}-{'0' * 16}"
        of_an_older_version.write_bytes(b"another format")
        bystander = folder / "legato-kv-notes"
        bystander.touch()
        ours, gone = abandoned(own, folder=folder), {abandoned(ended, folder=folder), of_an_older_version}
        with Worker("hold", living, folder) as survivor:
            with Worker("hold", living, folder) as dying:
                kept = {survivor.opened()[0], dying.opened()[0]}
            assert set(sweep(folder, own)) == gone
            assert set(folder.iterdir()) == kept | {ours, bystander}
        assert set(sweep(folder, own)) == kept
        assert set(folder.iterdir()) == {ours, bystander}


def test_a_worker_that_ends_cleanly_leaves_nothing(scope: str) -> None:
    with Worker("hold", scope) as ending:
        path, _ = ending.opened()
        ending.end()
        assert not path.exists()


def test_a_closed_segment_takes_no_more_content_but_its_views_stay(scope: str) -> None:
    segment = open_segment(SHARED_MEMORY, scope)
    view = segment.memory
    segment.close(unlink=True)
    segment.close(unlink=True)
    assert view[0] == 0
    with pytest.raises(AssertionError, match="is closed"):
        segment.stored(0, key_of(0))


def test_a_digest_names_bytes_and_key() -> None:
    digests = {
        block_digest(key, content)
        for key in ((b"a" * 16, 0), (b"a" * 16, 1), (b"b" * 16, 0))
        for content in (b"", b"x")
    }
    assert len(digests) == 6


class SegmentMachine(RuleBasedStateMachine):
    """Random use of a pool whose observer is a segment, read by a neighbour, and killed now and then."""

    leases: Bundle[BlockLease] = Bundle("leases")

    def __init__(self) -> None:
        super().__init__()
        self.scope = uuid.uuid4().hex
        self.segment = open_segment(SHARED_MEMORY, self.scope)
        self.pool = restored_pool(self.segment)
        self.neighbours = PeerSegments(
            SHARED_MEMORY, self.scope, FINGERPRINT, None, num_groups=1, rescan_s=0, follow_s=0, clock=lambda: 0.0
        )

    @rule(target=leases, num_blocks=st.integers(0, 4), numbers=st.lists(st.integers(0, 11), min_size=4, max_size=4))
    def compute(self, num_blocks: int, numbers: list[int]) -> BlockLease:
        try:
            lease = self.pool.lease(num_blocks)
        except OutOfBlocksError:
            return multiple()  # type: ignore[return-value]
        for block, number in zip(lease.blocks, numbers, strict=False):
            words(self.segment, block)[:] = content_of(number)
            self.pool.publish(lease, block, key_of(number))
        return lease

    @rule(lease=leases, number=st.integers(0, 11))
    def adopt(self, lease: BlockLease, number: int) -> None:
        block = self.pool.find(key_of(number))
        if block is not None and self._is_open(lease):
            self.pool.adopt(lease, [block])

    @rule(lease=consumes(leases))
    def release(self, lease: BlockLease) -> None:
        if self._is_open(lease):
            self.pool.release(lease)

    @rule()
    def drop_cached(self) -> None:
        self.pool.drop_cached()

    @rule()
    def die(self) -> None:
        path, content = self.segment.path, published(self.segment)
        self.segment.close(unlink=False)
        self.segment = open_segment(SHARED_MEMORY, self.scope)
        assert self.segment.path == path
        self.pool = restored_pool(self.segment)
        assert published(self.segment) == content

    @invariant()
    def index_equals_pool(self) -> None:
        self.pool.check()
        told = published(self.segment)
        assert {key: block for key in map(key_of, range(12)) if (block := self.pool.find(key)) is not None} == told
        found = [key for key in map(key_of, range(12)) if self.neighbours.holds(key[0])]
        assert set(found) == told.keys()
        for key in found[:2]:
            copy = bytearray(BLOCK_BYTES)
            assert self.neighbours.load([key[0]], [[memoryview(copy)]]) == [True]
            assert copy == content_of(number_of(key)).tobytes()

    def teardown(self) -> None:
        self.neighbours.close()
        self.segment.close(unlink=True)
        assert not segment_paths(SHARED_MEMORY, self.scope)

    def _is_open(self, lease: BlockLease) -> bool:
        return lease.epoch == self.pool.epoch and not lease.released


TestSegment = SegmentMachine.TestCase
TestSegment.settings = settings(
    max_examples=50, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
