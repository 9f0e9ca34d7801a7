"""Compiled: a hash table of digests, each with a number, asked for many at once: processors wait for the memory of
several together, where dictionaries of Python wait for one after the other.

Open addressing with linear probing, nowhere more than half full. A row of `table` is a digest's two halves and its
number; 0: the row is free. What is called stands before what calls it, since that is compiled at once. Knows no
workers, but that a number's lowest three bits say whether one of them is the digest's only holder: see `put_sole`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from cluster.scheduler.placement.compiled import compiled, part
from engine.kv.prefix import HASH_BYTES

Digests = NDArray[np.uint64]  # [digests, 2]
Table = NDArray[np.uint64]  # [rows, 3]: a power of two of them

_DIGESTS: Final = "Array(u8, 2, 'C', readonly=True)"
_FREE: Final = np.uint64(0)
_LOW: Final = np.uint64(7)
_SHIFT: Final = np.uint64(3)
_HALF: Final = np.uint64(32)
_ODD: Final = np.uint64(0x9E3779B97F4A7C15)
_OTHER_ODD: Final = np.uint64(0xD6E8FEB86659FD93)


def split(joined: bytes) -> Digests:
    """Digests that are joined."""
    return np.frombuffer(joined, np.uint64).reshape(-1, HASH_BYTES // 8)


def new_table(num_rows: int) -> Table:
    return np.zeros((num_rows, 3), np.uint64)


@part
def _home(table: Table, first: np.uint64, second: np.uint64) -> int:
    """The row where the search for a digest begins."""
    mixed = (first ^ (second * _ODD)) * _OTHER_ODD
    mixed = (mixed ^ (mixed >> _HALF)) * _OTHER_ODD
    return int(np.int64(mixed >> _HALF) & (len(table) - 1))


@part
def _row(table: Table, first: np.uint64, second: np.uint64) -> int:
    """Where the digest is, or would be."""
    row = _home(table, first, second)
    while table[row, 2] != _FREE and (table[row, 0] != first or table[row, 1] != second):
        row = (row + 1) & (len(table) - 1)
    return row


@part
def _fill(table: Table, row: int, first: np.uint64, second: np.uint64, number: np.uint64) -> None:
    table[row, 0], table[row, 1], table[row, 2] = first, second, number


@part
def _empty(table: Table, row: int) -> None:
    """Those behind it that would not be found across the gap move up."""
    last, gap, row = len(table) - 1, row, (row + 1) & (len(table) - 1)
    while table[row, 2] != _FREE:
        home = _home(table, table[row, 0], table[row, 1])
        if (row - home) & last >= (row - gap) & last:
            _fill(table, gap, table[row, 0], table[row, 1], table[row, 2])
            gap = row
        row = (row + 1) & last
    table[gap, 2] = _FREE


@compiled(f"u8[::1](u8[:, ::1], {_DIGESTS})")
def numbers_until_free(table: Table, digests: Digests) -> NDArray[np.uint64]:
    """Of the digests up to the first that is not there, whose 0 is the last."""
    found = np.empty(len(digests), np.uint64)
    for at in range(len(digests)):
        found[at] = table[_row(table, digests[at, 0], digests[at, 1]), 2]
        if found[at] == _FREE:
            return found[: at + 1]
    return found


@compiled(f"i8(u8[:, ::1], {_DIGESTS}, u8)")
def put_number(table: Table, digests: Digests, number: int) -> int:
    """One digest's; 0: it is there no more. Returns by how many rows more are used."""
    first, second = digests[0]
    row = _row(table, first, second)
    was_used = table[row, 2] != _FREE
    if number != _FREE:
        _fill(table, row, first, second, np.uint64(number))
    elif was_used:
        _empty(table, row)
    return int(number != _FREE) - int(was_used)


@compiled(f"Tuple((i8[::1], i8))(u8[:, ::1], {_DIGESTS}, u8, Array(u1, 1, 'C', readonly=True))")
def put_sole(table: Table, digests: Digests, worker: int, low: NDArray[np.uint8]) -> tuple[NDArray[np.int64], int]:
    """The number of each digest becomes 8 * `worker` + `low`; where that is 0, the digest is there no more. Where it
    has a number of another worker's, or one whose lowest bits are 0, nothing is done, and where `low` is not 0 or these
    bits are, its index is told. Returns these, and by how many rows more are used."""
    others, num_others, num_more = np.empty(len(digests), np.int64), 0, 0
    for at in range(len(digests)):
        first, second = digests[at]
        row = _row(table, first, second)
        number, bits = table[row, 2], np.uint64(low[at])
        if number != _FREE and (number & _LOW == _FREE or number >> _SHIFT != np.uint64(worker)):
            if bits != _FREE or number & _LOW == _FREE:
                others[num_others] = at
                num_others += 1
        elif bits != _FREE:
            num_more += number == _FREE
            _fill(table, row, first, second, np.uint64(worker) << _SHIFT | bits)
        elif number != _FREE:
            num_more -= 1
            _empty(table, row)
    return others[:num_others], num_more


@compiled("u8[:, ::1](u8[:, ::1])")
def doubled(table: Table) -> Table:
    larger = np.zeros((2 * len(table), 3), np.uint64)
    for row in range(len(table)):
        if table[row, 2] != _FREE:
            first, second = table[row, 0], table[row, 1]
            _fill(larger, _row(larger, first, second), first, second, table[row, 2])
    return larger
