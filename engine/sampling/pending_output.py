"""What a step brings, before it is known: the device may still compute it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.memory.streams import Event
from engine.sequence import SampledToken, StepOutput, TokenLogprobs, TokensSoFar

Drafts = Mapping[int, int]
"""By rows, the guess of their token that the row after them was computed for; that row is the same sequence's."""

Rows = Sequence[TokensSoFar]
"""Whose next tokens are sampled."""

NO_DRAFTS: Final[Drafts] = MappingProxyType({})


class SampledTokens(Protocol):
    """The next tokens of some rows, which the device may not have come to yet."""

    @property
    def token_ids(self) -> Tensor:
        """`[B]` int64, where the logits were; -1 where no token can be chosen."""
        ...

    def finish(self) -> Sequence[SampledToken | None]:
        """Wait for them. None: not sampled, since a draft before it is wrong. Raises
        `engine.sampling.sampler.InvalidLogitsError` for rows of which no token can be chosen."""
        ...


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Output whose tokens were sampled on the host, so that they are known at once."""

    tokens: Sequence[SampledToken | None]

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([-1 if token is None else token.token_id for token in self.tokens], dtype=torch.int64)

    def finish(self) -> Sequence[SampledToken | None]:
        return self.tokens


@dataclass(frozen=True, slots=True)
class _JoinedTokens:
    parts: Sequence[SampledTokens]

    @property
    def token_ids(self) -> Tensor:
        return torch.cat([part.token_ids for part in self.parts])

    def finish(self) -> Sequence[SampledToken | None]:
        return [token for part in self.parts for token in part.finish()]


def joined(parts: Sequence[SampledTokens]) -> SampledTokens:
    """The tokens of all rows, of which several calls have sampled some each, in their order."""
    if len(parts) == 1:
        return parts[0]
    tokens = _JoinedTokens(parts)
    return KnownTokens(tokens.finish()) if all(isinstance(part, KnownTokens) for part in parts) else tokens


def nothing_to_check() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutput:
    """`prompt_logprobs` has an entry for each item of the plan; `tokens` are those of its `sampling_items`, of each one
    row and another for each of its `drafts`; `pooled` is as in `StepOutput`.

    `copies`: the end of what a device still copies for the step, None where nothing is: until then nobody else may have
    the blocks at either end.
    `check()` raises an error if what the device brought is of no use, though it brought something.
    """

    prompt_logprobs: list[list[TokenLogprobs] | None]
    sampling_items: tuple[int, ...] = ()
    tokens: SampledTokens = KnownTokens([])
    drafts: Drafts = field(default_factory=lambda: NO_DRAFTS)
    pooled: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    copies: Event | None = None
    check: Callable[[], None] = nothing_to_check

    @property
    def is_known(self) -> bool:
        """Whether `output` waits for nothing."""
        return self.copies is None and isinstance(self.tokens, KnownTokens)

    def output(self) -> StepOutput:
        """Wait for it, once. Raises what `SampledTokens.finish` does, and what `check` does."""
        if self.copies is not None:  # first: whatever is raised, the blocks may be given away after
            self.copies.wait()
        sampled: list[SampledToken | None] = [None] * len(self.prompt_logprobs)
        try:
            tokens = self.tokens.finish()
        finally:
            self.check()
        following: dict[int, list[SampledToken]] = {}
        row = 0
        for index in self.sampling_items:
            sampled[index] = tokens[row]
            if row in self.drafts:
                following[index] = list(self._after_right_drafts(tokens, row))
                while row in self.drafts:
                    row += 1
            row += 1
        assert row == len(tokens), f"{len(tokens)} rows were sampled in place of {row}"
        return StepOutput(sampled, self.prompt_logprobs, self.pooled, following)

    def _after_right_drafts(self, tokens: Sequence[SampledToken | None], row: int) -> Iterator[SampledToken]:
        """The tokens of the rows after this one before which no draft is wrong."""
        while (token := tokens[row]) is not None and token.token_id == self.drafts.get(row):
            row += 1
            following = tokens[row]
            assert following is not None, "what follows a right draft was not sampled"
            yield following
