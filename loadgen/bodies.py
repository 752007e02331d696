"""The JSON of one request in each API: chat completions, text completions, Responses.

Owns the names of their fields.  min_tokens and ignore_eos, which ask for exactly the planned number of tokens, are
vLLM's extensions; the Responses API has no such thing, so there a planned length is an upper bound.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from typing import Any, Final

from loadgen.prompts import Prompt, PromptMaker

CHAT: Final = "chat"
COMPLETIONS: Final = "completions"
RESPONSES: Final = "responses"
APIS: Final = (CHAT, COMPLETIONS, RESPONSES)
PATHS: Final = {CHAT: "/v1/chat/completions", COMPLETIONS: "/v1/completions", RESPONSES: "/v1/responses"}


@dataclass(frozen=True, slots=True)
class Sampling:
    """What every body says about decoding.  exact_output asks for exactly the planned number of tokens."""

    model: str
    seed: int
    temperature: float
    top_p: float
    exact_output: bool
    api: str = CHAT

    @property
    def path(self) -> str:
        return PATHS[self.api]

    def body(self, maker: PromptMaker, prompt: Prompt, index: int, output_tokens: int) -> bytes:
        """The JSON of one streamed request."""
        draw = hashlib.blake2b(f"{self.seed}:{index}:sampling".encode(), digest_size=4).digest()
        body: dict[str, Any] = {"model": self.model}
        if self.api == RESPONSES:
            body |= {"input": maker.messages(prompt), "max_output_tokens": output_tokens, "store": False}
            body |= {"temperature": self.temperature, "top_p": self.top_p, "stream": True}
            return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
        if self.api == CHAT:
            body["messages"] = maker.messages(prompt)
        else:
            body["prompt"] = prompt.text
        body |= {
            "max_tokens": output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "seed": int.from_bytes(draw, "big") >> 1,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.exact_output:
            body |= {"min_tokens": output_tokens, "ignore_eos": True}
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()
