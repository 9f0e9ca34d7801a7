"""What a worker's process makes of the configuration: its replica, of whichever role. Knows nothing of Ray."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from cluster.config.build import (
    decode_engine,
    decode_tiers,
    prefill_engine,
    prefill_tiers,
    transfer_config,
    worker_roles,
)
from cluster.config.settings import LegatoConfig
from kv_transfer.messages.fields import Role
from kv_transfer.messages.requests import Endpoint
from kv_transfer.tiers.worker_tiers import WorkerTiers
from kv_transfer.worker.replica import ReplicaSite, WorkerReplica


def worker_replica(
    role: Role, config: LegatoConfig, site: ReplicaSite, locate_scheduler: Callable[[], Awaitable[Endpoint]]
) -> WorkerReplica:
    """A replica of the pool of this role, which it has at first. Not started."""
    if role == "prefill":
        tiers = WorkerTiers(prefill_tiers(config), prefill_engine(config), site.secret)
    else:
        tiers = WorkerTiers(decode_tiers(config), decode_engine(config), site.secret)
    return WorkerReplica(role, worker_roles(config), tiers, transfer_config(config), site, locate_scheduler)
