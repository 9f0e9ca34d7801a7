"""Everything that can go wrong with a request, in OpenAI's shape.

    ApiError
    ├── InvalidRequestError            400  the client's mistake; says what to change (of a body also 408 and 413)
    │   ├── NotFoundError              404  no such model or URL
    │   ├── ConflictError              409  not in the state that the cluster is in
    │   └── UnreadError                400  the client does not read what it asked for
    └── GenerationError                     what a `Generator` may raise
        ├── RequestTooLargeError       400  no worker of this cluster could ever hold it
        ├── PoisonRequestError         422  it makes workers fail, and will not be tried again
        ├── OverloadedError            429  not now; `Retry-After` says when
        ├── UnavailableError           503  no worker is ready
        ├── DeadlineError              504  the request's deadline passed
        └── FailedError                500  every attempt failed

Knows HTTP status codes, nothing of FastAPI, workers or Ray.

To add one, write a class here and say in `cluster.slo.account.slo_outcome_of` whether it breaks a promise.
`docs/guide/http-api.md` and `docs/guide/troubleshooting.md` explain its code; `test_timeline.py` and `test_http_api.py`
try it. Raise it where it is found out:

    of a field of the body        `cluster.http.openai.fields`; a code of ours is listed in `_OUR_CODES` of
                                  `cluster.http.error_responses`, or it turns into `invalid_value`
    of the body as a whole        `cluster.http.parse`
    no room in this gateway       `cluster.http.api`
    by the scheduler              `cluster.scheduler.placement.admission`, whose verdict `cluster.scheduler.scheduler`
                                  logs and tells; `Unplaceable` on the wire, an error in
                                  `cluster.gateway.scheduler_client`. It has a sentence and a time to come back; one
                                  with a class of its own needs a field more, and `cluster.gateway.placing` has to know
                                  whether a request that is recovering may be placed again after it
    by a worker                   `Refused` or `FailureEvent`, taken by `cluster.gateway.orchestrator`
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
    """Base class. `message` is a full sentence for the client, `param` the field it speaks of. `code` and `status`:
    where they are not those of the class."""

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
        """The JSON object that OpenAI's clients parse."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The one that Anthropic's clients parse."""
        kind = _ANTHROPIC_KINDS.get(self.status, "invalid_request_error" if self.status < 500 else "api_error")
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.code == "thread_unsupported_request":  # what its clients look for, to go on without one
            error["details"] = {"error_code": self.code, "unsupported": [self.param]}
        return {"type": "error", "error": error}

    def headers(self) -> dict[str, str]:
        """`Retry-After` in whole seconds, rounded up, where a time is known."""
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
    """Base class of what ends the generation of a sequence without a finish reason."""


class RequestTooLargeError(GenerationError):
    status = 400
    kind = "invalid_request_error"
    default_code = "request_too_large"


class PoisonRequestError(GenerationError):
    """The fault is ours, but clients repeat what gets a 5xx by themselves, and this must not be repeated."""

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
