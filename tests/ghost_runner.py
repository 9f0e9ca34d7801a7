"""A runner without a model: its KV is a hash of all tokens so far, its next token follows from that hash.

So every sequence's tokens are known in advance, and KV that was overwritten, freed too early, taken from the wrong
block or never computed is noticed the moment it is read.
"""

from __future__ import annotations

from engine.allocation import BlockAllocator
from engine.sequence import SampledToken, ScheduledSequence, Sequence, StepOutput, StepPlan, TokenLogprobs

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


class GhostRunner:
    """Executes plans on ghost KV. Raises AssertionError where a sequence's KV is not what it should be."""

    def __init__(self, allocator: BlockAllocator) -> None:
        self._block_size = allocator.block_size
        self._layer_groups = allocator.layer_groups
        self._kv: dict[tuple[int, int], int] = {}  # (block, offset) -> chain

    def execute(self, plan: StepPlan) -> StepOutput:
        for item in plan.items:
            self._compute(item)
        return StepOutput(
            [self._sample(item) if item.samples else None for item in plan.items],
            [self._judge(item) for item in plan.items],
        )

    def land(self, seq: Sequence) -> None:
        """The KV of all tokens of `seq` arrives in its blocks from elsewhere."""
        self._write(seq, 0, seq.num_tokens)

    def _compute(self, item: ScheduledSequence) -> None:
        seq, start = item.seq, item.seq.num_computed
        assert 1 <= item.num_tokens <= seq.num_uncomputed, "a step computes tokens that are there and not computed"
        self._write(seq, start, start + item.num_tokens)
        self._verify(seq, start + item.num_tokens)

    def _write(self, seq: Sequence, start: int, stop: int) -> None:
        state = chain_of(seq.tokens(0, start))
        for position, token_id in enumerate(seq.tokens(start, stop), start):
            state = _chain(state, token_id)
            for slot in self._slots(seq, position):
                self._kv[slot] = state

    def _verify(self, seq: Sequence, stop: int) -> None:
        state = _START
        for position, token_id in enumerate(seq.tokens(0, stop)):
            state = _chain(state, token_id)
            for slot in self._slots(seq, position):
                assert self._kv.get(slot) == state, f"{seq.key} reads foreign KV at position {position}"

    def _slots(self, seq: Sequence, position: int) -> list[tuple[int, int]]:
        assert seq.block_table is not None, f"{seq.key} is computed without blocks"
        column, offset = divmod(position, self._block_size)
        return [(int(seq.block_table.view[group, column]), offset) for group in range(self._layer_groups)]

    @staticmethod
    def _sample(item: ScheduledSequence) -> SampledToken:
        return SampledToken(next_token(item.seq.tokens(0, item.seq.num_tokens)))

    @staticmethod
    def _judge(item: ScheduledSequence) -> list[TokenLogprobs] | None:
        """The position of each prompt token that a row speaks of, in place of its logprob."""
        seq = item.seq
        if seq.params.prompt_logprobs is None:
            return None
        stop = min(seq.num_computed + item.num_tokens + 1, len(seq.prompt_token_ids))
        return [TokenLogprobs(float(position), []) for position in range(seq.num_computed + 1, stop)]
