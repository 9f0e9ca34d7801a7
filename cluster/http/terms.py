"""The terms that a request is served on, from its headers and body: its class and targets, and who it belongs to. And
whose trace it is a part of.

Who it belongs to counts for sharing under overload, and for whose prompts its own may be found in. A tenant's name says
nothing about keys or people:

    x-tenant             as it is, where the operator trusts the proxy that sets it (`gateway.trust_tenant_header`)
    Authorization        else a keyed hash of the client's key; Anthropic's clients send it as `x-api-key`
    safety_identifier    else a keyed hash of what the client says of its user; `user` is its older name
    ""                   else: all such requests are one tenant

Prefixes are kept apart by a salt. Who trusts each other is told by the key alone, or by a trusted proxy: what a client
says of its users does not split a key's prefixes, and an `x-tenant` that nobody vouches for can only keep them further
apart, as `cache_salt` does.

Both hashes are keyed with the cluster's secret, so that all gateways give the same name and nobody else can tell whose
it is by trying keys.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Final

from fastapi import Request

from cluster.errors import InvalidRequestError
from cluster.http.internal_requests import on_behalf
from cluster.http.openai.schemas import SampledBody, ServedBody
from cluster.http.server.connection import arrival
from cluster.slo.classes import CLASS_HEADER, STANDARD_TIERS, RequestTerms, SloClass, SloConfig

TENANT_HEADER: Final = "x-tenant"
MAX_TENANT: Final = 64
_MAX_TRACEPARENT: Final = 512
_MAX_TRACESTATE: Final = 512  # the standard asks to pass on at least so many characters


class Tenants:
    """Names tenants, and the salts of their prefixes, under one secret."""

    def __init__(self, secret: bytes, *, trust_header: bool = False, share_prefixes: bool = False) -> None:
        self._key = hashlib.blake2b(secret, person=b"legato-tenants").digest()
        self._salt_key = hashlib.blake2b(secret, person=b"legato-salts").digest()
        self._trust_header = trust_header
        self._share_prefixes = share_prefixes

    def name(self, headers: Mapping[str, str], safety_identifier: str | None, user: str | None) -> str:
        """The name of the tenant that a request belongs to.
        Raises InvalidRequestError for an `x-tenant` that cannot be one."""
        given = _tenant_header(headers)
        if given and self._trust_header:
            return given
        for kind, text in (
            ("key", _key(headers)),
            ("user", safety_identifier),
            ("user", user),
        ):
            if text:
                return f"{kind}-{self._hash(text)}"
        return ""

    def salt(self, headers: Mapping[str, str], cache_salt: str | None) -> str:
        """The salt of a request's prefixes: requests reuse each other's only if their salts are equal.

        "" without key, tenant and `cache_salt`: such prefixes have the same names under any secret, and are found on
        disk after a restart. Raises InvalidRequestError for an `x-tenant` that cannot be one.
        """
        key, tenant = _key(headers), _tenant_header(headers)
        if tenant and self._trust_header:
            key = ""  # a tenant may have several keys
        if self._share_prefixes:
            key = tenant = ""
        if not (key or tenant or cache_salt):
            return ""
        return self._salt(key, tenant, cache_salt or "")

    def resalted(self, salt: str, cache_salt: str | None) -> str:
        """The salt, with this `cache_salt`, of a client whose salt without one is `salt`."""
        return self._salt(salt, cache_salt) if cache_salt else salt

    def _salt(self, *parts: str) -> str:
        return hashlib.blake2b(json.dumps(parts).encode(), key=self._salt_key, digest_size=16).hexdigest()

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=8).hexdigest()


def _key(headers: Mapping[str, str]) -> str:
    """The client's key, from OpenAI's header or from Anthropic's, in one form: whichever API it is sent to, one key is
    one client's. "": there is none."""
    other = headers.get("x-api-key")
    return headers.get("authorization") or (f"Bearer {other}" if other else "")


def _tenant_header(headers: Mapping[str, str]) -> str:
    """The name in the header `x-tenant`; "": there is none.
    Raises InvalidRequestError for one that cannot be a tenant."""
    name = headers.get(TENANT_HEADER)
    if name is None:
        return ""
    if not 0 < len(name) <= MAX_TENANT or not name.isprintable():
        raise InvalidRequestError(
            f"{TENANT_HEADER} has {len(name)} characters; write 1 to {MAX_TENANT} printable ones.", param=TENANT_HEADER
        )
    return name


def terms_of(request: Request, body: ServedBody, classes: SloConfig, tenants: Tenants, model: str) -> RequestTerms:
    """The terms of a request: its class, its targets, whose it is, and whose workers serve it (`model`). Raises
    InvalidRequestError for a class, tier, target or tenant that there cannot be."""
    slo = classes.choose(body.service_tier, request.headers)
    cache_salt = body.cache_salt if isinstance(body, SampledBody) else None
    if (whose := on_behalf(request.scope)) is None:
        tenant, deadline = tenants.name(request.headers, body.safety_identifier, body.user), None
        salt = tenants.salt(request.headers, cache_salt)
    else:
        tenant, deadline, salt = whose.tenant, whose.deadline, tenants.resalted(whose.salt, cache_salt)
    return RequestTerms(
        slo=slo,
        tier=_answered_tier(request, body, slo),
        tenant=tenant,
        salt=salt,
        model=model,
        arrived_at=arrival(request),
        deadline=deadline,
    )


def _answered_tier(request: Request, body: ServedBody, slo: SloClass) -> str:
    """What the answer says in `service_tier`: the tier that was asked for; where a header chose the class, one that
    stands for it and that OpenAI's clients know, as these refuse others."""
    chosen = body.service_tier or "auto"
    if CLASS_HEADER in request.headers:
        chosen = next((word for word in (slo.name, *slo.service_tiers) if word in STANDARD_TIERS), "default")
    return "default" if chosen == "auto" else chosen


def trace_headers(request: Request) -> dict[str, list[str]]:
    """The request's headers of W3C's trace context, for who makes spans. Two `traceparent` name no one parent and count
    as none, as does one that is longer than any version's may be."""
    parents = request.headers.getlist("traceparent")
    if len(parents) != 1 or len(parents[0]) > _MAX_TRACEPARENT:
        return {}
    states = request.headers.getlist("tracestate")
    return {"traceparent": parents, "tracestate": states if sum(map(len, states)) <= _MAX_TRACESTATE else []}
