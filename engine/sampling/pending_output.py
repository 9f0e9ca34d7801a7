"""What a step brings, before it is known: the device may still compute it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.memory.streams import Event
from engine.sequence import SampledToken, StepOutput, TokenLogprobs


class SampledTokens(Protocol):
    """The next tokens of some rows, which the device may not have come to yet."""

    @property
    def token_ids(self) -> Tensor:
        """`[B]` int64, where the logits were; -1 where no token can be chosen."""
        ...

    def finish(self) -> list[SampledToken]:
        """Wait for them. Raises `engine.sampling.sampler.InvalidLogitsError` for rows of which no token can be
        chosen."""
        ...


@dataclass(frozen=True, slots=True)
class KnownTokens:
    """Those that were sampled on the host."""

    tokens: list[SampledToken]

    @property
    def token_ids(self) -> Tensor:
        return torch.tensor([token.token_id for token in self.tokens], dtype=torch.int64)

    def finish(self) -> list[SampledToken]:
        return self.tokens


def nothing_to_check() -> None:
    pass


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutput:
    """`prompt_logprobs` has an entry for each item of the plan; `tokens` are those of its `sampling_items`; `pooled` is
    as in `StepOutput`.

    `copies`: the end of what a device still copies for the step, None where nothing is: until then nobody else may have
    the blocks at either end.
    `check()` raises an error if what the device brought is of no use, though it brought something.
    """

    prompt_logprobs: list[list[TokenLogprobs] | None]
    sampling_items: tuple[int, ...] = ()
    tokens: SampledTokens = KnownTokens([])
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
        for index, token in zip(self.sampling_items, tokens, strict=True):
            sampled[index] = token
        return StepOutput(sampled, self.prompt_logprobs, self.pooled)
