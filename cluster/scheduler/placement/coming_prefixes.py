"""Which prefixes workers will hold once they have computed the prompts in their queues.

The block index knows what is there. Of those that share a prefix all but the first find it when their turn comes,
since a worker computes prompts in the order in which they came, and keeps what it has computed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np

from engine.kv.prefix import HASH_BYTES

_WORDS: Final = HASH_BYTES // 8  # of a hash
_MOST_LENGTHS: Final = 16  # of what others have in common with a prompt that are told apart: a look-up has 0.1 ms


@dataclass(slots=True)
class _Run:
    """`hashes`, joined: columns that all these prompts have, behind those of the runs that lead here. `num_prompts`: by
    worker, the runs behind it included; `following`: these, each by its first column."""

    hashes: bytes
    num_prompts: dict[str, int]
    following: dict[bytes, _Run]


class ComingPrefixes:
    """The prefixes of prompts that workers compute, as a tree of runs: what prompts have in common stands there once,
    and takes a step of a look-up. A run is as long as it can be, so that no more is kept than the prompts that are in
    it bring, in whatever order they come and go."""

    def __init__(self) -> None:
        self._runs: dict[bytes, _Run] = {}

    def __len__(self) -> int:
        """Runs that are kept."""
        num, runs = 0, [*self._runs.values()]
        while runs:
            num += 1
            runs += runs.pop().following.values()
        return num

    def add(self, worker_id: str, hashes: bytes) -> None:
        """The worker will hold the columns with these hashes (joined), which begin a prompt."""
        runs, at = self._runs, 0
        while at < len(hashes):
            first = hashes[at : at + HASH_BYTES]
            run = runs.get(first)
            if run is None:
                run = runs[first] = _Run(hashes[at:], {}, {})
            elif not hashes.startswith(run.hashes, at):
                length = num_common(run.hashes, hashes[at:]) * HASH_BYTES
                rest = _Run(run.hashes[length:], run.num_prompts.copy(), run.following)
                run.hashes, run.following = run.hashes[:length], {rest.hashes[:HASH_BYTES]: rest}
            run.num_prompts[worker_id] = run.num_prompts.get(worker_id, 0) + 1
            runs, at = run.following, at + len(run.hashes)

    def remove(self, worker_id: str, hashes: bytes) -> None:
        """Take back what was added with the same words."""
        runs, at, last = self._runs, 0, None
        while at < len(hashes):
            run = runs[hashes[at : at + HASH_BYTES]]
            run.num_prompts[worker_id] -= 1
            if not run.num_prompts[worker_id]:
                del run.num_prompts[worker_id]
            if not run.num_prompts:
                del runs[run.hashes[:HASH_BYTES]]  # and with it all that follows
                break
            runs, at, last = run.following, at + len(run.hashes), run
        if last is not None and len(last.following) == 1:
            (only,) = last.following.values()
            if only.num_prompts == last.num_prompts:
                last.hashes, last.following = last.hashes + only.hashes, only.following

    def reaches(self, hashes: bytes) -> dict[str, int]:
        """How many leading columns of a prompt with these hashes each worker will hold; others are left out. Where what
        others have in common with it is of very many lengths, some workers hold more."""
        path: list[tuple[dict[str, int], int]] = []
        runs, at = self._runs, 0
        while (run := runs.get(hashes[at : at + HASH_BYTES])) is not None:
            is_whole = hashes.startswith(run.hashes, at)
            length = len(run.hashes) if is_whole else num_common(run.hashes, hashes[at:]) * HASH_BYTES
            runs, at = run.following, at + length
            path.append((run.num_prompts, at // HASH_BYTES))
            if not is_whole:
                break
        found: dict[str, int] = {}
        for num_prompts, reach in path[:: -(-len(path) // _MOST_LENGTHS) or 1]:
            found |= dict.fromkeys(num_prompts, reach)
        if path:
            found |= dict.fromkeys(*path[-1])
        return found


def num_common(one: bytes, other: bytes) -> int:
    """How many leading columns two prompts have in common, by their joined hashes."""
    num_words = min(len(one), len(other)) // HASH_BYTES * _WORDS
    differs = np.frombuffer(one, np.uint64, num_words) != np.frombuffer(other, np.uint64, num_words)
    return int(differs.argmax() if differs.any() else num_words) // _WORDS
