"""The weights of a safetensors folder: checked from their headers, mapped into memory, never copied when fp32.

What must hold: before a tensor is handed out, every weight of the shape is known to be there, with the right shape, a
supported type and all its bytes in the file.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from models.errors import UserError
from models.file_kind import first_bytes, read_json
from models.shape import ModelShape

if TYPE_CHECKING:
    import torch

_BYTES: Final = {"F32": 4, "F16": 2, "BF16": 2}
_AGAIN: Final = "fetch the file again"
_HEADER_LIMIT: Final = 100_000_000  # bytes; the format's own limit


def weight_files(folder: Path) -> list[Path]:
    """model.safetensors, or the shards that model.safetensors.index.json names.  Raises UserError if neither."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if index.exists():
        names = read_json(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError("weight_map is missing or damaged", where=str(index), remedy=_AGAIN)
        shards = sorted(set(names.values()))
        if any(Path(name).name != name for name in shards):
            raise UserError("weight_map names a file outside the folder", where=str(index), remedy=_AGAIN)
        return [folder / name for name in shards]
    if single.exists():
        return [single]
    raise UserError(
        "no model.safetensors and no model.safetensors.index.json in this folder",
        where=str(folder),
        remedy="give a folder with a model's safetensors files, or a .gguf file",
    )


def read_header(path: Path) -> dict[str, Any]:
    """name -> {dtype, shape, data_offsets} of one file.  Raises UserError for a damaged or truncated file."""
    start = first_bytes(path, 8)
    size = path.stat().st_size
    length = int.from_bytes(start, "little")
    if len(start) < 8 or length > min(_HEADER_LIMIT, size - 8):
        raise UserError("not a safetensors file, or truncated in its header", where=str(path), remedy=_AGAIN)
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            ends = [int(entry["data_offsets"][1]) for entry in header.values()]
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise UserError(f"damaged safetensors header: {error}", where=str(path), remedy=_AGAIN) from error
    expected = 8 + length + max(ends, default=0)
    if size < expected:
        raise UserError(f"truncated: {size} of {expected} bytes", where=str(path), remedy=_AGAIN)
    return dict(header)


class Weights(Mapping[str, "torch.Tensor"]):
    """Hugging Face name -> fp32 tensor; fp32 files are mapped, fp16 and bf16 are widened at each access.

    stored(name) gives the tensor as the file has it, always mapped.
    """

    def __init__(self, folder: Path, shape: ModelShape) -> None:
        """Raises UserError naming the tensor that is missing, unknown, of another shape or type."""
        self._file_of: dict[str, Path] = {}
        self.total_bytes = 0
        expected = shape.tensor_shapes()
        for path in weight_files(folder):
            for name, entry in read_header(path).items():
                if name not in expected:
                    _refuse_unknown(name, path)
                    continue
                _check(name, entry, expected[name], path)
                self._file_of[name] = path
                self.total_bytes += _BYTES[entry["dtype"]] * math.prod(expected[name])
        missing = [name for name in expected if name not in self._file_of]
        if missing:
            raise UserError(
                f"tensor {missing[0]} is missing ({len(missing)} in all)", where=str(folder), remedy="fetch it again"
            )
        self._open: dict[Path, Any] = {}

    def stored(self, name: str) -> torch.Tensor:
        """The tensor as stored.  Raises KeyError for an unknown name."""
        path = self._file_of[name]
        if path not in self._open:
            from safetensors import safe_open

            self._open[path] = safe_open(str(path), framework="pt", device="cpu")
        tensor: torch.Tensor = self._open[path].get_tensor(name)
        return tensor

    def __getitem__(self, name: str) -> torch.Tensor:
        return self.stored(name).float()

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


def _refuse_unknown(name: str, path: Path) -> None:
    # A tied model may repeat its head, and old exports carry RoPE tables: both follow from what we have.
    if name == "lm_head.weight" or name.endswith("rotary_emb.inv_freq"):
        return
    raise UserError(
        f"tensor {name} is not part of a model of this shape",
        where=str(path),
        remedy="use a model of the Llama family without adapters, further biases or quantised weights",
    )


def _check(name: str, entry: dict[str, Any], expected: tuple[int, ...], path: Path) -> None:
    dtype, shape = entry.get("dtype"), tuple(entry.get("shape") or ())
    if dtype not in _BYTES:
        raise UserError(
            f"tensor {name} has type {dtype}, which is not supported",
            where=str(path),
            remedy=f"use weights in {', '.join(_BYTES)}",
        )
    if shape != expected:
        raise UserError(
            f"tensor {name} has shape {shape}, config.json wants {expected}",
            where=str(path),
            remedy="use config.json and weights of the same model",
        )
