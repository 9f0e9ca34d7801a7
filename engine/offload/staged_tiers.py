"""The two caches of one runner and the ring between them: what is staged where, whoever copies it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol

from engine.kv.cache import KVCache, SequenceKV
from engine.model.transformer import LayerHooks
from engine.offload.staging_plan import BlockPairs, StagingConfig, StagingPlan, plan_staging
from engine.sequence import StepPlan

TIMED_BYTES = 1 << 20  # smaller fetches say more about Python than about memory
_SMOOTHING = 0.05


@dataclass(slots=True)
class TransferStats:
    """What moved so far. Fields only grow but the last; each has one writer and may be read from any thread."""

    fetched_bytes: int = 0  # host to device, ring and copies
    fetch_s: float = 0.0  # that took whoever copies
    written_bytes: int = 0  # device to host
    write_s: float = 0.0  # that took whoever copies
    exposed_s: float = 0.0  # that compute waited for copies
    host_bytes_per_s: float = 0.0  # smoothed rate of fetches

    def record_fetch(self, num_bytes: int, duration_s: float) -> None:
        self.fetched_bytes += num_bytes
        self.fetch_s += duration_s
        if num_bytes >= TIMED_BYTES and duration_s > 0:
            self.host_bytes_per_s += _SMOOTHING * (num_bytes / duration_s - self.host_bytes_per_s)

    def record_write(self, num_bytes: int, duration_s: float) -> None:
        self.written_bytes += num_bytes
        self.write_s += duration_s


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedTiers:
    """The last `ring.total_blocks` blocks of `kv_cache` are the ring; without one, whole blocks can be copied and
    nothing can be computed from the host. `windows[g]` is how far back any layer of group g sees, in tokens; None: to
    the start.
    """

    kv_cache: SequenceKV
    host_cache: KVCache
    ring: StagingConfig | None
    windows: tuple[int | None, ...]

    def __post_init__(self) -> None:
        assert self.kv_cache.layout == self.host_cache.layout, "blocks of both tiers must be of one layout"

    @property
    def num_pool_blocks(self) -> int:
        """Blocks of the device cache that are not the ring's."""
        return self.kv_cache.num_blocks - (self.ring.total_blocks if self.ring else 0)

    @property
    def num_slots(self) -> int:
        return self.ring.num_groups if self.ring else 0

    def plan_staging(self, plan: StepPlan) -> StagingPlan | None:
        """Place a step's host-resident groups in the ring. None if all of the plan's sequences are on the device.
        Raises ValueError if they do not fit the ring."""
        return plan_staging(plan, self.kv_cache.layout, self.ring, self.num_pool_blocks)

    def fetched(self, staging_plan: StagingPlan, group: int) -> BlockPairs:
        """What the ring must hold of a group before it computes."""
        return staging_plan.fetched(group, self.kv_cache.layout.block_size, self.windows[group])

    def num_bytes(self, pairs: BlockPairs) -> int:
        return len(pairs) * self.kv_cache.layout.block_bytes


class Staging(Protocol):
    """Copies between the tiers of a runner, within its steps."""

    @property
    def tiers(self) -> StagedTiers: ...

    @property
    def stats(self) -> TransferStats: ...

    def step(
        self, plan: StepPlan, staging_plan: StagingPlan | None, on_layer: Callable[[int], None] | None
    ) -> AbstractContextManager[LayerHooks]:
        """The copies of one step, as hooks of its forward pass and as a context that no copy outlives unknown."""
        ...

    def close(self) -> None:
        """When this returns no copy is under way. No step may follow."""
        ...
