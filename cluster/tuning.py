"""Ray and Serve settings that Legato's speed depends on. They are environment variables, read when Ray starts.

Set here for clusters that Legato starts; `docs/operations.md` lists them for clusters that others start.
"""

from __future__ import annotations

import os
from typing import Final

from cluster.free_ports import free_ports

RAY_ENVIRONMENT: Final = {
    # No token file is written or needed: a laptop's own Ray, on loopback.
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    # HAProxy in front instead of Serve's Python proxy, and gRPC between replicas: 5 to 8 times the requests per second.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Above the longest generation: a reload of HAProxy must not cut a stream.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    # Workers report every second what size their pool should have; by default Serve hears of it every ten.
    "RAY_SERVE_REPLICA_AUTOSCALING_METRIC_PUSH_INTERVAL_S": "1",
    # Workers load beside the proxies: on a busy machine these take longer than Serve's 5 s, after which it kills them.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Nobody balances load over a laptop's one proxy: it need not linger half a minute before it stops.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # What Ray's own processes do while nothing happens interrupts the threads that compute, and all of them wait for
    # one. Serve's controller looks around four times a second, not ten; its metrics wait a second, not a tenth.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
    # Statistics of Ray's event loops, for its developers: a seventh of what each of its timers costs.
    "RAY_event_stats": "0",
    # How often the machine's memory is looked at, lest it run out.
    "RAY_memory_monitor_refresh_ms": "1000",
    # The log monitor lists the log files every ten seconds, not every tenth of one.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "10",
}


# Ports that HAProxy binds besides the HTTP port; fixed ones would keep a second cluster from starting on the machine.
HAPROXY_PORTS: Final = ("RAY_SERVE_HAPROXY_STATS_PORT", "RAY_SERVE_HAPROXY_METRICS_PORT")


def tune_environment() -> None:
    """Set what the user has not set. Call before Ray is imported."""
    for name, value in RAY_ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    for name, port in zip(HAPROXY_PORTS, free_ports(len(HAPROXY_PORTS)), strict=True):
        os.environ.setdefault(name, str(port))
