"""The endpoints beside generation that clients use: models, tokens, health, load.

A new one is a route here, or in a module of its own that `cluster.http.app` names, and a row of
`docs/guide/http-api.md`. The proxy of `docs/guide/security.md` lets through what begins with `/v1/`, and by name what
does not. Tests: `test_http_api.py`, `tests/support/openai_conformance.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from cluster.errors import InvalidRequestError
from cluster.http.api import Api, ApiOf
from cluster.http.openai.schemas import DetokenizeBody, TemplateBody, TokenizeBody
from cluster.http.openai.tools import told_tools
from cluster.http.prompts import chat_token_ids, text_token_ids, token_text
from cluster.http.response import ReadResponse
from cluster.http.served_model import NO_WORKER, ServedModel
from cluster.http.server.body import JsonRoute

if TYPE_CHECKING:
    from cluster.gateway.adapter_folder import ListedAdapter

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models", response_model=None)
@router.head("/v1/models", response_model=None, include_in_schema=False)
@router.get("/v1/models/", response_model=None, include_in_schema=False)  # as people type it to see who is there
async def list_models(api: ApiOf) -> Response:
    listed = [(_model_card(api, model), await model.listed_adapters()) for model in api.models]

    def answer() -> dict[str, Any]:
        cards = []
        for card, adapters in listed:
            cards += [card, *(_adapter_card(card, told) for told in adapters)]
        return {"object": "list", "data": cards}

    return await ReadResponse.made(api, answer)


@router.get("/v1/models/{model:path}", response_model=None)
async def retrieve_model(model: str, api: ApiOf) -> dict[str, Any]:
    cards: dict[str, dict[str, Any]] = {}  # of the adapters of that name, by the models whose they are
    if api.served(model) is None:
        for base in api.models:
            if (told := await base.listed_adapter(model)) is not None:
                cards[base.name] = _adapter_card(_model_card(api, base), told)
    if len(cards) == 1:  # as it lies there, whether or not it can be computed
        return next(iter(cards.values()))
    asked = await api.find_model(model)
    return cards.get(asked.model.name) or _model_card(api, asked.model)


def _adapter_card(base: dict[str, Any], told: ListedAdapter) -> dict[str, Any]:
    return base | {"id": told.name, "created": told.changed_at, "root": told.folder, "parent": base["id"]}


def _model_card(api: Api, model: ServedModel) -> dict[str, Any]:
    limits = model.limits()
    return {
        "id": model.name,
        "object": "model",
        "created": api.created,
        "owned_by": "legato",
        "max_model_len": None if limits is None else limits.max_model_len,
        "parent": None,
    }


@router.post("/tokenize", response_model=None)
async def tokenize(body: TokenizeBody, api: ApiOf) -> Response:
    asked = await api.find_model(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise InvalidRequestError("Send either prompt or messages.", param="prompt")
    if body.messages is not None:
        tokens = await chat_token_ids(body.messages, body, asked, told_tools(body.tools or ()))
    elif of_chats := [n for n in (*TemplateBody.model_fields, "tools") if getattr(body, n) not in (None, {}, [])]:
        raise InvalidRequestError(f"{of_chats[0]} is only possible with messages. Leave it out.", param=of_chats[0])
    else:
        tokens = await text_token_ids(body.prompt or "", asked, add_special_tokens=body.add_special_tokens)
    limits = asked.model.limits()
    context = None if limits is None else limits.max_model_len

    def answer() -> dict[str, Any]:
        told: dict[str, Any] = {"tokens": tokens, "count": len(tokens), "max_model_len": context}
        if body.return_token_strs:
            told["token_strs"] = [asked.model.tokenizer.token_name(token_id) for token_id in tokens]
        return told

    return await ReadResponse.made(api, answer)


@router.post("/detokenize", response_model=None)
async def detokenize(body: DetokenizeBody, api: ApiOf) -> Response:
    asked = await api.find_model(body.model)
    text = await token_text(body.tokens, asked)
    return await ReadResponse.made(api, lambda: {"prompt": text})


@router.get("/ping", response_model=None)
@router.post("/ping", response_model=None)
@router.get("/health", response_model=None)
@router.head("/health", response_model=None, include_in_schema=False)  # as load balancers look
async def health(api: ApiOf) -> JSONResponse:
    """Answers 200 only if a request sent now could be served, else 503. Of several models one is enough; `unavailable`
    names the others: who takes a gateway out of service for one model would take it from all."""
    reasons = {}
    for model in api.models:
        limits = model.limits()
        if limits is None or not limits.ready:
            reasons[model.name] = NO_WORKER if limits is None else limits.reason
    if len(reasons) < len(api.models):
        return JSONResponse({"status": "ready"} | ({"unavailable": reasons} if reasons else {}))
    return JSONResponse({"status": "unavailable", "reason": " ".join(dict.fromkeys(reasons.values()))}, status_code=503)


@router.get("/version", response_model=None)
async def version(api: ApiOf) -> dict[str, str | int]:
    return api.build


@router.get("/load", response_model=None)
async def load(api: ApiOf) -> dict[str, int]:
    """How many requests the gateway that is asked is answering now, under vLLM's name."""
    return {"server_load": api.recent.num_running}
