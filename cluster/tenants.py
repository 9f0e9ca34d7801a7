"""Who a request belongs to, for sharing under overload: a name that says nothing about keys or people.

    x-tenant             as it is: set by who runs the service, in what authenticates clients
    Authorization        else a keyed hash of the client's key
    safety_identifier    else a keyed hash of what the client says of its user; `user` is its older name
    ""                   else: all such requests are one tenant

The hash is keyed with the cluster's secret, so that all gateways give the same name and nobody else can tell whose it
is by trying keys. Knows no HTTP server.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Final

from cluster.errors import InvalidRequestError

TENANT_HEADER: Final = "x-tenant"
MAX_TENANT: Final = 64


class Tenants:
    """Names tenants under one secret."""

    def __init__(self, secret: bytes) -> None:
        self._key = hashlib.blake2b(secret, person=b"legato-tenants").digest()

    def name(self, headers: Mapping[str, str], safety_identifier: str | None, user: str | None) -> str:
        """Raises InvalidRequestError where the header is none that Legato takes."""
        given = headers.get(TENANT_HEADER)
        if given is not None:
            return _checked(given)
        for kind, text in (
            ("key", headers.get("authorization")),
            ("user", safety_identifier),
            ("user", user),
        ):
            if text:
                return f"{kind}-{self._hash(text)}"
        return ""

    def _hash(self, text: str) -> str:
        return hashlib.blake2b(text.encode(), key=self._key, digest_size=8).hexdigest()


def _checked(name: str) -> str:
    if not 0 < len(name) <= MAX_TENANT or not name.isprintable():
        raise InvalidRequestError(
            f"{TENANT_HEADER} has {len(name)} characters; write 1 to {MAX_TENANT} printable ones.", param=TENANT_HEADER
        )
    return name
