"""How a replica becomes a prefill worker: see `kv_transfer.worker.parts.WorkerRole`."""

from __future__ import annotations

from dataclasses import dataclass

from kv_transfer.worker.parts import WorkerParts
from prefill_workers.worker import PrefillWorker, PrefillWorkerConfig


@dataclass(frozen=True, slots=True)
class PrefillRole:
    config: PrefillWorkerConfig

    def make(self, parts: WorkerParts) -> PrefillWorker:
        return PrefillWorker(parts, self.config)
