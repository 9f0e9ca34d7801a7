"""How a replica becomes a decode worker: see `kv_transfer.worker.parts.WorkerRole`."""

from __future__ import annotations

from dataclasses import dataclass

from decode_workers.worker import DecodeWorker, DecodeWorkerConfig
from kv_transfer.worker.parts import WorkerParts


@dataclass(frozen=True, slots=True)
class DecodeRole:
    config: DecodeWorkerConfig

    def make(self, parts: WorkerParts) -> DecodeWorker:
        return DecodeWorker(parts, self.config)
