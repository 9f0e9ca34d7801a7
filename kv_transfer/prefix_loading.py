"""What a prefill worker does with its prefix tiers: loads prefixes before they are computed, passes on what was.

Compares predicted times; the tiers do the work. Knows nothing of steps or of hand-offs.
"""

from __future__ import annotations

from collections.abc import Callable

from engine.allocation import BlockAllocator
from engine.sequence import Sequence, SequenceKey
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.promotion import Promotion


class PrefixLoading:
    """Owns the promotions of sequences that wait for their prefix. `on_over(key)`: what could be had is there.

    Without `tiers` there is nothing to load.
    """

    def __init__(
        self,
        tiers: PrefixTiers | None,
        allocator: BlockAllocator,
        *,
        prefill_s: Callable[[int], float],
        on_over: Callable[[SequenceKey], None],
    ) -> None:
        self._tiers = tiers
        self._allocator = allocator
        self._prefill_s = prefill_s
        self._on_over = on_over
        self._promotions: dict[SequenceKey, Promotion] = {}

    def begin(self, seq: Sequence) -> bool:
        """Start loading if that is predicted to be faster than computing; True: `on_over` will be called, later."""
        if self._tiers is None or seq.wants_prompt_logprobs or not self._allocator.prefix_caching:
            return False
        block_size = self._allocator.block_size
        hashes = self._allocator.hashes(seq, (seq.num_tokens - 1) // block_size)
        plan = self._tiers.missing(hashes)
        num_gained = (plan.num_reachable - plan.num_ready) * block_size
        if num_gained == 0 or plan.load_s >= self._prefill_s(num_gained):
            return False
        promoted = hashes[: plan.num_reachable]
        self._promotions[seq.key] = self._tiers.promote(promoted, lambda _: self._over(seq.key))
        return True

    def cancel(self, key: SequenceKey) -> None:
        """Harmless if nothing is loaded for it."""
        promotion = self._promotions.pop(key, None)
        if promotion is not None:
            promotion.cancel()

    def published(self, seq: Sequence, before: int) -> None:
        """A step has made columns of `seq` findable, from the `before`-th on, unless it was dropped."""
        if self._tiers is not None and seq.lease is not None and seq.num_published > before:
            self._tiers.stored(self._allocator.hashes(seq, seq.num_published)[before:])

    def close(self) -> None:
        """Nobody is called back any more."""
        for key in list(self._promotions):
            self.cancel(key)

    def _over(self, key: SequenceKey) -> None:
        del self._promotions[key]
        self._on_over(key)
