"""The one key that a server may ask for, as ``Authorization: Bearer KEY``.

What must hold: the key is never kept, logged or shown, only its digest; comparing takes the same time whatever was
sent.  Health, metrics and the API's description are open to all: they show no prompt.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from typing import Final

from engine.server.fields import ApiError
from models.errors import UserError

OPEN: Final = ("/health", "/health/live", "/health/ready", "/metrics", "/openapi.json")


class ApiKey:
    """Knows the digest of a key."""

    __slots__ = ("_digest",)

    def __init__(self, key: str) -> None:
        self._digest = hashlib.sha256(key.encode()).digest()

    def check(self, headers: Mapping[str, str]) -> None:
        """Raises ApiError 401."""
        scheme, _, given = headers.get("Authorization", "").partition(" ")
        found = hashlib.sha256(given.strip().encode(errors="surrogateescape")).digest()
        if not hmac.compare_digest(found, self._digest) or scheme.lower() != "bearer":
            message = "Incorrect or missing API key: send it as 'Authorization: Bearer KEY'."
            raise ApiError(401, message, kind="authentication_error", code="invalid_api_key")


def key_from_environment(name: str) -> str:
    """The key in a variable.  Raises UserError when there is none."""
    key = os.environ.get(name, "").strip()
    if not key:
        raise UserError(
            f"the variable {name!r} is empty or not set",
            where="--api-key-env",
            remedy=f"set {name} to the key that clients must send, or leave the option out",
        )
    return key
