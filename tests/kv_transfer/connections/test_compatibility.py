"""What two ends must agree on before KV moves, and what they need not."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from engine.kv.cache import KVLayout
from kv_transfer.connections.handshake import describe, fingerprint, mismatch
from kv_transfer.messages import PROTOCOL_VERSION

LAYOUT = KVLayout(num_layers=30, layers_per_group=30, num_kv_heads=3, head_dim=64, block_size=16, dtype=torch.bfloat16)
OURS = describe("f00d", LAYOUT)


def test_equal_ends_match() -> None:
    assert mismatch(OURS, describe("f00d", LAYOUT)) is None


def test_blocks_are_each_ends_own_affair() -> None:
    theirs = describe("f00d", replace(LAYOUT, block_size=32, layers_per_group=1))
    assert mismatch(OURS, theirs) is None


@pytest.mark.parametrize(
    ("theirs", "says"),
    [
        (describe("beef", LAYOUT), "model fingerprint is f00d here and beef there"),
        (describe("f00d", replace(LAYOUT, dtype=torch.float32)), "KV dtype is bfloat16 here and float32 there"),
        (describe("f00d", replace(LAYOUT, num_kv_heads=9)), "KV heads is 3 here and 9 there"),
        (describe("f00d", replace(LAYOUT, head_dim=128)), "head size is 64 here and 128 there"),
        (describe("f00d", LAYOUT, protocol_version=99), f"protocol version is {PROTOCOL_VERSION} here and 99 there"),
        (describe("f00d", LAYOUT, digest_kinds=["crc32"]), "digests is row_sum_64, xxh3_64 here and crc32 there"),
    ],
)
def test_each_difference_is_named_with_both_values(theirs: dict[str, str], says: str) -> None:
    assert says in (mismatch(OURS, theirs) or "")
    assert (mismatch(OURS, theirs) or "").count(" here and ") == 1


def test_all_differences_are_named_at_once() -> None:
    sentence = mismatch(OURS, describe("beef", replace(LAYOUT, num_layers=2, layers_per_group=2))) or ""
    assert "layers is 30 here and 2 there" in sentence and "f00d" in sentence


def test_missing_fields_are_differences() -> None:
    assert "digests is row_sum_64, xxh3_64 here and not stated there" in (mismatch(OURS, {}) or "")
    assert "speed is not stated here and fast there" in (mismatch(OURS, {**OURS, "speed": "fast"}) or "")


def test_fingerprint_is_of_facts_not_of_their_order() -> None:
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 2})
    assert len(fingerprint({})) == 64
