"""What a Ray cluster can't hold is said in a sentence before anything waits for it."""

from __future__ import annotations

from typing import Any

import pytest

from cluster.config.load import ConfigError, load_config
from cluster.deployment.capacity import needs, require_room, sizes_at_start
from tests.cluster.config.test_config import FILES

CPU_FILES = [path for path in FILES if not path.name.startswith("gpu")]


def room(tree: dict[str, Any], *nodes: dict[str, float]) -> None:
    require_room(load_config(tree), nodes)


def test_everything_that_is_started_is_counted() -> None:
    tree = {
        "prefill": {"replicas": 2, "num_cpus": 1.5},
        "decode": {"num_gpus": 1, "resources": {"rack": 1}, "autoscaling": {"min_replicas": 1, "max_replicas": 3}},
        "gateway": {"replicas": 2, "num_cpus": 0.5},
    }
    totals = {need.settings: (need.replicas, dict(need.each)) for need in needs(load_config(tree))}
    assert totals == {
        "prefill": (2, {"CPU": 1.5, "GPU": 0}),
        "decode": (1, {"CPU": 0.5, "GPU": 1, "rack": 1}),
        "gateway": (2, {"CPU": 0.5}),
        "scheduler": (1, {"CPU": 0.1}),
    }


def test_without_a_prefill_pool_none_is_counted() -> None:
    tree = {"prefill": {"replicas": 0, "num_cpus": 7}}
    assert "prefill" not in {need.settings for need in needs(load_config(tree))}


@pytest.mark.parametrize("path", CPU_FILES, ids=lambda path: str(path.stem))
def test_each_cpu_file_fits_two_cores(path: Any) -> None:
    require_room(load_config(path), [{"CPU": 2}])


def test_no_settings_at_all_fit_two_cores() -> None:
    room({}, {"CPU": 2})


def test_too_few_cpus_are_named_with_what_to_lower() -> None:
    tree = {"prefill": {"num_cpus": 2}, "decode": {"replicas": 3, "num_cpus": 1}}
    with pytest.raises(ConfigError) as raised:
        room(tree, {"CPU": 2}, {"CPU": 2})
    sentence = str(raised.value)
    assert "needs 5.6 CPUs (1 prefill worker x 2, 3 decode workers x 1, 1 gateway x 0.5, 1 scheduler x 0.1)" in sentence
    assert "the Ray cluster has 4 on 2 nodes" in sentence
    assert "Lower prefill.num_cpus or decode.num_cpus or gateway.num_cpus or prefill.replicas" in sentence
    assert "\n" not in sentence


def test_gpus_that_are_not_there_are_said_to_be_missing() -> None:
    (path,) = (path for path in FILES if path.name == "gpu_1p1d.yaml")
    config = load_config(path)
    require_room(config, [{"CPU": 10, "GPU": 2}])
    with pytest.raises(ConfigError, match=r"needs 2 GPUs .* has 0 on 1 node. Lower prefill.num_gpus"):
        require_room(config, [{"CPU": 10}])


def test_a_worker_must_fit_on_one_node() -> None:
    tree = {
        "prefill": {"replicas": 0},
        "decode": {"num_gpus": 4, "tensor_parallel": 4},
        "kv": {"decode": {"host_memory": 0}},
    }
    room(tree, {"CPU": 8, "GPU": 4})
    with pytest.raises(ConfigError, match="Each decode worker needs 4 GPUs on one node and the largest has 2"):
        room(tree, {"CPU": 8, "GPU": 2}, {"CPU": 8, "GPU": 2})


def test_a_missing_custom_resource_is_named() -> None:
    with pytest.raises(ConfigError, match=r"1 of 'rack' .* Lower decode.resources"):
        room({"decode": {"resources": {"rack": 1}}}, {"CPU": 8})


def test_nodes_that_ray_will_add_are_waited_for() -> None:
    room(
        {
            "wait_for_nodes": True,
            "network": {"host": "node"},
            "decode": {"num_gpus": 8, "tensor_parallel": 8},
            "kv": {"decode": {"host_memory": 0}},
        },
        {"CPU": 1},
    )


def test_what_nodes_have_left_together_is_no_place() -> None:
    tree: dict[str, Any] = {
        "network": {"host": "node"},
        "prefill": {"replicas": 3, "num_cpus": 3},
        "decode": {"num_cpus": 3},
    }
    nodes = [{"CPU": cpus} for cpus in (4.0, 4.0, 4.0, 1.0)]
    told = (
        r"needs 4 places \(3 prefill workers, 1 decode worker\) of at least 3 CPUs, each on one node, .* has 3\. Lower"
    )
    with pytest.raises(ConfigError, match=told):
        room(tree, *nodes)
    room(tree, {"CPU": 6.0}, *nodes)
    room({**tree, "decode": {"num_cpus": 0.5}}, *nodes)
    on_gpu = {**tree, "prefill": {"replicas": 1, "num_cpus": 8, "num_gpus": 1}, "decode": {"num_cpus": 1}}
    with pytest.raises(ConfigError, match=r"needs 1 places .* of at least 8 CPUs and 1 GPUs"):
        room(on_gpu, {"CPU": 8.0}, {"CPU": 4.0, "GPU": 1.0})


def test_loopback_is_one_node() -> None:
    """Workers of two would each be reached by nobody else, and /health say 503 for ever."""
    (path,) = (path for path in FILES if path.name == "gpu_1p1d.yaml")
    config = load_config(path)
    node = {"CPU": 10.0, "GPU": 2.0}
    require_room(config, [node])
    require_room(config, [node, {"CPU": 0.0}])
    with pytest.raises(ConfigError, match=r"network\.host is 127\.0\.0\.1, .* has 2 nodes .* Set network\.host: node"):
        require_room(config, [node, node])
    room({"network": {"host": "node"}}, {"CPU": 2.0}, {"CPU": 2.0})


@pytest.mark.parametrize(("present", "first"), [(0, 2), (1, 2), (3, 3), (9, 4)])
def test_a_pool_that_has_grown_begins_anew_as_large_as_it_is(present: int, first: int) -> None:
    """Serve would stop all beyond `initial_replicas` at once."""
    config = load_config({"decode": {"replicas": 2, "autoscaling": {"max_replicas": 4}}})
    assert sizes_at_start(config, [{"CPU": 64}], {"DecodeWorker": present}) == {"DecodeWorker": first}


@pytest.mark.parametrize(("num_cpus", "sizes"), [(1, (3, 5)), (2, (2, 2))])
def test_no_pool_begins_with_more_than_there_is_room_for(num_cpus: int, sizes: tuple[int, int]) -> None:
    """Each may take more now. Serve, which replaces no old worker while a new one waits for a place, would wait for
    good."""
    pool = {"num_cpus": num_cpus, "autoscaling": {"max_replicas": 8}}
    tree = {"prefill": pool, "decode": pool, "network": {"host": "node"}}
    present = {"PrefillWorker": 3, "DecodeWorker": 5}
    kept = dict(zip(present, sizes, strict=True))
    nodes = [{"CPU": 5}, {"CPU": 5}]
    assert sizes_at_start(load_config(tree), nodes, present) == kept
    waits = load_config({**tree, "wait_for_nodes": True})
    assert sizes_at_start(waits, nodes, present) == present, "Ray adds nodes"


def test_of_several_models_each_pool_keeps_its_own_size() -> None:
    own = {"workers": 1, "decode": {"autoscaling": {"max_replicas": 8}, "num_cpus": 1}}
    models = [{"model": {"ref": "tiny", "served_name": name}, **own} for name in ("x/a", "b")]
    sizes = sizes_at_start(load_config({"models": models}), [{"CPU": 5.6}], {"DecodeWorker": 7})
    assert sizes == {"DecodeWorker": 4, "DecodeWorker-b": 1}
