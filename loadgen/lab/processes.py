"""Trials on server processes: the bundled engine, simulated or computing, with its faults switched on over HTTP.

    tailspan serve --enable-faults ◄── (fault proxy) ◄── a replay, twice a pair: as it is, and with the fault

The load is the Azure conversation trace, fitted to a share of what the healthy server carries; both sides get the same
requests.  Must always hold: no server outlives the trials; a fault is out of force before the next replay begins.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rich.console import Console

from loadgen.canaries.check import check
from loadgen.canaries.client import Client
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.record import record
from loadgen.lab.proxy import Proxy, make
from loadgen.lab.scenario import REAL, SERVER, Scenario, drawn
from loadgen.lab.sized import sized
from loadgen.lab.trial import Explain, Trial, scored
from loadgen.options import Options
from loadgen.patience import Patience
from loadgen.prepare import prepare
from loadgen.run import run
from models.errors import UserError
from telemetry.bundle import INTERRUPTED, Bundle
from telemetry.parts import write_atomically

TRACE: Final = "azure-2023-conv"
WINDOW_S: Final = 40.0
READY_S: Final = 180.0
CANARY_RUNS: Final = 4
MAX_BATCH: Final = 16
CANARIES: Final = "canaries.json"
#: How the server of each way is started, and the model whose tokenizer counts its prompts.
COMMANDS: Final[Mapping[str, tuple[str, ...]]] = {
    SERVER: ("--backend", "simulated", "--device", "a100", "--model", "llama-3.1-8b", "--max-context", "4096"),
    REAL: ("--backend", "cpu", "--model", "smollm2", "--max-context", "2048"),
}
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Server:
    """One process of ``tailspan serve``.  Raises UserError when it does not get ready."""

    def __init__(self, way: str, folder: Path, options: Mapping[str, Any]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        ready = folder / f"ready-{time.monotonic_ns()}.json"
        self.log = folder / "server.log"
        words = [
            sys.executable,
            "-m",
            "tailspan",
            "serve",
            *COMMANDS[way],
            "--port",
            "0",
            "--enable-faults",
            "--no-spans",
        ]
        words += ["--ready-file", str(ready), "--log-level", "error"]
        for name, value in {"max_batch": MAX_BATCH, **options}.items():
            words += [f"--{name.replace('_', '-')}", f"{value}"]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        end = time.monotonic() + READY_S
        while not ready.exists():
            if self.process.poll() is not None or time.monotonic() > end:
                self.close()
                raise UserError("the server did not get ready", where=str(self.log), remedy="its last lines say why")
            time.sleep(0.2)
        self.url = str(json.loads(ready.read_text())["url"])
        ready.unlink()

    def faults(self, method: str, body: Mapping[str, Any] | None = None) -> None:
        """PUT a fault, or DELETE all."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/debug/faults", data=data, method=method)
        with _OPENER.open(request, timeout=90) as answer:
            answer.read()

    def close(self) -> None:
        """End it and what it started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait(15)


class Servers:
    """Plays trials; keeps the healthy server between them."""

    def __init__(self, way: str, root: Path) -> None:
        self._way, self._root = way, root
        self._healthy = Server(way, root / "servers", {})
        self._canaries: CanaryFile | None = None

    def close(self) -> None:
        self._healthy.close()

    def trial(
        self, scenario: Scenario, explain: Explain, *, load: float, seed: int, pairs: int, keep: str = "wrong"
    ) -> Trial:
        """One trial.  Raises UserError for a server or a load that cannot be had."""
        began = time.monotonic()
        draw = random.Random(f"lab size {scenario.id} {seed}")
        asked = drawn(dict(scenario.real), draw)
        folder = self._root / f"{draw.getrandbits(40):010x}"
        with ExitStack() as own:
            healthy, faulty = (self._server(asked.get(side) or {}, folder, own) for side in ("healthy", "serve"))
            a, b = self._pairs(asked, folder, load, seed, pairs, healthy, faulty)
        return scored(
            scenario,
            explain,
            a,
            b,
            way=self._way,
            load=load,
            seed=seed,
            size=asked,
            folder=folder,
            keep=keep,
            began=began,
        )

    def _server(self, options: Mapping[str, Any], folder: Path, own: ExitStack) -> Server:
        """The server that all trials share, or one with these options, for as long as `own` is entered."""
        if not options:
            return self._healthy
        server = Server(self._way, folder, options)
        own.callback(server.close)
        return server

    def _pairs(
        self,
        asked: Mapping[str, Any],
        folder: Path,
        load: float,
        seed: int,
        pairs: int,
        healthy: Server,
        faulty: Server,
    ) -> tuple[list[Bundle], list[Bundle]]:
        patience = Patience.of(asked["patience"], "patience") if asked.get("patience") else None
        base = Options(
            targets=healthy.url,
            trace=TRACE,
            slo="chat",
            duration_s=WINDOW_S,
            seed=seed,
            over_limit="clip",
            patience=patience,
            exact_output=asked.get("exact_output", True),
            runs=str(folder),
            otlp_port=0,
            total_timeout_s=60.0,
            first_token_timeout_s=30.0,
        )
        plan = prepare(replace(base, fit=load), _quiet()).plan  # measured once: both sides get the same load
        base = replace(base, rate_scale=plan.rate_scale, length_scale=plan.length_scale)
        changed = _with_load(base, asked.get("load") or {})
        if asked.get("canaries") and self._canaries is None:
            self._canaries = record(self._client(healthy), runs=CANARY_RUNS, say=lambda _: None)
        found: tuple[list[Bundle], list[Bundle]] = ([], [])
        for pair in range(pairs):
            found[0].append(self._replay(base, healthy, pair, asked))
            with _spoilt(sized(asked, found[0][0]), faulty, WINDOW_S / base.speed) as target:
                found[1].append(self._replay(replace(changed, targets=target), faulty, pair, asked))
        return found

    def _replay(self, options: Options, server: Server, pair: int, asked: Mapping[str, Any]) -> Bundle:
        checked: dict[str, Any] = {}
        asking = threading.Thread(target=self._ask, args=(server, checked)) if asked.get("canaries") else None
        if asking is not None:
            asking.start()  # inside the load: some damage shows only there
        bundle, _ = run(options, prepare(options, _quiet()), _quiet(), repeat=pair)
        if asking is not None:
            asking.join()
        if bundle.status == INTERRUPTED:
            raise KeyboardInterrupt  # half a side tells nothing; the trials before it are kept
        if checked:
            write_atomically(bundle.path / CANARIES, json.dumps(checked).encode())
        return bundle

    def _client(self, server: Server) -> Client:
        return Client(server.url, "smollm2", {})

    def _ask(self, server: Server, checked: dict[str, Any]) -> None:
        """The canaries, where the server answers them: one that fails says in its load what is wrong with it."""
        assert self._canaries is not None
        with suppress(UserError):
            checked.update(check(self._client(server), self._canaries).to_dict())


def _with_load(options: Options, load: Mapping[str, Any]) -> Options:
    """speed: of the replay; length_scale: of the prompts and answers, beyond that of the fit."""
    speed = float(load.get("speed", 1.0))
    length = (options.length_scale or 1.0) * float(load.get("length_scale", 1.0))
    return replace(options, speed=options.speed * speed, length_scale=length)


@contextmanager
def _spoilt(asked: Mapping[str, Any], server: Server, length_s: float) -> Iterator[str]:
    """The faults in force, now or in mid-run; gives the address to ask."""
    timers = []
    for fault in asked.get("faults") or ():
        body = {key: value for key, value in fault.items() if key not in ("at", "for_s")}
        if "size" in body:
            body["size"] = round(body["size"], 4)
        at = fault.get("at", 0.4 if "for_s" in fault else 0.0) * length_s
        if at:
            timers.append(threading.Timer(at, server.faults, ("PUT", body)))
        else:
            server.faults("PUT", body)
        if "for_s" in fault:
            timers.append(threading.Timer(at + fault["for_s"], server.faults, ("DELETE",)))
    for timer in timers:
        timer.daemon = True
        timer.start()
    try:
        with _proxied(server.url, asked.get("wire")) as url:
            yield url
    finally:
        for timer in timers:
            timer.cancel()
        server.faults("DELETE")


@contextmanager
def _proxied(url: str, wire: Mapping[str, Any] | None) -> Iterator[str]:
    """The address of a fault proxy before it, on a loop of its own in a thread; the server's where no wire is bad."""
    if wire is None:
        yield url
        return
    fault = make(wire["kind"], wire.get("share", 1.0), wire.get("size"))
    ready: list[str] = []
    loop = asyncio.new_event_loop()
    up, stop = threading.Event(), asyncio.Event()

    async def serve() -> None:
        async with Proxy([url], (fault,)) as proxy:
            ready.append(proxy.url)
            up.set()
            await stop.wait()

    def work(serving: Callable[[], Any] = serve) -> None:
        with asyncio.Runner(loop_factory=lambda: loop) as runner:
            runner.run(serving())

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    if not up.wait(10):
        raise UserError("the fault proxy did not start", remedy="is a port free?")
    try:
        yield ready[0]
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)


def _quiet() -> Console:
    return Console(quiet=True)
