"""What is planned for, and what a layout achieves under it: the seam between the search and the simulation."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from cluster.simulation.plan.demand import Demand, Estimate, Targets, demand_of, estimate
from cluster.simulation.plan.search import Layout, OutOfTime
from cluster.simulation.plan.worker_memory import WorkerMemory, predict_memory
from cluster.simulation.routers.legato import LegatoRouter
from cluster.simulation.simulate import SimulationConfig, SimulationResult, simulate
from cluster.simulation.worker_shape import WorkerShape, measured
from cluster.simulation.workload.traces import TraceRequest, scaled
from cluster.slo.classes import SloClass, SloConfig
from engine.cost_model.roofline import Device, ModelShape, roofline_cost

_SAMPLED_BY_PREFILL: Final = 32  # prompts that end in one step


@dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """Model and device, and the limits of workers that do not depend on the layout."""

    model: ModelShape
    device: Device
    link_bytes_per_s: float = 50e9
    prefill_budget: int = 2048
    decode_budget: int = 512
    max_num_seqs: int = 256
    ring_bytes: int = 0
    noise: float = 0.1
    block_size: int = 64

    def memory(self, role: str, num_devices: int) -> WorkerMemory:
        is_prefill = role == "prefill"
        return predict_memory(
            self.model,
            self.device,
            num_devices=num_devices,
            token_budget=self.prefill_budget if is_prefill else self.decode_budget,
            max_num_seqs=_SAMPLED_BY_PREFILL if is_prefill else self.max_num_seqs,
            ring_bytes=self.ring_bytes,
        )

    def worker(self, role: str, num_devices: int) -> WorkerShape:
        """Raises ValueError where the model does not fit, or cannot be cut into so many parts."""
        layer_bytes = self.model.kv_bytes_per_token / self.model.num_layers
        return WorkerShape(
            cost=measured(roofline_cost(self.model, self.device, num_devices=num_devices), self.noise),
            kv_tokens=self.memory(role, num_devices).kv_tokens,
            token_budget=self.prefill_budget if role == "prefill" else self.decode_budget,
            block_size=self.block_size,
            max_num_seqs=self.max_num_seqs,
            handoff_token_s=layer_bytes / self.link_bytes_per_s,
            step_noise=self.noise,
        )


class Problem:
    """A trace, targets and hardware. After `deadline`, by `clock`, simulations raise OutOfTime."""

    def __init__(
        self,
        requests: Sequence[TraceRequest],
        targets: Targets,
        hardware: Hardware,
        *,
        deadline: float = float("inf"),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.requests = requests
        self.targets = targets
        self.hardware = hardware
        self.demand: Demand = demand_of(requests)
        self._deadline = deadline
        self._clock = clock

    def estimate(self, num_devices: int) -> Estimate:
        prefill = self.hardware.worker("prefill", num_devices)
        decode = self.hardware.worker("decode", num_devices)
        return estimate(
            self.demand,
            self.targets,
            decode.cost,
            devices_per_worker=num_devices,
            chunk_tokens=prefill.token_budget,
            kv_tokens=decode.kv_tokens,
            max_num_seqs=decode.max_num_seqs,
        )

    def play(self, layout: Layout, *, load: float = 1.0) -> SimulationResult:
        """All requests, at `load` times their rate, over workers as the layout says."""
        slo = SloClass(name="planned", ttft_s=self.targets.ttft_s, tpot_s=self.targets.tpot_s)
        config = SimulationConfig(
            num_prefill=layout.num_prefill,
            num_decode=layout.num_decode,
            prefill=self.hardware.worker("prefill", layout.devices_per_worker),
            decode=self.hardware.worker("decode", layout.devices_per_worker),
            slo=SloConfig(classes=(slo,), default=slo.name),
        )
        return simulate(config, self._timed(scaled(self.requests, load=load)), LegatoRouter())

    def _timed(self, requests: Iterator[TraceRequest]) -> Iterator[TraceRequest]:
        for request in requests:
            if self._clock() > self._deadline:
                raise OutOfTime
            yield request
