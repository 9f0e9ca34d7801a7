"""How the wishes of a batch's rows are laid out for the sampling kernels: one array of words, uploaded at once.

First the rows, `[B, NUM_FIELDS]` 64-bit words, then the edits, `[E, 2]`. Knows nothing of requests.

An edit changes the logit of one token of one row. Its first word holds the token's id and, from bit 32 on, `REPEATED`
and `BANNED`; the second one the bits of two float32: what is added first, and what is subtracted last.
"""

from __future__ import annotations

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


NUM_FIELDS: Final = len(Field)


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
    rows = np.zeros((len(wishes), NUM_FIELDS), dtype=np.int64)
    reals = rows.view(np.float64)
    num_edits = 0
    for row, real, wish in zip(rows, reals, wishes, strict=True):
        row[Field.SEED], row[Field.POSITION] = wish.seed, wish.position
        row[Field.TOP_K] = wish.top_k if wish.top_k < vocab_size else 0
        real[Field.TEMPERATURE], real[Field.TOP_P] = wish.temperature, wish.top_p
        real[Field.LOG_MIN_P], real[Field.REPETITION] = wish.log_min_p, wish.repetition
        row[Field.FIRST_EDIT], row[Field.STOP_EDIT] = num_edits, num_edits + len(wish.edits)
        row[Field.HAS_BANS] = bool((wish.edits[:, 0] & BANNED << 32).any())
        row[Field.NUM_TOP] = wish.num_top
        num_edits += len(wish.edits)
    drawing = [wish for wish in wishes if wish.draws]
    return PackedRows(
        words=np.concatenate([rows.ravel(), *(wish.edits.ravel() for wish in wishes)]),
        num_rows=len(wishes),
        edits=num_edits > 0,
        draws=bool(drawing),
        truncates=any(0 < wish.top_k < vocab_size or wish.top_p < 1.0 for wish in drawing),
        num_top=max((wish.num_top for wish in wishes), default=-1),
    )
