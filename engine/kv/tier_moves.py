"""What a step is asked to copy between memory tiers for one sequence, and what is to be done when it has.

Plain data of `engine.kv.allocation`; owns no block.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from engine.sequence import BlockCopy

Blocks = npt.NDArray[np.int32]
"""`[groups, columns]` blocks of one tier; -1 for none."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A prefix hit of which some blocks are fetched from host memory. `sources` are leased until they have been."""

    sources: list[int]


@dataclass(frozen=True, slots=True)
class Relocation:
    """Layer groups on their way to the other tier. Both block tables have their rows until it is settled."""

    groups: list[int]
    to_device: bool


Move = Opening | Relocation


def row_copies(
    groups: Iterable[int],
    to: Literal["device", "host"],
    source: Blocks,
    destination: Blocks,
    is_copied: npt.NDArray[np.bool_],
) -> tuple[BlockCopy, ...]:
    """Of the rows of these groups, those blocks that `is_copied` names; `[num_groups, columns]` all."""
    return tuple(
        BlockCopy(group=group, to=to, source=source[row][chosen], destination=destination[row][chosen])
        for row, (group, chosen) in enumerate(zip(groups, is_copied, strict=True))
        if chosen.any()
    )


def by_columns(blocks: Blocks) -> list[int]:
    """All blocks of a table, column by column."""
    flat = blocks.T.ravel()
    ordered: list[int] = flat[flat >= 0].tolist()
    return ordered
