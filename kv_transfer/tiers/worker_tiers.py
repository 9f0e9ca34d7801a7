"""One worker's tiers below the device: opened as the model asks for its host memory, closed after the last step.

Composition only: which file, which folder, in which order. What moves between the tiers, and when, is `prefix_tiers`'.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path

import torch

from engine.checkpoint.store import resolve_model
from engine.checkpoint.weights import LoadProgress
from engine.kv.cache import KVLayout
from engine.memory.devices import pinning_for
from engine.memory.host import map_private_memory, memory_bytes
from engine.steps.loading import EngineConfig, LoadedModel, kv_fingerprint, load_model
from kv_transfer.tiers.base import ColumnSource, TierMemory
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.tiers.config import Budget, DiskConfig, TiersConfig
from kv_transfer.tiers.disk.column_files import ColumnFormat
from kv_transfer.tiers.disk.folder import DiskTierError
from kv_transfer.tiers.disk.tier import DiskTier
from kv_transfer.tiers.host.peer_segments import PeerSegments
from kv_transfer.tiers.host.segment import HostSegment
from kv_transfer.tiers.host.segment_files import remove_if_last, sweep
from kv_transfer.tiers.prefix_tiers import PrefixTiers
from kv_transfer.transports.shared_memory.segment import SegmentError

logger = logging.getLogger(__name__)

FORMAT_VERSION = 1
"""Of the bytes in a block. To be raised when the same name would stand for other bytes."""
REFRESH_S = 1.0
MAX_HOST_SHARE = 0.9


class WorkerTiers:
    """What a worker's model and scheduler get of its tiers, and the one who closes them."""

    def __init__(self, config: TiersConfig, engine: EngineConfig, secret: bytes) -> None:
        self._config = config
        self._engine = engine
        # Applications do not share KV: whoever does not know the secret cannot name another one's files.
        self._scope = hashlib.blake2b(secret, digest_size=16, person=b"legato-scope").hexdigest()
        self.segment: HostSegment | None = None  # from `load` on; None where host memory is private, or there is none
        self._peers: PeerSegments | None = None
        self._disk: DiskTier | None = None
        self._following: asyncio.Task[None] | None = None
        self._prefix: PrefixTiers | None = None

    def load(self, progress: LoadProgress | None = None) -> LoadedModel:
        """The model with its host memory. Blocks for long, and tells `progress` how far it is; raises ValueError where
        the configuration cannot be met."""
        host_bytes = _host_bytes(self._config.host)
        model = load_model(replace(self._engine, host_bytes=host_bytes), self._host_memory, progress)
        if model.host_pool is not None and self.segment is not None:
            if self.segment.adopted:
                model.host_pool.restore(self.segment.restored())
            model.host_pool.observe(self.segment)
        return model

    async def open(self, model: LoadedModel, events: BlockEventLog) -> PrefixTiers | None:
        """The prefix cache over all tiers; None where there is but the device, or where prefixes are not kept.

        On the worker's loop, but what is on disk is looked through in a thread: that takes a minute of many small
        files. `events` follows what the tiers hold from here on.
        """
        events.watch("device", model.block_pool)
        if model.host_cache is None or model.host_pool is None:
            return None
        events.watch("host", model.host_pool)
        if not model.prefix_caching:
            return None
        fingerprint = await asyncio.to_thread(self._fingerprint, model.layout)  # it looks into each file of the model
        sources: list[ColumnSource] = []
        if self.segment is not None:
            self._peers = PeerSegments(
                Path(self._config.host_folder),
                self._scope,
                fingerprint,
                self.segment.path,
                num_groups=model.layout.num_layer_groups,
            )
            self._following = asyncio.create_task(_follow(self._peers), name="peer-segments")
            sources.append(self._peers)
        if self._config.disk is not None:
            self._disk = await asyncio.to_thread(_open_disk, self._config.disk, fingerprint, model.layout, events)
            sources.append(self._disk)
        device = TierMemory(model.sequence_kv, model.block_pool)
        host = TierMemory(model.host_cache, model.host_pool)
        timeout_s = self._config.load_timeout_s
        self._prefix = PrefixTiers(device, host, sources=sources, sink=self._disk, load_timeout_s=timeout_s)
        return self._prefix

    async def close(self) -> None:
        """After the worker has stopped. Its host memory is given up; what is on disk stays.

        The node's last worker takes along the host memory that killed ones have left.
        """
        if self._following is not None:
            self._following.cancel()
        if self._prefix is not None:
            await self._prefix.close()
        if self._disk is not None:
            await asyncio.to_thread(self._disk.close)
        if self._peers is not None:
            self._peers.close()
        if self.segment is not None:
            self.segment.close(unlink=True)
            remove_if_last(Path(self._config.host_folder), self._scope)

    def _host_memory(self, layout: KVLayout, num_blocks: int) -> memoryview:
        """Memory for the host tier: in a file that the node shares, or private where no such file can be made."""
        folder = Path(self._config.host_folder)
        pin = pinning_for(torch.device(self._engine.device))
        try:
            sweep(folder, self._scope)  # what applications left that ended without a chance to clean up
            self.segment = HostSegment.open(
                folder, self._scope, self._fingerprint(layout), layout.block_bytes, num_blocks, pin=pin
            )
        except SegmentError as error:
            logger.warning("Host KV memory is private to this worker: no other can use or adopt it. %s", error)
            return map_private_memory(num_blocks * layout.block_bytes, pin)
        return self.segment.memory

    def _fingerprint(self, layout: KVLayout) -> str:
        """All that must be equal for a block of one process to be of use to another, as text."""
        engine = self._engine
        facts = {
            "format": FORMAT_VERSION,
            "model": kv_fingerprint(resolve_model(engine.model_ref, backend=engine.backend), engine),
            "layout": [layout.num_layers, layout.layers_per_group, layout.num_kv_heads, layout.head_dim],
            "block_size": layout.block_size,
            "dtype": str(layout.dtype),
        }
        return json.dumps(facts, sort_keys=True)


async def _follow(peers: PeerSegments) -> None:
    """An idle worker asks for nothing, and would keep segments mapped that are gone."""
    while True:
        peers.refresh()
        await asyncio.sleep(REFRESH_S)


def _host_bytes(budget: Budget) -> int:
    """Raises ValueError rather than have the kernel end the worker when it fills its host memory."""
    total = memory_bytes()
    wanted = budget.resolve(total)
    if wanted > MAX_HOST_SHARE * total:
        raise ValueError(
            f"host memory of {wanted} bytes is more than {MAX_HOST_SHARE:.0%} of the {total} bytes that this machine or"
            " container has. Lower kv.prefill.host_memory or kv.decode.host_memory, or give a share such as 20%."
        )
    return wanted


def _open_disk(config: DiskConfig, fingerprint: str, layout: KVLayout, events: BlockEventLog) -> DiskTier:
    folder = Path(config.folder).expanduser()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise DiskTierError(
            f"The folder for KV on disk, {folder}, cannot be made: {error}. Name one that this user may write to in"
            " kv.disk.path, or leave kv.disk out."
        ) from error
    budget_bytes = config.budget.resolve(shutil.disk_usage(folder).total)
    form = ColumnFormat(fingerprint=fingerprint, num_groups=layout.num_layer_groups, block_bytes=layout.block_bytes)
    observers = [events.observer("disk", blocks_per_column=1)]
    return DiskTier(folder, form, budget_bytes=budget_bytes, sync=config.sync, observers=observers)
