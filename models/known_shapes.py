"""Shapes of well-known models without their weights: enough to plan with, for the cost account and the simulation.

Every figure is from the model's published config.json; tests hold the number of parameters against the published one.
``nominal`` is the number by which people call the model (7B), which rules of thumb count with.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from models.errors import UserError, did_you_mean
from models.known import KNOWN
from models.shape import ModelShape

_LLAMA3: Final[dict[str, Any]] = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def _llama(
    name: str,
    layers: int,
    hidden: int,
    ffn: int,
    heads: int,
    kv_heads: int,
    *,
    vocab: int = 32_000,
    context: int = 4096,
    theta: float = 10_000.0,
    head_dim: int | None = None,
    scaling: float | None = None,
    tied: bool = False,
    bos: int = 1,
    eos: tuple[int, ...] = (2,),
    eps: float = 1e-5,
    qkv_bias: bool = False,
    qk_norm: bool = False,
) -> ModelShape:
    return ModelShape(
        name=name,
        architecture="llama",
        n_layers=layers,
        hidden=hidden,
        ffn=ffn,
        n_heads=heads,
        n_kv_heads=kv_heads,
        head_dim=head_dim or hidden // heads,
        vocab=vocab,
        max_context=context,
        rope_theta=theta,
        rope_scaling={**_LLAMA3, "factor": scaling} if scaling else None,
        rms_eps=eps,
        tied_embeddings=tied,
        bos_token_id=bos,
        eos_token_ids=eos,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
    )


def _llama3(
    name: str, layers: int, hidden: int, ffn: int, heads: int, *, scaling: float, tied: bool = False
) -> ModelShape:
    return _llama(
        name,
        layers,
        hidden,
        ffn,
        heads,
        8,
        vocab=128_256,
        context=131_072,
        theta=500_000.0,
        scaling=scaling,
        tied=tied,
        bos=128_000,
        eos=(128_001, 128_008, 128_009),
    )


def _smollm2(name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, *, theta: float) -> ModelShape:
    return _llama(name, layers, hidden, ffn, heads, kv_heads, vocab=49_152, context=8192, theta=theta, tied=True)


def _qwen(name: str, layers: int, hidden: int, ffn: int, heads: int, kv_heads: int, **more: Any) -> ModelShape:
    """Qwen2.5 (biases) or Qwen3 (q/k norms), as ``more`` says."""
    return _llama(
        name,
        layers,
        hidden,
        ffn,
        heads,
        kv_heads,
        theta=1e6,
        bos=151_643,
        eos=(151_645, 151_643),
        eps=1e-6,
        **more,
    )


@dataclass(frozen=True, slots=True)
class KnownShape:
    """shape, and the number of parameters that the model is called by."""

    shape: ModelShape
    nominal: float


SHAPES: Final = {
    known.shape.name: known
    for known in (
        # meta-llama/Llama-2-{7b,13b,70b}
        KnownShape(_llama("llama-2-7b", 32, 4096, 11_008, 32, 32), 7e9),
        KnownShape(_llama("llama-2-13b", 40, 5120, 13_824, 40, 40), 13e9),
        KnownShape(_llama("llama-2-70b", 80, 8192, 28_672, 64, 8), 70e9),
        # meta-llama/Llama-3.1-{8B,70B}-Instruct, Llama-3.2-{1B,3B}-Instruct
        KnownShape(_llama3("llama-3.1-8b", 32, 4096, 14_336, 32, scaling=8.0), 8e9),
        KnownShape(_llama3("llama-3.1-70b", 80, 8192, 28_672, 64, scaling=8.0), 70e9),
        KnownShape(_llama3("llama-3.2-1b", 16, 2048, 8192, 32, scaling=32.0, tied=True), 1e9),
        KnownShape(_llama3("llama-3.2-3b", 28, 3072, 8192, 24, scaling=32.0, tied=True), 3e9),
        # mistralai/Mistral-7B-v0.3
        KnownShape(
            _llama("mistral-7b", 32, 4096, 14_336, 32, 8, vocab=32_768, context=32_768, theta=1e6),
            7e9,
        ),
        # TinyLlama/TinyLlama-1.1B-Chat-v1.0
        KnownShape(_llama("tinyllama-1.1b", 22, 2048, 5632, 32, 4, context=2048), 1.1e9),
        # HuggingFaceTB/SmolLM2-{135M,360M,1.7B}-Instruct; smollm2 is the one that comes with tailspan
        KnownShape(_smollm2("smollm2", 30, 576, 1536, 9, 3, theta=100_000.0), 135e6),
        KnownShape(_smollm2("smollm2-360m", 32, 960, 2560, 15, 5, theta=100_000.0), 360e6),
        KnownShape(_smollm2("smollm2-1.7b", 24, 2048, 8192, 32, 32, theta=130_000.0), 1.7e9),
        # Qwen/Qwen2.5-0.5B-Instruct, Qwen/Qwen3-8B
        KnownShape(
            _qwen("qwen2.5-0.5b", 24, 896, 4864, 14, 2, vocab=151_936, context=32_768, tied=True, qkv_bias=True), 5e8
        ),
        KnownShape(
            _qwen("qwen3-8b", 36, 4096, 12_288, 32, 8, vocab=151_936, context=40_960, head_dim=128, qk_norm=True), 8e9
        ),
    )
}


def only_a_shape(ref: str) -> UserError | None:
    """The error for a model whose shape is known and whose weights are not; None for any other."""
    if ref.lower() not in SHAPES or ref.lower() in KNOWN:
        return None
    return UserError(
        f"of {ref!r} the shape is known, not the weights: only --backend simulated has it",
        where="model",
        remedy=f"--backend simulated --device h100 --model {ref.lower()}; to compute it, give the path of its "
        "safetensors folder or .gguf file",
    )


def find_shape(ref: str) -> KnownShape:
    """The shape of a known name, a model folder or a GGUF file; weights are never read.  Raises UserError.

    nominal is, where there is no name to go by, the number of parameters itself.
    """
    known = SHAPES.get(ref.lower())
    if known is not None:
        return known
    path = Path(ref).expanduser()
    if not path.exists():
        raise UserError(
            f"no shape is known as {ref!r}, and there is no such file or folder",
            where="--model",
            remedy=did_you_mean(ref, SHAPES)
            + f"known: {', '.join(SHAPES)}; or give a folder with config.json, or a .gguf file",
        )
    from models.file_kind import read_json
    from models.store import resolve

    folder = resolve(ref)
    config = folder / "config.json"
    shape = ModelShape.from_config(read_json(config), str(config), name=path.name)
    return KnownShape(shape, float(shape.parameters()))
