"""What the ranks of a tensor-parallel group do together: sums, joins, and telling all. Each has a deadline.

Every rank calls the same functions in the same order. Knows tensors; nothing of models, steps or processes.

Shape legend: T packed tokens, E hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

from datetime import timedelta

import torch
from torch import Tensor
from torch._C._distributed_c10d import ProcessGroup, ProcessGroupGloo, Store  # where they have types

from engine.parallel.shards import Shard

_CPU = torch.device("cpu")
_LOCAL = "127.0.0.1"  # a group is of one node
_JOIN_S = 60.0


class RankGroup:
    """One rank's end of its group. What fails, because a rank has died or is late by `timeout_s`, raises RuntimeError.

    `store` is where the ranks find each other. The constructor returns when all have come.
    """

    def __init__(self, shard: Shard, store: Store, *, timeout_s: float) -> None:
        self.shard = shard
        self._timeout = timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub gives it another name
        options._timeout = timedelta(seconds=_JOIN_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOCAL)]
        backend = ProcessGroupGloo(store, shard.rank, shard.degree, options)
        self._ranks = ProcessGroup(store, shard.rank, shard.degree)
        self._ranks._register_backend(_CPU, ProcessGroup.BackendType.GLOO, backend)

    def sum(self, partial_TE: Tensor) -> Tensor:
        """Over the ranks, in float32 and in their order, as the argument's type.

        The order is the same for every element, so that a row's sum does not depend on where in a batch it stands; a
        ring would add each part of a batch in another one.
        """
        first, *others = self._gather(partial_TE)
        total = first.float()
        for other in others:
            total += other
        return total.to(partial_TE.dtype)

    def join(self, part_RV: Tensor, vocab_size: int) -> Tensor:
        """All ranks' parts of the vocabulary side by side, `[R, vocab_size]`."""
        parts = [Shard(rank, self.shard.degree).vocabulary(vocab_size) for rank in range(self.shard.degree)]
        widths = [part.stop - part.start for part in parts]
        padded = part_RV.new_zeros(len(part_RV), max(widths))
        padded[:, : part_RV.shape[1]] = part_RV
        joined = [rows[:, :width] for rows, width in zip(self._gather(padded), widths, strict=True)]
        return torch.cat(joined, dim=1)

    def tell(self, message: Tensor) -> None:
        """Rank 0's `message` to all others, which give a tensor of the same size to put it into."""
        self._ranks.broadcast(message, 0, self._timeout).wait()

    def meet(self) -> None:
        """Return when every rank has come here."""
        self._gather(torch.zeros(1))

    def leave(self) -> None:
        """The others' calls fail from now on."""
        self._ranks.shutdown()

    def _gather(self, mine: Tensor) -> list[Tensor]:
        received = mine.new_empty(self.shard.degree, *mine.shape)
        outputs = list(received.unbind())
        self._ranks.allgather(outputs, mine.contiguous(), self._timeout).wait()
        return outputs
