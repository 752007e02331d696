"""Prompts that a user brings, as JSONL: `{"prompt": "…"}` or `{"messages": […]}`, with an `answer` where it is known.

Request n of the class takes line n, from the first again when they end, as it stands: neither length nor beginning is
changed, so a line that comes twice meets the server's prefix cache.  Tokens are counted with the reference tokenizer.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

from loadgen.prompts import Prompt, PromptMaker
from models.errors import UserError

MAX_BYTES: Final = 256 << 20
KEYS: Final = ("prompt", "messages", "answer")


class UserPrompts:
    """The prompts of one file.  Raises UserError naming the line that cannot be used."""

    def __init__(self, maker: PromptMaker, path: Path) -> None:
        self._maker = maker
        try:
            if path.stat().st_size > MAX_BYTES:
                raise UserError(f"larger than {MAX_BYTES >> 20} MiB", where=str(path), remedy="give fewer prompts")
            lines = path.read_bytes().splitlines()
        except OSError as error:
            raise UserError(
                f"the prompts cannot be read ({error.strerror})", where=str(path), remedy="give a JSONL file of prompts"
            ) from None
        self._chats = [read_line(line, f"{path}:{n}") for n, line in enumerate(lines, start=1) if line.strip()]
        if not self._chats:
            raise UserError("no prompt in it", where=str(path), remedy='write lines like {"prompt": "…"}')
        self._counted: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._chats)

    def make(self, index: int) -> Prompt:
        """The prompt of one request."""
        place = index % len(self._chats)
        chat, answer = self._chats[place]
        tokens = self._counted.get(place)
        if tokens is None:
            tokens = self._counted[place] = self._maker.count_chat(chat)
        return Prompt("".join(str(message["content"]) for message in chat), tokens, answer, chat)


def read_line(line: bytes, where: str) -> tuple[tuple[dict[str, Any], ...], str | None]:
    """The messages of one line and its answer.  Raises UserError."""
    remedy = 'write {"prompt": "…"} or {"messages": [{"role": "user", "content": "…"}]}, and "answer" if it is known'
    try:
        found = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"not JSON: {error}", where=where, remedy=remedy) from None
    if not isinstance(found, dict):
        raise UserError("not an object", where=where, remedy=remedy)
    unknown = [key for key in found if key not in KEYS]
    if unknown:
        raise UserError(f"unknown key {unknown[0]!r}", where=where, remedy=remedy)
    messages = found.get("messages")
    if ("prompt" in found) == (messages is not None):
        raise UserError("it needs one of prompt and messages", where=where, remedy=remedy)
    if messages is None:
        messages = [{"role": "user", "content": found["prompt"]}]
    if not isinstance(messages, list) or not messages:
        raise UserError("messages is no list of messages", where=where, remedy=remedy)
    for message in messages:
        if not isinstance(message, dict) or not all(isinstance(message.get(key), str) for key in ("role", "content")):
            raise UserError(f"{message!r:.60} is no message with role and content", where=where, remedy=remedy)
    answer = found.get("answer")
    if answer is not None and (not isinstance(answer, str) or not answer):
        raise UserError(f"the answer {answer!r} is no text", where=where, remedy=remedy)
    return tuple(messages), answer
