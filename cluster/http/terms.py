"""From a request's headers and body to the terms it is served on.

Knows where clients write their wishes; `cluster.slo.classes` knows what they mean, `cluster.http.tenants` whose they
are.
"""

from __future__ import annotations

import time
from typing import Final

from fastapi import Request
from starlette.types import Scope

from cluster.errors import InvalidRequestError
from cluster.http.api import Api
from cluster.http.openai.schemas import GenerationBody
from cluster.slo.classes import CLASS_HEADER, SloChoiceError
from cluster.slo.terms import RequestTerms

_ARRIVED_AT: Final = "legato.arrived_at"


def note_arrival(scope: Scope) -> None:
    """The request has just come in; its body has not been read."""
    scope[_ARRIVED_AT] = time.monotonic()


def arrival(request: Request) -> float:
    arrived_at: float = request.scope[_ARRIVED_AT]
    return arrived_at


def terms_of(request: Request, body: GenerationBody, api: Api) -> RequestTerms:
    """Raises InvalidRequestError where a class, tier, target or tenant is none."""
    try:
        slo = api.slo.classes.choose(body.service_tier, request.headers)
    except SloChoiceError as error:
        raise InvalidRequestError(str(error), param=error.param) from error
    tenant = api.tenants.name(request.headers, body.safety_identifier, body.user)
    return RequestTerms(slo=slo, tenant=tenant, arrived_at=arrival(request))


def prefix_salt(request: Request, body: GenerationBody, api: Api) -> str:
    """With whom it shares cached prefixes: see `Tenants.salt`. Raises InvalidRequestError where a tenant is none."""
    return api.tenants.salt(request.headers, body.cache_salt)


def answered_tier(request: Request, body: GenerationBody) -> str:
    """What the answer says in `service_tier`: the tier that was asked for; a class, where a header chose one."""
    chosen = request.headers.get(CLASS_HEADER) or body.service_tier or "auto"
    return "default" if chosen == "auto" else chosen
