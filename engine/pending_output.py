"""What a step brings, before it is known: the device may still compute it. Knows neither devices nor samplers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.sequence import SampledToken, StepOutput, TokenLogprobs


class SampledTokens(Protocol):
    """The next tokens of some rows, which the device may not have come to yet."""

    @property
    def token_ids(self) -> Tensor:
        """`[B]` int64, where the logits were; -1 where no token can be chosen."""
        ...

    def finish(self) -> list[SampledToken]:
        """Wait for them. Raises `engine.sampler.InvalidLogitsError` for rows of which no token can be chosen."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingOutput:
    """`prompt_logprobs` has an entry for each item of the plan; `tokens` are those of its `sampling_items`."""

    prompt_logprobs: list[list[TokenLogprobs] | None]
    sampling_items: tuple[int, ...] = ()
    tokens: SampledTokens = KnownTokens([])

    @property
    def is_known(self) -> bool:
        """Whether `output` waits for nothing."""
        return isinstance(self.tokens, KnownTokens)

    def output(self) -> StepOutput:
        """Wait for it. Raises what `SampledTokens.finish` does."""
        sampled: list[SampledToken | None] = [None] * len(self.prompt_logprobs)
        for index, token in zip(self.sampling_items, self.tokens.finish(), strict=True):
            sampled[index] = token
        return StepOutput(sampled, self.prompt_logprobs)
