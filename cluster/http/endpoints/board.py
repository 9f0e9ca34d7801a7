"""The board at `/`: its page, which holds no data, and the stream of pictures that it draws (`cluster.http.board`).

Whoever may ask for `/cluster` may ask for `/cluster/events`, and the page asks with the key that it is given: what
authenticates clients in front of the gateway can let everybody have the page.
"""

from __future__ import annotations

import base64
import hashlib
import re
from pathlib import Path
from typing import Annotated, Final

from fastapi import APIRouter, Depends, Request
from fastapi.responses import Response

from cluster.http.board.board import Board, BoardResponse
from cluster.http.body import JsonRoute

router = APIRouter(route_class=JsonRoute)


async def _board(request: Request) -> Board:
    board: Board = request.app.state.board
    return board


@router.get("/", response_model=None)
@router.get("/board", response_model=None)
async def page() -> Response:
    """A page that shows the cluster live."""
    return Response(_PAGE, media_type="text/html", headers=_HEADERS)


@router.get("/cluster/events", response_model=None)
async def events(board: Annotated[Board, Depends(_board)]) -> BoardResponse:
    """Server-sent events: a `picture` of the cluster, then each `change` to it as a JSON merge patch."""
    return BoardResponse(board)


def _hashes(tag: bytes) -> str:
    """Of what the page has inline, as a Content-Security-Policy names them."""
    inline = re.findall(rb"<%b>(.*?)</%b>" % (tag, tag), _PAGE, flags=re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in inline)


_PAGE: Final = (Path(__file__).parents[1] / "board" / "page.html").read_bytes()
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
