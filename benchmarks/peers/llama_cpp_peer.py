"""The GGUF itself in llama.cpp, by its batch interface.  Usage: llama_cpp_peer.py FILE THREADS"""

from __future__ import annotations

import random
import sys

import llama_cpp
from worker import serve

CONTEXT, SEQUENCES = 16384, 32


class LlamaCpp:
    """See ``worker.Peer``."""

    def __init__(self, file: str, threads: int) -> None:
        llama_cpp.llama_backend_init()
        self.model = llama_cpp.llama_model_load_from_file(file.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, 512, 512, SEQUENCES
        params.n_threads = params.n_threads_batch = threads
        self.context = llama_cpp.llama_init_from_model(self.model, params)
        self.batch = llama_cpp.llama_batch_init(512, 0, 1)

    def _decode(self, rows: list[tuple[int, int, int, bool]]) -> None:
        """rows: token, position, sequence, whether its logits are wanted."""
        batch = self.batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, wanted) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.n_seq_id[i], batch.logits[i] = token, position, 1, wanted
            batch.seq_id[i][0] = sequence
        code = llama_cpp.llama_decode(self.context, batch)
        if code:
            raise RuntimeError(f"llama_decode returned {code}")
        llama_cpp.llama_synchronize(self.context)

    def _prompt(self, sequence: int, n: int) -> None:
        tokens = [random.randrange(3, 20000) for _ in range(n)]
        self._decode([(token, i, sequence, i == n - 1) for i, token in enumerate(tokens)])

    def _clear(self) -> None:
        llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(self.context), True)

    def prefill(self, tokens: int) -> None:
        self._clear()
        self._prompt(0, tokens)

    def start(self, batch: int, context: int) -> None:
        self._clear()
        for sequence in range(batch):
            self._prompt(sequence, context)
        self.size, self.at = batch, context

    def step(self) -> None:
        self._decode([(random.randrange(3, 20000), self.at, i, True) for i in range(self.size)])
        self.at += 1


if __name__ == "__main__":
    serve(LlamaCpp(sys.argv[1], int(sys.argv[2])))
