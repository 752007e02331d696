"""The language of the page: English as it stands in the code, or its Chinese from ``chinese.json``.

``tr`` gives a text in the language of the script run (a context variable, since every session runs in a thread of its
own).  Must always hold: every text passed to ``tr`` has a Chinese one with the same placeholders (tests/pages checks
the code); what comes from a bundle or a command stays as it is, so that it can be searched for.
"""

from __future__ import annotations

import json
from contextvars import ContextVar
from pathlib import Path
from typing import Final

CHINESE: Final[dict[str, str]] = json.loads((Path(__file__).parent / "chinese.json").read_text(encoding="utf-8"))
LANGUAGES: Final = {"en": "English", "zh": "中文"}
_CHOSEN: ContextVar[str] = ContextVar("language", default="en")


def use(language: str) -> None:
    """Speak this language for the rest of the script run."""
    _CHOSEN.set(language if language in LANGUAGES else "en")


def guess(locale: str | None) -> str:
    """The language for a browser's locale."""
    return "zh" if (locale or "").lower().startswith("zh") else "en"


def tr(text: str, /, **values: object) -> str:
    """``text`` in the chosen language, its ``{placeholders}`` filled with ``values``."""
    found = CHINESE.get(text, text) if _CHOSEN.get() == "zh" else text
    return found.format(**values) if values else found
