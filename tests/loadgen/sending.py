"""A dispatcher on real sockets for tests: calls at given moments, a scripted stub, the rows that came of it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import uvloop

from loadgen.dispatch import Dispatcher
from loadgen.job import Call, SendSettings
from loadgen.recorder import RowParts
from loadgen.row_maker import Tokenizer
from loadgen.spool import Common, Spool, SpoolReader, folder_for
from telemetry.parts import read_table
from telemetry.schema import ATTEMPTS, REQUESTS
from tests.loadgen.stub import Script, Stub

T = TypeVar("T")
Row = dict[str, Any]


def run(work: Coroutine[Any, Any, T]) -> T:
    """On uvloop, and never longer than 30 s."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(asyncio.wait_for(work, 30))


class Source:
    """Calls at the given moments; `built` counts those made so far."""

    def __init__(self, *intended_s: float) -> None:
        self._moments = intended_s
        self.built = 0

    def __len__(self) -> int:
        return len(self._moments)

    def __iter__(self) -> Iterator[Call]:
        for n, moment in enumerate(self._moments):
            self.built += 1
            body = json.dumps({"model": "m", "n": n, "stream": True}).encode()
            counts = {"input_tokens": 5, "expected_output_tokens": 3, "prompt_tokens_expected": 5}
            ids = {"trace_id": f"{n + 1:032x}", "span_id": f"{n + 1:016x}", "sampled": n % 2 == 0}
            yield Call(n, 100 + n, "chat", moment, body, "/v1/chat/completions", **counts, **ids)


def settings(*targets: str, **more: Any) -> SendSettings:
    return SendSettings(targets=targets, **{"flush_s": 0.1} | more)


def at_once(count: int) -> Source:
    return Source(*[0.0] * count)


class Run:
    """A dispatcher with its spool; `rows` by index once it has stopped, made here instead of in a recorder."""

    def __init__(self, folder: Path, source: Source, config: SendSettings, tokenizer: Tokenizer | None = None) -> None:
        self.folder = folder
        common = Common(2, config.model, config.keep_text, config.tokenizer_ref)
        place = folder_for(folder, "worker-2", config.keep_text)
        self.spool = Spool(place, common)
        self._reader = SpoolReader(place)
        self._parts = RowParts(folder, "worker-2", common, tokenizer, attempts=True)
        self.drained = asyncio.Event()
        self.dispatcher = Dispatcher(config, source, self.spool, 2, on_drained=self.drained.set)
        self.zero_ns = 0

    async def start(self, ahead_s: float = 0.0) -> None:
        await self.dispatcher.prepare()
        self.zero_ns = time.monotonic_ns() + round(ahead_s * 1e9)
        self.dispatcher.start(self.zero_ns)

    async def stop(self, grace_s: float = 0.0) -> list[Row]:
        await self.dispatcher.stop(grace_s)
        self.spool.close()
        return self.written()

    def tried(self) -> list[Row]:
        """The rows of all attempts, by request and attempt."""
        rows = read_table(self.folder / "attempts", ATTEMPTS).table.to_pylist()
        return sorted(rows, key=lambda row: (row["index"], row["attempt"]))

    def written(self) -> list[Row]:
        """The rows of what is on the disk at present."""
        for one in self._reader.records():
            assert self._reader.common is not None
            self._parts.add(one, self._reader.common.zero_ns)
        self._parts.flush()
        rows = read_table(self.folder / "requests", REQUESTS).table.to_pylist()
        return sorted(rows, key=lambda row: row["index"])


def send_all(folder: Path, script: Script, source: Source, **more: Any) -> tuple[list[Row], Stub]:
    """Send everything to one stub and wait until all has ended."""

    async def work() -> tuple[list[Row], Stub]:
        async with Stub(script) as stub:
            run_ = Run(folder, source, settings(stub.url, **more))
            await run_.start()
            await run_.drained.wait()
            return await run_.stop(), stub

    return run(work())
