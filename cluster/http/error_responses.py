"""Every error of the HTTP side in OpenAI's shape: ours, pydantic's, Starlette's, and the unexpected."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.types import Scope

from cluster.errors import ApiError, FailedError, InvalidRequestError
from cluster.http.api import Api
from cluster.http.server.request_id import is_anthropics

logger = logging.getLogger(__name__)

# Codes that `cluster.http.openai.fields` raises, with sentences that are whole.
_OUR_CODES = (
    "invalid_type",
    "invalid_value",
    "unsupported_parameter",
    "unsupported_value",
    "thread_unsupported_request",
)
_CODES: Mapping[str, str] = {
    "extra_forbidden": "unknown_parameter",
    "missing": "missing_required_parameter",
    **{code: code for code in _OUR_CODES},
}


def install_error_handlers(app: FastAPI) -> None:
    """Let the app answer every error in OpenAI's shape, or in Anthropic's on their paths."""
    app.add_exception_handler(ApiError, _api_error)
    app.add_exception_handler(RequestValidationError, _validation_error)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _unexpected)


def error_response(error: ApiError, scope: Scope) -> JSONResponse:
    """The answer for an error, in the shape that clients of the request's path parse."""
    return JSONResponse(_body(error, scope), status_code=error.status, headers=error.headers())


def _body(error: ApiError, scope: Scope) -> dict[str, Any]:
    return error.anthropic_body() if is_anthropics(scope) else error.body()


async def _api_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, ApiError)
    _count(request, error.code or "invalid")
    return error_response(error, request.scope)


async def _validation_error(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    return await _api_error(request, _invalid(error.errors()[0]))


async def _http_exception(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error.__cause__, ApiError):  # FastAPI takes whatever the parser of a body raises for a 400 of its own
        return await _api_error(request, error.__cause__)
    path = request.scope["path"][:200]  # `request.url` would decode the query as well, which may be no UTF-8
    sentences = {
        404: f"There is no {path}. See /openapi.json for what there is.",
        405: f"{request.method} is not possible on {path}. See /openapi.json for what is.",
        400: "The body cannot be read. Send a JSON object in UTF-8.",
    }
    message = sentences.get(error.status_code, f"{error.detail}.")
    codes = {404: "unknown_url", 405: "method_not_allowed", 400: "invalid_json"}
    answer = InvalidRequestError(message, code=codes.get(error.status_code), status=error.status_code)
    _count(request, answer.code or "invalid")
    return JSONResponse(_body(answer, request.scope), status_code=error.status_code, headers=error.headers)


async def _unexpected(request: Request, error: Exception) -> JSONResponse:
    # Starlette raises it again for the server to log, with its traceback.
    _count(request, "failed")
    return error_response(FailedError("The server failed to answer; the fault is its own. Try again."), request.scope)


def _count(request: Request, outcome: str) -> None:
    """Count a request that ended with this outcome, by its route:
    the client's own path would make any number of series."""
    api: Api = request.app.state.api
    route = request.scope.get("route")
    api.metrics.count(getattr(route, "path", "other"), outcome)


def from_validation(error: ValidationError, *path: str | int) -> InvalidRequestError:
    """An error for the first of pydantic's problems with a body, or with the part of it at `path`: a sentence that
    names the field and says what to do."""
    problem = error.errors(include_url=False)[0]
    return _invalid({**problem, "loc": ("body", *path, *problem["loc"])})


def _invalid(problem: Mapping[str, Any]) -> InvalidRequestError:
    kind, path = problem["type"], problem["loc"][1:]
    if not path:
        return InvalidRequestError(
            "The body must be a JSON object, sent with the header Content-Type: application/json.", code="invalid_json"
        )
    param = _dotted(path)
    return InvalidRequestError(_sentence(param, problem), param=param, code=_CODES.get(kind, _type_code(kind)))


def _sentence(param: str, problem: Mapping[str, Any]) -> str:
    kind, message = problem["type"], str(problem["msg"])
    if kind == "extra_forbidden":
        return f"Unrecognized request argument supplied: {param}. Check its spelling, or leave it out."
    if kind == "missing":
        return f"{param} is missing. It is required, so send it."
    if kind in _OUR_CODES:
        return f"{param}: {message}."
    return f"{param}: {message[:1].lower()}{message[1:]}, but it is {_shown(problem.get('input'))}."


def _type_code(kind: str) -> str:
    return "invalid_type" if kind.endswith(("_type", "_parsing")) or kind == "int_from_float" else "invalid_value"


def _dotted(path: Sequence[int | str]) -> str:
    """A path as text: ("messages", 0, "role") becomes "messages[0].role"."""
    dotted = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return dotted.removeprefix(".")[:200]


def _shown(value: object) -> str:
    """At most 80 characters that show a value, however large or deep it is."""
    shown = reprlib.repr(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."
