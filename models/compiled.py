"""C sources of ours as programs and libraries: compiled once, kept in the cache under all that they depend on."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import subprocess
import time
from collections import defaultdict
from pathlib import Path
from typing import Final

from models.cache import cache_dir, locked, made
from models.errors import UserError

LIMIT_S: Final = 120.0
_VERSION_LIMIT_S: Final = 20.0
#: Seconds that this process spent compiling, by the name of the source.
spent_s: Final[defaultdict[str, float]] = defaultdict(float)


def compiled(
    source: Path, flags: tuple[str, ...], suffix: str = "", *, headers: tuple[Path, ...] = (), libraries: str = ""
) -> Path:
    """The file that `cc FLAGS source LIBRARIES` makes; suffix: ".so" of a library; headers: ours that it includes.

    Raises UserError where there is no compiler, it does not take the source, or the cache cannot be written.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UserError("no cc, gcc or clang on the path", where=source.name, remedy="install one of them")
    name = source.stem.replace("_", "-")
    words = [compiler, *flags]
    result = made(cache_dir() / "native") / f"{name}-{_key(words, (source, *headers))}{suffix}"
    if result.exists():
        return result
    with locked(name, lambda _: None):
        if not result.exists():
            start = time.perf_counter()
            part = result.with_suffix(".part")
            _run([*words, "-o", str(part), str(source), *libraries.split()], LIMIT_S)
            part.replace(result)
            spent_s[name] += time.perf_counter() - start
    return result


def _key(words: list[str], sources: tuple[Path, ...]) -> str:
    """Of source, compiler, flags and, where they ask for the processor's own instructions, the processor."""
    text = [*(one.read_text(encoding="utf-8") for one in sources), *words, platform.machine()]
    text.append(_run([words[0], "--version"], _VERSION_LIMIT_S))
    if "-march=native" in words:
        text.append(_processor())
    return hashlib.sha256("\n".join(text).encode()).hexdigest()[:16]


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    return next((line for line in lines if line.startswith(("flags", "Features"))), platform.processor())


def _run(words: list[str], limit_s: float) -> str:
    """What it prints.  Raises UserError with the first line of its error."""
    remedy = "it needs Linux and a GCC or clang that works; CC names one"
    try:
        ended = subprocess.run(words, capture_output=True, text=True, check=False, timeout=limit_s)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{words[0]}: {error}", where="C compiler", remedy=remedy) from error
    if ended.returncode:
        told = [line for line in ended.stderr.splitlines() if "error" in line] or ended.stderr.strip().splitlines()
        first = told[0] if told else f"exit code {ended.returncode}"
        raise UserError(f"{words[0]} failed: {first}", where="C compiler", remedy=remedy)
    return ended.stdout
