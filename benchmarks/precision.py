"""How far each precision of the weights moves the model's predictions: mean KL divergence to fp32 over a text.

Usage: python -m benchmarks.precision [--model smollm2] [--text FILE] [--tokens 256]
KL(fp32 || precision) of the next-token distribution at every position, in nats: mean and largest; and how often the
most likely token is another one.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from engine.config import EngineConfig
from engine.native.panels import TYPES
from engine.native.runner import NativeRunner
from engine.phase_clock import PhaseClock
from engine.request import Request, SamplingParams
from engine.scheduler import Slice
from models.store import LoadedModel, load


def log_probabilities(model: LoadedModel, kind: str, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocabulary] log-probabilities of what follows each token."""
    runner = NativeRunner(model, EngineConfig(dtype=kind, kv_blocks=len(tokens) // 16 + 1))
    request = Request("text", tokens, SamplingParams(max_tokens=1), PhaseClock(0), lambda _output: None)
    request.tokens, request.blocks = tokens, list(range(len(tokens) // 16 + 1))
    logits = runner.forward([Slice(request, i, 1, True) for i in range(len(tokens))])
    return logits.double().log_softmax(-1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", type=Path, default=Path(__file__).resolve().parents[1] / "CONTRIBUTING.md")
    parser.add_argument("--tokens", type=int, default=256)
    options = parser.parse_args()
    model = load(options.model)
    tokens = model.tokenizer.encode_plain(options.text.read_text())[: options.tokens]
    want = log_probabilities(model, "fp32", tokens)
    print("| weights | mean KL | largest KL | other first choice |\n|---|---|---|---|")
    for kind in TYPES:
        got = log_probabilities(model, kind, tokens)
        divergence = (want.exp() * (want - got)).sum(-1)
        other = (want.argmax(-1) != got.argmax(-1)).double().mean()
        print(f"| {kind} | {divergence.mean():.2g} | {divergence.max():.2g} | {other:.1%} |", flush=True)


if __name__ == "__main__":
    main()
