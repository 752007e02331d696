"""Compile ``llama.c`` for this machine, once; the library stays in the cache, named after all that it depends on.

Needs a C compiler that takes GCC's vector extensions, and POSIX threads; without one the forward runs in torch.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

from models.cache import cache_dir

SOURCES = tuple(Path(__file__).with_name(name) for name in ("llama.c", "pack.h", "panels.h", "team.h", "vectors.h"))
FLAGS = ("-O3", "-march=native", "-pthread", "-Wno-psabi", "-shared", "-fPIC")


spent_s = 0.0  # compiling, in this process


class NoCompiler(Exception):
    """There is no usable C compiler; the message says what was tried."""


def library() -> ctypes.CDLL:
    """The loaded library, compiled if need be (a few seconds).  Raises NoCompiler."""
    compiler = os.environ.get("CC") or shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if compiler is None:
        raise NoCompiler("no cc, gcc or clang on the path")
    path = cache_dir() / "native" / f"llama-{_key(compiler)}.so"
    if not path.exists():
        _compile(compiler, path)
    loaded = ctypes.CDLL(str(path))
    loaded.tailspan_start.argtypes, loaded.tailspan_start.restype = [ctypes.c_int], ctypes.c_void_p
    loaded.tailspan_end.argtypes, loaded.tailspan_end.restype = [ctypes.c_void_p], None
    loaded.tailspan_forward.argtypes, loaded.tailspan_forward.restype = [ctypes.c_void_p] * 2, None
    loaded.tailspan_panel_bytes.argtypes, loaded.tailspan_panel_bytes.restype = [ctypes.c_int] * 2, ctypes.c_size_t
    loaded.tailspan_pack.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.tailspan_own_floats.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    loaded.tailspan_own_floats.restype = ctypes.c_size_t
    return loaded


def _key(compiler: str) -> str:
    """Everything that the code depends on: source, flags, compiler and processor."""
    try:
        version = subprocess.run(
            [compiler, "--version"], capture_output=True, text=True, check=False, timeout=20
        ).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoCompiler(f"{compiler}: {error}") from error
    cpu = next((line for line in _cpuinfo() if line.startswith(("flags", "Features"))), platform.processor())
    text = "\n".join([*[source.read_text() for source in SOURCES], *FLAGS, compiler, version, platform.machine(), cpu])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _cpuinfo() -> list[str]:
    try:
        return Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return []


def _compile(compiler: str, path: Path) -> None:
    global spent_s
    start = time.perf_counter()
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        command = [compiler, *FLAGS, "-o", str(made), str(SOURCES[0]), "-lm"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoCompiler(f"{compiler}: {error}") from error
        if result.returncode:
            first = result.stderr.strip().splitlines()[:1]
            raise NoCompiler(f"{compiler} failed: {first[0] if first else f'exit code {result.returncode}'}")
        made.replace(path)  # atomic: two engines that start at once both end with a whole library
    spent_s += time.perf_counter() - start
