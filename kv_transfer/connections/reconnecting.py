"""How workers and gateways stay connected to the global scheduler, whatever becomes of it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Final

from kv_transfer.connections.connection import Connection, connect
from kv_transfer.messages.requests import Endpoint
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)

_CONNECT_TIMEOUT_S: Final = 5.0
_RETRY_S: Final = 0.5


async def stay_connected(
    identity: Identity,
    *,
    purpose: str,
    locate_scheduler: Callable[[], Awaitable[Endpoint]],
    talk: Callable[[Connection], Awaitable[None]],
    goodbye: str,
) -> None:
    """Connect to the scheduler and `talk` to it; again, half a second later, whenever either fails or ends. Each
    connection that `talk` leaves open is closed, saying `goodbye`. Raises nothing: it ends by being cancelled."""
    told = ""  # the error whose traceback the log has: it may come twice a second, for as long as the scheduler is away
    while True:
        try:
            async with asyncio.timeout(_CONNECT_TIMEOUT_S):
                endpoint = await locate_scheduler()
            connection = await connect(endpoint, identity, purpose=purpose, timeout_s=_CONNECT_TIMEOUT_S)
            try:
                await talk(connection)
            finally:
                connection.close(goodbye)
        except (TransportError, OSError, TimeoutError) as error:
            logger.info("the scheduler cannot be reached, trying again: %s", str(error) or "no answer in time")
        except Exception as error:
            # The task's boundary: who locates the scheduler may raise anything (errors of Ray, Serve and gRPC have no
            # base class in common), and without this task its process is known to nobody, and counts as healthy.
            logger.error("the scheduler cannot be talked to, trying again: %s", error, exc_info=repr(error) != told)
            told = repr(error)
        await asyncio.sleep(_RETRY_S)
