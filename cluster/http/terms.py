"""The terms that a request is served on, from its headers and body: its class and targets, and who it belongs to.

Who it belongs to counts for sharing under overload, and for whose prompts its own may be found in. A tenant's name says
nothing about keys or people:

    x-tenant             as it is, where the operator trusts the proxy that sets it (`gateway.trust_tenant_header`)
    Authorization        else a keyed hash of the client's key
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
from cluster.http.connection import arrival
from cluster.http.openai.schemas import GenerationBody
from cluster.slo.classes import CLASS_HEADER, RequestTerms, SloConfig

TENANT_HEADER: Final = "x-tenant"
MAX_TENANT: Final = 64


class Tenants:
    """Names tenants, and the salts of their prefixes, under one secret."""

    def __init__(self, secret: bytes, *, trust_header: bool = False, share_prefixes: bool = False) -> None:
        self._key = hashlib.blake2b(secret, person=b"legato-tenants").digest()
        self._salt_key = hashlib.blake2b(secret, person=b"legato-salts").digest()
        self._trust_header = trust_header
        self._share_prefixes = share_prefixes

    def name(self, headers: Mapping[str, str], safety_identifier: str | None, user: str | None) -> str:
        """Raises InvalidRequestError where the header is none that Legato takes."""
        given = _tenant_header(headers)
        if given and self._trust_header:
            return given
        for kind, text in (
            ("key", headers.get("authorization")),
            ("user", safety_identifier),
            ("user", user),
        ):
            if text:
                return f"{kind}-{self._hash(text)}"
        return ""

    def salt(self, headers: Mapping[str, str], cache_salt: str | None) -> str:
        """Requests reuse each other's prefixes only if theirs are equal. "" without key, tenant and `cache_salt`: such
        prefixes have the same names under any secret, and are found on disk after a restart.

        Raises InvalidRequestError where the header is none that Legato takes.
        """
        key, tenant = headers.get("authorization") or "", _tenant_header(headers)
        if tenant and self._trust_header:
            key = ""  # one tenant may have several
        if self._share_prefixes:
            key = tenant = ""
        if not (key or tenant or cache_salt):
            return ""
        whole = json.dumps([key, tenant, cache_salt or ""]).encode()
        return hashlib.blake2b(whole, key=self._salt_key, digest_size=16).hexdigest()

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=8).hexdigest()


def _tenant_header(headers: Mapping[str, str]) -> str:
    """ "": there is none."""
    name = headers.get(TENANT_HEADER)
    if name is None:
        return ""
    if not 0 < len(name) <= MAX_TENANT or not name.isprintable():
        raise InvalidRequestError(
            f"{TENANT_HEADER} has {len(name)} characters; write 1 to {MAX_TENANT} printable ones.", param=TENANT_HEADER
        )
    return name


def terms_of(request: Request, body: GenerationBody, classes: SloConfig, tenants: Tenants) -> RequestTerms:
    """Raises InvalidRequestError where a class, tier, target or tenant is none."""
    slo = classes.choose(body.service_tier, request.headers)
    tenant = tenants.name(request.headers, body.safety_identifier, body.user)
    return RequestTerms(slo=slo, tenant=tenant, arrived_at=arrival(request))


def answered_tier(request: Request, body: GenerationBody) -> str:
    """What the answer says in `service_tier`: the tier that was asked for; a class, where a header chose one."""
    chosen = request.headers.get(CLASS_HEADER) or body.service_tier or "auto"
    return "default" if chosen == "auto" else chosen
