"""Where a sequence is in the cluster, for those who measure how it fares: who computes it, and since when.

Written by the generator that runs the sequence, read by the HTTP side. Decides nothing.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from kv_transfer.messages.scheduling import Placement


@dataclass(slots=True, kw_only=True)
class Journey:
    """Of the newest attempt. `prefill` None: the decode worker computes the prompt, or nobody was chosen yet.

    `started_at`: when that worker was told to, on this process's monotonic clock. `worker_wait_s`: how long the prompt
    then waited there before its first step, as the worker says with the first token. `predicted_ttft_s`: by who placed
    it; None: not known.
    """

    prefill: str | None = None
    decode: str | None = None
    started_at: float | None = None
    worker_wait_s: float = 0.0
    predicted_ttft_s: float | None = None

    def placed(self, placement: Placement) -> None:
        self.prefill = placement.prefill
        self.decode = placement.decode
        self.predicted_ttft_s = placement.ttft_s

    def started(self) -> None:
        self.started_at = time.monotonic()

    def queue_s(self, arrived_at: float) -> float | None:
        """From arrival to the prompt's first step; None: not known."""
        return None if self.started_at is None else self.started_at - arrived_at + self.worker_wait_s
