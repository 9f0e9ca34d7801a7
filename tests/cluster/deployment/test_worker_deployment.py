"""What a replica asks Serve for, whatever Serve answers."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.exceptions import DeploymentUnavailableError

from cluster.deployment.worker import locator
from kv_transfer.messages.requests import Endpoint

HERE = Endpoint(host="127.0.0.1", port=1, node_id="node")


def handle(answer: Callable[[], Endpoint]) -> Any:
    """In place of Serve's handle of the scheduler."""

    async def remote() -> Endpoint:
        return answer()

    return SimpleNamespace(endpoint=SimpleNamespace(remote=remote))


@pytest.mark.parametrize(
    "error",
    [
        ActorDiedError(),
        ActorUnavailableError("it is away", None),
        DeploymentUnavailableError(SimpleNamespace(name="GlobalScheduler")),
        RuntimeError("Unexpected error"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_whatever_serve_raises_is_tried_again(error: Exception) -> None:
    """Gateways and workers ask again after an OSError. Any other error would end the task that asks: the process would
    be without a scheduler until it is replaced."""

    def raising() -> Endpoint:
        raise error

    with pytest.raises(OSError, match=f"where the scheduler is: {type(error).__name__}"):
        await locator(handle(raising))()
    assert await locator(handle(lambda: HERE))() == HERE
