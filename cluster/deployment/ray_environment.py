"""Ray's and Serve's own settings that Legato's speed depends on. They are environment variables.

Serve's controller reads SERVE_ENVIRONMENT when it starts, and what it starts inherits them: the files in `ray_configs/`
give them to it (`controller_options`). Ray reads RAY_ENVIRONMENT when it starts itself, which no file can reach:
`python -m cluster serve` sets both, `python -m cluster environment` prints them for a Ray that others start, and where
they are missing the application says so (`unset`).
"""

from __future__ import annotations

import contextlib
import os
import random
import socket
from typing import Final

from cluster.deployment.ray_access import HAPROXY_PORTS, keep_ray_on_loopback

# Ports below those that Linux gives to whoever asks for any, of which Ray takes dozens while it starts, and clear of
# Serve's.
_FIRST, _STOP = 20_000, 30_000
_TRIES: Final = 1_000

# From here on upwards each gateway takes the first port that is free, and HAProxy knows it by the port alone.
_FIRST_GATEWAY_PORT: Final = "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT"
# Variables for ports that a cluster must not share with another one on the machine. While HAProxy believes all gateways
# down, it goes to Serve's own proxy at the fallback's port.
_OWN_PORTS: Final = (*HAPROXY_PORTS, "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT", _FIRST_GATEWAY_PORT)

_NO_SPLICING: Final = "no option splice-request"

SERVE_ENVIRONMENT: Final = {
    # HAProxy in front instead of Serve's Python proxy, and gRPC between replicas: 5 to 8 times the requests per second.
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    # Above the longest generation: a reload of HAProxy must not cut a stream.
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "3600",
    # A client that sends half a request, or takes nothing of an answer, gives its connection back after a minute; Ray's
    # own value is an hour. Waiting for a worker does not count, so answers and their pauses may be longer.
    "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "60",
    # Ray's own value, and two lines of HAProxy's `defaults` for which Ray's template (2.60), which takes any text here,
    # has no settings. Where a request is spliced and its client leaves, HAProxy (2.8) does not tell the gateway and
    # takes a whole core, until the answer begins or goes on (docs/log/gateway-http.md). Whoever sends no whole head is
    # given up after half a minute.
    "RAY_SERVE_HAPROXY_RETRY_ON": f"conn-failure\n    {_NO_SPLICING}\n    timeout http-request 30s",
    "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "1",
    # Workers load beside the proxies: on a busy machine these take longer than Serve's 5 s, after which it kills them.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
    # Nobody balances load over a laptop's one proxy: it need not linger half a minute before it stops.
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": "0",
    # What Ray's own processes do while nothing happens interrupts the threads that compute, and all of them wait for
    # one. Serve's controller looks around four times a second, not ten; its metrics wait a second, not a tenth.
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.25",
    "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "1000",
}

RAY_ENVIRONMENT: Final = {
    # Statistics of Ray's event loops, for its developers: a seventh of what each of its timers costs.
    "RAY_event_stats": "0",
    # How often the machine's memory is looked at, lest it run out.
    "RAY_memory_monitor_refresh_ms": "1000",
    # The log monitor lists the log files every ten seconds, not every tenth of one.
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "10",
}


def tune_environment() -> None:
    """Set the variables that the user has not set, for a Ray on this machine alone. Call it before Ray is imported."""
    keep_ray_on_loopback()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray starts another Ray where a thread asks it for something once it was told to end: as that one, which waits for
    # Serve.
    os.environ.setdefault("RAY_ENABLE_AUTO_CONNECT", "0")
    # How long the node may take to come up. Ray's own 30 s are too few on a machine that is busy with other things.
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    # Of the boards on its Metrics page Ray lets one be another: that of Ray Data, which nobody uses here.
    os.environ.setdefault("RAY_GRAFANA_DATA_DASHBOARD_UID", "legato")  # cluster/metrics/grafana/legato.json
    for name, value in (RAY_ENVIRONMENT | SERVE_ENVIRONMENT).items():
        os.environ.setdefault(name, value)
    # Fixed ports would keep a second cluster from starting on the machine, or, worse, let it answer the first one's
    # requests: Serve opens the port behind HAProxy so that several processes may have it.
    for name, port in zip(_OWN_PORTS, free_ports(len(_OWN_PORTS)), strict=True):
        os.environ.setdefault(name, str(port))
    os.environ.setdefault("RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT", str(int(os.environ[_FIRST_GATEWAY_PORT]) + 999))


def unset() -> list[str]:
    """Sentences that say which variables this process's Ray was started without, and what that costs. None are returned
    where nothing is missing."""
    sentences: list[str] = []
    if "RAY_SERVE_ENABLE_HA_PROXY" not in os.environ:
        sentences.append(
            "RAY_SERVE_ENABLE_HA_PROXY is not set: Serve's Python proxy stands in front, which passes on a fifth of the"
            " requests per second and adds 3 to 5 ms to each. Take `controller_options` from a file in ray_configs/."
        )
    elif os.environ["RAY_SERVE_ENABLE_HA_PROXY"] == "1" and _NO_SPLICING not in os.environ.get(
        "RAY_SERVE_HAPROXY_RETRY_ON", ""
    ):
        sentences.append(
            f"RAY_SERVE_HAPROXY_RETRY_ON does not say `{_NO_SPLICING}`: where a client leaves, its gateway is not told,"
            " and HAProxy takes a core, until the answer begins or goes on. Take `controller_options`"
            " from a file in ray_configs/."
        )
    missing = [f"{name}={value}" for name, value in RAY_ENVIRONMENT.items() if name not in os.environ]
    if missing:
        sentences.append(
            f"Ray was started without {' '.join(missing)}: idle, it takes 16 % of a core instead of 11. To have them,"
            ' before Ray starts: eval "$(python -m cluster environment)".'
        )
    return sentences


def free_ports(num: int) -> list[int]:
    """Find `num` different ports that nobody listens on, on any address. Raises OSError if there are not so many.

    They are drawn by chance, so it is unlikely that somebody has taken them a minute later.
    """
    draw = random.SystemRandom()
    found: list[int] = []
    for port in draw.sample(range(_FIRST, _STOP), _TRIES):
        if len(found) == num:
            break
        with contextlib.suppress(OSError), socket.socket() as sock:
            sock.bind(("", port))
            found.append(port)
    if len(found) < num:
        raise OSError(f"no {num} of {_TRIES} ports between {_FIRST} and {_STOP} are free")
    return found


def free_port() -> int:
    (port,) = free_ports(1)
    return port
