"""The board at `/`: its routes, its page, which holds no data, and the stream of pictures that the page draws.

Whoever may ask for `/cluster` may ask for `/cluster/events`, and the page asks with the key that it is given: what
authenticates clients in front of the gateway can let everybody have the page.

Those who look are sent a whole picture of the cluster first, then what is different from it.

While somebody looks, one task takes a picture `PER_S` times a second; its difference from the last one is written once,
for all. A viewer that is slow gets no queue: when it has taken what it was sent, it gets the newest difference, or a
whole picture if it has missed one. So what waits for it is bounded by one message. It counts as unread output, and who
takes none of it for `HttpLimits.unread_timeout_s` is cut off, as from any other answer.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
import random
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from cluster.errors import OverloadedError
from cluster.http.api import Api
from cluster.http.board.picture import REST_S, Observer, Picture
from cluster.http.openai.sse import dumps
from cluster.http.response import EventStream
from cluster.http.server.body import JsonRoute

logger = logging.getLogger(__name__)
router = APIRouter(route_class=JsonRoute)

PER_S: Final = 4.0
MAX_VIEWERS: Final = 32  # of one gateway
BEAT_S: Final = 2.0  # between comments while nothing changes, by which a viewer knows that it is so
_APART_S: Final = 0.003  # between two viewers' messages, on average
_BEAT: Final = b": beat\n\n"


class Board:
    """Takes pictures of the cluster for all viewers of one gateway's board. Belongs to the gateway's event loop, and
    costs nothing while nobody looks."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self._observer = Observer(api)
        self._picture: Picture = {}
        self._version = 0  # of the picture; 0: there is none yet
        self._whole: bytes | None = None  # the picture as an event; None: not written yet
        self._change = b""  # the difference from the version before, as an event
        self._next = asyncio.Event()  # set with another version, or when there will be none
        self._num_viewers = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def viewing(self) -> Iterator[None]:
        """Count one more viewer inside the block, and take pictures. Raises OverloadedError if there are too many."""
        if self._num_viewers >= MAX_VIEWERS:
            raise OverloadedError(
                f"{MAX_VIEWERS} others look at this gateway's board already. Try again later.", retry_after_s=10.0
            )
        if self._task is None or self._task.done():
            self._picture, self._version = {}, 0
            self._observer.forget()
            self._task = asyncio.create_task(self._watch(), name="board")
        self._num_viewers += 1
        try:
            yield
        finally:
            self._num_viewers -= 1
            if self._num_viewers == 0 and self._task is not None:
                self._task.cancel()
                self._task = None

    async def pictures(self) -> AsyncGenerator[bytes, None]:
        """Yields pictures and changes as server-sent events, for one more viewer. Raises as `viewing` does."""
        with self.viewing():
            version, news = await self.news(0)
            while news:
                yield news
                version, news = await self.news(version)

    async def news(self, version: int) -> tuple[int, bytes]:
        """Wait for what is new to a viewer that has `version` (0: nothing). Returns the version that it has then, and
        the event that brings it there:
        a comment if nothing is new for `BEAT_S`, no bytes if nothing will come any more."""
        try:
            async with asyncio.timeout(BEAT_S):
                while self._version == version:
                    if self._task is None or self._task.done():
                        return version, b""
                    await self._next.wait()
                    # Not all in one turn of the loop, for which every stream's tokens would wait.
                    await asyncio.sleep(random.uniform(0.0, _APART_S * (self._num_viewers - 1)))
        except TimeoutError:
            return version, _BEAT
        if version and version == self._version - 1:
            return self._version, self._change
        if self._whole is None:
            self._whole = _event("picture", self._picture)
        return self._version, self._whole

    async def _watch(self) -> None:
        """Take pictures again and again, until cancelled. An error ends it, and all viewers' streams."""
        try:
            while True:
                rest = asyncio.create_task(asyncio.sleep(1.0 / PER_S))
                await self._show(await self._observer.observe())
                await rest
        except Exception:
            logger.exception("the board cannot be shown")
            asyncio.get_running_loop().call_soon(self._next.set)  # once this task is done

    async def _show(self, picture: Picture) -> None:
        """Make a picture the newest version, if more than its time is different."""
        change = difference(self._picture, picture)
        if change.keys() <= {"now"}:
            return
        await asyncio.sleep(REST_S)
        self._picture, self._whole, self._change = picture, None, _event("change", change)
        self._version += 1
        self._next.set()
        self._next = asyncio.Event()


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON merge patch (RFC 7396) that makes `new` of `old`; neither holds None."""
    patch: dict[str, Any] = {name: None for name in old if name not in new}
    for name, value in new.items():
        before = old.get(name)
        if isinstance(value, dict) and isinstance(before, dict):
            if value is not before and (inner := difference(before, value)):
                patch[name] = inner
        elif value != before:
            patch[name] = value
    return patch


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), dumps(value))


async def _board(request: Request) -> Board:
    board: Board = request.app.state.board
    return board


@router.get("/", response_model=None)
@router.get("/board", response_model=None)
async def page() -> Response:
    """A page that shows the cluster live."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/cluster/events", response_model=None)
async def events(board: Annotated[Board, Depends(_board)]) -> EventStream:
    """Server-sent events: a `picture` of the cluster, then each `change` to it as a JSON merge patch."""
    return EventStream(board.api, board.pictures())


def _hashes(tag: bytes) -> str:
    """Hashes of the page's inline texts in such tags, as a Content-Security-Policy names them."""
    inline = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), _PAGE, flags=re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inline)


_PAGE: Final = (Path(__file__).parent / "page.html").read_bytes()
_HEADERS: Final = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(b'script')}",
            f"style-src {_hashes(b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    ),
    "cache-control": "no-cache",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
}
