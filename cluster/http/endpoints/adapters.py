"""The routes by which adapters come and go while the gateway runs, as vLLM spells them."""

from __future__ import annotations

from collections.abc import Iterable
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
    adapters = _adapters_of(body.base_model_name, api)
    if api.served(body.lora_name) is not None:
        raise InvalidRequestError(f"{body.lora_name!r} is the model itself. Use another name.", param="lora_name")
    for model in api.models:
        if model.adapters is not adapters and await model.listed_adapter(body.lora_name) is not None:
            raise InvalidRequestError(
                f"{body.lora_name!r} is an adapter of {model.name!r}. Use another name.", param="lora_name"
            )
    folder = Path(body.lora_path)
    try:
        await adapters.in_thread(adapters.register, body.lora_name, folder, replace=body.load_inplace)
    except (ValueError, OSError) as error:
        raise InvalidRequestError(f"The adapter is not loaded: {error}.", param="lora_path") from error
    return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")


@router.post("/v1/unload_lora_adapter", response_model=None)
async def unload(body: UnloadAdapterBody, api: ApiOf) -> PlainTextResponse:
    """Refuse requests that name it from now on; those that run with it go on."""
    return await _unload(body.lora_name, body.base_model_name, api)


@router.delete("/v1/load_lora_adapter", response_model=None)
async def delete(
    lora_name: Annotated[str, Query(min_length=1)], api: ApiOf, base_model_name: str | None = None
) -> PlainTextResponse:
    """Take an adapter away as `unload` does, by the same fields in the query."""
    return await _unload(lora_name, base_model_name, api)


async def _unload(name: str, model: str | None, api: Api) -> PlainTextResponse:
    adapters = _adapters_of(model, api) if model else await _adapters_with(name, api)
    try:
        was_there = adapters is not None and await adapters.in_thread(adapters.unregister, name)
    except (ValueError, OSError) as error:
        raise ConflictError(f"The adapter stays: {error}.", param="lora_name", code="adapter_not_unloaded") from error
    if was_there:
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")
    raise NotFoundError(
        f"There is no adapter {name[:200]!r} here (see /v1/models).", param="lora_name", code="model_not_found"
    )


async def _adapters_with(name: str, api: Api) -> AdapterFolder | None:
    """The adapters of the only model that has one of that name, whatever lies there; None: none has. Raises
    InvalidRequestError where several have: which one would go is not to depend on their order."""
    folders = _all_adapters(api)
    having = [model for model, adapters in folders.items() if await adapters.in_thread(adapters.has, name)]
    if len(having) > 1:
        raise InvalidRequestError(
            f"Adapters of several models have the name {name[:200]!r}. Say whose goes: {_choices(having)}.",
            param="base_model_name",
        )
    return folders[having[0]] if having else None


def _adapters_of(model: str | None, api: Api) -> AdapterFolder:
    """The adapters of that model; None: of the only one that has some. Raises InvalidRequestError."""
    found = _all_adapters(api)
    if model is None and len(found) == 1:
        return next(iter(found.values()))
    if model is None or model not in found:
        raise InvalidRequestError(f"Say whose adapter it is: {_choices(found)}.", param="base_model_name")
    return found[model]


def _choices(models: Iterable[str]) -> str:
    return " or ".join(map(repr, models))


def _all_adapters(api: Api) -> dict[str, AdapterFolder]:
    """The adapters of each model that is served with some, by its name. Raises InvalidRequestError without any."""
    found = {model.name: model.adapters for model in api.models if model.adapters is not None}
    if not found:
        raise InvalidRequestError(
            "Adapters are not served here. Whoever operates this service can set adapters.folder.",
            code="unsupported_value",
        )
    return found
