"""How many blocks each tier of a worker's KV memory gets, and how the layers are cut into groups. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from engine.kv.cache import KVLayout
from engine.offload.staging_plan import StagingConfig

# With host memory: few enough groups that each is worth a copy, and enough that a group in the ring is a small part.
_FEWEST_GROUPS, _MOST_GROUPS = 6, 12


@dataclass(frozen=True, slots=True, kw_only=True)
class KVMemory:
    """What a worker is given. Exactly one of `kv_blocks` and `kv_bytes` is set; ring and host memory come on top."""

    kv_blocks: int | None = None
    kv_bytes: int | None = None
    host_bytes: int = 0
    staging_bytes: int = 0
    ring_groups: int = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class KVSizes:
    """Sizes of the KV memory, in blocks. The device cache holds the pool's, then the ring's."""

    pool_blocks: int
    host_blocks: int
    ring: StagingConfig | None

    @property
    def device_blocks(self) -> int:
        return self.pool_blocks + (self.ring.total_blocks if self.ring else 0)

    def longest(self, layout: KVLayout) -> int:
        """Tokens of the longest sequence that lies on the device alone, or in host memory alone."""
        host_blocks = self.host_blocks // layout.num_layer_groups
        staged = min(host_blocks, self.ring.num_blocks if self.ring else 0)
        return max(self.pool_blocks // layout.num_layer_groups, staged) * layout.block_size


def layers_per_group_for(num_layers: int) -> int:
    """The cut into 6 to 12 groups (one a layer, if there are fewer) that wastes the least; of equals, the finest.

    The last group's blocks are as large as the others', even where it has fewer layers: that is the waste.
    """
    sizes = range(1, num_layers + 1)
    fitting = [size for size in sizes if _FEWEST_GROUPS <= -(-num_layers // size) <= _MOST_GROUPS] or [1]
    return min(fitting, key=lambda size: (-num_layers % size, size))


def size_tiers(layout: KVLayout, memory: KVMemory) -> KVSizes:
    """Raises ValueError, with advice, for sizes that cannot work."""
    if (memory.kv_blocks is None) == (memory.kv_bytes is None):
        raise ValueError("give the size of the KV cache either as kv_blocks or as kv_bytes")
    pool_blocks = memory.kv_blocks if memory.kv_bytes is None else memory.kv_bytes // layout.block_bytes
    assert pool_blocks is not None
    _require_a_token("a KV cache", pool_blocks, layout)
    host_blocks = memory.host_bytes // layout.block_bytes
    if memory.host_bytes:
        _require_a_token("host memory for KV", host_blocks, layout)
    return KVSizes(pool_blocks=pool_blocks, host_blocks=host_blocks, ring=_ring(layout, memory))


def _require_a_token(what: str, num_blocks: int, layout: KVLayout) -> None:
    if num_blocks < layout.num_layer_groups:
        raise ValueError(
            f"{what} of {num_blocks} blocks cannot hold a single token: each token needs a block in each of"
            f" {layout.num_layer_groups} layer groups, {layout.num_layer_groups * layout.block_bytes} bytes in all"
        )


def _ring(layout: KVLayout, memory: KVMemory) -> StagingConfig | None:
    if not memory.staging_bytes:
        return None
    if not memory.host_bytes:
        raise ValueError("staging_bytes is set without host_bytes: nothing would be staged; give host memory too")
    if memory.ring_groups < 1:
        raise ValueError(f"ring_groups is {memory.ring_groups}; the staging ring has at least one slot")
    num_groups = min(memory.ring_groups, layout.num_layer_groups)
    num_blocks = memory.staging_bytes // (num_groups * layout.block_bytes)
    if num_blocks < 1:
        raise ValueError(
            f"staging_bytes is {memory.staging_bytes}; {num_groups} slots of a single block take"
            f" {num_groups * layout.block_bytes} bytes"
        )
    return StagingConfig(num_groups=num_groups, num_blocks=num_blocks)
