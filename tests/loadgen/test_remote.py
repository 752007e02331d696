"""A worker that shares no disk with the master: plan and trace go out, every row comes back."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from loadgen.control.remote import PartShipper, PartStore, PlanReceiver, described, sha256, trace_piece
from loadgen.locust_runner import address_of, checked_network, free_port
from models.errors import UserError
from tailspan import main
from telemetry import names
from telemetry.bundle import Bundle
from telemetry.part_writer import PartWriter
from telemetry.parts import read_table
from telemetry.schema import REQUESTS
from tests.bundles import answered_row
from tests.loadgen.place import COUNT, ROOT, WAIT_S, Place, chats, script, wait_for
from tests.loadgen.stub import StubThread


def pieces_of(shipper: PartShipper) -> list[dict[str, Any]]:
    return list(shipper.new_pieces())


def test_parts_arrive_whole_in_pieces_that_may_come_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.control.remote.CHUNK", 700)
    far, near = tmp_path / "far", tmp_path / "near"
    near.mkdir()
    shipper, store = PartShipper(far), PartStore(near)
    writer = PartWriter(far / "requests", REQUESTS, "worker-1")
    seen = 0
    for n in range(40):
        writer.append(answered_row(n))
        if n % 7 == 0:
            writer.flush()
            for piece in pieces_of(shipper):
                store.take(piece)
                store.take(piece)
                seen += 1
    writer.close()
    assert pieces_of(shipper) and not pieces_of(shipper)
    store = PartStore(near)
    for piece in pieces_of(PartShipper(far)):  # a master that starts anew is sent everything again
        store.take(piece)
    found = read_table(near / "requests", REQUESTS)
    assert (found.table.num_rows, found.torn_bytes, store.missing) == (40, 0, 0)
    assert seen > 6
    assert (near / "requests" / "remote-part-worker-1.arrow").read_bytes() == writer.path.read_bytes()


def test_a_gap_is_noticed_and_a_name_cannot_leave_the_bundle(tmp_path: Path) -> None:
    store = PartStore(tmp_path)
    store.take({"table": "requests", "file": "p.arrow", "offset": 9, "data": b"x"})
    store.take({"table": "../x", "file": "p.arrow", "offset": 0, "data": b"x"})
    store.take({"table": "requests", "file": "../../p.txt", "offset": 0, "data": b"x"})
    store.take({"table": "requests", "file": "../../p.arrow", "offset": 0, "data": b"ok"})
    assert store.missing == 3
    written = [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size]
    assert written == [tmp_path / "requests" / "remote-p.arrow"]


def test_the_trace_goes_with_the_plan_unless_it_lies_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("loadgen.control.remote.CHUNK", 1000)
    monkeypatch.delenv("TAILSPAN_TRACES", raising=False)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    there.mkdir()
    trace, plan = here / "t.csv", here / "plan.json"
    trace.write_bytes(os.urandom(4321))
    plan.write_text(json.dumps({"trace_path": str(trace), "trace_sha256": sha256(trace)}), encoding="utf-8")
    receiver = PlanReceiver(there)
    receiver.take_plan(described(plan, 5))
    asked = 0
    while receiver.wants is not None:
        assert receiver.take_piece(receiver.wants, trace_piece(plan, receiver.wants)) is None
        assert receiver.take_piece(0, b"late") is None, "a piece that was not asked for is passed over"
        asked += 1
    assert (asked, receiver.workers) == (5, 5)
    got = Path(json.loads(receiver.plan.read_text(encoding="utf-8"))["trace_path"])
    assert got == there / "t.csv" and got.read_bytes() == trace.read_bytes()
    monkeypatch.setenv("TAILSPAN_TRACES", str(here))
    again = PlanReceiver(there)
    again.take_plan(described(plan, 5))
    assert again.wants is None
    monkeypatch.delenv("TAILSPAN_TRACES")
    broken = PlanReceiver(there)
    broken.take_plan(described(plan, 5))
    fault = None
    while fault is None and broken.wants is not None:
        fault = broken.take_piece(broken.wants, trace_piece(plan, broken.wants)[::-1])
    assert fault == "the trace did not arrive as it was sent"


def test_addresses() -> None:
    assert address_of("10.0.0.1:5557", "--master") == ("10.0.0.1", 5557)
    for bad in ("host", "host:", ":1", "host:x", "host:70000"):
        with pytest.raises(UserError) as caught:
            address_of(bad, "--master")
        assert caught.value.where == "--master"


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "loadgen-7", "*"])
def test_a_network_is_refused_unless_its_plain_text_is_wanted(host: str) -> None:
    with pytest.raises(UserError, match="unencrypted") as caught:
        checked_network(host, "--bind", unencrypted=False)
    assert "--unencrypted" in str(caught.value.remedy) and "ssh -N -L" in str(caught.value.remedy)
    checked_network(host, "--bind", unencrypted=True)
    for near in ("127.0.0.1", "127.8.9.1", "::1", "[::1]", "localhost"):
        checked_network(near, "--bind", unencrypted=False)


def test_both_ends_refuse_a_network_before_anything_starts(place: Place, capsys: pytest.CaptureFixture[str]) -> None:

    load = ["run", "--target", "http://127.0.0.1:9", "--trace", str(place.trace), "--model", str(place.model)]
    for words in (
        ["worker", "--master", "192.0.2.7:5557"],
        [*load, "--remote-workers", "1", "--bind", "0.0.0.0:5557"],
    ):
        assert main(words) == names.EXIT_USAGE
        assert "would go unencrypted" in capsys.readouterr().err


def worker(folder: Path, port: int) -> subprocess.Popen[str]:
    folder.mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "tailspan", "worker", "--master", f"127.0.0.1:{port}"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_worker_without_our_disk_sends_its_part_and_ships_its_rows(place: Place, model: Path) -> None:
    port = free_port()
    with StubThread(script(model)) as stub:
        run = place.start(stub.url, "--workers", "1", "--remote-workers", "1", "--bind", f"127.0.0.1:{port}", "--json")
        far = worker(place.folder / "far", port)
        place.started.append(far)
        out, err = run.communicate(timeout=WAIT_S)
        far.communicate(timeout=WAIT_S)
    assert run.returncode == 0, f"{json.loads(out)['validity']}\n{err}"
    assert json.loads(out)["labels"][names.GOOD] == COUNT
    bundle = place.bundle()
    rows = bundle.table("requests").to_pylist()
    assert [row["index"] for row in rows] == list(range(COUNT))
    assert {row["worker"] for row in rows} == {0, 1}
    assert sorted(request.body for request in chats(stub)) == sorted(bodies(bundle))
    assert far.returncode == 0


def bodies(bundle: Bundle) -> list[bytes]:
    """What one worker alone would have sent."""
    from loadgen.plan import load_worker

    return [call.body for call in load_worker(bundle.path / "plan.json", 0, 1)[1]]


def test_a_remote_worker_that_is_killed_is_lost(place: Place, model: Path) -> None:
    import psutil

    port = free_port()
    with StubThread(script(model, wait=0.2)) as stub:
        options = ["--workers", "1", "--remote-workers", "1", "--bind", f"127.0.0.1:{port}", "--speed", "0.5", "--json"]
        run = place.start(stub.url, *options)
        far = worker(place.folder / "far", port)
        place.started.append(far)
        wait_for(lambda: len(chats(stub)) >= 12, "request")
        family = [psutil.Process(far.pid), *psutil.Process(far.pid).children(recursive=True)]
        for process in reversed(family):
            with suppress(psutil.NoSuchProcess):  # its builder may have done its work
                process.kill()
        out, err = run.communicate(timeout=WAIT_S)
        far.communicate(timeout=WAIT_S)
    assert run.returncode == names.EXIT_RUN_NOT_VALID, err
    summary = json.loads(out)
    assert summary["validity"]["verdict"] == names.INCOMPLETE
    assert summary["reasons"][names.INVALID][names.WORKER_LOST] > 0


def test_all_workers_may_be_elsewhere(place: Place, model: Path) -> None:
    with StubThread(script(model)) as stub:
        code, out, err = place.run(stub.url, "--workers", "0", "--remote-workers", "2", "--dry-run", "--json")
        assert code == 0, err
        assert json.loads(out)["plan"]["workers"] == 2
        code, _, err = place.run(stub.url, "--workers", "0", "--dry-run")
        assert code == 4 and "--workers: 0 workers" in err
