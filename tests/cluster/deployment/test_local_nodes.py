"""Which nodes `make cluster` starts, and what of a configuration lands where. That it runs: tests/ray."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from cluster.config.build_scheduler import scheduler_policy
from cluster.config.load import LegatoConfig, load_config
from cluster.deployment import local_nodes
from cluster.deployment.capacity import require_room
from cluster.deployment.local_cluster import StartError
from cluster.deployment.local_nodes import (
    LocalNodes,
    NodePlan,
    config_on_nodes,
    describe,
    plan_nodes,
    way_of_newest,
)
from tests.cluster.config.test_config import ROOT
from tests.support.threaded_server import QuietHandler, threaded_server
from tests.support.waiting import HANGS_S, wait_until

QUICKSTART = load_config(ROOT / "ray_configs" / "quickstart.yaml")


def names(number: int, config: LegatoConfig = QUICKSTART) -> list[str]:
    return [plan.name for plan in plan_nodes(number, config)]


def test_pools_take_turns() -> None:
    assert names(3) == ["head", "prefill-1", "decode-1"]
    assert names(5) == ["head", "prefill-1", "decode-1", "prefill-2", "decode-2"]
    assert names(3, load_config({"prefill": {"replicas": 0}})) == ["head", "decode-1", "decode-2"]
    assert plan_nodes(3, QUICKSTART)[0] == NodePlan("head", "127.0.0.2", None)


def test_of_two_nodes_the_head_decodes() -> None:
    head, other = plan_nodes(2, QUICKSTART)
    assert (head.role, other.role) == ("decode", "prefill")
    assert head.address != other.address


@pytest.mark.parametrize("number", [-1, 0, 1, 17])
def test_other_numbers_are_refused(number: int) -> None:
    with pytest.raises(StartError, match="give 2 to 16"):
        plan_nodes(number, QUICKSTART)


@pytest.mark.parametrize("path", ["quickstart", "cpu_2p2d", "colocated", "auto", "kv_tiers", "slo", "quantised"])
@pytest.mark.parametrize("number", [2, 3, 6])
def test_every_worker_has_its_node_and_no_node_but_the_head_anything_else(path: str, number: int) -> None:
    given = load_config(ROOT / "ray_configs" / f"{path}.yaml")
    plans = plan_nodes(number, given)
    config = config_on_nodes(given, plans)
    assert config.network.host == "node" and config.model == given.model and config.kv == given.kv
    assert scheduler_policy(config).decision == scheduler_policy(given).decision
    for role, pool in config.pools.items():
        assert pool.replicas == sum(plan.role == role for plan in plans)
        if pool.replicas:
            assert (pool.num_cpus, pool.resources) == (0, {f"{role}_node": 1})
    # As `ray start` is told: CPUs, which gateways and the scheduler need, are on the head alone.
    require_room(config, [{"CPU": 4.0 if plan.is_head else 0.0, **plan.resources} for plan in plans])


def test_it_says_what_runs_where_and_where_to_look(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    nodes = LocalNodes(plan_nodes(3, QUICKSTART), tmp_path)
    monkeypatch.setattr(nodes, "names", lambda: {"a1": "head", "b2": "decode-1"})
    worker = {"role": "decode", "worker_id": "decode-x-7", "pid": 7, "endpoint": {"node_id": "b2", "port": 8}}
    assert describe(nodes, [worker]).splitlines() == [
        "  head       127.0.0.2   gateways, global scheduler",
        "  prefill-1  127.0.0.3   nothing",
        "  decode-1   127.0.0.4   decode worker decode-x-7 (pid 7, port 8)",
        f"  logs: {tmp_path}/NODE/session_latest/logs/serve",
        f"  Ray:  RAY_AUTH_MODE=token ray status --address={nodes.address}",
    ]


_ENDS_BESIDE_OTHERS = """
import signal, sys, time
from pathlib import Path

folder, name, *awaited = sys.argv[1:]


def end(*_):
    (folder / f"{name} ends").touch()
    gives_up_at = time.monotonic() + HANGS_S / 2
    while not all((folder / other).exists() for other in awaited):
        time.sleep(0.005)
        if time.monotonic() > gives_up_at:
            sys.exit(1)
    (folder / f"{name} has ended").touch()
    sys.exit()


folder = Path(folder)
signal.signal(signal.SIGTERM, end)
(folder / f"{name} is there").touch()
while True:
    time.sleep(60)
"""


def test_nodes_end_side_by_side_and_the_head_after_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes seconds. Each of the others waits for the other to be told, and the head for neither to be there."""
    monkeypatch.setattr(local_nodes, "_STOP_S", HANGS_S)
    nodes = LocalNodes(plan_nodes(3, QUICKSTART), tmp_path)
    awaited = {"head": ["a has ended", "b has ended"], "a": ["b ends"], "b": ["a ends"]}
    for name, others in awaited.items():
        program = f"HANGS_S = {HANGS_S}\n{_ENDS_BESIDE_OTHERS}"
        command = [sys.executable, "-c", program, str(tmp_path), name, *others]
        nodes._processes.append(subprocess.Popen(command))
    for name in awaited:
        wait_until((tmp_path / f"{name} is there").exists)
    nodes.stop()
    assert [process.poll() for process in nodes._processes] == [0, 0, 0]


def test_a_model_that_refused_the_first_question_is_served_all_the_same(tmp_path: Path) -> None:
    """One without a chat template: nothing was placed, so there is no way to tell."""

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self.wfile.write(b'HTTP/1.1 200 OK\r\n\r\n{"decisions": []}')

    with threaded_server(Handler) as url:
        assert way_of_newest(LocalNodes(plan_nodes(3, QUICKSTART), tmp_path), url) == "No request has been placed yet."
