"""What a worker does with its prefix tiers: loads prefixes before they are computed, passes on what was.

Compares predicted times; the tiers do the work. Both roles' workers have one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator

from engine.kv.allocation import BlockAllocator
from engine.sequence import Sequence, SequenceKey, StepPlan
from kv_transfer.messages.fields import PrefixSource
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.tiers.promotion import Promotion


class PrefixLoading:
    """Owns the promotions of sequences that wait for their prefix. `on_over(seq)`: what could be had is there.
    `on_room()`: blocks that the tiers' own threads held, in either pool, are free.

    Without `tiers` there is nothing to load.
    """

    def __init__(
        self,
        tiers: PrefixTiers | None,
        allocator: BlockAllocator,
        *,
        prefill_s: Callable[[int], float],
        on_over: Callable[[Sequence], None],
        on_room: Callable[[], None],
    ) -> None:
        self.tiers = tiers
        self._allocator = allocator
        self._prefill_s = prefill_s
        self._on_over = on_over
        self._on_room = on_room
        self._loading: dict[SequenceKey, tuple[Sequence, Promotion]] = {}
        self.hit_tokens: Counter[PrefixSource] = Counter()
        self.missed_tokens = 0

    @property
    def num_loading(self) -> int:
        return len(self._loading)

    @property
    def loading(self) -> Iterator[Sequence]:
        """The sequences whose prefix is being loaded."""
        return (seq for seq, _ in self._loading.values())

    @property
    def num_loading_tokens(self) -> int:
        """The number of tokens of all sequences whose prefix is being loaded."""
        return sum(seq.num_tokens for seq, _ in self._loading.values())

    def begin(self, seq: Sequence) -> bool:
        """Start loading if that is predicted to be faster than computing; True: `on_over` will be called, later."""
        if self.tiers is None or not seq.skips_prefix or not self._allocator.prefix_caching:
            return False
        block_size = self._allocator.block_size
        hashes = self._allocator.hashes(seq, (seq.num_tokens - 1) // block_size)
        plan = self.tiers.missing(hashes)
        num_gained = (plan.num_reachable - plan.num_ready) * block_size
        if num_gained == 0 or plan.load_s >= self._prefill_s(num_gained):
            return False
        promotion = self.tiers.promote(hashes[: plan.num_reachable], lambda num_ready: self._over(seq.key, num_ready))
        self._loading[seq.key] = seq, promotion
        return True

    def cancel(self, key: SequenceKey) -> None:
        """Harmless if nothing is loaded for it."""
        if key in self._loading:
            _, promotion = self._loading.pop(key)
            promotion.cancel()

    def completed_by(self, plan: StepPlan) -> list[tuple[Sequence, int, int]]:
        """What the step in flight makes findable of each sequence, if all goes well: for `stored`, when it is over.

        To be asked before its results are taken in: a sequence that ends with them holds no blocks any more.
        """
        block_size = self._allocator.block_size
        return [
            (item.seq, item.seq.num_published, item.stop // block_size)
            for item in plan.items
            if item.seq.pooling is None
        ]

    def stored(self, columns: Iterable[tuple[Sequence, int, int]]) -> None:
        """Write columns `[first, stop)` of sequences, which have become findable, down the tiers, unless the sequence
        was dropped."""
        if self.tiers is None:
            return
        for seq, first, stop in columns:
            if seq.prefix is not None and stop > first:
                self.tiers.stored(seq.prefix.hashes[first:stop])

    def ended(self, seq: Sequence) -> None:
        """A sequence has ended and will store no more: what is kept of it is let go from its end on, in every tier."""
        if self.tiers is not None and seq.prefix is not None:
            self.tiers.used(seq.prefix.hashes)

    def count(self, seq: Sequence) -> None:
        """Count where the prefix of a sequence came from, once its prompt has been computed here."""
        if seq.num_received:  # who computed the first part has counted that
            self.missed_tokens += len(seq.prompt_token_ids) + seq.num_prior_output - seq.num_received
            return
        on_host = seq.num_cached_on_host
        self.hit_tokens["device"] += seq.num_cached - on_host
        for source, num_tokens in seq.num_brought.items():
            used = min(num_tokens, on_host)  # the others were left out, or found on the device meanwhile
            self.hit_tokens[source] += used
            on_host -= used
        self.hit_tokens["host"] += on_host
        self.missed_tokens += len(seq.prompt_token_ids) + seq.num_prior_output - seq.num_cached

    def open(self) -> None:
        """`on_room` is called from now on: what an earlier worker's tiers still held may be let go at any moment."""
        if self.tiers is not None:
            self.tiers.call_on_room(self._on_room)

    def close(self) -> None:
        """Close: no callback comes any more."""
        if self.tiers is not None:
            self.tiers.call_on_room(lambda: None)
        for key in list(self._loading):
            self.cancel(key)

    def _over(self, key: SequenceKey, num_ready: int) -> None:
        seq, promotion = self._loading.pop(key)
        ready = set(self._allocator.hashes(seq, num_ready))
        brought = Counter(source.name for prefix_hash, source in promotion.wanted if prefix_hash in ready)
        seq.num_brought = {name: count * self._allocator.block_size for name, count in brought.items()}
        self._on_over(seq)
