"""`make cluster NODES=3`: a Ray cluster of several nodes on this machine, prefill and decode on different ones.

Each node is a `ray start` of its own, as on a machine of its own, with a loopback address of its own: the head has the
gateways and the scheduler, each other node one worker. KV goes from node to node by TCP, since processes of different
Ray nodes share no memory for Legato. On several machines the same is done by hand: docs/guide/clusters.md.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from cluster.config.load import ConfigError, LegatoConfig, give_secret, http_options, load_config
from cluster.deployment.capacity import live_nodes, require_room
from cluster.deployment.local_cluster import (
    START_TIMEOUT_S,
    Interruption,
    StartError,
    fetch_models,
    heed_signals,
    interrupted_by_signals,
    read_document,
    require_free_port,
    require_serve_takes,
    show_first_answer,
    start_legato,
    stopping,
    told_in_words,
    unless_interrupted,
)
from cluster.deployment.ray_access import require_token
from cluster.deployment.ray_environment import free_port, free_ports, tune_environment

_OBJECT_STORE_BYTES: Final = 80 * 2**20
_STOP_S: Final = 15.0


@dataclass(frozen=True, slots=True)
class NodePlan:
    """One node: its name, the address that it listens on, and the role of its worker. `role` None: it is the head of
    three or more nodes, which has gateways and the scheduler alone."""

    name: str
    address: str
    role: str | None

    @property
    def is_head(self) -> bool:
        return self.name == "head"

    @property
    def resources(self) -> dict[str, float]:
        return {} if self.role is None else {f"{self.role}_node": 1}


def plan_nodes(number: int, config: LegatoConfig) -> list[NodePlan]:
    """Plan so many nodes, the head first. The others have a worker of each pool in turns, prefill first; of two nodes
    the head decodes. Raises StartError."""
    if not 2 <= number <= 16:
        raise StartError(
            f"{number} nodes are too few or too many for one machine; give 2 to 16 (make cluster NODES=3)."
        )
    turns = ["decode"] if config.is_colocated else ["prefill", "decode"]
    roles = [None, *(turns[i % len(turns)] for i in range(number - 1))]
    if number == 2:
        roles[0] = "decode"
    counts: dict[str, int] = {}
    plans = []
    for index, role in enumerate(roles):
        counts[role or ""] = counts.get(role or "", 0) + 1
        name = "head" if index == 0 else f"{role}-{counts[role or '']}"
        plans.append(NodePlan(name, f"127.0.0.{index + 2}", role))
    return plans


def config_on_nodes(config: LegatoConfig, plans: Sequence[NodePlan]) -> LegatoConfig:
    """The configuration with one worker for each node that is planned to have one. A resource of that node keeps the
    worker there; nothing else fits there, since all nodes but the head have no CPUs in Ray's books."""
    tree = config.model_dump(exclude_unset=True)
    if config.workers is not None:
        tree["workers"] = sum(plan.role == "decode" for plan in plans)
    for role in ("prefill", "decode"):
        number = sum(plan.role == role for plan in plans)
        pool = {**tree.get(role, {}), "replicas": number, "num_cpus": 0.0}
        pool.pop("autoscaling", None)
        tree[role] = pool | ({"resources": {f"{role}_node": 1}} if number else {})
    tree["network"] = {**tree.get("network", {}), "host": "node"}
    return load_config(tree)


class LocalNodes:
    """The `ray start` processes of all nodes. Starts them, and ends them with all that they started."""

    def __init__(self, plans: Sequence[NodePlan], folder: Path) -> None:
        self.plans = plans
        self.logs = f"{folder}/NODE/session_latest/logs/serve"  # of each node, for people
        self.address = f"{plans[0].address}:{free_port()}"
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []

    def start(self, interrupted: Interruption) -> None:
        """Start the nodes and join them; returns when all are there, or when `interrupted` is set.
        Raises StartError."""
        import ray

        head, *others = self.plans
        self._start(head)
        self._wait(lambda: _listens(self.address), "the head", interrupted)
        for plan in others:
            self._start(plan)
        if not interrupted.is_set():
            with told_in_words("The nodes' Ray cannot be joined", f"Look into {self._folder}, or try again."):
                ray.init(
                    address=self.address, _node_ip_address=head.address, log_to_driver=False, logging_level="warning"
                )
        self._wait(lambda: len(live_nodes()) == len(self.plans), f"{len(self.plans)} nodes", interrupted)

    def names(self) -> dict[str, str]:
        """The names of the nodes that are there, by Ray's id of each."""
        import ray

        by_address = {plan.address: plan.name for plan in self.plans}
        return {node["NodeID"]: by_address[node["NodeManagerAddress"]] for node in ray.nodes() if node["Alive"]}

    def stop(self) -> None:
        """End all nodes, side by side, and then the head. Whatever does not end by itself is killed, by its id."""
        started = [child for process in self._processes for child in _family(process)]
        for processes in (self._processes[1:], self._processes[:1]):
            for process in processes:
                process.send_signal(signal.SIGTERM)  # which is nothing to one that is gone
            deadline = time.monotonic() + _STOP_S
            for process in processes:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.0, deadline - time.monotonic()))
        for child in psutil.wait_procs(started, timeout=_STOP_S)[1]:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(started, timeout=_STOP_S)

    def _start(self, plan: NodePlan) -> None:
        port = self.address.rpartition(":")[2]
        where = (
            ["--head", f"--port={port}", "--include-dashboard=false", "--num-cpus=4"]
            if plan.is_head
            else [f"--address={self.address}", "--num-cpus=0"]
        )
        # Where another Ray has the dashboard's usual port, a head without a dashboard does not come up. Ray's client
        # server, which nobody needs here, has the same port on every head.
        own_ports = ("--dashboard-port", "--ray-client-server-port") if plan.is_head else ()
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--block",
            "--disable-usage-stats",
            *where,
            *(f"{option}={own}" for option, own in zip(own_ports, free_ports(len(own_ports)), strict=True)),
            f"--node-ip-address={plan.address}",
            f"--node-name={plan.name}",
            f"--temp-dir={self._folder / plan.name}",
            f"--resources={json.dumps(plan.resources)}",
            f"--object-store-memory={_OBJECT_STORE_BYTES}",
        ]
        with (self._folder / f"{plan.name}.log").open("wb") as output:
            # Each node has a session of its own: Ctrl-C in the terminal is for this process, which ends them in order.
            self._processes.append(
                subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
            )
        hidden = ("--block", "--dashboard", "--disable", "--object", "--ray-client", "--temp")
        shown = [word for word in command[1:] if not word.startswith(hidden)]
        print("  ray", *shown, flush=True)

    def _wait(self, holds: Callable[[], bool], what: str, interrupted: Interruption) -> None:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not interrupted.is_set() and not holds():
            for plan, process in zip(self.plans, self._processes, strict=False):
                if process.poll() is not None:
                    said = (self._folder / f"{plan.name}.log").read_text(errors="replace")[-2000:]
                    raise StartError(f"The node {plan.name} ended as it started:\n{said}")
            if time.monotonic() > deadline:
                raise StartError(f"Within {START_TIMEOUT_S:.0f} s there was not {what}; see {self._folder}.")
            interrupted.wait(0.2)


def _listens(address: str) -> bool:
    host, _, port = address.partition(":")
    with socket.socket() as sock:
        sock.settimeout(1)
        return sock.connect_ex((host, int(port))) == 0


def _family(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    with contextlib.suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def serve_on_nodes(path: str, number: int, *, port: int | None = None, stay: bool = True) -> None:
    """Serve the configuration in `path` on so many nodes until interrupted, or only for one answer. Raises ConfigError,
    StartError."""
    document = read_document(path)
    application = document["applications"][0]
    given = load_config(application.get("args") or {})
    if given.models:
        raise StartError("On nodes of this machine one model is served; give a configuration without `models`.")
    plans = plan_nodes(number, given)
    config = config_on_nodes(given, plans)
    http = http_options(document, port)
    require_free_port(http["host"], http["port"])
    # Ray must take the nodes for a cluster of machines; each listens on its own loopback address.
    os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "1"
    # Legato ends in order before its nodes do, so they need not wait for anybody.
    os.environ.setdefault("RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S", "0")
    tune_environment()
    give_secret()
    require_serve_takes(document, path)
    fetch_models(config)  # until here Ctrl-C just ends this process
    interrupted = interrupted_by_signals()
    with _folder() as folder:
        nodes = LocalNodes(plans, folder)
        with contextlib.ExitStack() as ends:
            ends.callback(nodes.stop)
            ends.enter_context(stopping(application))
            print(f"Starting {number} nodes ...", flush=True)
            nodes.start(interrupted)
            heed_signals(interrupted)
            if interrupted.is_set():
                return
            require_room(config, live_nodes())
            require_token(config)
            print("Ray listens on all of this machine's addresses, for whoever has its token (~/.ray/auth_token).")
            url = start_legato(document, http, config, interrupted, logs=nodes.logs)
            if not interrupted.is_set():
                print(f"\n{describe(nodes, ask(url, '/cluster')['workers'])}", flush=True)
                unless_interrupted(interrupted, show_first_answer, url, config.model.name)
                print(f"\n{way_of_newest(nodes, url)}", flush=True)
            if stay and not interrupted.is_set():
                print(f"\nServing on {url}/v1 (Ctrl-C to stop).", flush=True)
                interrupted.wait()


@contextlib.contextmanager
def _folder() -> Iterator[Path]:
    """A folder for Ray's files of this cluster. It is not Ray's usual place, where other programs would find and join
    the cluster. Its path is short, since the paths of the sockets in it must be. It is kept if the block raises."""
    folder = Path(tempfile.mkdtemp(prefix="legato-", dir="/tmp"))
    try:
        yield folder
    except Exception:
        print(f"What Ray and Legato wrote is in {folder}.", file=sys.stderr, flush=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def ask(url: str, path: str) -> Any:
    with urllib.request.urlopen(f"{url}{path}", timeout=30) as response:
        return json.load(response)


def describe(nodes: LocalNodes, workers: Sequence[dict[str, Any]]) -> str:
    """A line for each node: its address and what runs there. Then where their logs are, and how Ray is asked: each is
    another cluster's where Ray itself would look."""
    names = nodes.names()
    lines = []
    for plan in nodes.plans:
        runs = ["gateways, global scheduler"] if plan.is_head else []
        for worker in workers:
            if names.get(worker["endpoint"]["node_id"]) == plan.name:
                port = worker["endpoint"]["port"]
                runs.append(f"{worker['role']} worker {worker['worker_id']} (pid {worker['pid']}, port {port})")
        lines.append(f"  {plan.name:<10} {plan.address:<11} {'; '.join(runs) or 'nothing'}")
    lines += [f"  logs: {nodes.logs}", f"  Ray:  RAY_AUTH_MODE=token ray status --address={nodes.address}"]
    return "\n".join(lines)


def way_of_newest(nodes: LocalNodes, url: str) -> str:
    """Which workers, on which nodes, served the newest request."""
    newest = ask(url, "/cluster/decisions?limit=1")["decisions"]
    if not newest or not newest[0]["candidates"]:  # the first question was refused: the model has no chat template
        return "No request has been placed yet."
    where = {worker["worker_id"]: worker["endpoint"]["node_id"] for worker in ask(url, "/cluster")["workers"]}
    names = nodes.names()
    best = newest[0]["candidates"][0]
    chosen = (best["prefill"] or best["decode"], best["decode"])
    prefill, decode = (names.get(where.get(worker, ""), "a node that is gone") for worker in chosen)
    if prefill == decode:
        return f"The prompt was computed and the answer generated on {decode}."
    return f"The prompt was computed on {prefill}, its KV went to {decode} by TCP, and the answer was generated there."


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m cluster.deployment.local_nodes", description=__doc__)
    parser.add_argument("file", help="a Serve config file, such as ray_configs/quickstart.yaml")
    parser.add_argument("--nodes", type=int, default=3, help="2 to 16; the first is the head")
    parser.add_argument("--port", type=int, help="HTTP port; default: the file's")
    parser.add_argument("--exit", action="store_true", help="stop after the first answer")
    arguments = parser.parse_args()
    try:
        serve_on_nodes(arguments.file, arguments.nodes, port=arguments.port, stay=not arguments.exit)
    except (ConfigError, StartError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:  # whoever read it has seen enough
        sys.stderr.close()
        return 1
    except KeyboardInterrupt:  # before anything was started
        print("Stopped.", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
