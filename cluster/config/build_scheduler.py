"""From the configuration tree to the scheduler. Apart from `cluster.config.build`, so that only the scheduler's process
loads what it decides with.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from cluster.autoscaling.sizing import PoolRules, PoolsPlan
from cluster.config.settings import LegatoConfig
from cluster.gateway.line_log import LineLog
from cluster.scheduler.placement.admission import AdmissionPolicy
from cluster.scheduler.placement.policy import DecisionPolicy
from cluster.scheduler.scheduler import SchedulerPolicy
from cluster.scheduler.server import ModelRules, SchedulerServer
from kv_transfer.messages.fields import Role
from kv_transfer.transports.base import Identity

STALE_AFTER_S: Final = 3.0
"""A worker that is silent for so long, six heartbeats, gets no new work."""

_MANY: Final = 1_000_000  # no bound: a pool of fixed size may have as many workers as flips bring about


def scheduler_server(config: LegatoConfig, identity: Identity) -> SchedulerServer:
    decision_log = config.scheduler.decision_log
    rules = {
        served.model.name: ModelRules(policy=scheduler_policy(served), pools=pools_plan(served))
        for served in config.served
    }
    return SchedulerServer(
        rules,
        identity,
        slo_classes=config.slo_classes,
        model_flips=config.scheduler.model_flips,
        decision_log=None if decision_log is None else LineLog(Path(decision_log)),
    )


def scheduler_policy(config: LegatoConfig) -> SchedulerPolicy:
    """The policy for the workers of one model (see `LegatoConfig.served`)."""
    settings = config.scheduler
    return config.tuned(
        SchedulerPolicy(
            stale_after_s=STALE_AFTER_S,
            decision=DecisionPolicy(one_pool=config.workers is not None),
            admission=AdmissionPolicy(max_queued_tokens=settings.max_queued_tokens, max_wait_s=config.max_wait_s),
        )
    )


def pools_plan(config: LegatoConfig) -> PoolsPlan | None:
    """How the scheduler sizes the pools of one model. None: both stay as they are."""
    prefill, decode = _pool_rules("prefill", config), _pool_rules("decode", config)
    flips = config.scheduler.role_flips and not config.is_colocated
    if not (flips or prefill.scales or decode.scales or config.scheduler.model_flips):
        return None
    return PoolsPlan(prefill=prefill, decode=decode, flips=flips)


def _pool_rules(role: Role, config: LegatoConfig) -> PoolRules:
    pool = config.pools[role]
    scaling = pool.autoscaling
    if scaling is None:
        most = 0 if config.is_colocated and role == "prefill" else _MANY
        return PoolRules(min_workers=0, initial=min(pool.replicas, most), max_workers=most, scales=False)
    return PoolRules(
        min_workers=scaling.min_replicas,
        initial=pool.replicas,
        max_workers=scaling.max_replicas,
        target=scaling.target_utilisation,
        hold_s=scaling.downscale_delay_s,
        start_s=scaling.start_s,
    )
