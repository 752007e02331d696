"""``llama.c`` compiled for this machine and loaded.

Needs a C compiler that takes GCC's vector extensions, and POSIX threads; without one the forward runs in torch.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Final

from models.compiled import compiled
from models.errors import UserError

SOURCE: Final = Path(__file__).with_name("llama.c")
HEADERS: Final = tuple(SOURCE.with_name(name) for name in ("pack.h", "panels.h", "team.h", "vectors.h"))
FLAGS: Final = ("-O3", "-march=native", "-pthread", "-Wno-psabi", "-shared", "-fPIC")


class NoCompiler(Exception):
    """There is no library; the message says what was tried."""


def library() -> ctypes.CDLL:
    """The loaded library, compiled if need be (a few seconds).  Raises NoCompiler."""
    try:
        path = compiled(SOURCE, FLAGS, ".so", headers=HEADERS, libraries="-lm")
    except UserError as error:
        raise NoCompiler(error.message) from error
    loaded = ctypes.CDLL(str(path))
    loaded.tailspan_start.argtypes, loaded.tailspan_start.restype = [ctypes.c_int], ctypes.c_void_p
    loaded.tailspan_end.argtypes, loaded.tailspan_end.restype = [ctypes.c_void_p], None
    loaded.tailspan_forward.argtypes, loaded.tailspan_forward.restype = [ctypes.c_void_p] * 2, None
    loaded.tailspan_panel_bytes.argtypes, loaded.tailspan_panel_bytes.restype = [ctypes.c_int] * 2, ctypes.c_size_t
    loaded.tailspan_pack.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    loaded.tailspan_own_floats.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
    loaded.tailspan_own_floats.restype = ctypes.c_size_t
    return loaded
