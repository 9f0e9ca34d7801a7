"""How the wishes of a batch's rows are laid out for the sampling kernels: one array of words, uploaded at once.

First the rows, `[B, NUM_FIELDS]` 64-bit words, then the edits, `[E, 2]`. Knows nothing of requests.

An edit changes the logit of one token of one row. Its first word holds the token's id and, from bit 32 on, `REPEATED`
and `BANNED`; the second one the bits of two float32: what is added first, and what is subtracted last.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int64]

REPEATED: Final = 1  # the repetition penalty applies
BANNED: Final = 2  # impossible, unless nothing would be left
EDIT_WORDS: Final = 2


class Field(IntEnum):
    """Of a row. Reals are the bits of a float64."""

    SEED = 0
    POSITION = 1  # of the token to be drawn
    TEMPERATURE = 2  # real; 0: the best token is taken
    TOP_K = 3  # 0: off
    TOP_P = 4  # real; 1: off
    LOG_MIN_P = 5  # real; -inf: off
    REPETITION = 6  # real: the penalty
    FIRST_EDIT = 7
    STOP_EDIT = 8
    HAS_BANS = 9
    NUM_TOP = 10  # alternatives whose log-probabilities are asked for; -1: not even the chosen one's


NUM_FIELDS: Final = 12  # one is unused, so that all that follows rows begins at a multiple of 16 bytes

_ROW: Final = struct.Struct("=qqdqdddqqqq8x")  # the fields, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWish:
    """What one row asks for; `edits [n, 2]` as the module says, each token at most once."""

    seed: int
    position: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float = -np.inf
    repetition: float = 1.0
    edits: Words
    num_top: int = -1

    @property
    def draws(self) -> bool:
        return self.temperature > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """`words` is what goes up; the rest decides which kernels run."""

    words: Words
    num_rows: int
    edits: bool
    draws: bool
    truncates: bool  # some row keeps the likeliest tokens only, by number or by mass
    num_top: int  # the most that any row asks for; -1: no row does


def no_edits() -> Words:
    return np.empty((0, EDIT_WORDS), dtype=np.int64)


def pack_edits(
    token_ids: npt.NDArray[np.int64],
    flags: npt.NDArray[np.int64],
    added: npt.NDArray[np.float32],
    subtracted: npt.NDArray[np.float32],
) -> Words:
    """`[n, 2]` from arrays `[n]`."""
    words = np.empty((len(token_ids), EDIT_WORDS), dtype=np.int64)
    words[:, 0] = token_ids | flags << 32
    words.view(np.float32).reshape(-1, 2 * EDIT_WORDS)[:, 2:] = np.stack((added, subtracted), axis=1)
    return words


def pack_rows(wishes: Sequence[RowWish], vocab_size: int) -> PackedRows:
    rows, num_edits = bytearray(), 0
    for wish in wishes:
        stop = num_edits + len(wish.edits)
        top_k = wish.top_k if wish.top_k < vocab_size else 0
        has_bans = stop > num_edits and bool((wish.edits[:, 0] & BANNED << 32).any())
        rows += _ROW.pack(
            wish.seed, wish.position, wish.temperature, top_k, wish.top_p, wish.log_min_p, wish.repetition,
            num_edits, stop, has_bans, wish.num_top,
        )  # fmt: skip
        num_edits = stop
    edits = [wish.edits.ravel() for wish in wishes if len(wish.edits)]
    return PackedRows(
        words=np.concatenate([np.frombuffer(rows, dtype=np.int64), *edits]),
        num_rows=len(wishes),
        edits=num_edits > 0,
        draws=any(wish.draws for wish in wishes),
        truncates=any(wish.draws and (0 < wish.top_k < vocab_size or wish.top_p < 1.0) for wish in wishes),
        num_top=max((wish.num_top for wish in wishes), default=-1),
    )
