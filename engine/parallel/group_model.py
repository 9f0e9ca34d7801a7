"""A group as one model: every pass is told to the other ranks, and rank 0's sums tell how far all of them are."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from torch import Tensor

from engine.kv.cache import KVCache
from engine.model.batch import Batch
from engine.model.transformer import LayerHooks, Model
from engine.parallel.group import RankGroup

if TYPE_CHECKING:
    from engine.parallel.leader import GroupLeader


class LeaderRanks:
    """Rank 0's end of the group, which knows how far a pass is by its sums: each layer has two.

    Before the second one of a layer every rank has stored and read its KV, and none has begun with the next layer. On a
    GPU that holds of what the stream is given next.
    """

    def __init__(self, ranks: RankGroup) -> None:
        self._ranks = ranks
        self.shard = ranks.shard
        self.join, self.tell, self.meet = ranks.join, ranks.tell, ranks.meet
        self._num_sums = 0
        self._told: Callable[[int], None] = _nobody

    def sum(self, partial_TE: Tensor) -> Tensor:
        layer, is_second = divmod(self._num_sums, 2)
        self._num_sums += 1
        if is_second:
            self._told(layer)
        return self._ranks.sum(partial_TE)

    @contextmanager
    def layers_told(self, hooks: LayerHooks | None, num_layers: int) -> Iterator[Callable[[int], None]]:
        """For one pass, which begins with this context. Gives what to call when a layer is over without sums."""
        self._num_sums = 0
        self._told = _nobody if hooks is None else partial(_tell, hooks, num_layers)
        if hooks is not None:
            hooks.before_store(0)
        try:
            yield self._told
        finally:
            self._told = _nobody


def _nobody(layer: int) -> None:
    pass


def _tell(hooks: LayerHooks, num_layers: int, layer: int) -> None:
    """A layer is over; the next one may begin when this returns."""
    hooks.stored(layer)
    hooks.attended(layer)
    if layer + 1 < num_layers:
        hooks.before_store(layer + 1)


class GroupModel:
    """All ranks' parts of a model as one, offering a runner what `Model` does. `model` is rank 0's part."""

    def __init__(self, leader: GroupLeader, model: Model) -> None:
        self._leader = leader
        self._model = model
        self.dtype = model.dtype
        self.device = model.device

    def forward(self, batch: Batch, kv_cache: KVCache, hooks: LayerHooks | None = None) -> Tensor:
        """See `Model.forward`. `hooks` hear of a layer before any rank begins it, and when all have stored and read it.

        Both come late rather than early: `stored` only with `attended`.
        """
        leader, num_layers = self._leader, self._model.config.num_layers
        with leader.together(), leader.ranks.layers_told(hooks, num_layers) as told:
            leader.tell_step(batch)
            hidden = self._model.forward(batch, kv_cache)
            if not len(batch.output_rows):  # the last layer ended without a sum over the ranks
                leader.ranks.meet()
                told(num_layers - 1)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, E] -> [R, V]` float32."""
        with self._leader.together():
            self._leader.tell_hidden(hidden)
            return self._model.logits(hidden)
