"""Who asks: API keys and the tenant that each one stands for.

Keys are compared as digests, in constant time and all of them, so that the time taken says
nothing about a key. A tenant is the digest of its key; it salts the prefix cache, so that
tenants neither share nor can time each other's prompts.
"""

import hashlib
import hmac
from collections.abc import Iterable

_TENANT_DOMAIN = b"kvasir.tenant.v1"
_SALT_DOMAIN = b"kvasir.tenant-salt.v1"
_SCHEME = "bearer "

ANYONE = b""
"""The tenant of a router without keys."""


class Keys:
    """The accepted API keys; with none, everyone is let in as ``ANYONE``."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._tenants = tuple(_tenant(key) for key in keys)

    def tenant(self, authorization: str | None) -> bytes | None:
        """The tenant of an Authorization header, or None if it is not let in."""
        if not self._tenants:
            return ANYONE
        header = authorization or ""
        bearer = header[: len(_SCHEME)].lower() == _SCHEME
        offered = _tenant(header[len(_SCHEME) :].strip())
        found = None
        for tenant in self._tenants:
            if hmac.compare_digest(tenant, offered):
                found = tenant
        return found if bearer else None


def cache_salt(tenant: bytes, asked: str | None) -> bytes:
    """Salt of the block hashes of a request; ``asked`` is its ``cache_salt`` field."""
    own = (asked or "").encode()
    return hashlib.sha256(_SALT_DOMAIN + tenant + own).digest() if tenant else own


def _tenant(key: str) -> bytes:
    return hashlib.sha256(_TENANT_DOMAIN + key.encode("utf-8", "surrogateescape")).digest()
