"""The HTTP application of one gateway: OpenAI's API over a `Generator`.

Knows no worker and no Ray: `cluster.app` runs it inside a Serve replica, tests run it under uvicorn.
"""

from __future__ import annotations

from typing import Final

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware

from cluster.http.api import Api
from cluster.http.board import board
from cluster.http.endpoints import adapters, batches, generation, messages, operators, pooling, responses, service
from cluster.http.error_responses import install_error_handlers
from cluster.http.other_gateways import OtherGateways
from cluster.http.server.body import BodyLimit
from cluster.slo.classes import CLASS_HEADER

MODULES: Final = (generation, messages, responses, pooling, batches, adapters, operators, service, board)
"""Of endpoints: each has a `router`."""


def create_app(api: Api) -> FastAPI:
    """Make the application of a gateway, whose endpoints use what `api` holds."""
    # A client that sends JSON without saying so is understood. Docs pages would load scripts from elsewhere. A slash
    # too many at a path's end is a 404, as at OpenAI: whom Starlette sends elsewhere gets a 500 where the query is no
    # UTF-8, and an address without TLS behind a proxy that has it.
    app = FastAPI(title="Legato", docs_url=None, redoc_url=None, strict_content_type=False, redirect_slashes=False)
    app.state.api = api
    app.state.board = board.Board(api)
    app.state.others = OtherGateways(api)
    for module in MODULES:
        app.include_router(module.router)
    install_error_handlers(app)
    api.metrics.watch_unread(lambda: api.unread.num_bytes)
    max_bytes = api.settings.max_body_bytes
    app.add_middleware(
        BodyLimit,
        max_bytes=max_bytes,
        max_arriving_bytes=max(api.limits.max_arriving_bytes, max_bytes),
        timeout_s=api.limits.body_timeout_s,
        streamed={batches.FILES_PATH: batches.MAX_FILE_BYTES},
    )
    if api.settings.cors_origins:  # outside of `BodyLimit`, so that a page can read its refusals, too
        app.add_middleware(
            CORSMiddleware,
            allow_origins=api.settings.cors_origins,
            allow_methods=("GET", "POST", "DELETE"),
            allow_headers=("*",),
            expose_headers=("x-request-id", "request-id", "retry-after", CLASS_HEADER),
        )
    return app
