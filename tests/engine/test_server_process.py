"""The server as a process: ready file, drain on SIGTERM, the second signal, ports and models that cannot be had."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from engine.commands import lower_priority
from engine.server.__main__ import main
from models.errors import UserError
from telemetry.names import EXIT_INTERRUPTED, EXIT_USAGE
from tests.engine.serving import parse_stream, tiny_folder

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0


class Process:
    """``python -m engine.server`` with its url and what it printed."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.url = ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)

    async def ended(self) -> tuple[int, str, str]:
        """Exit code, stdout, stderr."""
        out, err = await asyncio.wait_for(self.process.communicate(), WAIT_S)
        assert self.process.returncode is not None
        return self.process.returncode, out.decode(), err.decode()


@asynccontextmanager
async def started(
    tmp_path: Path, *options: str, model: str | None = None, ready: bool = True
) -> AsyncIterator[Process]:
    """A server process on a free port; killed at the end if it still runs."""
    file = tmp_path / "ready.json"
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "engine.server",
        "--model",
        model or str(tiny_folder()),
        "--port",
        "0",
        "--threads",
        "1",
        "--kv-blocks",
        "256",
        "--ready-file",
        str(file),
        *options,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    running = Process(process)
    try:
        if ready:
            deadline = time.monotonic() + WAIT_S
            while not file.exists():
                assert process.returncode is None, (await process.communicate())[1].decode()
                assert time.monotonic() < deadline, "not ready in time"
                await asyncio.sleep(0.02)
            content = json.loads(file.read_text())
            assert content["pid"] == process.pid
            running.url = content["url"]
        yield running
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 800, "ignore_eos": True, "stream": True, **more}


async def ready_is_503(http: aiohttp.ClientSession) -> None:
    async with asyncio.timeout(WAIT_S):
        while (await http.get("/health/ready")).status != 503:
            await asyncio.sleep(0.002)


def test_sigterm_drains(tmp_path: Path) -> None:
    async def go() -> None:
        async with started(tmp_path, "--no-spans", "--drain-timeout", "60", "--nice", "1") as server:
            async with aiohttp.ClientSession(server.url) as http:
                answer = await http.post("/v1/completions", json=ask())
                first = await answer.content.readline()
                assert first.startswith(b"data: ")
                server.signal(signal.SIGTERM)
                await ready_is_503(http)
                assert (await http.get("/health/live")).status == 200
                refused = await http.post("/v1/completions", json=ask())
                assert refused.status == 503
                assert "Retry-After" in refused.headers
                assert (await refused.json())["error"]["code"] == "shutting_down"
                rest = (await answer.read()).decode()
                stream = parse_stream(first.decode() + rest)
                assert stream.frames[-1][1] == "[DONE]"
                assert stream.chunks[-1]["choices"][0]["finish_reason"] == "length"
            code, out, err = await server.ended()
            assert code == 0, err
            assert out.startswith("serving tiny (") and server.url in out
            assert "ERROR" not in err and "Traceback" not in err
            assert not (tmp_path / "ready.json").exists()

    asyncio.run(go())


def test_the_drain_has_a_limit(tmp_path: Path) -> None:
    async def go() -> None:
        async with started(tmp_path, "--no-spans", "--drain-timeout", "0") as server:
            async with aiohttp.ClientSession(server.url) as http:
                answer = await http.post("/v1/completions", json=ask())
                first = await answer.content.readline()
                server.signal(signal.SIGINT)
                stream = parse_stream(first.decode() + (await answer.read()).decode())
                assert stream.chunks[-1]["error"]["code"] == "shutting_down"
                assert stream.frames[-1][1] == "[DONE]"
            code, _, err = await server.ended()
            assert code == 0, err

    asyncio.run(go())


def test_a_second_signal_ends_it_now(tmp_path: Path) -> None:
    async def go() -> None:
        async with (
            started(tmp_path, "--no-spans", "--drain-timeout", "600") as server,
            aiohttp.ClientSession(server.url) as http,
        ):
            answer = await http.post("/v1/completions", json=ask(max_tokens=2000))
            await answer.content.readline()
            server.signal(signal.SIGTERM)
            await ready_is_503(http)
            server.signal(signal.SIGTERM)
            code, _, err = await server.ended()
            assert code == EXIT_INTERRUPTED, err

    asyncio.run(go())


def test_no_collector_no_noise(tmp_path: Path) -> None:
    async def go() -> None:
        async with started(tmp_path, "--otlp-endpoint", "http://127.0.0.1:9") as server:
            async with aiohttp.ClientSession(server.url) as http:
                for _ in range(3):
                    assert (await http.post("/v1/completions", json=ask(max_tokens=2))).status == 200

                async def dropped() -> bool:
                    text = await (await http.get("/metrics")).text()
                    return any(
                        line.startswith("tailspan_spans_dropped_total{") and float(line.split()[-1]) > 0
                        for line in text.splitlines()
                    )

                async with asyncio.timeout(WAIT_S):
                    while not await dropped():
                        await asyncio.sleep(0.05)
            server.signal(signal.SIGTERM)
            code, _, err = await server.ended()
            assert code == 0
            assert [line for line in err.splitlines() if "INFO" not in line] == []

    asyncio.run(go())


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--dtype", "fp12"), "fp12"),
        (("--nice", "-5"), "--nice"),
        (("--log-level", "loud"), "--log-level"),
        (("--max-batch", "0"), "max_batch"),
        (("--model", "/nowhere/at/all"), "/nowhere/at/all"),
        (("--host", "203.0.113.1"), "203.0.113.1"),
    ],
)
def test_what_cannot_be_is_said_in_one_line(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--no-spans", "--port", "0", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_USAGE
    err = capsys.readouterr().err
    assert err.startswith("error: ") and said in err


def test_a_taken_port_names_the_remedy(tmp_path: Path) -> None:
    async def go() -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            async with started(tmp_path, "--no-spans", "--port", port, ready=False) as server:
                code, _, err = await server.ended()
                assert code == EXIT_USAGE
                assert f"127.0.0.1:{port}" in err and "remedy" in err and "--port" in err

    asyncio.run(go())


def test_priority_is_never_raised() -> None:
    for by in (-1, 20):
        with pytest.raises(UserError):
            lower_priority(by)
    lower_priority(0)


@pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="the scheduler does not group by session")
@pytest.mark.parametrize(("own_session", "expected"), [(True, "nice 7"), (False, None)])
def test_a_lower_priority_counts_beside_other_sessions_too(own_session: bool, expected: str | None) -> None:
    before = Path("/proc/self/autogroup").read_text().strip()
    script = (
        "from pathlib import Path; from engine.commands import lower_priority; lower_priority(7);"
        "print(Path('/proc/self/autogroup').read_text().strip())"
    )
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, start_new_session=own_session
    ).stdout.strip()
    if expected is None:  # the group is not its own: those in it did not ask for less
        assert said == before
    else:
        assert said.endswith(expected)
