"""Which layer groups of a prompt rest in host memory when the device has no room for all of it.

LayerKV (arXiv 2410.00428): keep the smallest number of layers x on the device for which moving the others takes no
longer than computing, T_offload(L - x) <= T_prefill(n), by what steps cost and copies take. So a prompt is admitted by
compute, not by free KV memory. Decides, and owns nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from engine.kv.allocation import BlockAllocator
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPlacement:
    """For prompts of at most `staging_columns` block columns, computed in chunks of `chunk_tokens`."""

    allocator: BlockAllocator
    staging_columns: int
    chunk_tokens: int
    block_bytes: int
    host_bytes_per_s: Callable[[], float]
    prefill_s: Callable[[int], float]  # predicted, for so many tokens

    def host_groups(self, seq: Sequence) -> frozenset[int]:
        """Empty if the prompt can only be computed on the device."""
        num_columns = self.allocator.num_columns_for(seq.num_tokens)
        if num_columns > self.staging_columns or self.allocator.host_pool is None:
            return frozenset()
        num_groups = self.allocator.layer_groups
        kept = num_groups - min(num_groups, self._num_hidden(seq.num_tokens))
        # With less room than that, the transfer shows a little; waiting for the device would show more.
        kept = min(kept, self.allocator.pool.num_available // num_columns, num_groups - 1)
        return self.allocator.all_groups - spread(kept, num_groups)

    def _num_hidden(self, num_tokens: int) -> int:
        """Groups whose transfer fits into the time that computing takes."""
        bytes_per_token = self.block_bytes / self.allocator.block_size
        group_s = moved_tokens(num_tokens, self.chunk_tokens) * bytes_per_token / self.host_bytes_per_s()
        return int(self.prefill_s(num_tokens) / group_s)


def moved_tokens(num_tokens: int, chunk_tokens: int) -> int:
    """Of one host-resident group: each token is written back once, and fetched for every later chunk."""
    num_chunks = -(-num_tokens // chunk_tokens)
    return num_tokens + chunk_tokens * num_chunks * (num_chunks - 1) // 2


def spread(count: int, num_groups: int) -> frozenset[int]:
    """`count` of the groups, evenly among them, so that those between can be fetched while these compute."""
    return frozenset((2 * i + 1) * num_groups // (2 * count) for i in range(count))
