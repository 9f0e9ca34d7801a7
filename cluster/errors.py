"""Everything that can go wrong with a request, in OpenAI's shape.

    ApiError
    ├── InvalidRequestError            400  the client is mistaken, and is told what to change; bodies also get 408, 413
    │   ├── NotFoundError              404  there is no such model, URL or object
    │   ├── ConflictError              409  the cluster's state does not allow it
    │   └── UnreadError                400  the client does not read what it asked for
    └── GenerationError                     what a `Generator` may raise
        ├── RequestTooLargeError       400  no worker of this cluster could ever hold the request
        ├── PoisonRequestError         422  the request makes workers fail, and will not be tried again
        ├── OverloadedError            429  there is no room now; `Retry-After` says when to come back
        ├── UnavailableError           503  no worker is ready
        ├── DeadlineError              504  the request's deadline passed
        └── FailedError                500  every attempt failed

This file knows HTTP status codes, and nothing of FastAPI, workers or Ray.

To add an error, write a class here and say in `cluster.slo.account.slo_outcome_of` whether it breaks a promise. Explain
its code in `docs/guide/http-api.md` and `docs/guide/troubleshooting.md`, try it in `test_timeline.py` and
`test_http_api.py`. A status that no other class has is also a word of other APIs (`_ANTHROPIC_KINDS` here, `told_error`
of `cluster.http.background`), and says to batches whether to try again (`_NOT_NOW` of `cluster.batch.service`). Raise
it where it is found out:

* A field of the body is wrong: in `cluster.http.openai.fields`. List a code of ours in `_OUR_CODES` of
  `cluster.http.error_responses`, or clients get `invalid_value`.
* The body as a whole is wrong: in `cluster.http.parse`; its prompt: in `cluster.http.prompts`.
* This gateway has no room: in `cluster.http.api`.
* The scheduler refuses: `cluster.scheduler.placement.admission` decides, `cluster.scheduler.scheduler` logs that and
  answers with `Unplaceable`, and `cluster.gateway.scheduler_client` turns this into an error. `Unplaceable` has a
  sentence and a time to come back. An error with a class of its own needs another field there, and
  `cluster.gateway.placing` has to know whether a request that is recovering may be placed again after it.
* A worker refuses or fails: it sends `Refused` or a `FailureEvent`, which `cluster.gateway.orchestrator` takes.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Final

_ANTHROPIC_KINDS: Final = {
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """The base class of all errors that a client is told. `message` is a full sentence for the client, and `param` the
    field that it speaks of. Give `code` and `status` where they differ from the class's own."""

    status: int = 500
    kind: ClassVar[str] = "server_error"
    default_code: ClassVar[str | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.status = status or self.status
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """The error as the JSON object that OpenAI's clients parse."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error as the JSON object that Anthropic's clients parse."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == "thread_unsupported_request":  # what its clients look for, to go on without one
            error["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return {"type": "error", "error": error}

    def headers(self) -> dict[str, str]:
        """The header `Retry-After` in whole seconds, rounded up, if it is known when to come back; else none."""
        if self.retry_after_s is None:
            return {}
        return {"retry-after": str(max(1, math.ceil(self.retry_after_s)))}


class InvalidRequestError(ApiError):
    status = 400
    kind = "invalid_request_error"
    default_code = "invalid_value"


class NotFoundError(InvalidRequestError):
    status = 404
    default_code = "not_found"


class ConflictError(InvalidRequestError):
    status = 409
    default_code = "conflict"


class UnreadError(InvalidRequestError):
    default_code = "unread"


class GenerationError(ApiError):
    """The base class of errors that end the generation of a sequence without a finish reason."""


class RequestTooLargeError(GenerationError):
    status = 400
    kind = "invalid_request_error"
    default_code = "request_too_large"


class PoisonRequestError(GenerationError):
    """The request makes workers fail. The fault is ours, but the status is no 5xx: clients repeat what gets one by
    themselves, and this must not be repeated."""

    status = 422
    kind = "invalid_request_error"
    default_code = "makes_workers_fail"

    def __init__(self) -> None:
        super().__init__(
            "This request makes the workers that compute it fail, two of them so far; it is not tried again. Change it,"
            " and report it to whoever operates this service."
        )


class OverloadedError(GenerationError):
    status = 429
    kind = "rate_limit_error"
    default_code = "overloaded"

    def __init__(self, message: str, *, retry_after_s: float) -> None:
        super().__init__(message, retry_after_s=retry_after_s)


class UnavailableError(GenerationError):
    status = 503
    kind = "service_unavailable_error"
    default_code = "unavailable"

    def __init__(self, message: str, *, retry_after_s: float, code: str | None = None) -> None:
        super().__init__(message, retry_after_s=retry_after_s, code=code)


class DeadlineError(GenerationError):
    status = 504
    kind = "timeout_error"
    default_code = "deadline_exceeded"


class FailedError(GenerationError):
    status = 500
    default_code = "generation_failed"
