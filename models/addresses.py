"""Addresses that a user writes: what is none is refused by the name of its option, before anything is begun."""

from __future__ import annotations

import ipaddress
import re
from urllib.parse import SplitResult, urlsplit

from models.errors import UserError

_HOST = re.compile(r"\w([\w.-]*\w)?\.?")


def http_url(url: str, where: str, what: str = "an http(s) address", remedy: str = "") -> SplitResult:
    """The parts of a base URL.  UserError: no http or https, no host, or a port that is none.

    where: the option that gave it.  what, remedy: for the error, "'foo' is not {what}".
    """
    try:
        parts = urlsplit(url)
        fits = parts.scheme in ("http", "https") and is_host(parts.hostname or "")
        fits = fits and (parts.port is None or parts.port > 0)
    except ValueError:  # brackets that do not close, a port beyond 65535
        fits = False
    if not fits:
        raise UserError(f"{url!r} is not {what}", where=where, remedy=remedy or "write it as http://HOST:PORT")
    return parts


def is_host(text: str) -> bool:
    """Whether a text is a host's name or an address, IPv6 with or without its brackets."""
    try:
        ipaddress.ip_address(text.removeprefix("[").removesuffix("]"))
    except ValueError:
        return bool(_HOST.fullmatch(text))
    return True


def checked_host(text: str, where: str) -> str:
    """An address to listen on.  UserError for a URL, one with a port, or nothing."""
    if not is_host(text):
        remedy = "write a name or an address alone, such as 127.0.0.1, without http:// and port"
        raise UserError(f"{text!r} is no host", where=where, remedy=remedy)
    return text
