"""``tailspan demo`` and ``tailspan up`` as processes: order, exit codes, Ctrl-C, kill -9, and nothing left behind.

The engine and the run are stand-ins (standin.py); Streamlit and Prometheus are the real ones.
"""

from __future__ import annotations

import http.server
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from dashboards import stack
from dashboards.processes import Children, answers, choose_port

ROOT = Path(__file__).resolve().parents[2]
STANDIN = Path(__file__).with_name("standin.py")
START = f"""
import sys
from dashboards import stack
stack.tailspan = lambda *words: [sys.executable, "-S", {str(STANDIN)!r}, *words]
from dashboards.commands import demo_command, up_command
import typer
app = typer.Typer(pretty_exceptions_enable=False)
app.command("demo")(demo_command)
app.command("up")(up_command)
app()
"""


class Command:
    """One ``demo`` or ``up`` under test, in a process of its own; its output collected line by line."""

    def __init__(self, folder: Path, *words: str, **env: str) -> None:
        self.pids_file = folder / "pids"
        self.lines: list[str] = []
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={
                **os.environ,
                "STANDIN_PIDS": str(self.pids_file),
                "TAILSPAN_RUNS": str(folder / "runs"),
                "TMPDIR": str(folder),
                "PYTHONPATH": str(ROOT),
                **env,
            },
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))

    def wait_line(self, text: str, timeout_s: float = 90.0) -> str:
        until = time.monotonic() + timeout_s
        while time.monotonic() < until:
            for line in list(self.lines):
                if text in line:
                    return line
            assert self.process.poll() is None or self._reader.is_alive(), self.text()
            time.sleep(0.05)
        raise AssertionError(f"{text!r} never came:\n{self.text()}")

    def text(self) -> str:
        return "\n".join(self.lines)

    def end(self) -> int:
        code = self.process.wait(60)
        self._reader.join(20)
        return code

    def descendants(self) -> dict[int, str]:
        """Live processes that carry this command's environment: the children, however they were started."""
        mark = f"STANDIN_PIDS={self.pids_file}".encode()
        found = {}
        for folder in Path("/proc").glob("[0-9]*"):
            try:
                if mark in (folder / "environ").read_bytes() and int(folder.name) != self.process.pid:
                    found[int(folder.name)] = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found


def wait_gone(command: Command) -> dict[int, str]:
    until = time.monotonic() + 20
    while (left := command.descendants()) and time.monotonic() < until:
        time.sleep(0.05)
    return left


@pytest.mark.parametrize(("run", "code"), [("0", 0), ("1", 0), ("3", 3), ("5", 5)])
def test_the_demo_passes_on_what_the_run_says_about_itself(tmp_path: Path, run: str, code: int) -> None:
    demo = Command(tmp_path, "demo", STANDIN_RUN=run, UI="0")
    assert demo.end() == code, demo.text()
    text = demo.text()
    order = [text.index(part) for part in ("tailspan demo:", "models pull smollm2", "ready at", "stand-in: run")]
    assert order == sorted(order)
    assert ("exit code 1" in text) == (run == "1")
    assert ("Try next" in text) == (code == 0)
    assert not demo.descendants()
    assert [path for path in tmp_path.iterdir() if path.name.startswith("tailspan-demo")] == []


def test_a_demo_whose_model_cannot_be_had_ends_with_that_code(tmp_path: Path) -> None:
    demo = Command(tmp_path, "demo", "--no-ui", STANDIN_RUN="0", STANDIN_PULL="4")
    assert demo.end() == 4
    assert "ready at" not in demo.text()


def test_ctrl_c_during_the_run_lets_it_end_and_gives_130(tmp_path: Path) -> None:
    demo = Command(tmp_path, "demo", "--no-ui", STANDIN_RUN="sleep")
    demo.wait_line("run goes on")
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 130, demo.text()
    assert not demo.descendants()


def test_kill_of_the_demo_leaves_nothing(tmp_path: Path) -> None:
    demo = Command(tmp_path, "demo", "--no-ui", STANDIN_RUN="sleep")
    demo.wait_line("run goes on")
    assert len(demo.descendants()) == 2
    demo.process.kill()
    demo.end()
    assert wait_gone(demo) == {}


def test_the_demo_serves_the_page_until_ctrl_c(tmp_path: Path) -> None:
    demo = Command(tmp_path, "demo", STANDIN_RUN="1", UI="1")
    demo.wait_line("until Ctrl-C.")
    url = next(line for line in demo.lines if line.strip().startswith("http://")).strip().split("/?")[0].rstrip("/")
    assert answers(f"{url}/_stcore/health")
    demo.process.send_signal(signal.SIGINT)
    assert demo.end() == 0, demo.text()
    assert wait_gone(demo) == {}


def test_up_starts_all_and_one_ctrl_c_ends_all(tmp_path: Path) -> None:
    up = Command(tmp_path, "up", "--engine-port", "0", "--ui-port", "0", "--prometheus-port", "0")
    up.wait_line("Ctrl-C ends all")
    page = up.wait_line("  page").split()[1]
    assert answers(f"{page}/_stcore/health")
    assert len(up.descendants()) == (3 if shutil.which("prometheus") else 2)
    up.process.send_signal(signal.SIGINT)
    assert up.end() == 0, up.text()
    assert wait_gone(up) == {}


def test_up_names_the_part_that_ended_and_ends_the_rest(tmp_path: Path) -> None:
    up = Command(tmp_path, "up", "--engine-port", "0", "--ui-port", "0", "--prometheus-port", "0")
    up.wait_line("Ctrl-C ends all")
    engine = int(up.pids_file.read_text().split()[1])
    os.kill(engine, signal.SIGKILL)
    assert up.end() == 5
    assert "engine ended (killed by SIGKILL)" in up.text()
    assert wait_gone(up) == {}


def test_up_with_a_taken_port_starts_nothing(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        up = Command(tmp_path, "up", "--engine-port", str(port))
        assert up.end() != 0
    assert f"port {port} for the engine is taken" in up.text()
    assert "--engine-port 0" in up.text()
    assert not up.pids_file.exists()


def test_an_engine_that_refuses_its_model_is_quoted(tmp_path: Path) -> None:
    up = Command(tmp_path, "up", "--engine-port", "0", "--ui-port", "0", "--prometheus-port", "0", STANDIN_SERVE="fail")
    assert up.end() != 0
    assert "engine ended before it was ready (exit code 4)" in up.text()
    assert "no model of that name" in up.text()
    assert wait_gone(up) == {}


class _Metrics(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/plain; version=0.0.4")
        self.end_headers()
        self.wfile.write(b"vllm:num_requests_running 3\n")

    def log_message(self, *args: object) -> None:
        return


@pytest.fixture
def metrics_url() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _Metrics)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.prometheus
def test_prometheus_scrapes_the_engine(tmp_path: Path, metrics_url: str) -> None:
    binary = stack.prometheus_binary()
    if binary is None:
        assert not os.environ.get("CI"), "prometheus is missing: apt-get install prometheus"
        pytest.skip("prometheus is missing: apt-get install prometheus")
    with Children(tmp_path) as children:
        port = choose_port(0, "Prometheus", "--prometheus-port")
        part = stack.start_prometheus(children, binary=binary, port=port, engine_url=metrics_url)
        query = f"{part.url}/api/v1/query?query=vllm:num_requests_running"
        until = time.monotonic() + 30
        while True:
            with urllib.request.urlopen(query, timeout=5) as reply:
                found = json.load(reply)["data"]["result"]
            if found or time.monotonic() > until:
                break
            time.sleep(0.2)
    assert [sample["value"][1] for sample in found] == ["3"]
