"""Text from anywhere, as text that can be written anywhere."""

from __future__ import annotations


def clean(text: str) -> str:
    """The text with lone surrogates, which no tokenizer takes, as U+FFFD."""
    return text if text.isascii() else text.encode("utf-8", "surrogatepass").decode("utf-8", "replace")
