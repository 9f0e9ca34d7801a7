"""What an idle worker tells the scheduler of itself, for tests that need somebody to tell it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from kv_transfer.messages.requests import Endpoint
from kv_transfer.messages.workers import StepCostReport, WorkerInfo, WorkerSnapshot

NOWHERE = Endpoint(host="127.0.0.1", port=1, node_id="node")
# A prompt of 1000 tokens takes 1.01 s, a decode step 10 ms and 1 ms more for each sequence.
REPORT = StepCostReport(
    base_s=0.01,
    prefill_token_s=0.001,
    prefill_pair_s=0.0,
    decode_s=0.001,
    context_token_s=0.0,
    prefill_error=0.1,
    decode_error=0.1,
)
# Of requests like this, five just keep their pace on a worker of these costs.
CLOSE: dict[str, Any] = {"num_tokens": 100, "max_new_tokens": 100, "ttft_s": 10.0, "tpot_s": 0.017}


def worker_info(worker_id: str, **changes: object) -> WorkerInfo:
    """`p...` is a prefill worker, any other one decodes."""
    info = WorkerInfo(
        worker_id=worker_id,
        role="prefill" if worker_id.startswith("p") else "decode",
        endpoint=NOWHERE,
        pid=1,
        model="model",
        compatibility="same",
        max_model_len=10_000,
        num_blocks=2000,
        block_size=16,
        layer_groups=1,
    )
    return replace(info, **changes)  # type: ignore[arg-type]


def worker_snapshot(worker_id: str, number: int = 1, **changes: object) -> WorkerSnapshot:
    snapshot = WorkerSnapshot(
        worker_id=worker_id,
        sequence_number=number,
        draining=False,
        num_running=0,
        num_waiting=0,
        queued_prefill_tokens=0,
        blocks_available=2000,
        num_leases=0,
    )
    return replace(snapshot, **changes)  # type: ignore[arg-type]
