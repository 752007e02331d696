"""From what a user calls a model to the model: a known name, a .gguf file or a safetensors folder.

What must hold: after the first use a model loads from the cache in well under a second, without copying its weights;
load_reference needs no torch.  Every problem is a UserError that names the file.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.cache import built_once, cache_dir, remembered_sha256
from models.convert import ORIGIN, VERSION, convert
from models.errors import UserError, did_you_mean
from models.file_kind import first_bytes, read_json
from models.known import KNOWN
from models.known_shapes import only_a_shape
from models.pull import pull, say
from models.safetensors_folder import Weights, weight_files
from models.shape import ModelShape
from models.template import ChatTemplate
from models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reference:
    """A model without its weights.  shas: SHA-256 of "tokenizer", "template" and, where there are weights, "model"."""

    name: str
    shape: ModelShape
    tokenizer: Tokenizer
    template: ChatTemplate
    shas: dict[str, str]
    folder: Path


@dataclass(frozen=True, slots=True)
class LoadedModel(Reference):
    """weights: Hugging Face name -> fp32 tensor (see safetensors_folder.Weights); no lm_head.weight if tied."""

    weights: Weights


def resolve(ref: str, progress: Callable[[str], None] = say) -> Path:
    """The folder, in the Hugging Face layout, of a known name, a .gguf file or a folder.

    A known model is pulled and a GGUF converted at their first use, which progress is told.  Raises UserError.
    """
    if ref in KNOWN:
        return pull(ref, progress)
    path = Path(ref).expanduser()
    if path.is_dir():
        if not (path / "config.json").exists():
            ggufs = sorted(path.glob("*.gguf"))
            raise UserError(
                "no config.json in this folder",
                where=str(path),
                remedy=f"give the file {ggufs[0]}" if ggufs else "give a model's safetensors folder or a .gguf file",
            )
        return path
    if path.exists() or path.suffix == ".gguf":
        return _converted(path, progress)
    if (simulated := only_a_shape(ref)) is not None:
        raise simulated
    raise UserError(
        f"no model is known as {ref!r}, and there is no such file or folder",
        where="model",
        remedy=did_you_mean(ref, KNOWN)
        + f"known models: {', '.join(KNOWN)}; or give the path of a .gguf file or of a safetensors folder",
    )


def load_reference(ref: str) -> Reference:
    """Shape, tokenizer, chat template and digests of a model, without weights and without torch.  Raises UserError."""
    folder = resolve(ref)
    shape = _shape(folder, _name(ref))
    tokenizer = Tokenizer.from_file(folder / "tokenizer.json")
    if tokenizer.vocab_size > shape.vocab:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model {shape.vocab}",
            where=str(folder),
            remedy="use tokenizer.json and config.json of the same model",
        )
    template = _template(folder)
    shas = {"tokenizer": tokenizer.sha, "template": template.sha}
    if (model_sha := _model_sha(folder)) is not None:
        shas["model"] = model_sha
    return Reference(shape.name, shape, tokenizer, template, shas, folder)


def load(ref: str) -> LoadedModel:
    """A whole model; its weights are mapped, so the first pass over them reads the disk.  Raises UserError."""
    reference = load_reference(ref)
    weights = Weights(reference.folder, reference.shape)
    return LoadedModel(
        name=reference.name,
        shape=reference.shape,
        tokenizer=reference.tokenizer,
        template=reference.template,
        shas=reference.shas,
        folder=reference.folder,
        weights=weights,
    )


def source_gguf(folder: Path) -> Path | None:
    """The GGUF that a converted folder came from, if it is still there; None for other folders."""
    if not (folder / ORIGIN).exists():
        return None
    path = folder / str(read_json(folder / ORIGIN).get("gguf"))
    return path if path.exists() else None


def _name(ref: str) -> str:
    return ref if ref in KNOWN else Path(ref).expanduser().resolve().name.removesuffix(".gguf")


def _converted(path: Path, progress: Callable[[str], None]) -> Path:
    start = first_bytes(path)
    if start[:4] != b"GGUF":
        raise UserError(
            f"not a GGUF file: it starts with {start[:4]!r}",
            where=str(path),
            remedy="give a .gguf file, or the folder that holds the safetensors files",
        )
    digest = remembered_sha256(path)

    def build(folder: Path) -> None:
        started = time.monotonic()
        convert(path, folder, sha256=digest, recorded=str(path.resolve()), progress=progress)
        progress(f"converted {path.name} in {time.monotonic() - started:.1f} s, kept in {cache_dir()}")

    stem = "".join(char if char.isalnum() or char in "-_." else "-" for char in path.stem)[:80].lstrip(".")
    return built_once(cache_dir() / "models" / f"{stem}-{digest[:16]}-v{VERSION}", build, waiting=progress)


def _shape(folder: Path, name: str) -> ModelShape:
    path = folder / "config.json"
    shape = ModelShape.from_config(read_json(path), str(path), name=name)
    generation = folder / "generation_config.json"
    if generation.exists():
        # Llama 3.1 lists its further end tokens only here.
        more = read_json(generation).get("eos_token_id")
        ids = more if isinstance(more, list) else [more]
        known = dict.fromkeys((*shape.eos_token_ids, *(one for one in ids if isinstance(one, int))))
        shape = replace(shape, eos_token_ids=tuple(known))
    return shape


def _template(folder: Path) -> ChatTemplate:
    path = folder / "tokenizer_config.json"
    config = read_json(path) if path.exists() else {}
    source, where = config.get("chat_template"), str(path)
    if isinstance(source, list):
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    own = folder / "chat_template.jinja"
    if own.exists():
        first_bytes(own)
        source, where = own.read_text(encoding="utf-8", errors="replace"), str(own)
    if source is not None and not isinstance(source, str):
        raise UserError("chat_template is not a text", where=where, remedy="fetch the file again")
    return ChatTemplate(source, bos_token=_text(config, "bos_token"), eos_token=_text(config, "eos_token"), where=where)


def _text(config: dict[str, Any], name: str) -> str:
    value = config.get(name)
    if isinstance(value, dict):  # the older form, an AddedToken as an object
        value = value.get("content")
    return value if isinstance(value, str) else ""


def _model_sha(folder: Path) -> str | None:
    """The GGUF's digest for a converted model, else that of the weight file (of the shards' digests, joined)."""
    if (folder / ORIGIN).exists():
        return str(read_json(folder / ORIGIN)["sha256"])
    if not any((folder / name).exists() for name in ("model.safetensors", "model.safetensors.index.json")):
        return None
    files = weight_files(folder)
    for path in files:
        first_bytes(path)
    digests = [remembered_sha256(path) for path in files]
    return digests[0] if len(digests) == 1 else hashlib.sha256("".join(digests).encode()).hexdigest()
