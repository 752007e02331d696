"""GGUF -> a folder in the Hugging Face layout, once, so that every later start maps it into memory.

The folder holds config.json, tokenizer.json, tokenizer_config.json, model.safetensors (fp32, dequantised exactly) and
origin.json, which records the GGUF it came from.  Peak memory is one tensor, whatever the size of the model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from models.cache import require_space
from models.gguf_file import GgufFile
from models.gguf_tokenizer import rebuild
from models.shape import ModelShape

# Part of the cached folder's name: raise it whenever the bytes that convert writes change.
VERSION: Final = 1
ORIGIN: Final = "origin.json"
_ALIGNMENT: Final = 64  # bytes; fp32 vectors of any instruction set load aligned


def convert(source: Path, folder: Path, *, sha256: str, recorded: str, progress: Callable[[str], None]) -> None:
    """Fill the empty folder from the GGUF at source.

    sha256: the GGUF's digest; recorded: the path that origin.json names for it, relative to folder if inside it.
    Raises UserError for whatever is missing or unsupported in the GGUF, and for a full disk.
    """
    gguf = GgufFile(source)
    config = gguf.config()
    shape = ModelShape.from_config(config, str(source))
    tokenizer, tokenizer_config = rebuild(gguf.metadata, str(source))
    size = 4 * shape.parameters()
    require_space(folder, size)
    progress(f"converting {source.name}: {shape.parameters() / 1e6:.1f}M weights to fp32 ({size / 1e6:.0f} MB)")
    _write_json(folder / "config.json", config)
    _write_json(folder / "tokenizer_config.json", {**tokenizer_config, "model_max_length": shape.max_context})
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    write_safetensors(folder / "model.safetensors", shape.tensor_shapes(), gguf.weights(shape))
    _write_json(
        folder / ORIGIN,
        {
            "gguf": recorded,
            "sha256": sha256,
            "converter": VERSION,
            "name": gguf.metadata.get("general.name"),
            "license": gguf.metadata.get("general.license"),
        },
    )


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], tensors: Iterator[tuple[str, npt.NDArray[np.float32]]]
) -> None:
    """Write fp32 tensors, in the order of shapes, as they come.  Format: 8-byte length, JSON header, data."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in shapes.items():
        end = offset + 4 * math.prod(shape)
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-(8 + len(text)) % _ALIGNMENT)  # the format allows trailing spaces
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for (expected, _), (name, array) in zip(shapes.items(), tensors, strict=True):
            if name != expected:
                raise ValueError(f"tensor {name} came where {expected} was due")
            file.write(array.astype("<f4", copy=False).tobytes())


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
