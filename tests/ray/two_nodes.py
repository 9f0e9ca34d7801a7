"""Serves a configuration on a Ray cluster of two nodes on this machine, in place of `python -m cluster serve`.

The head has the resource "decode_node", the other node "prefill_node": pools that ask for them land apart, and their KV
has to cross by TCP, since Legato takes processes of different Ray nodes to share no memory.
"""

from __future__ import annotations

import argparse
import threading
from pathlib import Path

import yaml

from cluster.config.load import load_config
from cluster.deployment.local_cluster import interrupted_by_signals, run_application
from cluster.deployment.ray_environment import tune_environment


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file")
    arguments = parser.parse_args()
    http_options = yaml.safe_load(Path(arguments.file).read_text(encoding="utf-8"))["http_options"]
    tune_environment()
    interrupted: threading.Event = interrupted_by_signals()
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    memory = 100 * 2**20
    cluster = Cluster(
        initialize_head=True,
        head_node_args={
            "num_cpus": 3,
            "include_dashboard": False,
            "object_store_memory": memory,
            "resources": {"decode_node": 1},
        },
    )
    try:
        # One CPU more than the worker asks for: Ray may put the gateway or the scheduler here first.
        cluster.add_node(num_cpus=2, object_store_memory=memory, resources={"prefill_node": 1})
        ray.init(address=cluster.address, log_to_driver=False)
        serve.start(proxy_location="HeadOnly", http_options=http_options)
        run_application({"name": "legato", "route_prefix": "/"}, load_config(arguments.file))
        interrupted.wait()
    finally:
        serve.shutdown()
        ray.shutdown()
        cluster.shutdown()


if __name__ == "__main__":
    main()
