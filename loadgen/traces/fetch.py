"""Fetching a known trace over https: pinned by sha256, resumed where it broke off, never a file that is not it.

Bytes go to `<file>.part`; the file takes its name only when its sha256 is the pinned one.  A web page (a login wall, an
error page) and a Git-LFS pointer are refused by name.  Without a network it gives up within a few seconds: the host
name is resolved under a limit of its own, since the resolver heeds no socket timeout.
"""

from __future__ import annotations

import http.client
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from loadgen.traces.catalogue import Known
from loadgen.traces.registry import what_it_is
from models.cache import locked, sha256_of
from models.errors import UserError

RESOLVE_S: Final = 3.0
SOCKET_S: Final = 5.0
ATTEMPTS: Final = 3
CHUNK: Final = 64 * 1024

LONGEST: Final = 4 << 30  # bytes, where the size of a trace is not known beforehand

Progress = Callable[[int, int | None], None]


class FetchError(Exception):
    """The trace could not be fetched: why, in words for a user."""


def fetch(known: Known, folder: Path, progress: Progress | None = None) -> Path:
    """Download into folder and return the file.  progress(bytes so far, bytes in all or None).  Raises FetchError."""
    if known.url is None:
        raise FetchError(f"{known.name} ships with tailspan and is not fetched")
    require_name(known.url)
    try:
        with locked(f"trace-{known.name}", lambda _: None):  # one download at a time on this machine
            target = folder / known.file
            return target if has_sha(target, known.sha256) else _fetched(known, known.url, target, progress)
    except UserError as error:
        raise FetchError(error.message) from None
    except urllib.error.HTTPError as error:
        raise FetchError(f"{known.url} answered {error.code} {error.reason}") from None
    except urllib.error.URLError as error:
        raise FetchError(f"{urlsplit(known.url).hostname} cannot be reached ({error.reason})") from None
    except OSError as error:
        raise FetchError(f"{folder} cannot be written ({error.strerror})") from None


def has_sha(path: Path, sha256: str) -> bool:
    """Does the file exist with these very bytes?"""
    try:
        return sha256_of(path) == sha256
    except OSError:
        return False


def _fetched(known: Known, url: str, target: Path, progress: Progress | None) -> Path:
    target.parent.mkdir(parents=True, exist_ok=True)
    part = target.with_name(f"{target.name}.part")
    for attempt in range(1, ATTEMPTS + 1):
        try:
            _download(known, url, part, progress)
            break
        except (TimeoutError, ConnectionError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS:
                raise FetchError(f"the connection broke ({error or type(error).__name__})") from None
    digest = sha256_of(part)
    if digest != known.sha256:
        part.unlink()
        raise FetchError(f"what came from {url} has the sha256 {digest[:12]}…, not {known.sha256[:12]}…")
    return part.replace(target)


def _download(known: Known, url: str, part: Path, progress: Progress | None) -> None:
    have = part.stat().st_size if part.exists() else 0
    if known.bytes is not None and have >= known.bytes:
        part.unlink()
        have = 0
    request = urllib.request.Request(url, headers={"User-Agent": "tailspan", "Accept-Encoding": "identity"})
    if have:
        request.add_header("Range", f"bytes={have}-")
    try:
        answer = urllib.request.urlopen(request, timeout=SOCKET_S)
    except urllib.error.HTTPError as error:
        if error.code == 416 and have:  # it is whole already, or no beginning of the file
            if has_sha(part, known.sha256):
                return
            part.unlink()
            raise ConnectionError("the partial file did not fit") from None
        raise
    with answer:
        if answer.status != 206:
            have = 0
        told = answer.headers.get("Content-Length")
        total = known.bytes if known.bytes is not None else have + int(told) if told and told.isdigit() else None
        if "html" in (answer.headers.get("Content-Type") or "").lower():
            raise FetchError(f"{url} gave a web page, not the trace")
        with part.open("r+b" if have else "wb") as file:
            file.seek(have)
            while chunk := answer.read(CHUNK):
                if have == 0 and (kind := what_it_is(chunk)):
                    raise FetchError(f"{url} gave {kind}, not the trace")
                have += len(chunk)
                if have > (known.bytes or LONGEST):
                    raise FetchError(f"{url} gave more than the {known.bytes or LONGEST:,} bytes of the trace")
                file.write(chunk)
                if progress:
                    progress(have, total)
    if total is not None and have < total:
        raise ConnectionError(f"it broke off at {have:,} of {total:,} bytes")


def require_name(url: str) -> None:
    """Raise FetchError unless the host (or the proxy that stands for it) has an address within RESOLVE_S."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    proxy = urllib.request.getproxies().get(parts.scheme)
    if proxy and not urllib.request.proxy_bypass(host):
        host = urlsplit(proxy if "//" in proxy else f"//{proxy}").hostname or host
    resolved: list[bool] = []

    def resolve() -> None:
        try:
            socket.getaddrinfo(host, None)
            resolved.append(True)
        except OSError:
            resolved.append(False)

    thread = threading.Thread(target=resolve, name="resolve", daemon=True)
    thread.start()
    thread.join(RESOLVE_S)
    if resolved != [True]:
        raise FetchError(f"no network: the name {host} cannot be resolved")
