"""A mini cluster whose workers run in processes of their own, to be stopped or killed there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from kernels.native.library import native_library
from kv_transfer.messages.fields import Role
from tests.support.clusters.mini_cluster import MiniCluster, MiniClusterConfig
from tests.support.clusters.worker_child import run
from tests.support.forked_child import ForkedChild
from tests.support.small_models import SmallModel
from tests.support.waiting import HANGS_S


@contextlib.asynccontextmanager
async def worker_processes(
    model: SmallModel, *roles: Role, **config: Any
) -> AsyncIterator[tuple[MiniCluster, dict[str, ForkedChild]]]:
    """A scheduler and a gateway here, workers in processes of their own, by their worker ids."""
    await asyncio.to_thread(native_library)  # compiled once for a machine, which takes longer than a worker may
    cluster = MiniCluster(MiniClusterConfig(model_ref=str(model.folder), num_prefill=0, num_decode=0, **config))
    await cluster.start()
    with contextlib.ExitStack() as stack:
        try:
            start = partial(ForkedChild, run, str(model.folder), cluster.secret, cluster.scheduler.endpoint)
            # The first one waits for what forks it, which imports for seconds, and beside others' work for many.
            started = [stack.enter_context(await asyncio.to_thread(start, role)) for role in roles]
            workers = {await asyncio.to_thread(process.told): process for process in started}  # once they are ready
            assert await cluster.orchestrator.connections.wait_up(set(workers), HANGS_S)
            yield cluster, workers
        finally:
            await cluster.stop()


async def hang_beyond(process: ForkedChild, position: int) -> None:
    """Its device will hang before the first step that goes beyond this position, until the process is killed or told
    that the device goes on."""
    process.tell(position)
    assert await asyncio.to_thread(process.told) == "will hang"


async def hangs(process: ForkedChild) -> None:
    """Waits until it does."""
    assert await asyncio.wait_for(asyncio.to_thread(process.told), HANGS_S) == "hangs"


def tell_to_go_on(process: ForkedChild) -> None:
    """Its device hangs no more, once it has heard that: at once, or when a process that is stopped is continued."""
    process.tell(0)


async def goes_on(process: ForkedChild) -> None:
    """Waits until it does."""
    assert await asyncio.wait_for(asyncio.to_thread(process.told), HANGS_S) == "goes on"
