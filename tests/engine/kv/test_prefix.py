"""Prefix hashes: chained, salted, the same everywhere."""

from __future__ import annotations

from itertools import count

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.kv.prefix import HASH_BYTES, PrefixHasher, block_hashes

_TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=40)


def test_only_full_blocks_have_a_hash() -> None:
    assert [len(block_hashes(list(range(n)), 4)) for n in (0, 3, 4, 7, 8)] == [0, 0, 1, 1, 2]
    assert {len(digest) for digest in block_hashes(list(range(8)), 4)} == {HASH_BYTES}


def test_the_hashes_are_pinned() -> None:
    """Workers of different versions compare hashes: changing them is a change of the protocol."""
    assert [digest.hex() for digest in block_hashes(list(range(8)), 4, "tenant")] == [
        "d569e8b4f7df4d274434de4c4414bba6",
        "d03b0a9f3bf4694ad804425a83c050c8",
    ]


@given(_TOKENS, _TOKENS, st.integers(1, 6))
def test_equal_hashes_mean_equal_tokens_up_to_the_blocks_end(first: list[int], second: list[int], size: int) -> None:
    pairs = zip(block_hashes(first, size), block_hashes(second, size), strict=False)
    for index, (left, right) in enumerate(pairs):
        stop = (index + 1) * size
        assert (left == right) == (first[:stop] == second[:stop])


def test_a_change_in_the_first_block_changes_all_hashes() -> None:
    tokens = list(range(64))
    changed = [99, *tokens[1:]]
    assert not set(block_hashes(tokens, 4)) & set(block_hashes(changed, 4))


@given(_TOKENS.filter(lambda tokens: len(tokens) >= 4), st.text(max_size=5), st.text(max_size=5))
def test_tenants_share_no_hash(tokens: list[int], salt: str, other: str) -> None:
    shared = set(block_hashes(tokens, 4, salt)) & set(block_hashes(tokens, 4, other))
    assert bool(shared) == (salt == other)


def test_a_salt_cannot_pass_for_another_tenants_prefix() -> None:
    """A salt that spells what is hashed for another tenant's block must not continue that tenant's chain."""
    victim, chain = next(
        (name, digest) for name in map(str, count()) if _is_text(digest := block_hashes([0], 1, name)[0])
    )
    salt = (chain + (2).to_bytes(4, "little")).decode()
    assert block_hashes([3], 1, salt)[0] != block_hashes([0, 2, 3], 1, victim)[2]


def _is_text(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


@given(_TOKENS, st.integers(1, 6), st.data())
def test_growing_gives_what_hashing_at_once_gives(tokens: list[int], size: int, data: st.DataObject) -> None:
    hasher = PrefixHasher(size, "salt")
    rest, emitted = tokens, []
    while rest:
        step = data.draw(st.integers(1, len(rest)))
        emitted += hasher.extend(rest[:step])
        rest = rest[step:]
    assert emitted == hasher.hashes == block_hashes(tokens, size, "salt")


def test_bad_input_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        PrefixHasher(0)
    with pytest.raises(OverflowError):
        block_hashes([-1], 1)
