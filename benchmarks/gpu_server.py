"""Many streams at once: through HTTP from a whole server, and from the engine in this process.

The server serves SmolLM2's shape with random weights.  It runs with what a bare GPU machine has (``NEEDS`` beside
torch, triton and numpy): no command line, no spans, no Arrow.  Its process is ``python -m benchmarks.gpu_server FOLDER
READY OPTIONS``.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from benchmarks.gpu_model import Bare, RandomWeights
from engine.config import EngineConfig
from engine.core import Engine
from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.runner_triton import TritonRunner
from engine.scheduler import Slice
from models.shape import ModelShape

if TYPE_CHECKING:
    from models.store import Reference

#: What the server imports beside torch (which brings jinja2), triton and numpy.
NEEDS = ("aiohttp", "tokenizers", "safetensors", "prometheus_client")


def missing() -> list[str]:
    """Modules of ``NEEDS`` that are not here."""
    return [name for name in NEEDS if importlib.util.find_spec(name) is None]


def server_run(*, dry: bool) -> dict[str, Any]:
    """64 streams (dry: 2) of 128 tokens each: tokens/s, median TTFT and median time between tokens.  Never raises for
    what is missing: ``skipped`` says what."""
    if gone := missing():
        return {"skipped": f"not installed here: {', '.join(gone)}"}
    from models.tiny import write_tiny

    streams, tokens = (2, 3) if dry else (64, 128)
    with tempfile.TemporaryDirectory() as name:
        folder, ready = Path(name) / "model", Path(name) / "ready.json"
        if dry:
            write_tiny(folder, n_layers=1, vocab=300, max_context=128)
        else:
            write_tiny(
                folder, n_layers=30, hidden=576, n_heads=9, n_kv_heads=3, ffn=1536, vocab=49_152, max_context=8192
            )
        options = {"kv_blocks": 64} if dry else {"max_batch": 64, "token_budget": 2048}
        server = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.gpu_server", str(folder), str(ready), json.dumps(options)],
            cwd=Path(__file__).parents[1],
        )
        try:
            deadline = time.monotonic() + 240
            while not ready.exists():
                if server.poll() is not None:
                    return {"skipped": f"the server ended with {server.returncode} before it was ready"}
                if time.monotonic() > deadline:
                    return {"skipped": "the server was not ready within 240 s"}
                time.sleep(0.1)
            url = str(json.loads(ready.read_text())["url"])
            return asyncio.run(_ask(url, streams, tokens))
        finally:
            server.terminate()
            try:
                server.wait(20)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def engine_run(shape: ModelShape, device: torch.device, *, dry: bool) -> dict[str, Any]:
    """As ``server_run``, without HTTP and text: the engine's own thread and scheduler over random weights.

    With each step started before the one before it is read, then one after the other; and whether starting one waits
    for the device anywhere, as torch sees it (launch_waits; None on a CPU).
    """
    streams = 2 if dry else 64
    dtype = torch.float32 if dry else torch.bfloat16
    config = EngineConfig(
        backend="triton",
        dtype="fp32" if dry else "bf16",
        max_batch=streams,
        token_budget=64 if dry else 2048,
        max_context=min(shape.max_context, 1024),
        kv_blocks=64 if dry else None,
        prefix_cache=False,
    )
    bare = Bare(shape, RandomWeights(shape, device, dtype))
    runner = TritonRunner(bare, config)
    runner.warm_up(_warm_slices)
    found: dict[str, Any] = {"launch_waits": _launch_waits(runner) if device.type == "cuda" else None}
    for name, overlap in (("overlap", True), ("no_overlap", False)):
        runner.feeds = overlap
        found[name] = _streams(Engine(config, cast("Reference", bare), runner, text=False), streams, dry=dry)
    return found


def _launch_waits(runner: TritonRunner) -> str:
    """What torch says of a decode's launch: "" where nothing in it waits for the device."""
    one = _warm_slices(1)
    (runner.launch(one) or tuple)()
    torch.cuda.set_sync_debug_mode("error")
    try:
        read = runner.launch(one)
    except RuntimeError as error:
        return str(error)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    (read or tuple)()
    return ""


def _streams(engine: Engine, streams: int, *, dry: bool) -> dict[str, Any]:
    """All at once, to their ends."""
    tokens, prompt, runner = 3 if dry else 128, 8 if dry else 200, engine.runner
    padded = getattr(runner, "padded_tokens", 0)
    engine.start()
    stamps: dict[str, list[float]] = {}
    over = threading.Semaphore(0)

    def heard(output: Output) -> None:
        stamps[output.request_id].append(time.perf_counter())
        if output.finish_reason is not None:
            over.release()

    start = time.perf_counter()
    for i in range(streams):
        ids = [(31 * i + 7 * j) % 250 + 3 for j in range(prompt)]
        params = SamplingParams(max_tokens=tokens, temperature=0.0, ignore_eos=True)
        now = time.monotonic_ns()
        clock = PhaseClock(now)
        clock.parsed(now)
        clock.tokenized(now)
        stamps[f"r{i}"] = [time.perf_counter()]
        engine.submit(Request(f"r{i}", ids, params, clock, heard))
    for _ in range(streams):
        if not over.acquire(timeout=200):
            return {"skipped": "the streams did not end within 200 s"}
    took = time.perf_counter() - start
    engine.stop()
    padded = getattr(runner, "padded_tokens", 0) - padded
    return {**_summary(list(stamps.values()), tokens, took), "padded_tokens": padded}


def _warm_slices(n: int) -> list[Slice]:
    one = Request("warm-up", [0] * n, SamplingParams(max_tokens=1), PhaseClock(0), lambda output: None)
    one.tokens, one.blocks = list(one.prompt_ids), list(range(-(-n // 16)))
    return [Slice(one, 0, n, True)]


def _summary(stamps: list[list[float]], tokens: int, took: float) -> dict[str, Any]:
    """stamps: of each stream when it was sent, then when each piece came."""
    gaps = [b - a for one in stamps for a, b in itertools.pairwise(one[1:])]
    return {
        "streams": len(stamps),
        "tokens_each": tokens,
        "tokens_s": len(stamps) * tokens / took,
        "ttft_ms": statistics.median(one[1] - one[0] for one in stamps) * 1e3,
        "gap_ms": statistics.median(gaps) * 1e3 if gaps else None,
    }


async def _ask(url: str, streams: int, tokens: int) -> dict[str, Any]:
    import aiohttp

    async def stream(session: aiohttp.ClientSession, i: int) -> list[float]:
        """When it was sent, then when each piece came."""
        body = {
            "model": "model",
            "prompt": f"Stream {i}: " + "the queue grows longer than the server can carry. " * 3,
            "max_tokens": tokens,
            "ignore_eos": True,
            "stream": True,
            "temperature": 0.0,
        }
        stamps = [time.perf_counter()]
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                raise RuntimeError(f"status {answer.status}: {await answer.text()}")
            async for line in answer.content:
                if line.startswith(b"data: {"):
                    stamps.append(time.perf_counter())
        return stamps

    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=240)) as session:
        await stream(session, -1)
        start = time.perf_counter()
        found = await asyncio.gather(*(stream(session, i) for i in range(streams)))
        took = time.perf_counter() - start
    return _summary(found, tokens, took)


def _serve(folder: str, ready: str, options: str) -> int:
    """A server until a signal ends it."""
    from engine.server.lifecycle import ServeOptions, serve

    config = EngineConfig(model=folder, backend="triton", dtype="bf16", **json.loads(options))
    return serve(ServeOptions(config, port=0, ready_file=Path(ready)), lambda line: print(line, flush=True))


if __name__ == "__main__":
    sys.exit(_serve(*sys.argv[1:]))
