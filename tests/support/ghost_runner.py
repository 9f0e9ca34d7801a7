"""A runner without a model: its KV is a hash of all tokens so far, its next token follows from that hash.

So every sequence's tokens are known in advance, and KV that was overwritten, freed too early, taken from the wrong
block or never computed is noticed the moment it is read.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, MutableMapping

from engine.kv.allocation import BlockAllocator
from engine.model.adapters import AdapterPool, Need
from engine.sequence import (
    DraftedSequence,
    SampledToken,
    ScheduledSequence,
    Sequence,
    StepOutput,
    StepPlan,
    TokenLogprobs,
)
from kv_transfer.worker.adapter_loading import AdapterLoading

VOCAB_SIZE = 24
_START = 0x9E37


def _chain(state: int, token_id: int) -> int:
    return hash((state, token_id))


def chain_of(token_ids: list[int]) -> int:
    """What the KV of the last of these tokens is."""
    state = _START
    for token_id in token_ids:
        state = _chain(state, token_id)
    return state


def next_token(token_ids: list[int]) -> int:
    """The token that follows these."""
    return chain_of(token_ids) // 7 % VOCAB_SIZE


def kv_of(token_ids: list[int], group: int) -> list[int]:
    """The KV of each of these tokens, which begin a sequence, in one layer group."""
    states = itertools.accumulate(token_ids, _chain, initial=_START)
    return [_chain(state, group) for state in itertools.islice(states, 1, None)]


_Slot = tuple[str, int, int]
"""(tier, block, offset)"""


class GhostRunner:
    """Executes plans on ghost KV. Raises AssertionError where a sequence's KV is not what it should be."""

    def __init__(self, allocator: BlockAllocator, kv: MutableMapping[_Slot, int] | None = None) -> None:
        """`kv`: what to keep the KV in, by (tier, block, offset); None: in nothing real."""
        self._block_size = allocator.block_size
        self._layer_groups = allocator.layer_groups
        self._kv: MutableMapping[_Slot, int] = {} if kv is None else kv  # hash of the chain and the layer group
        self.num_copied_blocks = 0

    def execute(self, plan: StepPlan) -> StepOutput:
        """Copies to the device come first, those to the host last: the moments that show most mistakes."""
        self._copy(plan, "device")
        for item in plan.items:
            self._compute(item)
        self._copy(plan, "host")
        sampled = [self._sample(item) if item.samples else [] for item in plan.items]
        return StepOutput(
            [tokens[0] if tokens else None for tokens in sampled],
            [self._judge(item) for item in plan.items],
            following={index: tokens[1:] for index, tokens in enumerate(sampled) if len(tokens) > 1},
        )

    def receive(self, seq: Sequence) -> None:
        """The KV of all tokens of `seq`, or of its `num_received`, arrives in its blocks from elsewhere."""
        self._write(seq, 0, seq.num_received or seq.num_tokens)

    def verify(self, seq: Sequence) -> None:
        """What counts as computed must stand where the sequence's tables say."""
        self._verify(seq, seq.num_computed)

    def _copy(self, plan: StepPlan, to: str) -> None:
        origin = "host" if to == "device" else "device"
        for copy in plan.copies:
            if copy.to != to:
                continue
            self.num_copied_blocks += len(copy.source)
            for source, destination in zip(copy.source.tolist(), copy.destination.tolist(), strict=True):
                assert source >= 0 and destination >= 0
                for offset in range(self._block_size):
                    self._kv[to, destination, offset] = self._kv.get((origin, source, offset), 0)

    def _compute(self, item: ScheduledSequence) -> None:
        if item.seq.num_computed != item.start:
            self._spoil(item)
            return
        seq = item.seq
        assert 1 <= item.num_tokens <= seq.num_uncomputed, "a step computes tokens that are there and not computed"
        self._write(seq, item.start, item.stop, item.drafts)
        self._verify(seq, item.stop, item.drafts)

    def _spoil(self, item: ScheduledSequence) -> None:
        """It was planned ahead of a step that brought the sequence nothing: what it writes is nobody's KV."""
        for slots in self._slots(item.seq, item.start, item.stop):
            for slot in slots:
                self._kv[slot] = -1

    def _write(self, seq: Sequence, start: int, stop: int, drafts: tuple[int, ...] = ()) -> None:
        state, tokens = chain_of(seq.tokens(0, start)), DraftedSequence(seq, drafts).tokens(start, stop)
        for token_id, slots in zip(tokens, self._slots(seq, start, stop), strict=True):
            state = _chain(state, token_id)
            for group, slot in enumerate(slots):
                self._kv[slot] = _chain(state, group)

    def _verify(self, seq: Sequence, stop: int, drafts: tuple[int, ...] = ()) -> None:
        state, tokens = _START, DraftedSequence(seq, drafts).tokens(0, stop)
        for position, (token_id, slots) in enumerate(zip(tokens, self._slots(seq, 0, stop), strict=True)):
            state = _chain(state, token_id)
            for group, slot in enumerate(slots):
                assert self._kv.get(slot) == _chain(state, group), f"{seq.key} reads foreign KV at position {position}"

    def _slots(self, seq: Sequence, start: int, stop: int) -> Iterator[list[_Slot]]:
        """Those of each position, by layer group. A block is looked up once for all of its positions."""
        blocks: list[tuple[str, int]] = []
        for position in range(start, stop):
            column, offset = divmod(position, self._block_size)
            if not blocks or offset == 0:
                blocks = [self._block(seq, group, column) for group in range(self._layer_groups)]
            yield [(tier, block, offset) for tier, block in blocks]

    @staticmethod
    def _block(seq: Sequence, group: int, column: int) -> tuple[str, int]:
        tier, table = ("host", seq.host_table) if group in seq.host_groups else ("device", seq.block_table)
        assert table is not None, f"{seq.key} is computed without blocks"
        block = int(table.view[group, column])
        assert block >= 0, f"{seq.key} has no {tier} block of group {group}"
        return tier, block

    @staticmethod
    def _sample(item: ScheduledSequence) -> list[SampledToken]:
        """The next token, and one more after each draft that is right."""
        token_ids = item.seq.tokens(0, item.seq.num_tokens)
        sampled = [next_token(token_ids)]
        for draft in item.drafts:
            if draft != sampled[-1]:
                break
            token_ids.append(draft)
            sampled.append(next_token(token_ids))
        return [SampledToken(token_id) for token_id in sampled]

    @staticmethod
    def _judge(item: ScheduledSequence) -> list[TokenLogprobs] | None:
        """The position of each prompt token that a row speaks of, in place of its logprob."""
        seq = item.seq
        if seq.params.prompt_logprobs is None:
            return None
        stop = min(seq.num_computed + item.num_tokens + 1, len(seq.prompt_token_ids))
        return [TokenLogprobs(float(position), []) for position in range(seq.num_computed + 1, stop)]


def ghost_loading(
    pool: AdapterPool,
    users: Callable[[], Iterable[tuple[Sequence, Need]]],
    on_late: Callable[[Sequence, float], None],
    *,
    wait_s: float,
) -> AdapterLoading:
    """As a worker has it around its scheduler; nobody else is told that an adapter was loaded, or could not be."""
    return AdapterLoading(
        pool, users=users, on_loaded=lambda: None, on_failed=lambda slot, reason: None, on_late=on_late, wait_s=wait_s
    )
