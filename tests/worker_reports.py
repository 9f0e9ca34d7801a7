"""What an idle worker tells the scheduler of itself, for tests that need somebody to tell it."""

from __future__ import annotations

from dataclasses import replace

from kv_transfer.messages import Endpoint, WorkerInfo, WorkerSnapshot

NOWHERE = Endpoint(host="127.0.0.1", port=1, node_id="node")


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
        prefill_tokens_per_s=0.0,
        decode_step_s=0.0,
    )
    return replace(snapshot, **changes)  # type: ignore[arg-type]
