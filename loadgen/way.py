"""How targets are reached: TLS trust and an HTTP proxy, the same for the load, the probes and the scrapes.

Proxies of the environment are never used by themselves: a load test that went through one unseen would measure it.
"""

from __future__ import annotations

import ssl
import urllib.request
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from urllib.parse import urlsplit

from models.errors import UserError


@dataclass(frozen=True)
class Way:
    """proxy: URL, with user and password if it wants them.  ca_file: certificates instead of the system's."""

    proxy: str | None = field(default=None, repr=False)
    ca_file: str | None = None
    verify_tls: bool = True

    @cached_property
    def tls(self) -> ssl.SSLContext:
        """Raises UserError for a file that holds no certificates."""
        if self.ca_file is not None and not Path(self.ca_file).is_file():
            raise UserError(f"there is no file {self.ca_file}", where="--ca-file", remedy="give a PEM file")
        try:
            context = ssl.create_default_context(cafile=self.ca_file)
        except (ssl.SSLError, OSError) as error:
            raise UserError(
                f"{self.ca_file} holds no certificates ({error})", where="--ca-file", remedy="give a PEM file"
            ) from None
        if not self.verify_tls:
            context.check_hostname = False
            context.verify_mode = ssl.CERT_NONE
        return context

    @cached_property
    def opener(self) -> urllib.request.OpenerDirector:
        """For single questions."""
        proxies = {} if self.proxy is None else {"http": self.proxy, "https": self.proxy}
        return urllib.request.build_opener(
            urllib.request.ProxyHandler(proxies), urllib.request.HTTPSHandler(context=self.tls)
        )


DIRECT = Way()


def checked_proxy(url: str) -> str:
    """A proxy as a plan keeps it: http only, its password by the name of a variable.  Raises UserError."""
    remedy = "write http://proxy:3128, or http://user:$PASSWORD@proxy:3128"
    try:
        parts = urlsplit(url)
        fits = parts.scheme == "http" and bool(parts.hostname) and (parts.port is None or parts.port > 0)
    except ValueError:
        fits = False
        parts = urlsplit("")
    if not fits or parts.path.rstrip("/") or parts.query:
        raise UserError("this is no HTTP proxy", where="--proxy", remedy=remedy)
    if parts.password and not parts.password.startswith("$"):
        raise UserError("the proxy's password would be kept in the run bundle", where="--proxy", remedy=remedy)
    return url.rstrip("/")
