"""OpenAI's files and batches: many requests in one file, answered when there is room, into another file."""

from __future__ import annotations

import json
import logging
import re
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Request
from pydantic import Field
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.exceptions import HTTPException

from cluster.batch.batches import Batch
from cluster.batch.files import StoredFile
from cluster.batch.lines import BatchLine, LineAnswer
from cluster.batch.service import BatchService
from cluster.errors import FailedError, InvalidRequestError, NotFoundError
from cluster.http.api import Api, ApiOf
from cluster.http.internal_requests import BatchClient, on_behalf, post_inside
from cluster.http.openai.fields import Metadata
from cluster.http.openai.schemas import Body
from cluster.http.response import ReadResponse
from cluster.http.server.body import JsonRoute
from cluster.http.server.request_id import OneRequestId
from cluster.http.terms import Tenants
from cluster.slo.classes import CLASS_HEADER, SloConfig

logger = logging.getLogger(__name__)

PURPOSE: Final = "batch"
FILES_PATH: Final = "/v1/files"
MAX_FILE_BYTES: Final = 200 * 2**20  # OpenAI's bound for a batch
MAX_PAGE: Final = 1_000  # files in one answer; more may be asked for, and then it says that there are more
MAX_BATCHES: Final = 100  # likewise: each may tell of as many errors. OpenAI's bound
_MAX_LIMIT: Final = 10_000  # OpenAI's, of files
_MAX_FIELD_BYTES: Final = 4_096
_MAX_FILENAME: Final = 255
_WINDOW: Final = re.compile(r"(\d{1,5})([smhd])")
_SECONDS: Final = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}
_LONGEST_WINDOW_S: Final = 14 * 86_400
_EXPIRY_S: Final = (3_600, 2_592_000)  # the least and the most time after which a file may expire: OpenAI's bounds
_BOUNDARY: Final = re.compile(rb"[ !#-\[\]-~]+")  # between parts of a form: what may stand in quotes as it is

router = APIRouter(route_class=JsonRoute)


class BatchBody(Body):
    """`POST /v1/batches`"""

    input_file_id: str = Field(min_length=1, max_length=100)
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: str = Field(max_length=10)
    metadata: Metadata = None


@router.post(FILES_PATH, response_model=None)
async def upload_file(request: Request, api: ApiOf) -> dict[str, Any]:
    service, owner = _service(api), _owner(request, api)
    try:
        form = await _plain_form(request).form(max_files=1, max_fields=8, max_part_size=_MAX_FIELD_BYTES)
    except HTTPException as error:  # which Starlette makes of what its parser refuses
        raise _no_form(error.detail) from None
    async with _closing(form):
        upload = form.get("file")
        if not isinstance(upload, UploadFile):
            raise InvalidRequestError("There is no file in the form. Send it as `file`.", param="file")
        expires_after_s = _checked_fields(form)
        filename = (upload.filename or "file")[:_MAX_FILENAME]
        content = service.files.new_content()
        await service.files.copy(upload.file, content)
        try:
            file = await service.files.add(
                content, owner, filename=filename, purpose=PURPOSE, expires_after_s=expires_after_s
            )
        except Exception:
            content.unlink(missing_ok=True)
            raise
    return file.describe()


def _plain_form(request: Request) -> Request:
    """The request as one of a form without an encoding of its own, which a form has not (RFC 7578, section 5.1.2).
    Starlette would ask Python for it, which remembers for ever each name that it does not know. Raises
    InvalidRequestError for what is no form with parts, before any of it is read."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not _BOUNDARY.fullmatch(boundary):
        raise _no_form("its Content-Type says so, or names no boundary.")
    headers = [(name, value) for name, value in request.scope["headers"] if name != b"content-type"]
    headers.append((b"content-type", b'multipart/form-data; boundary="%b"' % boundary))
    return Request({**request.scope, "headers": headers}, request.receive)


def _no_form(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"This is no form with a file: {why} Send multipart/form-data.")


@asynccontextmanager
async def _closing(form: FormData) -> AsyncIterator[None]:
    try:
        yield
    finally:
        await form.close()


def _checked_fields(form: FormData) -> int | None:
    """The seconds after which the file expires; None: it does not. Raises InvalidRequestError for fields that cannot be
    honoured."""
    known = {"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"}
    for name in form:
        if name not in known:
            shown = name[:100]
            raise InvalidRequestError(f"There is no field {shown!r} here. Leave it out.", param=shown)
    if form.get("purpose") != PURPOSE:
        raise InvalidRequestError(f'purpose must be "{PURPOSE}": files are for batches here.', param="purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return None
    least, most = _EXPIRY_S
    if anchor != "created_at" or not isinstance(seconds, str) or not re.fullmatch(r"\d{1,9}", seconds):
        raise InvalidRequestError('expires_after needs the anchor "created_at" and seconds.', param="expires_after")
    if not least <= int(seconds) <= most:
        raise InvalidRequestError(f"expires_after lies between {least} and {most} seconds.", param="expires_after")
    return int(seconds)


@router.get(FILES_PATH, response_model=None)
async def list_files(
    request: Request,
    api: ApiOf,
    purpose: str | None = None,
    after: str | None = None,
    limit: int = MAX_PAGE,
    order: Literal["asc", "desc"] = "desc",
) -> ReadResponse:
    limit = _checked_limit(limit, MAX_PAGE)
    files = await _service(api).files.list(
        _owner(request, api), purpose=purpose, after=after, limit=limit + 1, newest_first=order == "desc"
    )
    return await ReadResponse.made(api, lambda: _page([file.describe() for file in files], limit))


@router.get(FILES_PATH + "/{file_id}", response_model=None)
async def retrieve_file(file_id: str, request: Request, api: ApiOf) -> dict[str, Any]:
    return (await _file(file_id, request, api)).describe()


@router.get(FILES_PATH + "/{file_id}/content", response_model=None)
async def file_content(file_id: str, request: Request, api: ApiOf) -> ReadResponse:
    file = await _file(file_id, request, api)
    headers = {"content-type": "application/octet-stream", "content-length": str(file.num_bytes)}
    return ReadResponse(api, _service(api).files.read(file), headers)


@router.delete(FILES_PATH + "/{file_id}", response_model=None)
async def delete_file(file_id: str, request: Request, api: ApiOf) -> dict[str, Any]:
    await _service(api).files.delete(file_id, _owner(request, api))
    return {"id": file_id, "object": "file", "deleted": True}


async def _file(file_id: str, request: Request, api: Api) -> StoredFile:
    return await _service(api).files.get(file_id, _owner(request, api))


@router.post("/v1/batches", response_model=None)
async def create_batch(body: BatchBody, request: Request, api: ApiOf) -> dict[str, Any]:
    service, owner = _service(api), _owner(request, api)
    file = await service.files.get(body.input_file_id, owner)
    if file.purpose != PURPOSE:
        raise InvalidRequestError("The file's purpose is not batch. Upload the lines anew.", param="input_file_id")
    created_at = int(time.time())
    batch = Batch(
        owner=owner,
        tenant=api.tenants.name(request.headers, None, None),
        salt=api.tenants.salt(request.headers, None),
        endpoint=body.endpoint,
        input_file_id=file.id,
        completion_window=body.completion_window,
        created_at=created_at,
        expires_at=created_at + _window_s(body.completion_window),
        metadata=body.metadata,
    )
    await service.add(batch, file)
    return batch.describe()


def _window_s(text: str) -> int:
    """The seconds of a completion window such as "24h". Raises InvalidRequestError."""
    found = _WINDOW.fullmatch(text)
    seconds = int(found[1]) * _SECONDS[found[2]] if found else 0
    if not 0 < seconds <= _LONGEST_WINDOW_S:
        raise InvalidRequestError(
            "completion_window is a number with s, m, h or d, such as 24h, of 14d at most.", param="completion_window"
        )
    return seconds


@router.get("/v1/batches", response_model=None)
async def list_batches(request: Request, api: ApiOf, after: str | None = None, limit: int = 20) -> ReadResponse:
    limit = _checked_limit(limit, MAX_BATCHES)
    batches = await _service(api).batches.list(_owner(request, api), after=after, limit=limit + 1)
    return await ReadResponse.made(api, lambda: _page([batch.describe() for batch in batches], limit))


@router.get("/v1/batches/{batch_id}", response_model=None)
async def retrieve_batch(batch_id: str, request: Request, api: ApiOf) -> dict[str, Any]:
    return (await _service(api).batches.get(batch_id, _owner(request, api))).describe()


@router.post("/v1/batches/{batch_id}/cancel", response_model=None)
async def cancel_batch(batch_id: str, request: Request, api: ApiOf) -> dict[str, Any]:
    service = _service(api)
    batch = await service.batches.cancel(batch_id, _owner(request, api))
    service.wake()
    return batch.describe()


def _service(api: Api) -> BatchService:
    """The gateway's files and batches. Raises NotFoundError if it keeps none."""
    if api.batches is None:
        raise NotFoundError(
            "This server keeps no files. Who operates it can give them a folder: gateway.storage.", code="no_storage"
        )
    return api.batches


def _owner(request: Request, api: Api) -> str:
    return owner_of(request, api, _service(api).secret)


def owner_of(request: Request, api: Api, secret: bytes) -> str:
    """The name of the client whose files and responses are asked for. It is hashed under the folder's secret, so that
    they are found again after a restart."""
    if (whose := on_behalf(request.scope)) is not None:
        return whose.owner
    tenants = Tenants(secret, trust_header=api.settings.trust_tenant_header)
    return tenants.name(request.headers, None, None)


def _checked_limit(limit: int, most: int) -> int:
    """How many objects to tell of, of which an answer has `most`. Raises InvalidRequestError."""
    if not 0 < limit <= _MAX_LIMIT:
        raise InvalidRequestError(f"limit lies between 1 and {_MAX_LIMIT}.", param="limit")
    return min(limit, most)


def _page(objects: list[dict[str, Any]], limit: int) -> dict[str, Any]:
    """OpenAI's `list` of the first `limit` of these objects. One more among them means that there are more."""
    shown = objects[:limit]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": len(objects) > limit,
    }


@asynccontextmanager
async def running_batches(app: FastAPI) -> AsyncIterator[None]:
    """Answer the lines of batches, and generate responses in the background, inside the block."""
    api: Api = app.state.api
    if api.batches is None:
        yield
        return
    headers = {CLASS_HEADER: _patient_class(api.slo.classes)}
    named = OneRequestId(app)  # answers from inside get a request id as those of the server do

    async def send(batch: Batch, line: BatchLine) -> LineAnswer:
        deadline = time.monotonic() + batch.expires_at - time.time()
        whose = BatchClient(batch.tenant, batch.salt, batch.owner, deadline)
        try:
            answered = await post_inside(named, line.url, line.body, headers, whose)
        except Exception:  # it has been answered with 500, and is raised for a server to log
            logger.exception("line %d of batch %s failed", line.number, batch.id)
            error = FailedError("The server failed to answer; the fault is its own. Try again.")
            return LineAnswer(status=error.status, body=json.dumps(error.body()))
        return LineAnswer.of_http(answered.status, answered.body.decode(), answered.headers)

    assert api.responses is not None
    models = [model.name for model in api.models]
    async with api.batches.running(send, models), api.responses.running():
        yield


def _patient_class(classes: SloConfig) -> str:
    """The name of the class that batches run in: the first one without targets, or the default if all have some."""
    return next((known.name for known in classes.classes if not known.has_targets), classes.default)
