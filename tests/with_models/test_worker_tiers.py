"""One worker's tiers as it opens and closes them: what it refuses to allocate, and what it leaves behind."""

from __future__ import annotations

import threading
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from engine.kv.block_pool import PoolObserver
from engine.memory.host import memory_bytes
from engine.steps.loading import EngineConfig
from kv_transfer.messages.fields import Tier
from kv_transfer.tiers.block_events import BlockEventLog
from kv_transfer.tiers.config import Budget, DiskConfig, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers
from tests.processes.host_segments import SHARED_MEMORY
from tests.support.small_models import SmallModel


@pytest.mark.parametrize("budget", [Budget(num_bytes=memory_bytes()), Budget(num_bytes=2**50)])
def test_more_host_memory_than_there_is_is_refused(tmp_path: Path, budget: Budget) -> None:
    engine = EngineConfig(model_ref="unused", model_name="unused")
    tiers = WorkerTiers(TiersConfig(host=budget, host_folder=str(tmp_path)), engine, b"secret")
    with pytest.raises(ValueError, match=r"more than 90% .* share such as 20%"):
        tiers.load()
    assert not list(tmp_path.iterdir())


def started(folder: Path, model: SmallModel, **options: Any) -> WorkerTiers:
    """Of one application, whose workers all keep their host memory in the folder. `options`: of `EngineConfig`."""
    ref = str(model.folder)
    engine = EngineConfig(model_ref=ref, model_name="llama", dtype="float32", kv_blocks=16, num_threads=1, **options)
    tiers = WorkerTiers(TiersConfig(host=Budget(num_bytes=2**20), host_folder=str(folder)), engine, b"secret")
    tiers.load()
    return tiers


def files(folder: Path) -> list[Path]:
    return list(folder.iterdir())


def killed(folder: Path, model: SmallModel) -> Path:
    """What a worker leaves that had no chance to clean up."""
    tiers = started(folder, model)
    assert tiers.segment is not None
    tiers.segment.close(unlink=False)
    return tiers.segment.path


async def test_a_worker_that_ends_leaves_what_killed_ones_left_to_the_others(llama: SmallModel) -> None:
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = Path(name)
        first, second = started(folder, llama), started(folder, llama)
        left = killed(folder, llama)
        await first.close()
        assert left.exists(), "the application goes on"
        adopter = started(folder, llama)
        assert adopter.segment is not None
        assert (adopter.segment.path, adopter.segment.adopted) == (left, True)
        await second.close()
        await adopter.close()
        assert not files(folder)


async def test_kv_of_activations_that_were_rounded_otherwise_is_not_taken_over(llama: SmallModel) -> None:
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = Path(name)
        left = killed(folder, llama)
        other = started(folder, llama, activation_bits=16)
        assert other.segment is not None
        assert not other.segment.adopted
        assert other.segment.path != left
        await other.close()


async def test_kv_of_a_checkpoint_that_was_changed_in_one_place_is_not_taken_over(tmp_path: Path) -> None:
    model = SmallModel("llama", tmp_path, hidden_size=256, intermediate_size=512, num_hidden_layers=8)
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = Path(name)
        left = killed(folder, model)
        weights = load_file(tmp_path / "model.safetensors")
        weights["model.layers.0.self_attn.q_proj.weight"] *= 2
        save_file(weights, tmp_path / "model.safetensors", {"format": "pt"})
        other = started(folder, model)
        assert other.segment is not None
        assert not other.segment.adopted
        assert other.segment.path != left
        await other.close()


async def test_who_is_last_takes_along_what_killed_workers_left(llama: SmallModel) -> None:
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        folder = Path(name)
        only = started(folder, llama)
        left = killed(folder, llama)
        stranger = folder / f"legato-kv-{'0' * 32}-{'0' * 16}"
        stranger.touch()
        await only.close()
        assert not left.exists()
        assert files(folder) == [stranger]


class Told(BlockEventLog):
    """Notes in which thread the disk tier is opened."""

    opened_in: threading.Thread | None = None

    def observer(self, tier: Tier, *, blocks_per_column: int | None = None) -> PoolObserver:
        if tier == "disk":
            self.opened_in = threading.current_thread()
        return super().observer(tier, blocks_per_column=blocks_per_column)


async def test_what_is_on_disk_is_not_looked_through_on_the_loop(llama: SmallModel, tmp_path: Path) -> None:
    """That may take minutes, in which a worker would count as gone."""
    engine = EngineConfig(model_ref=str(llama.folder), model_name="llama", dtype="float32", kv_blocks=16, num_threads=1)
    disk = DiskConfig(folder=str(tmp_path), budget=Budget(num_bytes=2**20))
    with TemporaryDirectory(dir=SHARED_MEMORY) as name:
        config = TiersConfig(host=Budget(num_bytes=2**20), host_folder=name, disk=disk)
        tiers = WorkerTiers(config, engine, b"secret")
        model = tiers.load()
        events = Told("worker", layer_groups=model.layout.num_layer_groups)
        prefix_tiers = await tiers.open(model, events)
        try:
            assert prefix_tiers is not None and prefix_tiers.disk is not None
            assert events.opened_in not in (None, threading.current_thread())
        finally:
            model.runner.close()
            await tiers.close()
