"""What Legato says where Serve runs it: to whoever types `serve run`, where it answers, what is unset and why it does
not start; and in each replica's own log, which Ray's dashboard shows.

Serve writes its processes' output to files where it runs as Legato has it run, and its own account of an application
that fails lies there, too. Ray passes on what a process writes to the streams that it was started with. A replica's log
is JSON where the configuration says `logging_config: {encoding: JSON}`, one object a line. What is logged about a
request has its id as `request` (`extra={"request": ...}`), and what is about several as `requests`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from logging.handlers import MemoryHandler
from types import MappingProxyType
from typing import TextIO

import ray
from ray import serve
from ray.serve._private.constants import SERVE_LOGGER_NAME
from ray.serve.config import HTTPOptions

from cluster.config.load import draw_secret
from cluster.config.settings import LegatoConfig
from cluster.deployment.capacity import needs
from cluster.deployment.ray_access import open_doors
from cluster.deployment.ray_environment import unset

_LOOK_S = 0.2


def say(text: str, stream: TextIO | None = None) -> None:
    """Write one or several lines to the terminal of `serve run`."""
    stream = stream or sys.__stdout__
    if stream is not None:
        stream.write("".join(f"Legato: {line}\n" for line in text.splitlines()))  # Serve has a `print` of its own
        stream.flush()


@contextlib.contextmanager
def starting(what: str, log: logging.Logger | None = None) -> Iterator[None]:
    """Say on the terminal why `what` does not start, if the block raises. The exception is passed on to Serve. `log`: a
    replica's own, which is to have it, too: Serve writes there nothing of what a constructor raised."""
    try:
        yield
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        say(f"{what} cannot start: {kind}{error}", sys.__stderr__)
        if log is not None:
            log.exception("%s cannot start", what)
        raise


def describe_start(config: LegatoConfig, sizes: Mapping[str, int] = MappingProxyType({})) -> None:
    """Say what is about to be started, and what this Ray lacks. `sizes`: see `needs`.
    Call it on the cluster, where the application is built."""
    wanted = needs(config, sizes)
    parts = ", ".join(f"{need.replicas} {need.what}{'s' * (need.replicas > 1)}" for need in wanted)
    say(f"starts {config.names}: {parts}.")
    if not config.models and "model" not in config.model_fields_set:
        say("no `model` is given below `args`, so this is the one that is served by default.")
    for sentence in [*config.unheeded(), *unset(), *open_doors()]:
        say(sentence)
    has_disk = any(served.kv.disk is not None for served in config.served)
    if has_disk and not config.gateway.share_prefixes and draw_secret() is not None:
        say(
            "LEGATO_SECRET is not set: after a restart, what is on disk is found again only by clients without a key."
            " Set it before Ray starts."
        )


async def announce_when_ready(is_ready: Callable[[], bool], models: str) -> None:
    """Say where `models` are served, once they are. Only one of several gateways should call this."""
    while not is_ready():  # noqa: ASYNC110 - heartbeats make it so, and nobody else waits for that
        await asyncio.sleep(_LOOK_S)
    controller = ray.get_actor("SERVE_CONTROLLER_ACTOR", namespace="serve")
    say("\n".join(describe_http(await controller.get_http_config.remote(), models)))


def describe_http(options: HTTPOptions, models: str) -> Iterator[str]:
    """Yields sentences that say where `models` are served, by Serve's options for HTTP."""
    host = options.host
    if host in (None, "0.0.0.0", "::"):
        host = ray.util.get_node_ip_address()
    has_haproxy, has_key = os.environ.get("RAY_SERVE_ENABLE_HA_PROXY") == "1", options.ssl_certfile is not None
    scheme = "https" if has_key and not has_haproxy else "http"
    yield f"serves {models} on {scheme}://{host}:{options.port}{options.root_path}/v1"
    if has_key and has_haproxy:
        yield (
            "http_options.ssl_certfile is not heeded by HAProxy, as Serve has it in front: HTTP is NOT encrypted. End"
            " TLS in a proxy of your own."
        )


def is_first_replica() -> bool:
    """Whether this process is the first replica of its deployment."""
    rank = serve.get_replica_context().rank
    return rank is None or rank.rank == 0


def log_with_serve(level: str) -> None:
    """Write what Legato logs into Serve's log of this replica, or to standard error if Serve has none. Call it first in
    a replica's constructor."""
    handlers = [_unbuffered(handler) for handler in logging.getLogger(SERVE_LOGGER_NAME).handlers]
    logging.basicConfig(level=level, handlers=handlers or None, force=True)


def _unbuffered(handler: logging.Handler) -> logging.Handler:
    """A handler like this one that writes each record at once. Serve, which logs every request, collects a thousand
    records before it writes them; Legato logs only what is rare."""
    if not isinstance(handler, MemoryHandler) or handler.target is None:
        return handler
    direct = MemoryHandler(capacity=1, target=handler.target)
    for field_filter in handler.filters:
        direct.addFilter(field_filter)
    return direct
