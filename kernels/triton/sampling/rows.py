"""How a batch's sampling options are laid out for the kernels: one array of 64-bit words, uploaded at once.

First the rows, `[B, NUM_FIELDS]`, then the edits, `[E, 2]`, then the masks, `[M, ceil(V / 64)]`: a bit for each token
that the grammar of a row allows. Rows without a grammar have none.

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
Bits = npt.NDArray[np.int32]

REPEATED: Final = 1  # the repetition penalty applies
BANNED: Final = 2  # impossible, unless nothing would be left
EDIT_WORDS: Final = 2


class Field(IntEnum):
    """A field of a row. Reals are the bits of a float64."""

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

    MASK = 11  # which of the masks; -1: none


SPLIT: Final = 2048
"""Tokens of the vocabulary that one program takes."""

SHIPPED_SPLITS: Final = (16, 32, 64, 128, 256)
"""Splits of a vocabulary, rounded up to a power of two, that kernels are shipped for: of up to 32,768, 65,536, 131,072,
262,144 and 524,288 tokens."""

NUM_FIELDS: Final = 12  # even, so that all that follows rows begins at a multiple of 16 bytes

_ROW: Final = struct.Struct("=qqdqdddqqqqq")  # the fields, in their order


@dataclass(frozen=True, slots=True, kw_only=True)
class RowOptions:
    """One row's sampling options; `edits [n, 2]` as the module says, each token at most once.

    `mask [ceil(V / 32)]`: bit i % 32 of word i // 32 is set if token i is allowed; None: all are.
    """

    seed: int
    position: int
    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    log_min_p: float = -np.inf
    repetition: float = 1.0
    edits: Words
    mask: Bits | None = None
    num_top: int = -1

    @property
    def draws(self) -> bool:
        return self.temperature > 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedRows:
    """`words` is what goes up; the rest decides which kernels run."""

    words: Words
    num_rows: int
    num_edits: int
    num_masks: int
    draws: bool
    filters: bool  # some row is filtered by top-k or top-p
    num_top: int  # the most that any row asks for; -1: no row does

    @property
    def edits(self) -> bool:
        """Whether some row's logits are changed."""
        return self.num_edits > 0 or self.num_masks > 0


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


def pack_rows(rows: Sequence[RowOptions], vocab_size: int) -> PackedRows:
    packed, num_edits, masks = bytearray(), 0, [_mask_words(row.mask) for row in rows if row.mask is not None]
    num_masks = 0
    for row in rows:
        stop = num_edits + len(row.edits)
        top_k = row.top_k if row.top_k < vocab_size else 0
        has_bans = stop > num_edits and bool((row.edits[:, 0] & BANNED << 32).any())
        packed += _ROW.pack(
            row.seed, row.position, row.temperature, top_k, row.top_p, row.log_min_p, row.repetition,
            num_edits, stop, has_bans, row.num_top, -1 if row.mask is None else num_masks,
        )  # fmt: skip
        num_edits = stop
        num_masks += row.mask is not None
    edits = [row.edits.ravel() for row in rows if len(row.edits)]
    return PackedRows(
        words=np.concatenate([np.frombuffer(packed, dtype=np.int64), *edits, *masks]),
        num_rows=len(rows),
        num_edits=num_edits,
        num_masks=num_masks,
        draws=any(row.draws for row in rows),
        filters=any(row.draws and (0 < row.top_k < vocab_size or row.top_p < 1.0) for row in rows),
        num_top=max((row.num_top for row in rows), default=-1),
    )


def _mask_words(mask: Bits) -> Words:
    """The mask in words of 64 bits, of which the second half of the last one may be nobody's."""
    words = np.zeros(-(-len(mask) // 2), dtype=np.int64)
    words.view(np.int32)[: len(mask)] = mask
    return words
