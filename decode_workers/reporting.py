"""What a decode worker tells the global scheduler of itself: numbers that its parts keep, brought together."""

from __future__ import annotations

from collections.abc import Callable

from decode_workers.scheduler import DecodeScheduler
from engine.loading import LoadedModel
from engine.step_loop import StepRates
from kv_transfer.messages import WorkerSnapshot
from kv_transfer.prefix_loading import PrefixLoading
from kv_transfer.tiers.report import tiers_report


class DecodeReport:
    """Numbers its snapshots, so that whoever gets two knows the later one; else it only reads."""

    def __init__(
        self,
        worker_id: str,
        model: LoadedModel,
        scheduler: DecodeScheduler,
        prefix: PrefixLoading,
        rates: Callable[[], StepRates],
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._scheduler = scheduler
        self._prefix = prefix
        self._rates = rates
        self._num_snapshots = 0

    def snapshot(self, *, num_waiting: int, draining: bool) -> WorkerSnapshot:
        self._num_snapshots += 1
        rates, host_pool = self._rates(), self._model.host_pool
        return WorkerSnapshot(
            worker_id=self._worker_id,
            sequence_number=self._num_snapshots,
            draining=draining,
            num_running=self._scheduler.num_running,
            num_waiting=num_waiting,
            queued_prefill_tokens=self._scheduler.num_uncomputed_tokens + self._prefix.num_loading_tokens,
            blocks_available=self._model.block_pool.num_available,
            num_leases=self._model.block_pool.num_leases,
            prefill_tokens_per_s=rates.prefill_tokens_per_s,
            decode_step_s=rates.decode_step_s,
            num_paused=self._scheduler.num_paused,
            host_blocks_available=0 if host_pool is None else host_pool.num_available,
            tiers=tiers_report(
                self._model,
                self._prefix,
                num_in_host=self._scheduler.num_in_host,
                num_host_landings=self._scheduler.num_host_landings,
                num_offloads=self._scheduler.num_offloads,
                num_restores=self._scheduler.num_restores,
                num_preemptions=self._scheduler.num_preemptions,
            ),
        )
