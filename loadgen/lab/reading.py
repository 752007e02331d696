"""How many tokens a server counts in our prompts when it reads them wrongly: real texts, a real tokenizer, spoilt."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from loadgen.prompts import PromptMaker
from models.misreading import OTHER_TEMPLATE, fewer_merges
from models.store import Reference, load_reference
from models.template import ChatTemplate

MODEL = "smollm2"  # any tokenizer will do: what is compared is two counts of one text


@lru_cache(maxsize=4)
def _texts(counts: tuple[int, ...], seed: int) -> tuple[list[list[dict[str, str]]], Reference]:
    reference = load_reference(MODEL)
    maker = PromptMaker(reference.tokenizer, reference.template, seed=seed, salt=f"lab {seed}")
    return [maker.messages(maker.make(at, max(maker.minimum, count))) for at, count in enumerate(counts)], reference


@lru_cache(maxsize=4)
def _counts(counts: tuple[int, ...], kind: str, size: float, seed: int) -> tuple[int, ...]:
    chats, reference = _texts(counts, seed)
    template, tokenizer = reference.template, reference.tokenizer
    if kind == "template":
        template = ChatTemplate(OTHER_TEMPLATE)
    else:
        tokenizer = fewer_merges(reference.folder / "tokenizer.json", size)
    return tuple(len(tokenizer.encode(template.render(chat))) for chat in chats)


def misread(input_tokens: npt.NDArray[np.int64], reading: tuple[str, float], seed: int) -> npt.NDArray[np.int64]:
    """The count of each prompt as it is read: ("template", _) or ("tokenizer", share of the merges lost)."""
    kind, size = reading
    found = _counts(tuple(int(one) for one in input_tokens), kind, size, seed)
    return np.maximum(1, np.array(found, dtype=np.int64))
