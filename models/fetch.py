"""Fetch one file over HTTP so that an interrupted fetch goes on where it stopped.

What must hold: the target appears under its name only when its size and SHA-256 are right.  Until then its bytes are
in `<target>.part`, which the next call continues with a Range request, in this process or another.
"""

from __future__ import annotations

import http.client
import ssl
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final

from models.cache import sha256_of
from models.errors import UserError

_CHUNK: Final = 1 << 18
_TIMEOUT: Final = 60.0  # seconds without a byte
_BACKOFF: Final = (0.5, 1.0, 2.0, 4.0, 8.0)  # seconds before each further try that got no byte further


class RefusedError(Exception):
    """The server wants credentials, or its certificate is not trusted: another client may do better."""


def fetch(
    url: str,
    target: Path,
    *,
    size: int,
    sha256: str,
    on_bytes: Callable[[int], None],
    proxies: dict[str, str] | None = None,
    cafile: str | None = None,
    backoff: tuple[float, ...] = _BACKOFF,
) -> Path:
    """Fetch url into target and return it.  on_bytes(done) is told how many bytes are there, from the resumed ones on.

    proxies: scheme -> URL, None for those of the environment.  cafile: certificates, None for the system's.
    Raises UserError if the server cannot be reached, stops answering or sends another file; RefusedError for 401, 403,
    407 and an untrusted certificate.
    """
    part = target.with_name(target.name + ".part")
    opener = urllib.request.build_opener(
        urllib.request.ProxyHandler(proxies),
        urllib.request.HTTPSHandler(context=ssl.create_default_context(cafile=cafile)),
    )
    have = part.stat().st_size if part.exists() else 0
    if have > size:  # left by another version of the file
        part.unlink()
        have = 0
    most, failures = have, 0
    while have != size:
        on_bytes(have)
        problem = _go_on(opener, url, part, have, size, on_bytes)
        have = part.stat().st_size if part.exists() else 0
        if have > size:
            part.unlink()
            raise UserError(
                f"the file is larger than the {size} bytes expected",
                where=url,
                remedy="check the package index settings",
            )
        failures = 0 if have > most else failures + 1
        most = max(most, have)
        if have == size:
            break
        if failures > len(backoff):
            raise UserError(
                f"stopped at {have / 1e6:.1f} of {size / 1e6:.1f} MB: {problem or 'the connection was closed'}",
                where=url,
                remedy="check the network and run the same command again: it goes on from there",
            )
        time.sleep(backoff[failures - 1] if failures else 0.0)
    on_bytes(size)
    found = sha256_of(part)
    if found != sha256:
        part.unlink()
        raise UserError(
            f"the file has SHA-256 {found}, {sha256} is expected",
            where=url,
            remedy="run the same command again; if it stays so, the index or a proxy serves another file",
        )
    part.replace(target)
    return target


def _go_on(
    opener: urllib.request.OpenerDirector,
    url: str,
    part: Path,
    have: int,
    size: int,
    on_bytes: Callable[[int], None],
) -> str:
    """One request, appended to part.  Returns what went wrong, if it is worth another try, else ""."""
    request = urllib.request.Request(url, headers={"Range": f"bytes={have}-", "Accept-Encoding": "identity"})
    try:
        with opener.open(request, timeout=_TIMEOUT) as answer:
            resumes = answer.status == 206 and (answer.headers.get("Content-Range") or "").startswith(f"bytes {have}-")
            if not resumes:
                have = 0  # a server without ranges sends the whole file
            with part.open("ab" if resumes else "wb") as file:
                while have <= size and (block := answer.read(_CHUNK)):
                    file.write(block)
                    have += len(block)
                    on_bytes(min(have, size))
    except urllib.error.HTTPError as error:
        if error.code in (401, 403, 407):
            raise RefusedError(f"HTTP {error.code}") from error
        if error.code == 416:
            part.unlink(missing_ok=True)  # what we have is not the start of this file
        elif error.code < 500 and error.code not in (408, 429):
            raise UserError(
                f"the server answers {error.code} {error.reason}", where=url, remedy="check the package index settings"
            ) from error
        return f"the server answers {error.code}"
    except urllib.error.URLError as error:
        if isinstance(error.reason, ssl.SSLCertVerificationError):
            raise RefusedError(str(error.reason)) from error
        return str(error.reason)
    except (ConnectionError, TimeoutError, http.client.HTTPException) as error:
        return str(error) or type(error).__name__
    return ""
