"""The routes by which adapters come and go while the gateway runs, as vLLM spells them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastapi import APIRouter, Query
from fastapi.responses import PlainTextResponse

from cluster.errors import ConflictError, InvalidRequestError, NotFoundError
from cluster.http.api import Api, ApiOf
from cluster.http.openai.schemas import LoadAdapterBody, UnloadAdapterBody
from cluster.http.server.body import JsonRoute

if TYPE_CHECKING:
    from cluster.gateway.adapter_folder import AdapterFolder

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/load_lora_adapter", response_model=None)
async def load(body: LoadAdapterBody, api: ApiOf) -> PlainTextResponse:
    """Serve the adapter in that folder under that name from now on, at every gateway and after a restart."""
    adapters = _adapters(api)
    if body.lora_name == api.model_name:
        raise InvalidRequestError(f"{body.lora_name!r} is the model itself. Use another name.", param="lora_name")
    folder = Path(body.lora_path)
    try:
        await asyncio.to_thread(adapters.register, body.lora_name, folder, replace=body.load_inplace)
    except (ValueError, OSError) as error:
        raise InvalidRequestError(f"The adapter is not loaded: {error}.", param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None)
async def unload(body: UnloadAdapterBody, api: ApiOf) -> PlainTextResponse:
    """Refuse requests that name it from now on; those that run with it go on."""
    return await _unload(body.lora_name, api)


@router.delete("/v1/load_lora_adapter", response_model=None)
async def delete(lora_name: Annotated[str, Query(min_length=1)], api: ApiOf) -> PlainTextResponse:
    """Take an adapter away as `unload` does, with `lora_name` in the query."""
    return await _unload(lora_name, api)


async def _unload(name: str, api: Api) -> PlainTextResponse:
    try:
        was_there = await asyncio.to_thread(_adapters(api).unregister, name)
    except (ValueError, OSError) as error:
        raise ConflictError(f"The adapter stays: {error}.", param="lora_name") from error
    if not was_there:
        raise NotFoundError(
            f"There is no adapter {name[:200]!r} here (see /v1/models).", param="lora_name", code="model_not_found"
        )
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def _adapters(api: Api) -> AdapterFolder:
    if api.adapters is None:
        raise InvalidRequestError(
            "Adapters are not served here. Whoever operates this service can set adapters.folder.",
            code="unsupported_value",
        )
    return api.adapters
