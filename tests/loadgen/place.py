"""`tailspan run` as a user runs it: a folder with a model, a trace and an SLO, and what tests ask of the processes."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from models.store import load_reference
from telemetry.bundle import Bundle, newest
from tests.loadgen.stub import Request, Step, StubThread, answer, plain

ROOT = Path(__file__).parents[2]
WAIT_S = 60.0
#: Generous: these tests share two slow cores, and what they ask is not how fast (a sender may be 2 s late).
SLO = """
name: test
classes:
  default: {ttft: {base_s: 200}, gap_s: 200}
objectives: [goodput >= 90 %]
"""
LENGTH = 3.0  # seconds of the trace below
COUNT = 45


class Place:
    """A folder with a model, a trace and an SLO, and `tailspan run` started in it."""

    def __init__(self, folder: Path, model: Path) -> None:
        self.folder = folder
        self.model = model
        self.trace = folder / "trace.csv"
        stamps = (f"2031-02-03 04:05:{n * LENGTH / COUNT:010.7f},{40 + n % 30},{2 + n % 4}" for n in range(COUNT))
        self.trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]), encoding="utf-8")
        (folder / "slo.yaml").write_text(SLO, encoding="utf-8")
        self.runs = folder / "runs"
        self.started: list[subprocess.Popen[str]] = []

    def start(self, target: str, *options: str, command: str = "run") -> subprocess.Popen[str]:
        words = [sys.executable, "-m", "tailspan", command]
        if command in ("run", "capacity"):
            words += ["--target", target, "--trace", str(self.trace), "--slo", "slo.yaml", "--model", str(self.model)]
            words += ["--otlp-port", "0", "--runs", str(self.runs)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"}
        process = subprocess.Popen(
            [*words, *options],
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def run(self, target: str, *options: str) -> tuple[int, str, str]:
        process = self.start(target, *options)
        out, err = process.communicate(timeout=WAIT_S)
        return process.returncode, out, err

    def bundle(self) -> Bundle:
        path = newest(self.runs)
        assert path is not None
        return Bundle.open(path)


def words_of(process: psutil.Process) -> str:
    """Command line and working folder: what ties a process to a test."""
    try:
        return " ".join([*(process.info["cmdline"] or []), process.cwd()])
    except psutil.Error:
        return ""


def script(model: Path, wait: float = 0.005) -> Callable[[Request], list[Step]]:
    """A good server: as many words as were asked for, and the true number of prompt tokens."""
    reference = load_reference(str(model))

    def play(request: Request) -> list[Step]:
        if request.path == "/v1/models":
            return [plain("200 OK", {"data": [{"id": "stub", "max_model_len": 512}]})]
        if request.path != "/v1/chat/completions":
            return [plain("404 Not Found", {})]
        tokens = len(reference.tokenizer.encode(reference.template.render(request.json["messages"])))
        words = ["apple ", "tree ", "river ", "boat ", "wind ", "salt ", "door ", "moon "]
        return answer(*words[: request.json["max_tokens"]], prompt=tokens, wait=wait)

    return play


def wait_for(condition: Callable[[], Any], what: str) -> Any:
    end = time.monotonic() + WAIT_S
    while time.monotonic() < end:
        if found := condition():
            return found
        time.sleep(0.02)
    raise AssertionError(f"no {what} within {WAIT_S:.0f} s")


def chats(stub: StubThread) -> list[Request]:
    return [request for request in stub.requests if request.path == "/v1/chat/completions"]


def children(process: subprocess.Popen[str], word: str) -> list[psutil.Process]:
    """Descendants whose command line has this word."""
    found = []
    for child in psutil.Process(process.pid).children(recursive=True):
        with suppress(psutil.Error):  # builders end while they are looked at
            if word in child.cmdline():
                found.append(child)
    return found
