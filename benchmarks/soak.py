"""A server at 1.5x its capacity for a long time, with clients that go at random, then idle: is it as it was?

Usage: python -m benchmarks.soak [--minutes 30] [--model smollm2] [--load 1.5]
Finds the capacity with a closed loop, then sends open loop (Poisson) at ``--load`` times that; a tenth of the clients
goes before its answer is complete.  Then, idle: every law holds exactly, the counters of /metrics balance (they are
checked at every scrape on the way too), and resident memory is within 3 % of its level after the first five minutes
(a quarter of a shorter run).  Prints a Markdown table; exits with 1 when anything does not hold.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import psutil
from prometheus_client.parser import text_string_to_metric_families as parse_text

from telemetry import names

SETTLE_S: Final = 300.0
MEMORY: Final = 0.03
GONE: Final = 0.1  # of the clients
WORDS: Final = ("time", "queue", "server", "model", "token", "batch", "cache", "page", "answer", "river", "city")


@dataclass(slots=True)
class Tally:
    """What the clients saw, and what the scrapes said."""

    seen: Counter[str] = field(default_factory=Counter)
    scrapes: int = 0
    wrong: list[str] = field(default_factory=list)
    memory: list[tuple[float, int]] = field(default_factory=list)  # s after the start, bytes


def body(draw: random.Random, model: str) -> dict[str, Any]:
    """A request of a mixed load: short and long prompts and answers, shared beginnings, greedy and sampled."""
    prompt = " ".join([*WORDS[: draw.randrange(len(WORDS))], *draw.choices(WORDS, k=draw.choice((8, 8, 30, 150)))])
    return {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": draw.choice((8, 16, 16, 48)),
        "temperature": draw.choice((0.0, 1.0)),
        "stream": draw.random() < 0.7,
        "ignore_eos": True,
    }


async def one(http: aiohttp.ClientSession, draw: random.Random, model: str, tally: Tally, gone: float) -> None:
    """Send one request; a share of ``gone`` of the clients leaves after a random time."""
    patience = draw.uniform(0.01, 3.0) if draw.random() < gone else 600.0
    try:
        limit = aiohttp.ClientTimeout(total=patience)
        async with http.post("/v1/chat/completions", json=body(draw, model), timeout=limit) as answer:
            await answer.read()
            tally.seen[str(answer.status)] += 1
    except (TimeoutError, aiohttp.ClientError) as error:
        tally.seen["gone" if isinstance(error, TimeoutError) else type(error).__name__] += 1


async def capacity(http: aiohttp.ClientSession, draw: random.Random, model: str, seconds: float) -> float:
    """Requests per second of a closed loop that keeps the batch full."""
    tally, end = Tally(), time.monotonic() + seconds

    async def client() -> None:
        while time.monotonic() < end:
            await one(http, draw, model, tally, gone=0.0)

    start = time.monotonic()
    await asyncio.gather(*(client() for _ in range(24)))
    return tally.seen["200"] / (time.monotonic() - start)


def unbalanced(text: str) -> list[str]:
    """Laws that the counters of one scrape break."""
    value: dict[str, dict[str, float]] = {}
    for family in parse_text(text):
        for sample in family.samples:
            key = sample.labels.get("state") or sample.labels.get("outcome") or ""
            value.setdefault(family.name, {})[key] = sample.value
    states = value[names.M_ENGINE_REQUESTS]
    over = sum(count for state, count in states.items() if state != "received")
    wrong = []
    if states["received"] != over + value[names.M_ENGINE_LIVE][""]:
        wrong.append(f"engine: {states}, live {value[names.M_ENGINE_LIVE]['']}")
    outcomes, live = value.get(names.M_SERVER_REQUESTS, {}), value[names.M_SERVER_LIVE][""]
    if value[names.M_SERVER_RECEIVED][""] != sum(outcomes.values()) + live:
        wrong.append(f"server: received {value[names.M_SERVER_RECEIVED]['']}, {outcomes}, live {live}")
    if value[names.M_LAW_VIOLATIONS][""]:
        wrong.append(f"{value[names.M_LAW_VIOLATIONS]['']:.0f} violations of the engine's laws")
    return wrong


async def watch(http: aiohttp.ClientSession, process: psutil.Process, tally: Tally, every: float) -> None:
    """Scrape and weigh until cancelled."""
    start = time.monotonic()
    while True:
        tally.memory.append((time.monotonic() - start, process.memory_info().rss))
        tally.wrong += unbalanced(await (await http.get("/metrics")).text())
        tally.scrapes += 1
        await asyncio.sleep(every)


async def soak(url: str, pid: int, options: argparse.Namespace) -> int:
    """Run it against a server; returns the exit code."""
    draw, tally, process = random.Random(options.seed), Tally(), psutil.Process(pid)
    seconds = 60.0 * options.minutes
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:
        model = (await (await http.get("/v1/models")).json())["data"][0]["id"]
        most = await capacity(http, draw, model, min(20.0, seconds / 4))
        rate = options.load * most
        print(f"capacity {most:.2f} requests/s; {options.minutes:g} minutes at {rate:.2f}/s", flush=True)
        watching = asyncio.create_task(watch(http, process, tally, min(5.0, seconds / 20)))
        start, tasks, due = time.monotonic(), set(), 0.0
        while (due := due + draw.expovariate(rate)) < seconds:
            await asyncio.sleep(max(0.0, start + due - time.monotonic()))
            task = asyncio.create_task(one(http, draw, model, tally, gone=GONE))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
        await asyncio.gather(*tasks)
        await asyncio.sleep(2.0)
        watching.cancel()
        laws = await (await http.get("/debug/invariants")).json()
        tally.wrong += unbalanced(await (await http.get("/metrics")).text())
        after = process.memory_info().rss
    settled = min(SETTLE_S, seconds / 4)
    level = next(size for at, size in tally.memory if at >= settled)
    peak = max(size for _, size in tally.memory)
    growth = after / level - 1
    engine = laws["engine"]
    checks = {
        f"laws exact when idle ({laws['checks']['made']} checks)": laws["ok"] and laws["exact"],
        f"nothing live, no page used, of {engine['kv_total']}": (engine["live"], engine["kv_used"]) == (0, 0),
        f"counters balance at {tally.scrapes} scrapes": not tally.wrong,
        f"memory {growth:+.2%} of {level / 2**20:.0f} MiB after {settled:.0f} s (peak {peak / 2**20:.0f})": growth
        <= MEMORY,
        "no answer but 200, 429, 503 and clients that went": set(tally.seen) <= {"200", "429", "503", "gone"},
    }
    print("\n| what | holds |\n|---|---|")
    for what, holds in checks.items():
        print(f"| {what} | {'yes' if holds else '**no**'} |")
    print(f"\nclients: {dict(tally.seen)}; engine: {engine['preemptions']} preemptions, {engine['steps']} steps")
    for line in tally.wrong[:10] + laws["violations"]:
        print(f"broken: {line}")
    return 0 if all(checks.values()) else 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--model", default="smollm2", help="a known name, a folder, or 'tiny' for a random tiny model")
    parser.add_argument("--load", type=float, default=1.5)
    parser.add_argument("--kv-blocks", type=int, default=160, help="small enough that requests are preempted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        ready, model = Path(folder) / "ready.json", options.model
        if model == "tiny":
            from models.tiny import write_tiny

            model = str(write_tiny(Path(folder) / "tiny", max_context=2048))
        command = [sys.executable, "-m", "engine.server", "--model", model, "--port", "0", "--no-spans"]
        command += ["--ready-file", str(ready), "--kv-blocks", str(options.kv_blocks), "--queue-limit", "64"]
        command += ["--log-level", "warning", "--check-every", "200"]
        server = subprocess.Popen(command, env=os.environ)
        try:
            while not ready.exists():
                if server.poll() is not None:
                    print("the server did not start", file=sys.stderr)
                    return 1
                time.sleep(0.1)
            return asyncio.run(soak(json.loads(ready.read_text())["url"], server.pid, options))
        finally:
            server.terminate()
            server.wait(30)


if __name__ == "__main__":
    sys.exit(main())
