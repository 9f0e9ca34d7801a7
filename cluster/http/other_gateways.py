"""The requests of all gateways, at any of them: each keeps its own, and the others ask it.

Questions and answers are JSON, by way of the scheduler (`ClusterView.ask_gateways`), within a second; who asks says
which gateways did not answer. For `/cluster/requests` and the board, which a client may ask of whichever gateway it
reaches.
"""

from __future__ import annotations

import json
from typing import Any, Final, NamedTuple

from cluster.errors import UnavailableError
from cluster.http.api import Api
from cluster.http.openai.sse import dumps

MAX_ROWS: Final = 200  # requests that one gateway tells another of: the newest
ONE: Final = "a request"
NEWEST: Final = "requests"


class GatheredAnswers(NamedTuple):
    """What other gateways told.
    `asked`: all gateways, with the one that asks; `silent`: those that did not answer in time."""

    asked: list[str]
    silent: list[str]
    told: dict[str, Any]  # by gateway


class OtherGateways:
    """Asks the other gateways for their requests, and answers them from its making on.
    Belongs to one gateway's event loop."""

    def __init__(self, api: Api) -> None:
        self._api = api
        api.cluster.answer_gateways(ONE, self._tell_one)
        api.cluster.answer_gateways(NEWEST, self._tell_newest)

    async def find(self, request_id: str, choice: int | None) -> tuple[dict[str, Any] | None, GatheredAnswers]:
        """Ask for the details of a request that this gateway does not have, as `Api.details` gives them. None: no
        gateway that answered has it. If it has no such choice, they are of the one that was sent first."""
        found = await ask(self._api, ONE, {"id": request_id, "choice": choice}, one_is_enough=True)
        return next(iter(found.told.values()), None), found

    async def newest(self, limit: int) -> GatheredAnswers:
        """Ask for the newest requests. `told` has, for each gateway, how many requests it keeps (`kept`) and `rows` of
        the newest, at most `MAX_ROWS`."""
        return await ask(self._api, NEWEST, {"limit": min(limit, MAX_ROWS)})

    async def _tell_one(self, question: bytes) -> bytes:
        asked = json.loads(question)
        timeline, choice = self._api.recent.find(asked["id"]), asked["choice"]
        if timeline is None:
            return b""
        is_one = choice is not None and choice < len(timeline.sequences)
        return dumps(self._api.details(timeline, choice if is_one else None))

    async def _tell_newest(self, question: bytes) -> bytes:
        newest = self._api.recent.newest(json.loads(question)["limit"])
        return dumps({"kept": len(self._api.recent), "rows": await self._api.rows(newest)})


async def ask(api: Api, about: str, question: dict[str, Any], *, one_is_enough: bool = False) -> GatheredAnswers:
    """Ask all other gateways a question about a topic.
    Without a scheduler nobody is asked, and nobody counts as silent."""
    try:
        answers = await api.cluster.ask_gateways(about, dumps(question), one_is_enough=one_is_enough)
    except UnavailableError:
        answers = {}
    told = {gateway: json.loads(answer) for gateway, answer in answers.items() if answer}
    silent = [gateway for gateway, answer in answers.items() if answer is None]
    return GatheredAnswers(sorted({api.cluster.gateway, *answers}), silent, told)
