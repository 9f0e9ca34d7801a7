"""The endpoints beside generation that clients use: models, tokens, health, load."""

from __future__ import annotations

import asyncio
import importlib.metadata
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from cluster.errors import InvalidRequestError
from cluster.http.api import Api, ApiOf
from cluster.http.openai.schemas import DetokenizeBody, TemplateBody, TokenizeBody
from cluster.http.openai.sse import dumps_large
from cluster.http.parse import chat_token_ids, text_token_ids, token_text
from cluster.http.response import ReadResponse
from cluster.http.server.body import JsonRoute

if TYPE_CHECKING:
    from cluster.gateway.adapter_folder import ListedAdapter

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", response_model=None)
async def list_models(api: ApiOf) -> dict[str, Any]:
    return {"object": "list", "data": [_model_card(api), *(_adapter_card(api, told) for told in await _listed(api))]}


@router.get("/v1/models/{model:path}", response_model=None)
async def retrieve_model(model: str, api: ApiOf) -> dict[str, Any]:
    told = next((told for told in await _listed(api) if told.name == model), None)
    if told is not None and model != api.model_name:
        return _adapter_card(api, told)
    await api.adapter_of(model)
    return _model_card(api)


async def _listed(api: Api) -> list[ListedAdapter]:
    """The adapters that there are."""
    return [] if api.adapters is None else await asyncio.to_thread(api.adapters.listed)


def _adapter_card(api: Api, told: ListedAdapter) -> dict[str, Any]:
    card = {"id": told.name, "created": told.changed_at, "root": told.folder, "parent": api.model_name}
    return _model_card(api) | card


def _model_card(api: Api) -> dict[str, Any]:
    limits = api.generator.limits()
    return {
        "id": api.model_name,
        "object": "model",
        "created": api.created,
        "owned_by": "legato",
        "max_model_len": None if limits is None else limits.max_model_len,
        "parent": None,
    }


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, api: ApiOf) -> Response:
    if body.model is not None:
        await api.adapter_of(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either prompt or messages.", param="prompt")
    if body.messages is not None:
        tokens = await chat_token_ids(body.messages, body, api)
    elif of_chats := [name for name in TemplateBody.model_fields if getattr(body, name) not in (None, {}, [])]:
        raise InvalidRequestError(f"{of_chats[0]} is only possible with messages. Leave it out.", param=of_chats[0])
    else:
        tokens = await text_token_ids(body.prompt or "", api, add_special_tokens=body.add_special_tokens)
    limits = api.generator.limits()
    context = None if limits is None else limits.max_model_len
    answer: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": context}
    if body.return_token_strs:
        answer["token_strs"] = [api.tokenizer.token_name(token_id) for token_id in tokens]
    return await _json(answer, api)


async def _json(answer: dict[str, Any], api: Api) -> Response:
    """An answer of any size."""
    return ReadResponse.of_json(api, await api.turns.writing(dumps_large, answer))


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, api: ApiOf) -> Response:
    if body.model is not None:
        await api.adapter_of(body.model)
    return await _json({"prompt": await token_text(body.tokens, api)}, api)


@router.get("/ping", response_model=None)
@router.post("/ping", response_model=None)
@router.get("/health", response_model=None)
async def health(api: ApiOf) -> JSONResponse:
    """Answers 200 only if a request sent now could be served, else 503."""
    limits = api.generator.limits()
    if limits is not None and limits.ready:
        return JSONResponse({"status": "ready"})
    reason = "No worker has reported yet." if limits is None else limits.reason
    return JSONResponse({"status": "unavailable", "reason": reason}, status_code=503)


@router.get("/version", response_model=None)
async def version() -> dict[str, str]:
    try:
        return {"version": importlib.metadata.version("legato")}
    except importlib.metadata.PackageNotFoundError:  # a checkout that is not installed
        return {"version": "unknown"}


@router.get("/load", response_model=None)
async def load(api: ApiOf) -> dict[str, int]:
    """How many requests the gateway that is asked is answering now, under vLLM's name."""
    return {"server_load": api.recent.num_running}
