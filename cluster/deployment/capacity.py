"""Whether a Ray cluster can hold what a configuration starts: said before anything waits for it.

Arithmetic on what nodes have in all, in Ray's books (`num_cpus`, `num_gpus`, custom resources); what other
applications take of it is Ray's affair.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from urllib.parse import quote

from cluster.config.load import ConfigError
from cluster.config.settings import SCHEDULER_CPUS, LegatoConfig
from kv_transfer.messages.fields import Role

Resources = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ProcessNeed:
    """Processes of one kind, and what they take: there are `replicas` of them, and each takes `each` on one node.
    `settings`: the branch of the configuration that says so."""

    what: str
    settings: str
    replicas: int
    each: Resources

    def total(self, resource: str) -> float:
        return self.replicas * self.each.get(resource, 0.0)


def pool_name(role: Role, config: LegatoConfig, served: LegatoConfig) -> str:
    """The name of a pool's deployment, of the model `served`, which is one of the configuration's. The first model's
    has that of a model that is alone: where others come beside it, or go, Serve keeps its workers."""
    is_first = served.model.name == config.served[0].model.name
    of_model = "" if is_first else f"-{quote(served.model.name, safe='')}"
    return ("PrefillWorker" if role == "prefill" else "DecodeWorker") + of_model


def needs(config: LegatoConfig, sizes: Mapping[str, int] = MappingProxyType({})) -> list[ProcessNeed]:
    """The processes that are started with the application. Pools that grow later get what is there then. `sizes`: how
    many workers pools begin with, by their deployments' names, where it is not `replicas`."""
    found = []
    for index, served in enumerate(config.served):
        where, whose = (f"models.{index}.", f"{served.model.name} ") if config.models else ("", "")
        for name, pool in served.pools.items():
            if pool.replicas and not (name == "prefill" and served.is_colocated):
                each = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
                replicas = sizes.get(pool_name(name, config, served), pool.replicas)
                found.append(ProcessNeed(f"{whose}{name} worker", f"{where}{name}", replicas, each))
    found.append(ProcessNeed("gateway", "gateway", config.gateway.replicas, {"CPU": config.gateway.num_cpus}))
    found.append(ProcessNeed("scheduler", "scheduler", 1, {"CPU": SCHEDULER_CPUS}))
    return found


def sizes_at_start(config: LegatoConfig, nodes: Sequence[Resources], present: Mapping[str, int]) -> dict[str, int]:
    """How many workers each pool that scales begins with, by its deployment's name: as many as there are (`present`),
    where that is more than `replicas`, but not more than there may be or than the nodes have room for. Serve goes on
    replacing workers only when all new ones have found a place: where one never does, it waits for good.

    Call it where `require_room` raises nothing."""
    least, sizes = dict[str, int](), dict[str, int]()
    for served in config.served:
        for role, pool in served.pools.items():
            if pool.autoscaling is not None:
                name = pool_name(role, config, served)
                least[name] = pool.replicas
                sizes[name] = min(max(pool.replicas, present.get(name, 0)), pool.autoscaling.max_replicas)
    while sizes != least and not _has_room(config, nodes, sizes):
        sizes[max(sizes, key=lambda name: sizes[name] - least[name])] -= 1
    return sizes


def _has_room(config: LegatoConfig, nodes: Sequence[Resources], sizes: Mapping[str, int]) -> bool:
    try:
        require_room(config, nodes, sizes)
    except ConfigError:
        return False
    return True


def live_nodes() -> list[Resources]:
    """What each node of the Ray cluster that this process belongs to has in all."""
    import ray

    return [node["Resources"] for node in ray.nodes() if node["Alive"]]


def require_room(
    config: LegatoConfig, nodes: Sequence[Resources], sizes: Mapping[str, int] = MappingProxyType({})
) -> None:
    """Check that the nodes can hold what the configuration starts, and that it reaches itself there. `nodes`: what each
    live node has in all. `sizes`: see `needs`. Raises ConfigError with one sentence if they cannot, unless the
    configuration says to wait for nodes. What passes may still not fit: which processes share a node is Ray's to say.
    """
    if config.wait_for_nodes:
        return
    wanted = needs(config, sizes)
    for resource in dict.fromkeys(resource for need in wanted for resource in need.each):
        shares = [need for need in wanted if need.total(resource)]
        needed = math.fsum(need.total(resource) for need in shares)
        present = math.fsum(node.get(resource, 0.0) for node in nodes)
        largest = max((node.get(resource, 0.0) for node in nodes), default=0.0)
        if needed > present + 1e-6:
            parts = ", ".join(f"{n.replicas} {n.what}{'s' * (n.replicas > 1)} x {n.each[resource]:g}" for n in shares)
            raise ConfigError(
                f"The configuration needs {_amount(needed, resource)} ({parts}) and the Ray cluster has {present:g} on"
                f" {len(nodes)} node{'s' * (len(nodes) != 1)}. {_advice(shares, resource)}"
            )
        for need in shares:
            if need.each[resource] > largest + 1e-6:
                raise ConfigError(
                    f"Each {need.what} needs {_amount(need.each[resource], resource)} on one node and the largest has"
                    f" {largest:g}. {_advice([need], resource)}"
                )
    for need in wanted:
        _require_places(need, wanted, nodes)
    on = [node for node in nodes if any(_places(need.each, node) for need in wanted)]
    if len(on) > 1 and config.network.is_loopback:
        raise ConfigError(
            f"network.host is {config.network.host}, where no process of another node is reached, and this Ray cluster"
            f" has {len(on)} nodes that processes may be put on. Set network.host: node."
        )


def _require_places(need: ProcessNeed, wanted: Sequence[ProcessNeed], nodes: Sequence[Resources]) -> None:
    """Check that there are as many places for a process of this kind as there are processes that take no less: each is
    on one node, and what several nodes have left together is no place. Raises ConfigError."""
    taken = {resource: amount for resource, amount in need.each.items() if amount}
    for least in (*({resource: amount} for resource, amount in taken.items()), taken):
        alike = [each for each in wanted if all(each.each.get(name, 0.0) >= least[name] for name in least)]
        number, places = sum(each.replicas for each in alike), sum(_places(least, node) for node in nodes)
        if least and number > places:
            parts = ", ".join(f"{each.replicas} {each.what}{'s' * (each.replicas > 1)}" for each in alike)
            amounts = " and ".join(_amount(amount, resource) for resource, amount in least.items())
            raise ConfigError(
                f"The configuration needs {number} places ({parts}) of at least {amounts}, each on one node, and the"
                f" Ray cluster has {places}. {_advice(alike, next(iter(least)))}"
            )


def _places(each: Resources, node: Resources) -> int:
    """How many processes that take so much each a node has room for; 1 if they take nothing."""
    return min((int((node.get(name, 0.0) + 1e-6) // amount) for name, amount in each.items() if amount), default=1)


def _amount(number: float, resource: str) -> str:
    unit = {"CPU": "CPUs", "GPU": "GPUs"}.get(resource, f"of {resource!r}")
    return f"{number:g} {unit}"


def _advice(needs: Sequence[ProcessNeed], resource: str) -> str:
    name = {"CPU": "num_cpus", "GPU": "num_gpus"}.get(resource, "resources")
    pools = [need.settings for need in needs if need.settings != "scheduler"]
    lower = " or ".join([f"{settings}.{name}" for settings in pools] + [f"{settings}.replicas" for settings in pools])
    note = " (a CPU here is a number in Ray's books: it binds nobody to a core)" if resource == "CPU" else ""
    return f"Lower {lower}{note}, add nodes, or, where Ray adds them by itself, set wait_for_nodes: true."
