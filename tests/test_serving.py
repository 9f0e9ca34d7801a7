"""What `python -m cluster serve` asks of the Ray that it starts."""

from __future__ import annotations

import pytest

from cluster.config import load_config
from cluster.serving import StartError, needed_resources, require_gpus
from tests.test_config import FILES


def test_ray_is_to_have_what_all_replicas_take() -> None:
    tree = {
        "prefill": {"replicas": 2, "num_cpus": 1.5},
        "decode": {"replicas": 1, "num_gpus": 1, "autoscaling": {"min_replicas": 1, "max_replicas": 3}},
        "gateway": {"replicas": 2, "num_cpus": 0.5},
        "scheduler": {"num_cpus": 0.25},
    }
    assert needed_resources(load_config(tree)) == {"CPU": 3 + 3 + 1 + 0.25, "GPU": 1}


def test_without_a_prefill_pool_none_is_counted() -> None:
    tree = {"prefill": {"replicas": 0, "num_cpus": 7}, "gateway": {"num_cpus": 1}, "scheduler": {"num_cpus": 0}}
    assert needed_resources(load_config(tree)) == {"CPU": 2, "GPU": 0}


def test_gpus_that_are_not_there_are_said_to_be_missing() -> None:
    (path,) = (path for path in FILES if path.name == "gpu_1p1d.yaml")
    needed = needed_resources(load_config(path))["GPU"]
    require_gpus(needed, {"CPU": 8, "GPU": 2})
    with pytest.raises(StartError, match=r"need 2 GPUs and Ray finds 0 .*serve run"):
        require_gpus(needed, {"CPU": 8})
