"""A server whose model says what a test wants: token k of every answer is piece k of a script, byte for byte."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import torch

from engine.scheduler import Slice
from engine.server.lifecycle import Server
from tests.engine.serving import client, read_stream, serving

FIRST = 300  # token ids from here on get the bytes of the script
END: None = None  # in a script: the end-of-text token


class Scripted:
    """Stands in for the runner: logits that leave one token to choose."""

    name = "scripted"
    has_logits = True

    def __init__(self, server: Server, script: Sequence[bytes | None]) -> None:
        engine = server.service.engine
        self.kv_blocks, self.max_context = engine.runner.kv_blocks, engine.runner.max_context
        self._vocab = engine.model.shape.vocab
        (self._end, *_others) = engine.model.shape.eos_token_ids
        table = engine.model.tokenizer._bytes  # of this server's own tokenizer
        self._tokens = []
        for at, piece in enumerate(script):
            if piece is None:
                self._tokens.append(self._end)
            else:
                table[FIRST + at] = piece
                self._tokens.append(FIRST + at)

    def forward(self, slices: Sequence[Slice]) -> torch.Tensor:
        """[rows, vocabulary]; after the script comes end-of-text."""
        rows = []
        for piece in slices:
            for row in range(piece.rows):
                at = piece.request.generated
                token = self._tokens[at] if at < len(self._tokens) else self._end
                logits = torch.zeros(self._vocab)
                if row == piece.rows - 1:
                    logits[token] = 50.0
                rows.append(logits)
        return torch.stack(rows) if rows else torch.empty(0, self._vocab)


@asynccontextmanager
async def speaking(script: Sequence[bytes | None]) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of a server that speaks a script."""
    async with serving() as server, client(server) as http:
        server.service.engine.runner = Scripted(server, script)
        yield http


async def said(http: aiohttp.ClientSession, **more: Any) -> tuple[str, str, list[str]]:
    """Ask twice, whole and streamed, and see that both say the same: text, finish reason, the stream's deltas."""
    body = {"model": "tiny", "prompt": "hello", "temperature": 0, "max_tokens": 40, **more}
    whole = await (await http.post("/v1/completions", json=body)).json()
    (choice,) = whole["choices"]
    answer = await http.post("/v1/completions", json={**body, "stream": True})
    stream = await read_stream(answer)
    ends = [one["finish_reason"] for chunk in stream.chunks for one in chunk["choices"] if one["finish_reason"]]
    assert stream.text == choice["text"]
    assert ends == [choice["finish_reason"]]
    deltas = [one["text"] for chunk in stream.chunks for one in chunk["choices"] if one["text"]]
    return choice["text"], choice["finish_reason"], deltas
