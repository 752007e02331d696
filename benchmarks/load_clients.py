"""Clients of other makers for benchmarks.loadgen: how each is installed and told to send at a constant rate.

A rate is judged by what the stub saw, the same for all: requests in each second of the middle.  So no report of theirs
has to be trusted or parsed.  Each lives in a virtual environment of its own under build/peers.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from loadgen.native_stub import NativeStub
from loadgen.roofline import CHUNK_MS, CHUNKS, TTFT_MS

ROOT: Final = Path(__file__).resolve().parents[1]
PEERS: Final = ROOT / "build" / "peers"
INSTALL_S: Final = 900.0
#: A second of the middle may hold this share fewer requests than asked.
SLACK: Final = 0.02
Command = Callable[[str, str, float, float, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Client:
    """packages: what pip installs; command(python, url, rate, seconds, folder): what is run."""

    name: str
    packages: tuple[str, ...]
    command: Command


@dataclass(frozen=True, slots=True)
class Seen:
    """What the stub saw of one rate.  cpu_s: of all processes of the client."""

    rate: float
    requests: int
    done: int
    per_second: tuple[int, ...]
    cpu_s: float
    wall_s: float

    @property
    def held(self) -> bool:
        middle = self.per_second[1:-1]
        return len(middle) > 0 and min(middle) >= (1 - SLACK) * self.rate

    @property
    def cpu_per_request_s(self) -> float:
        return self.cpu_s / max(1, self.requests)


def _aiperf(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    tool = str(Path(python).with_name("aiperf"))
    lengths = ["--synthetic-input-tokens-mean", "200", "--output-tokens-mean", str(CHUNKS), "--streaming"]
    load = ["--request-rate", str(rate), "--request-rate-mode", "constant", "--request-count", str(int(rate * seconds))]
    where = ["--url", url, "--tokenizer", tokenizer(folder), "--artifact-dir", str(folder / "aiperf")]
    return [tool, "profile", "-m", "stub", "--endpoint-type", "chat", "--ui", "none", *lengths, *load, *where]


def _guidellm(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    tool = str(Path(python).with_name("guidellm"))
    data = f"kind=synthetic_text,prompt_tokens=200,output_tokens={CHUNKS}"
    load = ["--profile", f"kind=constant,rate={rate}", "--constraint", f"kind=max_duration,seconds={seconds}"]
    where = ["--backend", f"kind=openai_http,target={url},model=stub", "--data", data]
    return [tool, "run", *where, "--tokenizer", f"kind=hf_auto,model={tokenizer(folder)}", *load, "--disable-progress"]


def _inference_perf(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    config = {
        "load": {"type": "constant", "stages": [{"rate": rate, "duration": int(seconds)}]},
        "api": {"type": "chat", "streaming": True},
        "server": {"type": "vllm", "model_name": "stub", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": tokenizer(folder)},
        "data": {
            "type": "synthetic",
            "input_distribution": {"min": 190, "max": 210, "mean": 200, "std_dev": 2, "total_count": 1000},
            "output_distribution": {"min": 16, "max": 16, "mean": 16, "std_dev": 0, "total_count": 1000},
        },
        "storage": {"local_storage": {"path": str(folder / "inference-perf")}},
    }
    file = folder / "inference-perf.yml"
    file.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
    return [str(Path(python).with_name("inference-perf")), "--config_file", str(file)]


def _bare(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    return [python, str(ROOT / "benchmarks" / "clients" / "bare_loop.py"), url, str(rate), str(seconds)]


def _locust(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    script = str(ROOT / "benchmarks" / "clients" / "locust_line.py")
    users = ["-u", str(int(rate)), "-r", str(int(rate)), "-t", f"{int(seconds)}s"]
    return [python, "-m", "locust", "-f", script, "--headless", "--only-summary", "-H", url, *users]


BARE: Final = Client("bare loop", (), _bare)
LOCUST: Final = Client("locust", (), _locust)
OTHERS: Final = (
    Client("aiperf", ("aiperf==0.13.0",), _aiperf),
    Client("guidellm", ("guidellm==0.8.1",), _guidellm),
    Client("inference-perf", ("inference-perf==0.7.0",), _inference_perf),
)


def tokenizer(folder: Path) -> str:
    """A folder with a tokenizer that needs no network."""
    from models.tiny import write_tiny

    path = folder / "tiny"
    if not path.exists():
        path.mkdir()
        write_tiny(path)
    return str(path)


def python_of(client: Client) -> str:
    """The python of a client's own environment; ours for one that needs nothing.  Raises RuntimeError."""
    if not client.packages:
        return sys.executable
    folder = PEERS / client.name
    python = str(folder / "bin" / "python")
    if (folder / ".ready").exists():
        return python
    print(f"== installing {' '.join(client.packages)} into {folder}, at most {INSTALL_S:.0f} s", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *client.packages]
    try:
        done = subprocess.run(pip, capture_output=True, text=True, timeout=INSTALL_S, check=False)
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"not installed within {INSTALL_S:.0f} s") from None
    if done.returncode:
        raise RuntimeError(f"pip: {(done.stderr.strip().splitlines() or ['?'])[-1][:200]}")
    (folder / ".ready").touch()
    return python


def send(client: Client, rate: float, seconds: float, folder: Path, cpus: list[int] | None) -> Seen:
    """Let a client send at this rate on one core, the stub on the other.  Raises RuntimeError if it sends nothing."""
    python = python_of(client)
    with NativeStub(cpu=cpus[1] if cpus else None, chunks=CHUNKS, ttft_ms=TTFT_MS, chunk_ms=CHUNK_MS) as stub:
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        log = folder / f"{client.name.replace(' ', '-')}.log"
        began = time.monotonic()
        with log.open("a") as file:
            command = client.command(python, stub.url, rate, seconds, folder)
            process = subprocess.Popen(
                command, stdout=file, stderr=file, env=environment, cwd=folder, start_new_session=True
            )
            if cpus:
                os.sched_setaffinity(process.pid, {cpus[0]})
            cpu = _watch(process, seconds * 3 + 120)
        wall = time.monotonic() - began
    report: dict[str, Any] = stub.report
    if not report.get("requests"):
        raise RuntimeError(f"it sent nothing: {(log.read_text().strip().splitlines() or ['no word'])[-1][:200]}")
    per_second = tuple(report["per_second"])
    return Seen(rate, report["requests"], report["done"], per_second, cpu, wall)


def _watch(process: subprocess.Popen[bytes], limit_s: float) -> float:
    """Wait for the end; returns the CPU seconds of the process and its descendants, as far as they were seen."""
    end = time.monotonic() + limit_s
    spent: dict[int, float] = {}
    while process.poll() is None and time.monotonic() < end:
        try:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for one in family:
                times = one.cpu_times()
                spent[one.pid] = times.user + times.system
        except psutil.Error:
            pass
        time.sleep(0.2)
    if process.poll() is None:
        os.killpg(process.pid, 9)
        process.wait()
    return sum(spent.values())
