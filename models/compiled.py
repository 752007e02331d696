"""C sources of ours as programs and libraries: compiled once for what they and the compiler are, kept in the cache."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from models.cache import cache_dir, locked, made
from models.errors import UserError


def compiled(source: Path, flags: tuple[str, ...], suffix: str = "") -> Path:
    """The file that `cc FLAGS` makes of the source; suffix: ".so" of a library.

    Raises UserError where there is no compiler, or it does not take the source.
    """
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise UserError("no C compiler", where=source.name, remedy="install cc, gcc or clang")
    key = hashlib.sha256(source.read_bytes() + " ".join((*flags, compiler)).encode()).hexdigest()[:16]
    name = source.stem.replace("_", "-")
    result = made(cache_dir() / "native") / f"{name}-{key}{suffix}"
    if result.exists():
        return result
    with locked(name, lambda _: None):
        if not result.exists():
            part = result.with_suffix(".part")
            try:
                subprocess.run(
                    [compiler, *flags, "-o", str(part), str(source)], check=True, capture_output=True, text=True
                )
            except (OSError, subprocess.CalledProcessError) as error:
                told = getattr(error, "stderr", None) or str(error)
                raise UserError(
                    f"{compiler} fails: {told[-300:]}", where=str(source), remedy="it needs Linux and GCC or clang"
                ) from None
            part.replace(result)
    return result
