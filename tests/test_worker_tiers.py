"""One worker's tiers as it opens them: budgets that cannot be met are refused before anything is allocated."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.loading import EngineConfig
from engine.machine_memory import memory_bytes
from kv_transfer.tiers.tiers_config import Budget, TiersConfig
from kv_transfer.tiers.worker_tiers import WorkerTiers


@pytest.mark.parametrize("budget", [Budget(num_bytes=memory_bytes()), Budget(num_bytes=2**50)])
def test_more_host_memory_than_there_is_is_refused(tmp_path: Path, budget: Budget) -> None:
    engine = EngineConfig(model_ref="unused", model_name="unused")
    tiers = WorkerTiers(TiersConfig(host=budget, host_folder=str(tmp_path)), engine, b"secret")
    with pytest.raises(ValueError, match="more than 90% .* share such as 20%"):
        tiers.load()
    assert not list(tmp_path.iterdir())
