"""What a decode worker tells the global scheduler of itself: numbers that its parts keep, brought together."""

from __future__ import annotations

from collections.abc import Callable

from decode_workers.scheduler import DecodeScheduler
from engine.steps.loading import LoadedModel
from engine.steps.loop import StepLoop
from kv_transfer.messages import WorkerSnapshot
from kv_transfer.tiers.report import tiers_report
from kv_transfer.worker.cost_report import cost_report
from kv_transfer.worker.prefix_loading import PrefixLoading


class DecodeReport:
    """Numbers its snapshots, so that whoever gets two knows the later one; else it only reads."""

    def __init__(
        self,
        worker_id: str,
        model: LoadedModel,
        scheduler: DecodeScheduler,
        prefix: PrefixLoading,
        steps: Callable[[], StepLoop],
    ) -> None:
        self._worker_id = worker_id
        self._model = model
        self._scheduler = scheduler
        self._prefix = prefix
        self._steps = steps
        self._num_snapshots = 0

    def num_waiting(self, num_pending: int) -> int:
        """Whatever has no blocks yet, reservations included."""
        return num_pending + self._prefix.num_loading + self._scheduler.num_waiting

    def snapshot(self, *, num_pending: int, draining: bool) -> WorkerSnapshot:
        self._num_snapshots += 1
        steps, host_pool = self._steps(), self._model.host_pool
        return WorkerSnapshot(
            worker_id=self._worker_id,
            sequence_number=self._num_snapshots,
            draining=draining,
            num_running=self._scheduler.num_running,
            num_waiting=self.num_waiting(num_pending),
            queued_prefill_tokens=self._scheduler.num_uncomputed_tokens + self._prefix.num_loading_tokens,
            blocks_available=self._model.block_pool.num_available,
            num_leases=self._model.block_pool.num_leases,
            num_paused=self._scheduler.num_paused,
            host_blocks_available=0 if host_pool is None else host_pool.num_available,
            context_tokens=self._scheduler.num_context_tokens,
            num_local_waiting=self._prefix.num_loading + self._scheduler.num_uncomputed,
            num_pending=num_pending,
            step_cost=cost_report(steps.costs),
            tiers=tiers_report(
                self._model,
                self._prefix,
                num_in_host=self._scheduler.num_in_host,
                num_host_landings=self._scheduler.num_host_landings,
                num_offloads=self._scheduler.tiers.num_offloads,
                num_restores=self._scheduler.tiers.num_restores,
                num_preemptions=self._scheduler.num_preemptions,
            ),
        )
