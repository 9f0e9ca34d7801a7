"""Tokens that come later than the step which computes them, as a device's do."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Sequence

import torch

from engine.sampling.pending_output import KnownTokens
from engine.sequence import SampledToken


@dataclasses.dataclass
class LateTokens:
    """Tokens that a device would not have come to yet."""

    tokens: Sequence[SampledToken | None]
    wait: Callable[[], None]

    @property
    def token_ids(self) -> torch.Tensor:
        return KnownTokens(self.tokens).token_ids

    def finish(self) -> Sequence[SampledToken | None]:
        assert threading.current_thread().name.startswith("device")
        self.wait()
        return self.tokens
