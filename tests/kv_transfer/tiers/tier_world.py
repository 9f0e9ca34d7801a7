"""Workers with all their tiers, as they are in production save the model: ghost KV in real bytes.

Device and host memory, host segments, neighbours, disk folders, threads and schedulers are real; what a worker computes
is known in advance (`tests.support.ghost_runner`). So every block that can be found in any tier can be compared with
what its name says.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path

import torch

from decode_workers.offload_policy import OffloadPolicy
from decode_workers.pacing import LayerKvConfig
from decode_workers.scheduler import DecodeScheduler
from engine.cost_model.step_cost import StepCost
from engine.kv.allocation import BlockAllocator
from engine.kv.block_pool import BlockKey, BlockPool
from engine.kv.cache import KVCache, KVLayout
from engine.kv.prefix import block_hashes
from engine.sequence import Sequence, SequenceKey, StepPlan
from kv_transfer.tiers.base import ColumnSource, TierMemory
from kv_transfer.tiers.disk.column_files import ColumnFormat
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.tiers.host.index import block_digest
from kv_transfer.tiers.host.peer_segments import PeerSegments
from kv_transfer.tiers.host.segment import HostSegment
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.worker.prefix_loading import PrefixLoading
from prefill_workers.scheduler import PrefillScheduler
from tests.support.ghost_runner import GhostRunner, kv_of, next_token
from tests.support.host_records import published_digests
from tests.support.waiting import HANGS_S

GROUPS = 2
BLOCK_SIZE = 4
MAX_MODEL_LEN = 32
MODEL_COLUMNS = MAX_MODEL_LEN // BLOCK_SIZE
TOKEN_BUDGET = 13
EOS = frozenset({0})
# A block's bytes are one 64-bit number for each token.
LAYOUT = KVLayout(num_layers=2, layers_per_group=1, num_kv_heads=1, head_dim=1, block_size=4, dtype=torch.float32)
FORM = ColumnFormat(fingerprint="ghost", num_groups=GROUPS, block_bytes=LAYOUT.block_bytes)
SHARED_MEMORY = Path("/dev/shm")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """In columns, except `disk_columns`, which are files. `loads`: whether loading beats computing."""

    columns: int
    host_columns: int
    staging_columns: int
    disk_columns: int
    loads: bool
    scope: str
    disk_folder: Path


class KvBytes(MutableMapping[tuple[str, int, int], int]):
    """Ghost KV by (tier, block, offset), in the memory of real caches."""

    def __init__(self, device: KVCache, host: KVCache) -> None:
        self._words = {name: _words(cache) for name, cache in (("device", device), ("host", host))}

    def __getitem__(self, slot: tuple[str, int, int]) -> int:
        tier, block, offset = slot
        return int(self._words[tier][block, offset])

    def __setitem__(self, slot: tuple[str, int, int], value: int) -> None:
        tier, block, offset = slot
        self._words[tier][block, offset] = value

    def __delitem__(self, slot: tuple[str, int, int]) -> None:
        raise NotImplementedError

    def __iter__(self) -> Iterator[tuple[str, int, int]]:
        raise NotImplementedError

    def __len__(self) -> int:
        return sum(words.numel() for words in self._words.values())


def _words(cache: KVCache) -> torch.Tensor:
    """[num_blocks, BLOCK_SIZE]"""
    return cache.tensor.view(cache.num_blocks, -1).view(torch.int64)


class Truth:
    """What the bytes of every block that anybody may compute must be."""

    def __init__(self) -> None:
        self._of: dict[BlockKey, list[int]] = {}

    def add(self, seq: Sequence) -> None:
        """Its prompt's blocks and its answer's."""
        tokens = seq.tokens(0, seq.num_tokens)
        while len(tokens) < MAX_MODEL_LEN:
            tokens.append(next_token(tokens))
        for group in range(GROUPS):
            kv = kv_of(tokens, group)
            for column, digest in enumerate(block_hashes(tokens, BLOCK_SIZE, seq.cache_salt)):
                self._of[digest, group] = kv[column * BLOCK_SIZE : (column + 1) * BLOCK_SIZE]

    def check(self, pool: BlockPool, cache: KVCache) -> None:
        words = _words(cache)
        for key, block in pool.findable().items():
            assert words[block].tolist() == self._of[key], f"block {block} is found by a name that is not its content's"

    def check_column(self, digest: bytes, column: list[memoryview]) -> None:
        for group, view in enumerate(column):
            found = torch.frombuffer(bytearray(view), dtype=torch.int64).tolist()
            assert found == self._of[digest, group], "a file holds other KV than its name says"


@dataclass
class Worker:
    """What decode and prefill workers have in common. Opened and closed on a running loop."""

    sizes: Sizes
    stories: dict[SequenceKey, Sequence] = field(default_factory=dict)
    plan: StepPlan | None = None
    now: float = 0.0

    def open(self) -> None:
        sizes = self.sizes
        self.segment = HostSegment.open(
            SHARED_MEMORY, sizes.scope, "ghost", LAYOUT.block_bytes, sizes.host_columns * GROUPS
        )
        self.device = TierMemory(KVCache(LAYOUT, sizes.columns * GROUPS), BlockPool(sizes.columns * GROUPS))
        cache = KVCache(LAYOUT, sizes.host_columns * GROUPS, memory=self.segment.memory)
        self.host = TierMemory(cache, BlockPool(cache.num_blocks))
        self.host.pool.restore(self.segment.restored())
        self.host.pool.observe(self.segment)
        self.neighbours = PeerSegments(
            SHARED_MEMORY,
            sizes.scope,
            "ghost",
            self.segment.path,
            num_groups=GROUPS,
            rescan_s=0.0,
            follow_s=0.0,
            clock=lambda: 0.0,  # on which following takes no time, and is due at each call
        )
        self.disk = DiskTier(sizes.disk_folder, FORM, budget_bytes=sizes.disk_columns * FORM.file_bytes)
        sources: list[ColumnSource] = [self.neighbours, self.disk]
        self.tiers = PrefixTiers(self.device, self.host, sources=sources, sink=self.disk, load_timeout_s=HANGS_S)
        self.allocator = BlockAllocator(
            self.device.pool, layer_groups=GROUPS, block_size=BLOCK_SIZE, host_pool=self.host.pool
        )
        self.runner = GhostRunner(self.allocator, KvBytes(self.device.memory, self.host.memory))
        self.prefix = PrefixLoading(
            self.tiers,
            self.allocator,
            prefill_s=lambda num_tokens: 1e3 if sizes.loads else 0.0,
            on_over=self.on_prefix,
            on_room=lambda: None,
        )
        self.open_scheduler()

    def open_scheduler(self) -> None:
        raise NotImplementedError

    def on_prefix(self, seq: Sequence) -> None:
        raise NotImplementedError

    def drop(self, key: SequenceKey) -> None:
        raise NotImplementedError

    def abandon_step(self) -> None:
        raise NotImplementedError

    async def close(self, *, crash: bool) -> None:
        """All requests are lost. After a crash the host segment is there to be adopted."""
        self.stories.clear()
        self.plan = None
        self.prefix.close()
        await self.tiers.close()
        await asyncio.to_thread(self.disk.close)
        self.neighbours.close()
        self.segment.close(unlink=not crash)

    def check(self, truth: Truth) -> None:
        for memory in (self.device, self.host):
            memory.pool.check()
            truth.check(memory.pool, memory.memory)
        assert published_digests(self.segment) == {
            key: (block, block_digest(key, self.segment.block(block)))
            for key, block in self.host.pool.findable().items()
        }, "what neighbours are told is not what is there"

    def check_disk(self, truth: Truth, digests: list[bytes]) -> None:
        for digest in digests:
            column = [memoryview(bytearray(LAYOUT.block_bytes)) for _ in range(GROUPS)]
            if self.disk.holds(digest) and self.disk.load([digest], [column])[0]:
                truth.check_column(digest, column)

    def scribble(self) -> None:
        """What a step that failed in the middle leaves in the places that it was to copy to."""
        assert self.plan is not None
        for copy in self.plan.copies:
            cache = self.device.memory if copy.to == "device" else self.host.memory
            _words(cache)[copy.destination.tolist()] = 13

    def fail_step(self) -> None:
        """In the middle. Whoever had a part in it is gone."""
        assert self.plan is not None
        self.scribble()
        plan, self.plan = self.plan, None
        self.abandon_step()
        for item in plan.items:
            self.drop(item.seq.key)

    @property
    def is_quiet(self) -> bool:
        """No thread holds a block, and nobody waits for one."""
        return not (self.device.pool.num_leases or self.host.pool.num_leases or self.prefix.num_loading)


class DecodeNode(Worker):
    """As `decode_workers.worker` does it."""

    def open_scheduler(self) -> None:
        config = LayerKvConfig(max_in_flight=8, growth_tokens=4, max_steps_without_prefill=3)
        cost = StepCost(base_s=0.01, prefill_token_s=1e-3, prefill_pair_s=0.0, decode_s=0.0, context_token_s=0.0)
        residency = OffloadPolicy(
            self.allocator,
            config,
            staging_columns=self.sizes.staging_columns,
            block_bytes=LAYOUT.block_bytes,
            cost=lambda: cost,
            host_bytes_per_s=lambda: 1e6,
        )
        self.scheduler = DecodeScheduler(
            self.allocator,
            max_num_seqs=5,
            token_budget=TOKEN_BUDGET,
            max_model_len=MAX_MODEL_LEN,
            eos_token_ids=EOS,
            tiers=residency,
        )

    def add(self, seq: Sequence) -> None:
        self.stories[seq.key] = seq
        if not self.prefix.begin(seq):
            self.scheduler.add(seq)

    def on_prefix(self, seq: Sequence) -> None:
        self.scheduler.add(seq)

    def receive(self, seq: Sequence) -> None:
        """A hand-off that was reserved for: all in one go."""
        first_token = next_token(seq.tokens(0, seq.num_tokens))
        self.runner.receive(seq)
        self.scheduler.admit(seq.key, first_token)
        self.prefix.stored([(seq, 0, seq.num_published)])

    def drop(self, key: SequenceKey) -> None:
        self.stories.pop(key, None)
        self.prefix.cancel(key)
        self.scheduler.drop(key)

    def begin_step(self) -> bool:
        self.now += 0.03
        plan = self.scheduler.plan(self.now)
        self.plan = plan if not plan.is_empty else None
        return self.plan is not None

    def finish_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        completed = self.prefix.completed_by(plan)
        emissions = self.scheduler.finish_step(plan, self.runner.execute(plan))
        self.prefix.stored(completed)
        for emission in emissions:
            seq = emission.seq
            assert emission.token.token_id == next_token(seq.tokens(0, len(seq.prompt_token_ids) + emission.index))
            if emission.finish is not None:
                self.stories.pop(seq.key, None)
                self.prefix.ended(seq)

    def abandon_step(self) -> None:
        self.scheduler.abandon_step()


class PrefillNode(Worker):
    """As `prefill_workers.worker` does it."""

    def open_scheduler(self) -> None:
        self.handing_over: dict[SequenceKey, Sequence] = {}
        self.scheduler = PrefillScheduler(
            self.allocator,
            token_budget=TOKEN_BUDGET,
            max_waiting=64,
            staging_columns=self.sizes.staging_columns,
            host_groups=lambda seq: frozenset({len(seq.prompt_token_ids) % GROUPS}),
        )

    def add(self, seq: Sequence) -> None:
        self.stories[seq.key] = seq
        self.scheduler.add(seq, loading=self.prefix.begin(seq))

    def on_prefix(self, seq: Sequence) -> None:
        self.scheduler.loaded(seq.key)

    def drop(self, key: SequenceKey) -> None:
        """Also the end of a hand-off."""
        self.stories.pop(key, None)
        self.handing_over.pop(key, None)
        self.prefix.cancel(key)
        self.scheduler.release(key)

    def begin_step(self) -> bool:
        plan = self.scheduler.plan()
        self.plan = plan if not plan.is_empty else None
        return self.plan is not None

    def finish_step(self) -> None:
        assert self.plan is not None
        plan, self.plan = self.plan, None
        completed = self.prefix.completed_by(plan)
        first_tokens = self.scheduler.finish_step(plan, self.runner.execute(plan))
        self.prefix.stored(completed)
        for seq, sampled in first_tokens:
            assert sampled is not None and sampled.token_id == next_token(seq.prompt_token_ids)
            self.prefix.ended(seq)
            self.handing_over[seq.key] = seq

    def abandon_step(self) -> None:
        self.scheduler.abandon_step()

    def verify_hand_overs(self) -> None:
        """What is being sent must stand until it is released."""
        for seq in self.handing_over.values():
            self.runner.verify(seq)
