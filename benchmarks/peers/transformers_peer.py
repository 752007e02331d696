"""The model in transformers, eager, with its own cache.  Usage: transformers_peer.py FOLDER fp32|bf16"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM
from worker import serve


class Transformers:
    """See ``worker.Peer``."""

    def __init__(self, folder: str, kind: str) -> None:
        dtype = torch.float32 if kind == "fp32" else torch.bfloat16
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()

    @torch.inference_mode()
    def _forward(self, ids: torch.Tensor, past: object) -> None:
        out = self.model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
        self.past, self.last = out.past_key_values, out.logits[:, -1].argmax(-1, keepdim=True)

    def prefill(self, tokens: int) -> None:
        self._forward(torch.randint(3, 20000, (1, tokens)), None)

    def start(self, batch: int, context: int) -> None:
        self._forward(torch.randint(3, 20000, (1, context)).expand(batch, -1), None)

    def step(self) -> None:
        self._forward(self.last, self.past)


if __name__ == "__main__":
    serve(Transformers(sys.argv[1], sys.argv[2]))
