"""Which layout of the workers would have served most of what came lately, beside the automatic one: `LayoutStudy`.

`GET /cluster/layout` asks it. The simulations run in a process of their own with the least priority, which reads the
gateway's request log: `python -m cluster whatif --layouts` (`cluster.simulation.whatif.best_layout`).
"""

from __future__ import annotations

import asyncio
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any, Final

from cluster.errors import ConflictError, UnavailableError

logger = logging.getLogger(__name__)

NEWEST: Final = 2000  # requests of the log
TIME_S: Final = 60.0  # of one study
START_S: Final = 60.0  # for the process to start, to read the log and to end
WITH_LEAST_PRIORITY: Final = ("nice", "-n", "19")
FRESH_S: Final = 300.0  # how long a study's result is given out again
RETRY_S: Final = 60.0


class LayoutStudy:
    """Simulates the newest requests on layouts of the workers. Only one study runs at a time, for at most `TIME_S`; who
    asks meanwhile waits for it.

    `log`: the gateway's request log; None: it writes none. `newest`: what was found last, for `/cluster`."""

    def __init__(self, log: Path | None = None) -> None:
        self.newest: dict[str, Any] | None = None
        self._log = None if log is None else log.expanduser()
        self._fresh_until = float("-inf")
        self._running: asyncio.Task[dict[str, Any]] | None = None

    async def ask(self) -> dict[str, Any]:
        """How each layout would have served the newest requests. Raises ConflictError without a log, and
        UnavailableError where they cannot be simulated now."""
        if self._log is None:
            raise ConflictError(
                "This gateway notes no requests, so nobody knows what to simulate. Set gateway.request_log; of several"
                " models each has a log of its own, for `legato whatif --layouts`.",
                code="no_request_log",
            )
        if self.newest is not None and time.monotonic() < self._fresh_until:
            return self.newest
        if self._running is None:
            self._running = asyncio.create_task(self._study(self._log))
            self._running.add_done_callback(self._ended)
        return await asyncio.shield(self._running)  # who asked may go away, and others wait for it

    def _ended(self, study: asyncio.Task[dict[str, Any]]) -> None:
        self._running = None
        if not study.cancelled() and study.exception() is None:
            self.newest, self._fresh_until = study.result(), time.monotonic() + FRESH_S

    async def _study(self, log: Path) -> dict[str, Any]:
        command = [sys.executable, "-m", "cluster", "whatif", "--log", str(log), "--layouts", "--json"]
        command += ["--newest", str(NEWEST), "--time-s", str(TIME_S)]
        process = await asyncio.create_subprocess_exec(
            *(*WITH_LEAST_PRIORITY, *command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
        )
        try:
            async with asyncio.timeout(TIME_S + START_S):
                out, said = await process.communicate()
        except TimeoutError:
            out, said = b"", b"it took too long"
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
        if process.returncode != 0:
            reason = said.decode(errors="replace").strip().rpartition("\n")[2]
            logger.info("layouts could not be simulated: %s", reason)
            raise UnavailableError(
                f"The requests of lately could not be simulated: {reason}. Try again when more were served.",
                retry_after_s=RETRY_S,
            )
        found: dict[str, Any] = json.loads(out)
        return found
