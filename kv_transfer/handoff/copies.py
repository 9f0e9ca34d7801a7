"""Which copies write into which lease, so that none is given back or written anew too early.

One owner of that knowledge for all hand-offs of a decode worker. A copy cannot be recalled: cancelling a hand-off stops
neither the thread nor the device that executes it. Knows nothing of digests, peers or time.
"""

from __future__ import annotations

from kv_transfer.handoff.actions import Copy, ReleaseLease
from kv_transfer.messages import Fence


class CopiesInFlight:
    """Copies that were ordered and not yet reported, by delivery and by lease."""

    def __init__(self) -> None:
        self._by_delivery: dict[int, Copy] = {}
        self._by_lease: dict[int, dict[int, Copy]] = {}
        self._draining: set[int] = set()  # leases to give back after their last copy

    def start(self, copy: Copy) -> None:
        assert copy.delivery_id not in self._by_delivery, f"delivery {copy.delivery_id} is already being copied"
        assert copy.lease_id not in self._draining, f"lease {copy.lease_id} is on its way back to the pool"
        self._by_delivery[copy.delivery_id] = copy
        self._by_lease.setdefault(copy.lease_id, {})[copy.delivery_id] = copy

    def finish(self, delivery_id: int) -> tuple[Copy, list[ReleaseLease]]:
        """The copy that just ended, and its lease's release if that waited for it."""
        copy = self._by_delivery.pop(delivery_id)
        copies = self._by_lease[copy.lease_id]
        del copies[delivery_id]
        if copies:
            return copy, []
        del self._by_lease[copy.lease_id]
        return copy, self._release_if_drained(copy.lease_id)

    def is_idle(self, lease_id: int) -> bool:
        """Nothing writes into the lease's blocks."""
        return lease_id not in self._by_lease

    def only_of(self, fence: Fence) -> bool:
        """Nothing but this attempt's own copies writes into its lease's blocks."""
        return all(copy.header.fence == fence for copy in self._by_lease.get(fence.lease, {}).values())

    def release(self, lease_id: int) -> list[ReleaseLease]:
        """Give the lease back: now if nothing writes into it, else when the last copy has ended."""
        assert lease_id not in self._draining, f"lease {lease_id} is released twice"
        self._draining.add(lease_id)
        return self._release_if_drained(lease_id)

    def _release_if_drained(self, lease_id: int) -> list[ReleaseLease]:
        if lease_id not in self._draining or not self.is_idle(lease_id):
            return []
        self._draining.remove(lease_id)
        return [ReleaseLease(lease_id)]
