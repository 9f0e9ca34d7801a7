"""What the ranks of a tensor-parallel group do together: sums, joins, and telling all. Each has a deadline.

Every rank calls the same functions in the same order. Tensors of the host go by gloo, those of a GPU by NCCL, which
begins when a stream comes to it: see `engine.parallel.rank_devices`. Knows tensors; nothing of models, steps or
processes.

Shape legend: T packed tokens, E hidden size, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import (  # where they have types
    AllgatherOptions,
    FileStore,
    ProcessGroup,
    ProcessGroupGloo,
    Store,
    Work,
)
from torch.nn import functional

from engine.memory.devices import CPU
from engine.model.shards import Shard
from engine.parallel.protocol import RankSpec
from engine.parallel.rank_devices import add_device_backend, do_nothing

_LOCAL = "127.0.0.1"  # a group is of one node
_JOIN_S = 60.0
_IN_PARTS_FROM_BYTES = 1 << 20  # of three ranks and more


class RanksApartError(RuntimeError):
    """The ranks did not do something together: one has ended, or is late."""


class RankGroup:
    """One rank's end of its group. What fails, because a rank has died or is late by `timeout_s`, raises
    RanksApartError; on a GPU it waits instead, until `leave`.

    `store` is where the ranks find each other, `device` where they compute. The constructor returns when all have come.
    `before_sum`, which a leader sets, is called at the beginning of each sum.
    """

    def __init__(self, shard: Shard, store: Store, *, timeout_s: float, device: torch.device = CPU) -> None:
        self.shard = shard
        self.before_sum = do_nothing
        self._device = device
        self._timeout = timedelta(seconds=timeout_s)
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # the stub gives it another name
        options._timeout = timedelta(seconds=_JOIN_S)
        options._devices = [ProcessGroupGloo.create_device(hostname=_LOCAL)]
        # The stub knows none of its methods.
        self._gloo: Any = ProcessGroupGloo(store, shard.rank, shard.degree, options)
        self._ranks = ProcessGroup(store, shard.rank, shard.degree)
        self._ranks._register_backend(CPU, ProcessGroup.BackendType.GLOO, self._gloo)
        self._abort = add_device_backend(self._ranks, store, shard, device, self._timeout)
        self.meet()  # NCCL finds the ranks only now

    def sum(self, partial_TE: Tensor) -> Tensor:
        """Over the ranks, in float32 and in their order, as the argument's type.

        The order is the same for every element, so that a row's sum does not depend on where in a batch it stands; a
        ring would add each part of a batch in another one. Of N ranks each receives the tensor N - 1 times; where that
        takes longer than a second act, 2 (N - 1) / N times, as in a ring: its own part of everybody's, and everybody's
        sums. The bits are the same.
        """
        self.before_sum()
        num_ranks = self.shard.degree
        if num_ranks == 2 or partial_TE.nbytes < _IN_PARTS_FROM_BYTES:
            return _added(self._gather(partial_TE))
        size = -(-partial_TE.numel() // num_ranks)
        mine = partial_TE.new_zeros(num_ranks * size)
        mine[: partial_TE.numel()] = partial_TE.view(-1)
        parts = torch.empty_like(mine)
        self._together(lambda: self._ranks.alltoall_base(parts, mine, [], [], self._timeout))
        sums = torch.cat(self._gather(_added(list(parts.view(num_ranks, size)))))
        return sums[: partial_TE.numel()].view(partial_TE.shape)

    def join(self, part: Tensor, width: int) -> Tensor:
        """All ranks' parts of each row side by side, `[R, width]`: what a rank has of it, `Shard.vocabulary` says."""
        shares = [Shard(rank, self.shard.degree).vocabulary(width) for rank in range(self.shard.degree)]
        widths = [share.stop - share.start for share in shares]
        padded = functional.pad(part, (0, max(widths) - part.shape[1]))
        joined = [rows[:, :share] for rows, share in zip(self._gather(padded), widths, strict=True)]
        return torch.cat(joined, dim=1)

    def broadcast(self, message: Tensor) -> None:
        """Send rank 0's `message` to all others, which give a tensor of the same size to put it into."""
        self._together(lambda: self._ranks.broadcast(message, 0, self._timeout))

    def meet(self) -> None:
        """Return when every rank has come here; or have the device do so."""
        self._gather(torch.zeros(1, device=self._device))

    def leave(self) -> None:
        """The others' calls fail from now on; what waits on this rank's GPU for them ends, with whatever stands there.

        From any thread. May block for a while.
        """
        self._gloo.shutdown()
        self._abort()

    def _gather(self, mine: Tensor) -> list[Tensor]:
        received = mine.new_empty(self.shard.degree, *mine.shape)
        options = AllgatherOptions()
        options.timeout = self._timeout
        # Into one tensor: by the list of its parts NCCL would gather into another one first.
        self._together(lambda: self._ranks._allgather_base(received.view(-1), mine.reshape(-1), options))
        return list(received.unbind())

    def _together(self, begin: Callable[[], Work]) -> None:
        try:
            begin().wait()
        except RuntimeError as error:
            raise RanksApartError(f"rank {self.shard.rank} is without the others: {error}") from error


def _added(of_ranks: list[Tensor]) -> Tensor:
    first, *others = of_ranks
    total = first.float()
    for other in others:
        total += other
    return total.to(first.dtype)


def join_ranks(spec: RankSpec) -> RankGroup:
    """Find the others by the file that all were told of."""
    store = FileStore(spec.rendezvous, spec.degree)
    shard = Shard(spec.rank, spec.degree, spec.expert_parallel)
    return RankGroup(shard, store, timeout_s=spec.timeout_s, device=torch.device(spec.device))
