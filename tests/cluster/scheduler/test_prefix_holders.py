"""The turned-around index against a plain walk over every worker."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cluster.scheduler.block_index import PrefixHolders, members
from engine.kv.prefix import HASH_BYTES

COLUMNS = [bytes([number]) * HASH_BYTES for number in range(6)]


def _run(tiers: dict[bytes, int], wanted: int, digests: list[bytes]) -> int:
    length = 0
    while length < len(digests) and tiers.get(digests[length], 0) & wanted:
        length += 1
    return length


@given(
    st.lists(st.tuples(st.sampled_from(COLUMNS), st.sampled_from([0, 1, 2, 70, 999]), st.integers(0, 7)), max_size=80),
    st.lists(st.sampled_from(COLUMNS), unique=True),
)
def test_reaches_are_those_of_a_walk_over_every_worker(
    changes: list[tuple[bytes, int, int]], digests: list[bytes]
) -> None:
    holders, plain = PrefixHolders(), {worker: dict[bytes, int]() for worker in (0, 1, 2, 70, 999)}
    for digest, worker, tiers in changes:
        holders.put(digest, worker, bytes([tiers]))
        plain[worker][digest] = tiers
    expected = {
        worker: (_run(tiers, 1, digests), _run(tiers, 3, digests), _run(tiers, 7, digests))
        for worker, tiers in plain.items()
        if _run(tiers, 7, digests)
    }
    found = {
        worker: reach for reach, workers in holders.reaches(b"".join(digests)).items() for worker in members(workers)
    }
    assert found == expected


@given(st.lists(st.tuples(st.sampled_from(COLUMNS), st.integers(0, 3), st.integers(1, 7)), max_size=40))
def test_nothing_is_left_of_those_who_are_gone(changes: list[tuple[bytes, int, int]]) -> None:
    holders = PrefixHolders()
    for digest, worker, tiers in changes:
        holders.put(digest, worker, bytes([tiers]))
    for worker in range(4):
        holders.put(b"".join(COLUMNS), worker, bytes(len(COLUMNS)))
    assert holders.reaches(b"".join(COLUMNS)) == {}
    assert len(holders) == holders.num_shared_sets == 0


def test_a_set_of_workers_is_told_by_its_members() -> None:
    assert members(0) == []
    assert members(0b1 | 1 << 70) == [0, 70]
