"""Rank 0 of a group: starts the others' processes, tells them each step, and speaks for all of them.

To its worker the group is one model with one KV cache. A failure of any rank ends the whole group: what its ranks hold
of a step that failed is not the same any more, and another replica takes the worker's place.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from torch import Tensor
from torch._C._distributed_c10d import FileStore

from engine.batch import Batch
from engine.kv_cache import KVCache, KVLayout
from engine.model import LayerHooks, Model
from engine.model_config import ModelConfig
from engine.parallel.batches import pack_batch
from engine.parallel.group import RankGroup
from engine.parallel.kv import GroupKV, shard_layout, shared_cache, shared_memory
from engine.parallel.processes import GroupError, RankProcess
from engine.parallel.shards import Shard, check_degree
from engine.parallel.spec import HERE, JOIN, LOGITS, READY, STEP, RankSpec, with_number

logger = logging.getLogger(__name__)

STEP_S = 60.0  # for what the ranks do together; between two of these acts lies the computing of half a layer
START_S = 120.0  # for the processes to start
LOAD_S = 1800.0  # for the slowest rank to load its weights


class LeaderRanks:
    """Rank 0's end of the group, which knows how far a pass is by its sums: each layer has two.

    Before the second one of a layer every rank has stored and read its KV, and none has begun with the next layer.
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


class GroupLeader:
    """The other ranks' processes, from their start to their end, and the KV of all ranks.

    `wait_until_loaded()` before the first step. A step may raise GroupError, or another RuntimeError where a rank does
    not answer; the group is then broken, and stays so.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: ModelConfig,
        layout: KVLayout,
        num_blocks: int,
        *,
        degree: int,
        num_threads: int,
    ) -> None:
        check_degree(config, degree)
        self._config = config
        self._broken: str | None = None
        self._processes: list[RankProcess] = []
        caches = [KVCache(shard_layout(layout, Shard(0, degree)), num_blocks)]
        # The last rank to find the others needs the file for longer than the first.
        self._meeting = tempfile.TemporaryDirectory(prefix="legato-ranks-")
        rendezvous = str(Path(self._meeting.name) / "ranks")
        try:
            for rank in range(1, degree):
                spec = RankSpec(
                    model_folder=str(model_folder),
                    config=config,
                    rank=rank,
                    degree=degree,
                    layout=shard_layout(layout, Shard(rank, degree)),
                    num_blocks=num_blocks,
                    num_threads=num_threads,
                    rendezvous=rendezvous,
                    timeout_s=STEP_S,
                )
                caches.append(self._start(spec))
            self._expect(HERE, START_S)
            for process in self._processes:
                process.tell(JOIN)
            self.ranks = LeaderRanks(RankGroup(Shard(0, degree), FileStore(rendezvous, degree), timeout_s=STEP_S))
        except BaseException:
            self.close()
            raise
        self.own_cache = caches[0]
        self.kv_cache = GroupKV(layout, caches)

    @property
    def healthy(self) -> bool:
        return self._broken is None and all(process.is_alive for process in self._processes)

    def wait_until_loaded(self) -> None:
        self._expect(READY, LOAD_S)
        self._meeting.cleanup()

    def tell_step(self, batch: Batch) -> None:
        message = pack_batch(batch, self.own_cache.layout.block_size)
        self._tell(STEP, len(message), message)

    def tell_hidden(self, hidden_RE: Tensor) -> None:
        self._tell(LOGITS, len(hidden_RE), hidden_RE.contiguous())

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do in this block they do alike, or the group is broken."""
        if not self.healthy:
            self._break(self._broken or "one of its processes has ended")
            raise GroupError(f"the tensor-parallel group is of no use any more: {self._broken}")
        try:
            yield
        except BaseException as error:
            self._break(str(error) or type(error).__name__)
            raise

    def close(self) -> None:
        """End the other ranks' processes."""
        self._broken = self._broken or "it was closed"
        for process in self._processes:
            process.dismiss()
        for process in self._processes:
            process.wait_for_end()
        self._meeting.cleanup()

    def _start(self, spec: RankSpec) -> KVCache:
        """Its KV, seen from here."""
        memory = shared_memory(spec.num_blocks * spec.layout.block_bytes)
        try:
            self._processes.append(RankProcess(spec, memory))
            return shared_cache(spec.layout, spec.num_blocks, memory)
        finally:
            os.close(memory)

    def _expect(self, message: bytes, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for process in self._processes:
            process.expect(message, deadline)

    def _tell(self, word: bytes, number: int, content: Tensor) -> None:
        for process in self._processes:
            process.tell(with_number(word, number))
        self.ranks.tell(content)

    def _break(self, reason: str) -> None:
        if self._broken is None:
            logger.error("the tensor-parallel group ends: %s", reason)
            self._broken = reason
            self.close()


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
