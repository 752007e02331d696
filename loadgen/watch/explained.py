"""What a breach is explained by: the last good stretch beside the bad one, through ``tailspan explain``.

In a process of its own: an explanation of a large window takes memory and the interpreter's lock for a while, and the
watch has to hear spans meanwhile.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final

from models.errors import UserError
from telemetry.bundle import Bundle

Part = tuple[Bundle, float, float]
LIMIT_S: Final = 300.0


def explained(good: Part, bad: Part) -> tuple[dict[str, Any], str]:
    """Plain JSON, and Markdown for who is on call.  Raises UserError where nothing can be compared, or not in time."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "said.md"
        words = [sys.executable, "-m", "tailspan", "explain", str(good[0].path.resolve()), str(bad[0].path.resolve())]
        words += ["--window", window_of(good, bad), "--json", "--markdown", str(out)]
        try:
            done = subprocess.run(
                words, capture_output=True, text=True, timeout=LIMIT_S, check=False, preexec_fn=_politely
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"no explanation within {LIMIT_S:.0f} s", remedy="explain it by hand") from None
        try:
            return json.loads(done.stdout), out.read_text(encoding="utf-8")
        except (ValueError, OSError):
            said = done.stderr.strip() or f"it ended with {done.returncode}"
            raise UserError(said.removeprefix("error: ")) from None


def window_of(good: Part, bad: Part) -> str:
    """The bounds of both, as ``--window`` takes them."""
    return f"{good[1]:.3f}:{good[2]:.3f},{bad[1]:.3f}:{bad[2]:.3f}"


def _politely() -> None:
    os.nice(10)
