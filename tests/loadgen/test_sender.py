"""The sender process with its protocol, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from loadgen.recover import recover
from telemetry import names
from telemetry.parts import read_table
from telemetry.schema import REQUESTS
from tests.loadgen.sending import Row
from tests.loadgen.stub import HANG, Request, Step, StubThread, answer

CHILD = """
import sys
from loadgen import sender
from tests.loadgen.sending import Source, settings
def load(plan, worker, workers):
    print("a stray line")
    moments = [n * 0.05 for n in range(int(sys.argv[2]))]
    more = {"headers": {"Authorization": "Bearer s3cret"}, "keep_text": (sys.argv[3:] or ["wrong"])[0]}
    return settings(sys.argv[1], **more), Source(*moments)
sys.exit(sender.main(load))
"""


class Process:
    """A sender process; what it says on stdout, event by event."""

    def __init__(self, *command: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )

    def say(self, cmd: str, **fields: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"cmd": cmd, **fields}) + "\n")
        self.process.stdin.flush()

    def prepare(self, bundle: Path) -> dict[str, Any]:
        self.say("prepare", plan=str(bundle / "plan.json"), worker=1, workers=2, bundle=str(bundle))
        return self.hear()

    def hear(self, until: Callable[[dict[str, Any]], bool] = lambda event: True) -> dict[str, Any]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            found: dict[str, Any] = json.loads(line)  # nothing else is ever on stdout
            if until(found):
                return found
        raise AssertionError(f"stdout ended; stderr: {self.process.stderr.read() if self.process.stderr else ''}")

    def __enter__(self) -> Process:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait(10)
        for pipe in (self.process.stdin, self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()


def child(url: str, count: int = 5, keep_text: str = "wrong") -> Process:
    return Process("-c", CHILD, url, str(count), keep_text)


def rows_of(bundle: Path) -> list[Row]:
    return read_table(bundle / "requests", REQUESTS).table.to_pylist()


def test_the_process_from_prepare_to_end(tmp_path: Path) -> None:
    with StubThread(lambda request: answer("Aaaa")) as stub, child(stub.url) as sender:
        ready = sender.prepare(tmp_path)
        assert {"ev": "ready", "worker": 1, "requests": 5, "warnings": []}.items() <= ready.items()
        assert abs(ready["monotonic_ns"] - time.monotonic_ns()) < 60e9
        zero = time.monotonic_ns() + 50_000_000
        sender.say("start", zero_monotonic_ns=zero)
        progress = sender.hear(lambda event: event["finished"])
        counts = {"ev": "progress", "due": 5, "sent": 5, "done": 5, "inflight": 0, "answered": 5, "errors": {}}
        assert counts.items() <= progress.items()
        sender.process.send_signal(signal.SIGINT)  # a Ctrl-C of the terminal is the parent's to judge
        sender.say("stop", grace_s=5)
        end = sender.hear(lambda event: event["ev"] != "progress")
        assert {"ev": "end", "sent": 5, "done": 5}.items() <= end.items()
        assert 0 < end["lag_p50_s"] <= end["lag_p99_s"] and end["lag_max_s"] > 0
        assert end["cpu_ratio"] > 0 and end["rss_bytes"] > 1 << 20 and "collections" in end["gc"]
        assert end["major_faults"] >= 0 and end["preempted"] >= 0 and end["memory_locked"] in (True, False)
        assert sender.process.wait(10) == 0
        assert [request.headers["authorization"] for request in stub.requests] == ["Bearer s3cret"] * 5
        assert all(request.t_ns >= zero + n * 50_000_000 for n, request in enumerate(stub.requests))
    assert [row["worker"] for row in rows_of(tmp_path)] == [1] * 5
    assert not any(b"s3cret" in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())


@pytest.mark.parametrize("how", ["end of stdin", "SIGTERM"])
def test_a_parent_that_dies_is_a_stop_with_all_rows_written(tmp_path: Path, how: str) -> None:
    def script(request: Request) -> list[Step]:
        return [HANG] if request.json["n"] == 0 else answer("Aaaa")

    with StubThread(script) as stub, child(stub.url, 1000) as sender:
        sender.prepare(tmp_path)
        sender.say("start", zero_monotonic_ns=time.monotonic_ns())
        sender.hear(lambda event: event["ev"] == "progress" and event["done"] >= 3)
        if how == "SIGTERM":
            sender.process.terminate()
        else:
            assert sender.process.stdin is not None
            sender.process.stdin.close()
        end = sender.hear(lambda event: event["ev"] == "end")
        assert sender.process.wait(10) == 0
    rows = rows_of(tmp_path)
    assert len(rows) == end["done"]
    assert sum(row["error"] == names.CUT_BY_END for row in rows) >= 1
    assert {row["index"] for row in rows} == set(range(len(rows)))


def recorder_of(sender: Process) -> psutil.Process:
    """The process that makes the rows of this sender."""
    children = psutil.Process(sender.process.pid).children()
    (found,) = (one for one in children if "loadgen.recorder" in one.cmdline())
    return found


@pytest.mark.parametrize("dies", ["sender", "recorder", "both"])
def test_a_kill_costs_no_row_of_what_was_noted(tmp_path: Path, dies: str) -> None:
    with StubThread(lambda request: answer("Aaaa")) as stub, child(stub.url, 1000) as sender:
        sender.prepare(tmp_path)
        recorder = recorder_of(sender)
        if dies != "sender":
            recorder.suspend()  # so that it has made nothing
        sender.say("start", zero_monotonic_ns=time.monotonic_ns())
        before = sender.hear(lambda event: event["ev"] == "progress" and event["done"] >= 3)
        sender.hear(lambda event: event["ev"] == "progress" and event["t_s"] > before["t_s"] + 0.5)
        if dies != "sender":
            recorder.kill()
        if dies == "recorder":
            after = sender.hear(lambda event: event["ev"] == "progress" and event["write_error"] is not None)
            assert "makes the rows" in after["write_error"]
            sender.say("stop", grace_s=0)
            end = sender.hear(lambda event: event["ev"] == "end")
            assert "makes the rows" in end["write_error"] and end["recorder_cpu_s"] is None
            assert sender.process.wait(10) == 0
        else:
            sender.process.kill()
            sender.process.wait(10)
        made = recover(tmp_path)
    assert (made == 0) == (dies == "sender"), "a recorder whose sender is gone makes the rows that are left, and ends"
    rows = rows_of(tmp_path)
    assert len(rows) >= before["done"]
    assert sorted(row["index"] for row in rows) == list(range(len(rows)))
    assert not (tmp_path / "spool").exists()


def test_a_recorder_that_cannot_go_on_is_told_while_the_run_goes(tmp_path: Path) -> None:
    with StubThread(lambda request: answer("Aaaa")) as stub, child(stub.url, 1000) as sender:
        sender.prepare(tmp_path)
        (tmp_path / "spool" / "worker-1" / "000000.msgpack").write_bytes(b"\0")
        sender.say("start", zero_monotonic_ns=time.monotonic_ns())
        told = sender.hear(lambda event: event["ev"] == "progress" and event["write_error"] is not None)
        assert "no segment of this version" in told["write_error"]
        sender.say("stop", grace_s=0)
        assert sender.hear(lambda event: event["ev"] == "end")["write_error"]
        assert sender.process.wait(10) == 0


def test_a_bundle_that_keeps_no_text_has_none_at_any_time(tmp_path: Path) -> None:
    with StubThread(lambda request: answer("Aaaa")) as stub, child(stub.url, 1000, keep_text="none") as sender:
        sender.prepare(tmp_path)
        recorder_of(sender).suspend()
        sender.say("start", zero_monotonic_ns=time.monotonic_ns())
        sender.hear(lambda event: event["ev"] == "progress" and event["done"] >= 10)
        memory = (tmp_path / "spool" / "worker-1").resolve()
        while not any(b"Aaaa" in path.read_bytes() for path in memory.iterdir()):
            time.sleep(0.02)
        inside = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert inside and not any(b"Aaaa" in path.read_bytes() for path in inside)
        recorder_of(sender).resume()
        sender.say("stop", grace_s=0)
        sender.hear(lambda event: event["ev"] == "end")
        assert sender.process.wait(10) == 0
    assert not memory.exists() and rows_of(tmp_path)
    assert {row["text"] for row in rows_of(tmp_path)} == {None}


def test_the_grace_can_be_cut_short(tmp_path: Path) -> None:
    with StubThread(lambda request: [HANG]) as stub, child(stub.url, 2) as sender:
        sender.prepare(tmp_path)
        sender.say("start", zero_monotonic_ns=time.monotonic_ns())
        sender.hear(lambda event: event["ev"] == "progress" and event["sent"] == 2)
        sender.say("stop", grace_s=3600)
        sender.say("stop", grace_s=0)
        sender.hear(lambda event: event["ev"] == "end")
        assert sender.process.wait(10) == 0
    assert [row["error"] for row in rows_of(tmp_path)] == [names.CUT_BY_END] * 2


def test_stop_before_the_start_and_before_prepare(tmp_path: Path) -> None:
    with child("http://127.0.0.1:1") as sender:
        sender.prepare(tmp_path)
        sender.say("stop", grace_s=1)
        end = sender.hear(lambda event: event["ev"] == "end")
        assert (end["sent"], end["done"]) == (0, 0)
        assert sender.process.wait(10) == 0
    assert rows_of(tmp_path) == []
    with child("http://127.0.0.1:1") as sender:
        sender.say("stop", grace_s=1)
        assert sender.process.wait(10) == 0


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ({"cmd": "start", "zero_monotonic_ns": 1}, "does not fit here"),
        ({"cmd": "dance"}, "dance"),
        ({"cmd": "prepare", "worker": "x", "workers": 1}, "worker"),
    ],
)
def test_a_command_that_makes_no_sense_is_an_error(command: dict[str, Any], says: str) -> None:
    with child("http://127.0.0.1:1") as sender:
        sender.say(**command)
        found = sender.hear()
        assert found["ev"] == "error" and says in found["message"]
        assert sender.process.wait(10) == 1


def test_bad_input_is_told_with_its_remedy(tmp_path: Path) -> None:
    with child("http://no-such-host.invalid") as sender:
        found = sender.prepare(tmp_path)
        assert found["ev"] == "error" and "no-such-host.invalid" in found["message"] and found["remedy"]
        assert sender.process.wait(10) == 1
    with Process("-m", "loadgen.sender") as sender:
        found = sender.prepare(tmp_path)  # there is no plan
        assert found["ev"] == "error" and "plan.json" in f"{found['where']} {found['message']}"
        assert sender.process.wait(10) == 1


def test_a_fault_of_ours_ends_the_process_with_its_rows_written(tmp_path: Path) -> None:
    broken = """
from loadgen.stream import Answer
feed = Answer.feed
def fail_on_the_third(self, data, now_ns):
    if b"Bang" in data:
        raise RuntimeError("a bug")
    feed(self, data, now_ns)
Answer.feed = fail_on_the_third
"""

    def script(request: Request) -> list[Step]:
        return answer("Bang" if request.json["n"] == 2 else "Aaaa")

    with StubThread(script) as stub, Process("-c", broken + CHILD, stub.url, "1000") as sender:
        sender.prepare(tmp_path)
        sender.say("start", zero_monotonic_ns=time.monotonic_ns())
        found = sender.hear(lambda event: event["ev"] != "progress")
        assert found["ev"] == "error" and "a bug" in found["message"]
        assert sender.process.wait(10) == 1
    rows = rows_of(tmp_path)
    assert {0, 1, 2} <= {row["index"] for row in rows}
    assert {row["error"] for row in rows} <= {None, names.CUT_BY_END, names.STREAM_CUT}
