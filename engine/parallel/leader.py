"""Rank 0 of a group: starts the others' processes, tells them each step, and speaks for all of them.

To its worker the group is one model with one KV cache. A failure of any rank ends the whole group: what its ranks hold
of a step that failed is not the same any more, and another replica takes the worker's place.
"""

from __future__ import annotations

import logging
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from engine.checkpoint.quantisation import Quantisation
from engine.kv.cache import KVCache, KVLayout
from engine.memory.devices import CPU
from engine.memory.host import give_back_freed
from engine.model.batch import Batch
from engine.model.config import ModelConfig
from engine.model.shards import shards_of
from engine.model.transformer import LayerHooks, Model
from engine.parallel.group import RankGroup, RanksApartError, join_ranks
from engine.parallel.kv import GroupKV, shard_layout, shared_memory
from engine.parallel.processes import GroupError, GroupWatch, RankProcess, end_of
from engine.parallel.protocol import FREE, HERE, JOIN, KV, LOGITS, READY, STEP, RankSpec, pack_batch, with_number
from engine.parallel.rank_devices import do_nothing, mark_on, rank_device
from kernels.quantised_weight import ActivationBits

logger = logging.getLogger(__name__)

STEP_S = 60.0  # for what the ranks do together; between two of these acts lies the computing of half a layer
START_S = 120.0  # for the processes to start
JOIN_S = 90.0  # for the ranks to find each other
LOAD_S = 1800.0  # for the slowest rank to load its weights
_LOOK_S = 2.0  # for the end of a process to show, when something else has told of it


class GroupLeader:
    """The other ranks' processes, from their start to their end, and the KV of all ranks.

    `wait_until_loaded()` before the first step. A step may raise GroupError; the group is then broken, and stays so.
    On GPUs a step that was queued may still fail: `check()` when it has been waited for.
    """

    def __init__(
        self,
        model_folder: str | Path,
        config: ModelConfig,
        layout: KVLayout,
        num_blocks: int,
        *,
        degree: int,
        expert_parallel: bool | None = None,
        num_threads: int,
        device: torch.device = CPU,
        batch_invariant: bool = False,
        activation_bits: ActivationBits = 8,
        quantisation: Quantisation | None = None,
    ) -> None:
        self._ranks = shards_of(config, degree, expert_parallel=expert_parallel, quantisation=quantisation)
        self._device = device
        self._layout = layout
        self._lock = threading.Lock()
        self._closing = threading.Lock()
        self._closed = False  # guarded by that
        self._broken: str | None = None  # guarded by the lock
        self._processes: list[RankProcess] = []
        self._watch: GroupWatch | None = None
        self._leave: Callable[[], None] = do_nothing
        # The last rank to find the others needs the file for longer than the first.
        self._meeting = tempfile.TemporaryDirectory(prefix="legato-ranks-")
        rendezvous = str(Path(self._meeting.name) / "ranks")
        specs = [
            RankSpec(
                model_folder=str(model_folder),
                config=config,
                rank=shard.rank,
                degree=shard.degree,
                layout=shard_layout(layout, shard),
                num_threads=num_threads,
                rendezvous=rendezvous,
                timeout_s=STEP_S,
                expert_parallel=shard.expert_parallel,
                device=str(rank_device(device, shard.rank)),
                batch_invariant=batch_invariant,
                activation_bits=activation_bits,
                quantisation=quantisation,
            )
            for shard in self._ranks
        ]
        try:
            self._processes.extend(map(RankProcess, specs[1:]))
            self.ranks = self._join(specs[0])
            self.give_kv(num_blocks)
        except BaseException:
            self.close()
            raise

    @property
    def is_healthy(self) -> bool:
        return self._broken is None and all(process.is_alive for process in self._processes)

    @property
    def pids(self) -> list[int]:
        """The process ids of the other ranks, by rank."""
        return [process.pid for process in self._processes]

    def wait_until_loaded(self) -> None:
        self._expect(READY, LOAD_S)
        self._meeting.cleanup()
        self._watch = GroupWatch(self._processes, self._break, within_s=STEP_S)

    @property
    def devices(self) -> list[torch.device]:
        """The devices of the ranks."""
        return [rank_device(self._device, shard.rank) for shard in self._ranks]

    def give_kv(self, num_blocks: int) -> KVCache:
        """Caches of so many blocks in place of all ranks', between two steps. Returns this rank's."""
        caches = [KVCache(shard_layout(self._layout, self._ranks[0]), num_blocks, self._device)]
        for shard, process in zip(self._ranks[1:], self._processes, strict=True):
            device = rank_device(self._device, shard.rank)
            cache, memory = shared_memory(shard_layout(self._layout, shard), num_blocks, device)
            try:
                process.send_file(with_number(KV, num_blocks), memory)
            finally:
                os.close(memory)
            caches.append(cache)
        self.own_cache = caches[0]
        self.kv_cache = GroupKV(self._layout, caches, self.check)
        return self.own_cache

    def tell_step(self, batch: Batch) -> None:
        message, on_device = pack_batch(batch, self.own_cache.layout.block_size)
        self._tell(STEP, len(message), message)
        self.ranks.broadcast(on_device)

    def tell_hidden(self, hidden_RE: Tensor) -> None:
        self._tell(LOGITS, len(hidden_RE), hidden_RE.contiguous())

    def give_back_freed(self) -> None:
        """What the allocators of all ranks keep for tensors to come, between two steps."""
        with self.together():
            for process in self._processes:
                process.send(FREE)
            give_back_freed(self._device)
            self.ranks.meet()
            if self._device.type == "cuda":  # which has only been told to meet
                torch.cuda.synchronize(self._device)

    @contextmanager
    def together(self) -> Iterator[None]:
        """What all ranks do in this block they do alike, or the group is broken."""
        if not self.is_healthy:
            self._break("one of its processes has ended")
        self.check()
        try:
            yield
        except RanksApartError as error:
            self._break(str(error))
            raise GroupError(f"the tensor-parallel group has failed: {self._broken}") from error
        except BaseException as error:
            self._break(str(error) or type(error).__name__, look_s=0.0)
            raise
        if self._watch is not None:
            self._watch.expect(mark_on(self._device))

    def check(self) -> None:
        """Raises GroupError if the group is broken: whatever a device has brought since is of no use."""
        if self._broken is not None:
            raise GroupError(f"the tensor-parallel group is of no use any more: {self._broken}")

    def close(self) -> None:
        """End the other ranks' processes. From any thread, at any time; who comes second waits for the end too."""
        with self._lock:
            self._broken = self._broken or "it was closed"
        if self._watch is not None:
            self._watch.close()  # before the lock: its thread may be closing already
        with self._closing:
            if self._closed:
                return
            self._closed = True
            # In a thread, since NCCL may take its time; what waits for the others on this rank's GPU ends by it.
            threading.Thread(target=self._leave, name="rank-leave", daemon=True).start()
            for process in self._processes:
                process.dismiss()
            for process in self._processes:
                process.wait_for_end()
            self._meeting.cleanup()

    def _join(self, spec: RankSpec) -> RankGroup:
        """Join the group in a thread that is left behind if need be: nobody can give up a communicator that is being
        made."""
        self._expect(HERE, START_S)
        for process in self._processes:
            process.send(JOIN)
        joined: Future[RankGroup] = Future()

        def join() -> None:
            try:
                joined.set_result(join_ranks(spec))
            except Exception as error:  # the boundary of the thread: whoever waits is told
                joined.set_exception(error)

        threading.Thread(target=join, name="rank-join", daemon=True).start()
        try:
            ranks = joined.result(JOIN_S)
        except (TimeoutError, RuntimeError) as error:
            why = end_of(self._processes, _LOOK_S) or str(error) or f"not all of them came within {JOIN_S:g} s"
            raise GroupError(f"the ranks of the tensor-parallel group did not find each other: {why}") from error
        self._leave = ranks.leave
        return ranks

    def _expect(self, message: bytes, within_s: float) -> None:
        deadline = time.monotonic() + within_s
        for process in self._processes:
            process.expect(message, deadline)

    def _tell(self, word: bytes, number: int, content: Tensor) -> None:
        for process in self._processes:
            process.send(with_number(word, number))
        self.ranks.broadcast(content)

    def _break(self, reason: str, look_s: float = _LOOK_S) -> None:
        """End the group, from any thread. `reason` is what is said if within `look_s` no rank's end turns out to be the
        reason."""
        with self._lock:
            if self._broken is not None:
                return
            self._broken = end_of(self._processes, look_s) or reason
        logger.error("the tensor-parallel group ends: %s", self._broken)
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
        leader = self._leader
        with leader.together(), self._telling(hooks) as layer_over:
            leader.tell_step(batch)
            hidden = self._model.forward(batch, kv_cache)
            if not len(batch.output_rows):  # the last layer ended without a sum over the ranks
                leader.ranks.meet()
                layer_over(self._model.config.num_layers - 1)
        return hidden

    @contextmanager
    def _telling(self, hooks: LayerHooks | None) -> Iterator[Callable[[int], None]]:
        """Tell hooks of layers during one pass, which begins with this context. Gives what to call when a layer is over
        without sums.

        How far the pass is shows by its sums, of which each layer has two: before the second one every rank has stored
        and read its KV, and none has begun with the next layer. On a GPU that holds of what the stream is given next.
        """
        num_sums = 0

        def before_sum() -> None:
            nonlocal num_sums
            layer, is_second = divmod(num_sums, 2)
            num_sums += 1
            if is_second:
                layer_over(layer)

        def layer_over(layer: int) -> None:
            """The next one may begin when this returns."""
            if hooks is not None:
                hooks.stored(layer)
                hooks.attended(layer)
                if layer + 1 < self._model.config.num_layers:
                    hooks.before_store(layer + 1)

        if hooks is not None:
            hooks.before_store(0)
        self._leader.ranks.before_sum = before_sum
        try:
            yield layer_over
        finally:
            self._leader.ranks.before_sum = do_nothing

    def logits(self, hidden: Tensor) -> Tensor:
        """As a model's."""
        with self._leader.together():
            self._leader.tell_hidden(hidden)
            return self._model.logits(hidden)
