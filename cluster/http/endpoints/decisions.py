"""`GET /cluster/decisions`: what the global scheduler decided lately, and from which candidates."""

from __future__ import annotations

import json
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from cluster.http.api import Api
from kv_transfer.messages.decisions import MAX_DECISIONS

router = APIRouter()


@router.get("/cluster/decisions", response_model=None)
async def decisions(
    request: Request,
    limit: Annotated[int, Query(ge=1, le=MAX_DECISIONS)] = 20,
    format: Literal["json", "text"] = "json",
) -> Response:
    """The newest first. `format=text`: the tables that they were made from. `scheduler.decision_log` has them all."""
    api: Api = request.app.state.api
    as_text = format == "text"
    told = await api.generator.decisions(limit, as_text=as_text)
    if as_text:
        return PlainTextResponse("\n\n".join(told) + "\n")
    return JSONResponse({"decisions": [json.loads(line) for line in told]})
