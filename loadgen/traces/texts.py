"""Where a trace carries its texts: how long they are under two tokenizers, beside the length that it claims.

One number of tokens has no meaning without its tokenizer: a replay under another one is another load.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from loadgen.traces.own import texts
from loadgen.traces.trace import Choices

SAMPLE: Final = 20_000  # texts; encoding costs some 100 us each


@dataclass(frozen=True, slots=True)
class Counted:
    """Of the first `texts` rows: tokens under one tokenizer, tokens that the file claims, rows where both agree."""

    tokenizer: str
    texts: int
    tokens: int
    claimed: int
    equal: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        if not self.texts:
            return f"under {self.tokenizer}: no row has a text and a length"
        ratio = self.tokens / self.claimed if self.claimed else float("inf")
        return (
            f"under {self.tokenizer}: {self.tokens:,} tokens in {self.texts:,} texts, {ratio:.3f} times what the file "
            f"claims; equal in {self.equal / self.texts:.1%}"
        )


def count_texts(path: Path, choices: Choices, references: list[str]) -> list[Counted]:
    """Count the first SAMPLE texts with the tokenizer of each model.  Raises UserError."""
    from models.store import load_reference

    found = []
    for reference in references:
        tokenizer = load_reference(reference).tokenizer
        rows = tokens = claimed = equal = 0
        for text, length in texts(path, choices):
            count = tokenizer.count_plain(text)
            rows, tokens, claimed, equal = rows + 1, tokens + count, claimed + length, equal + (count == length)
            if rows == SAMPLE:
                break
        found.append(Counted(reference, rows, tokens, claimed, equal))
    return found
