"""A gateway's connections to workers: one per worker, frames in, requests out, deaths noticed."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from kv_transfer.connections.connection import Connection, connect
from kv_transfer.messages import Message
from kv_transfer.messages.workers import WorkerInfo
from kv_transfer.transports.base import Identity, TransportError

logger = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 5.0
_MAX_FALLEN = 1024
SILENCE_S = 1.5  # three pings that did not come


class WorkerConnections:
    """Holds a connection to each worker that it is told of.

    Calls `on_message(worker_id, message)` with each message that comes, and `on_lost(worker_id, in_order)` when a
    connection ends. `in_order`: the worker stopped as it was told to.
    """

    def __init__(
        self,
        identity: Identity,
        *,
        on_message: Callable[[str, Message], None],
        on_lost: Callable[[str, bool], None],
        silence_s: float = SILENCE_S,
    ) -> None:
        """`silence_s`: after which a worker, or the scheduler, is not waited for where there is another way."""
        self.silence_s = silence_s
        self._identity = identity
        self._on_message = on_message
        self._on_lost = on_lost
        self._connections: dict[str, Connection] = {}
        self._overdue: set[str] = set()
        self._fallen: dict[str, None] = {}  # workers that were connected and are not now; the oldest first
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._changed = asyncio.Condition()

    def is_up(self, worker_id: str) -> bool:
        return worker_id in self._connections

    def is_silent(self, worker_id: str) -> bool:
        connection = self._connections.get(worker_id)
        return connection is not None and connection.silent_s >= self.silence_s

    def unresponsive(self) -> set[str]:
        """Connected workers that are silent or whose step is overdue: `suspect` in `GET /cluster`."""
        return {worker_id for worker_id in self._connections if self.is_silent(worker_id)} | self._overdue

    def step_overdue(self, worker_id: str, is_overdue: bool) -> None:
        """Note what the worker says of its step: that it is overdue, or no longer."""
        (self._overdue.add if is_overdue else self._overdue.discard)(worker_id)

    def update(self, workers: list[WorkerInfo]) -> None:
        """Connect to every listed worker that is not connected. One that works outlives its worker's listing."""
        for info in workers:
            if info.worker_id not in self._tasks:
                self._tasks[info.worker_id] = asyncio.create_task(self._run(info), name=f"connection-{info.worker_id}")

    def post(self, worker_id: str, message: Message) -> bool:
        """Send to a worker; False if there is no connection to it."""
        connection = self._connections.get(worker_id)
        if connection is None:
            return False
        connection.post(message)
        return True

    async def post_large(self, worker_id: str, message: Message) -> bool:
        """Send a message that holds a prompt: wait until the connection has taken those before it. Returns False if
        there is no connection, or if it has ended meanwhile."""
        connection = self._connections.get(worker_id)
        if connection is None:
            return False
        await connection.post_large(message)
        return connection.closed is None

    async def wait_up(self, worker_ids: set[str], timeout_s: float) -> bool:
        """Wait until all of these workers are connected. Returns False after `timeout_s`, or at once if the connection
        to one of them was lost."""
        async with self._changed:
            try:
                async with asyncio.timeout(timeout_s):
                    await self._changed.wait_for(
                        lambda: worker_ids <= self._connections.keys() or worker_ids & self._fallen.keys()
                    )
            except TimeoutError:
                return False
        return worker_ids <= self._connections.keys()

    async def stop(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, info: WorkerInfo) -> None:
        try:
            connection = await connect(info.endpoint, self._identity, purpose="gateway", timeout_s=CONNECT_TIMEOUT_S)
        except (TransportError, OSError, TimeoutError) as error:
            logger.info("%s worker %s cannot be reached: %s", info.role, info.worker_id, error)
            del self._tasks[info.worker_id]
            return
        try:
            await self._set(info.worker_id, connection)
            while True:
                message = await connection.receive()
                self._on_message(info.worker_id, message)
        except TransportError as error:
            logger.info("link to %s worker %s is down: %s", info.role, info.worker_id, error)
        finally:
            connection.close("the gateway closes its link")
            del self._tasks[info.worker_id]
            self._connections.pop(info.worker_id, None)
            self._overdue.discard(info.worker_id)
            self._fallen[info.worker_id] = None
            if len(self._fallen) > _MAX_FALLEN:
                del self._fallen[next(iter(self._fallen))]
            self._on_lost(info.worker_id, connection.peer_left_in_order)
            async with self._changed:
                self._changed.notify_all()

    async def _set(self, worker_id: str, connection: Connection) -> None:
        async with self._changed:
            self._connections[worker_id] = connection
            self._fallen.pop(worker_id, None)
            self._changed.notify_all()
