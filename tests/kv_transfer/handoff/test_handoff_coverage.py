"""Token ranges and digests of one attempt."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from kv_transfer.digest import combine, slab_digest
from kv_transfer.handoff.coverage import BrokenHandoffError, Coverage

spans = st.tuples(st.integers(-1, 3), st.integers(-2, 12), st.integers(-1, 12))


@given(st.lists(spans, max_size=30))
def test_claims_agree_with_a_set_of_tokens(claims: list[tuple[int, int, int]]) -> None:
    coverage, taken = Coverage(3, 10), set[tuple[int, int]]()
    made: set[tuple[int, int, int]] = set()
    for claim in claims:
        layer, start, count = claim
        tokens = {(layer, token) for token in range(start, start + count)}
        fits = 0 <= layer < 3 and count >= 1 and start >= 0 and start + count <= 10
        if claim in made:
            assert coverage.claim(layer, start, count, 1) is False
        elif fits and not tokens & taken:
            assert coverage.claim(layer, start, count, 1) is True
            made.add(claim)
            taken |= tokens
        else:
            with pytest.raises(BrokenHandoffError):
                coverage.claim(layer, start, count, 1)
    for layer, _, count in made:
        coverage.complete(layer, count, 1)
    assert coverage.is_complete == (len(taken) == 30)


@given(st.permutations([(0, 2**64 - 1), (2, 5), (4, 2**63), (6, 7)]))
def test_layer_digest_does_not_depend_on_the_order(slabs: list[tuple[int, int]]) -> None:
    coverage = Coverage(1, 8)
    for start, digest in slabs:
        coverage.claim(0, start, 2, digest)
        coverage.complete(0, 2, digest)
    assert coverage.is_complete
    assert coverage.layer_digests == [combine(digest for _, digest in slabs)] == [2**63 + 11]


def test_completing_more_than_was_claimed_is_our_own_fault() -> None:
    coverage = Coverage(1, 2)
    coverage.complete(0, 2, 0)
    with pytest.raises(AssertionError, match="more tokens"):
        coverage.complete(0, 1, 0)


def test_known_digest() -> None:
    # xxhash's own value for the empty input, from its specification's test vectors.
    assert slab_digest(b"") == 0x2D06800538D394C2
    assert slab_digest(memoryview(b"abc")) == xxhash.xxh3_64(b"abc").intdigest()


def test_equal_slabs_do_not_cancel_each_other() -> None:
    assert combine([5, 5]) == 10
    assert combine([2**64 - 1, 2]) == 1
