"""Rank 0 of a group: starts the others' processes, tells them each step, and speaks for all of them.

To its worker the group is one model with one KV cache. A failure of any rank ends the whole group: what its ranks hold
of a step that failed is not the same any more, and another replica takes the worker's place.
"""

from __future__ import annotations

import logging
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
            self.ranks = RankGroup(Shard(0, degree), FileStore(rendezvous, degree), timeout_s=STEP_S)
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
        """See `Model.forward`. `hooks` hear of a layer when every rank has stored it: as the next one begins."""
        agreed = None if hooks is None else _AgreedLayers(hooks)
        with self._leader.together():
            self._leader.tell_step(batch)
            hidden = self._model.forward(batch, kv_cache, agreed)
            if not len(batch.output_rows):  # the last layer ended without a sum over the ranks
                self._leader.ranks.meet()
            if agreed is not None:
                agreed.settle(self._model.config.num_layers - 1)
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """`[R, E] -> [R, V]` float32."""
        with self._leader.together():
            self._leader.tell_hidden(hidden)
            return self._model.logits(hidden)


class _AgreedLayers:
    """Hooks of rank 0's pass. The sums at a layer's end say that all ranks have stored and read it."""

    def __init__(self, hooks: LayerHooks) -> None:
        self._hooks = hooks

    def before_store(self, layer: int) -> None:
        if layer:
            self.settle(layer - 1)
        self._hooks.before_store(layer)

    def stored(self, layer: int) -> None:
        pass

    def attended(self, layer: int) -> None:
        pass

    def settle(self, layer: int) -> None:
        self._hooks.stored(layer)
        self._hooks.attended(layer)
