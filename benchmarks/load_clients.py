"""Clients of other makers for benchmarks.loadgen: how each is installed and told to send at a constant rate.

A rate is judged by what the stub saw, the same for all: requests in each second of the middle, from its log.  So no
report of theirs has to be trusted or parsed.  The bare loop and the Locust script, which are ours, also tell their lag
and their TTFT, and are held to the same bounds as tailspan.  CPU counts while requests come, not for imports and
preparations.  Each client lives in a virtual environment of its own under build/peers and reads its tokenizer from a
folder laid out as the Hugging Face cache: that is how all three take one without a network.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import psutil

from loadgen.native_stub import NativeStub
from loadgen.roofline import CHUNK_MS, CHUNKS, LAG_S, TTFT_ERROR_S, TTFT_MS
from models.tiny import write_tiny

ROOT: Final = Path(__file__).resolve().parents[1]
PEERS: Final = ROOT / "build" / "peers"
INSTALL_S: Final = 900.0
#: A second of the middle may hold this share fewer requests than asked.
SLACK: Final = 0.02
#: A name in the cache that `tokenizer_cache` lays out; no hub knows it, and none is asked.
TOKENIZER: Final = "tailspan/tiny"
REVISION: Final = "0" * 40
PREPARE_S: Final = 90.0  # for imports and prompts, before the first request
WATCH_S: Final = 0.25
NS: Final = 1_000_000_000
PYTHONS: Final = tuple(f"python3.{minor}" for minor in range(14, 10, -1))
Command = Callable[[str, str, float, float, Path], list[str]]


@dataclass(frozen=True, slots=True)
class Client:
    """packages: what pip installs; command(python, url, rate, seconds, folder): what is run.

    exponential: its constant load has exponential gaps, so that a second may lack three standard deviations.
    tells: its last line is a JSON object with its own lag_p99_s and ttft_p50_s.
    """

    name: str
    packages: tuple[str, ...]
    command: Command
    least_python: tuple[int, int] = (3, 11)
    exponential: bool = False
    tells: bool = False


@dataclass(frozen=True, slots=True)
class Seen:
    """One rate.  per_second: arrivals at the stub in each second, the last first to be whole.  lag_p99_s, ttft_p50_s:
    where the client tells them.  cpu_s: of all its processes, from the first arrival counted to the last."""

    rate: float
    requests: int
    per_second: tuple[int, ...]
    cpu_s: float
    lag_p99_s: float | None = None
    ttft_p50_s: float | None = None
    exponential: bool = False

    @property
    def delivered(self) -> float:
        """Requests per second of the middle, not more than asked."""
        middle = self.per_second[1:-1]
        return min(self.rate, sum(middle) / max(1, len(middle)))

    @property
    def held(self) -> bool:
        middle = self.per_second[1:-1]
        least = (1 - SLACK) * self.rate - 1  # one may lie beyond an edge
        if self.exponential:
            in_time = len(middle) > 0 and self.delivered >= least - 3 * math.sqrt(self.rate / len(middle))
        else:
            in_time = len(middle) > 0 and min(middle) >= least
        prompt = self.lag_p99_s is None or self.lag_p99_s < LAG_S
        return in_time and prompt and (self.ttft_p50_s is None or self.ttft_p50_s < TTFT_MS / 1e3 + TTFT_ERROR_S)

    @property
    def cpu_per_request_s(self) -> float:
        return self.cpu_s / max(1, sum(self.per_second))

    def __str__(self) -> str:
        told = "" if self.lag_p99_s is None else f", lag p99 {self.lag_p99_s * 1e3:.2f} ms"
        told += "" if self.ttft_p50_s is None else f", TTFT p50 {self.ttft_p50_s * 1e3:.2f} ms"
        verdict = "held" if self.held else "not held"
        return f"{self.rate:,.0f}/s asked, each second {list(self.per_second)}{told}: {verdict}"


def _aiperf(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    tool = str(Path(python).with_name("aiperf"))
    lengths = ["--synthetic-input-tokens-mean", "200", "--output-tokens-mean", str(CHUNKS), "--streaming"]
    load = ["--request-rate", str(rate), "--request-rate-mode", "constant", "--request-count", str(int(rate * seconds))]
    where = ["--url", url, "--tokenizer", TOKENIZER, "--artifact-dir", str(folder / "aiperf")]
    return [tool, "profile", "-m", "stub", "--endpoint-type", "chat", "--ui", "none", *lengths, *load, *where]


def _guidellm(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    tool = str(Path(python).with_name("guidellm"))
    data = f"kind=synthetic_text,prompt_tokens=200,output_tokens={CHUNKS}"
    load = ["--profile", f"kind=constant,rate={rate}", "--constraint", f"kind=max_duration,seconds={seconds}"]
    where = ["--backend", f"kind=openai_http,target={url},model=stub", "--data", data]
    return [tool, "run", *where, "--tokenizer", f"kind=hf_auto,model={TOKENIZER}", *load, "--disable-progress"]


def _inference_perf(python: str, url: str, rate: float, seconds: float, folder: Path) -> list[str]:
    config = {
        "load": {
            "type": "constant",
            "stages": [{"rate": rate, "duration": int(seconds)}],
            "worker_max_concurrency": 10_000,  # 100 is its default: a knee of its own at 500 requests/s
        },
        "api": {"type": "completion", "streaming": True},  # its synthetic prompts go to no other
        "server": {"type": "vllm", "model_name": "stub", "base_url": url, "ignore_eos": True},
        "tokenizer": {"pretrained_model_name_or_path": TOKENIZER},
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


BARE: Final = Client("bare loop", (), _bare, tells=True)
LOCUST: Final = Client("locust", (), _locust, tells=True)
OTHERS: Final = (
    Client("aiperf", ("aiperf==0.13.0",), _aiperf),
    Client("guidellm", ("guidellm==0.8.1",), _guidellm),
    Client("inference-perf", ("inference-perf==0.7.0",), _inference_perf, least_python=(3, 12), exponential=True),
)


def tokenizer_cache(folder: Path) -> Path:
    """A Hugging Face cache with one tokenizer, TOKENIZER, that needs no network."""
    repository = folder / "hub" / f"models--{TOKENIZER.replace('/', '--')}"
    snapshot = repository / "snapshots" / REVISION
    if not snapshot.exists():
        snapshot.mkdir(parents=True)
        write_tiny(snapshot)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(REVISION, encoding="ascii")
    return folder / "hub"


def python_for(least: tuple[int, int]) -> str:
    """A Python of this version or a later one: ours, one on the path, or one of pyenv's.  Raises RuntimeError."""
    if sys.version_info[:2] >= least:
        return sys.executable
    found = [path for name in PYTHONS if (path := shutil.which(name))]
    found += map(str, sorted(Path("~/.pyenv/versions").expanduser().glob("3.*/bin/python"), reverse=True))
    for path in found:
        code = f"import sys; sys.exit(sys.version_info[:2] < {least})"
        if subprocess.run([path, "-c", code], capture_output=True, check=False).returncode == 0:
            return path
    raise RuntimeError(f"it needs Python {least[0]}.{least[1]} or newer, and none is here")


def python_of(client: Client) -> str:
    """The python of a client's own environment; ours for one that needs nothing.  Raises RuntimeError."""
    if not client.packages:
        return sys.executable
    folder = PEERS / client.name
    python = str(folder / "bin" / "python")
    if (folder / ".ready").exists():
        return python
    base = python_for(client.least_python)
    print(f"== installing {' '.join(client.packages)} into {folder}, at most {INSTALL_S:.0f} s", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([base, "-m", "venv", str(folder)], check=True)
    # compiling every module of a gigabyte takes longer than fetching it, and few of them are ever imported
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-compile", *client.packages]
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
    arrivals, log = folder / "arrivals.log", folder / f"{client.name.replace(' ', '-')}.log"
    arrivals.unlink(missing_ok=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    environment |= {"HF_HUB_CACHE": str(tokenizer_cache(folder)), "HF_HOME": str(folder)}
    stub = NativeStub(
        cpu=cpus[1] if cpus else None, chunks=CHUNKS, ttft_ms=TTFT_MS, chunk_ms=CHUNK_MS, log=str(arrivals)
    )
    with stub, log.open("w") as file:
        command = client.command(python, stub.url, rate, seconds, folder)
        process = subprocess.Popen(
            command, stdout=file, stderr=file, env=environment, cwd=folder, start_new_session=True
        )
        if cpus:
            os.sched_setaffinity(process.pid, {cpus[0]})
        spent = _watch(process, seconds * 3 + PREPARE_S)
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
    if not stub.report.get("requests"):
        raise RuntimeError(f"it sent nothing: {(said or ['no word'])[-1][:200]}")
    stamps = np.sort(np.array([int(line.split()[0]) for line in arrivals.read_text(encoding="ascii").splitlines()]))
    own = told(client, said)
    counted = per_second(stamps, seconds)
    window = max(int(stamps[0]), int(stamps[-1]) - len(counted) * NS), int(stamps[-1])
    cpu = float(np.diff(np.interp(window, *zip(*spent, strict=True)))[0]) if spent else 0.0
    return Seen(rate, len(stamps), counted, cpu, own.get("lag_p99_s"), own.get("ttft_p50_s"), client.exponential)


def told(client: Client, said: list[str]) -> dict[str, float]:
    """What a client that tells says at its end.  Raises RuntimeError where it does not."""
    if not client.tells:
        return {}
    try:
        last: dict[str, float] = json.loads(said[-1])
        return {name: float(last[name]) for name in ("lag_p99_s", "ttft_p50_s")}
    except (IndexError, ValueError, KeyError, TypeError):
        raise RuntimeError(f"its last line tells no lag and no TTFT: {(said or ['no word'])[-1][:200]}") from None


def per_second(stamps: npt.NDArray[np.int64], seconds: float) -> tuple[int, ...]:
    """Arrivals in each of the last `seconds`, counted back from the last of them; stamps: ns, sorted."""
    edges = stamps[-1] - np.arange(int(seconds), -1, -1, dtype=np.int64) * NS
    return tuple(int(n) for n in np.diff(np.searchsorted(stamps, edges, side="right")))


def _watch(process: subprocess.Popen[bytes], limit_s: float) -> list[tuple[int, float]]:
    """Wait for the end; returns moments (CLOCK_MONOTONIC ns) and the CPU seconds of process and descendants by then."""
    end = time.monotonic() + limit_s
    spent: dict[int, float] = {}
    found: list[tuple[int, float]] = []
    while process.poll() is None and time.monotonic() < end:
        with suppress(psutil.Error):
            for one in (psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)):
                times = one.cpu_times()
                spent[one.pid] = times.user + times.system
        found.append((time.monotonic_ns(), sum(spent.values())))
        time.sleep(WATCH_S)
    with suppress(ProcessLookupError):  # its children too: some leave some behind
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    return found
