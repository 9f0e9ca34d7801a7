"""Sequences whose tokens are counted and not kept: what a trace says of a prompt, as schedulers and pools want it."""

from __future__ import annotations

from collections.abc import Sequence as TokenIds
from typing import Any, cast

from cluster.simulation.workload.traces import TraceRequest
from cluster.slo.classes import SloClass
from engine.kv.prefix import PrefixHasher
from engine.sampling.params import SamplingParams
from engine.sequence import Sequence

TOKEN = 1  # that every simulated step samples


class ContentHasher(PrefixHasher):
    """Names the prompt's blocks by the trace's content names, and what follows by the request's own number. `whole`:
    the name of all of the prompt."""

    __slots__ = ("_block_size", "_owner", "whole")

    def __init__(self, request: TraceRequest, number: int, block_size: int) -> None:
        super().__init__(block_size)
        self._block_size = block_size
        self._owner = number
        self.hashes = content_hashes(request, number, block_size)
        self.whole = _whole(request, number)

    def extend(self, token_ids: TokenIds[int]) -> list[bytes]:
        first = len(self.hashes)
        self.hashes += [_own(self._owner, first + k) for k in range(len(token_ids) // self._block_size)]
        return self.hashes[first:]


def content_hashes(request: TraceRequest, number: int, block_size: int) -> list[bytes]:
    """The hashes of the prompt's full blocks. `number` tells the requests of a simulation apart.

    A content name stands for all content before it, too, as in the published traces; a block is named by the run in
    which it ends and its place, hence equal names mean equal tokens up to there.
    """
    num_blocks = request.prompt_tokens // block_size
    runs, run_tokens = request.content, request.content_tokens
    named = min(num_blocks, len(runs) * run_tokens // block_size)
    hashes = [
        runs[((block + 1) * block_size - 1) // run_tokens].to_bytes(8, "little") + block.to_bytes(8, "little")
        for block in range(named)
    ]
    return hashes + [_own(number, block) for block in range(named, num_blocks)]


def _whole(request: TraceRequest, number: int) -> bytes:
    runs, run_tokens = request.content, request.content_tokens
    run = (request.prompt_tokens - 1) // run_tokens
    return _own(number, run) if run >= len(runs) else runs[run].to_bytes(8, "little") + run.to_bytes(8, "little")


def _own(number: int, block: int) -> bytes:
    return (2**63 + number).to_bytes(8, "little") + block.to_bytes(8, "little")


def sequence_of(
    request: TraceRequest,
    hasher: PrefixHasher,
    attempt: int,
    slo: SloClass,
    num_emitted: int = 0,
    part_tokens: int = 0,
) -> Sequence:
    """A sequence for one request of the trace, which ends after as many tokens as in the trace, of which earlier
    attempts have emitted so many; `slo`: what it is promised. `part_tokens`: so many of it for a worker that computes
    no more of them; 0: all. Nobody looks at the prompt's tokens: a range has as many as a list of them, and takes no
    memory."""
    num_prompt = request.prompt_tokens
    if part_tokens:
        num_prompt, num_emitted = min(num_prompt, part_tokens), max(0, part_tokens - num_prompt)
    return Sequence(
        request_id=request.request_id,
        attempt=attempt,
        prompt_token_ids=cast(Any, range(num_prompt)),
        is_part=part_tokens > 0,
        params=SamplingParams(max_tokens=request.output_tokens, seed=0, ignore_eos=True),
        output_token_ids=[TOKEN] * num_emitted,
        num_prior_output=num_emitted,
        prefix=hasher,
        tpot_s=slo.tpot_s,
        gap_s=slo.gap_s,
    )
