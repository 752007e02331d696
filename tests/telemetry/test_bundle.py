"""Bundles: found by name, manifests whole at any moment, texts kept by choice, dead runs brought back."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from models.errors import UserError
from telemetry import bundle as bundles
from telemetry import parts, slo
from telemetry.bundle import Bundle, list_runs, newest, resolve
from tests.bundles import answered_row, dropped_row, make_bundle

ROOT = Path(__file__).parents[2]


def test_a_new_bundle_says_what_it_is(tmp_path: Path) -> None:
    bundle = Bundle.create(tmp_path, {"trace": "t"}, command="x", scheduled=3)
    manifest = json.loads((bundle.path / "manifest.json").read_text())
    assert manifest["run_id"] == bundle.path.name and manifest["status"] == "running"
    assert manifest["plan"] == {"trace": "t"} and manifest["schema_version"] == 1
    bundle.update(status="complete", generator={"cpu_ratio": np.float64(0.5)})
    again = Bundle.open(bundle.path)
    assert again.manifest["generator"] == {"cpu_ratio": 0.5} and again.manifest["command"] == "x"
    assert [p.name for p in bundle.path.iterdir()] == ["manifest.json"]


def test_two_holders_of_a_bundle_do_not_undo_each_other(tmp_path: Path) -> None:
    first = Bundle.create(tmp_path, {})
    second = Bundle.open(first.path)
    first.update(scheduled=7)
    second.update(status="complete")
    first.reload()
    assert (first.manifest["scheduled"], first.status) == (7, "complete")


def test_secrets_stay_out_of_the_manifest(tmp_path: Path) -> None:
    bundle = Bundle.create(
        tmp_path,
        {"api_key": "sk-1", "headers": [{"Authorization": "Bearer sk-2"}], "api_key_env": "KEY", "api-key": ""},
    )
    text = (bundle.path / "manifest.json").read_text()
    assert "sk-" not in text and '"api_key_env": "KEY"' in text


def test_a_failed_update_leaves_the_old_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = Bundle.create(tmp_path, {"a": 1})
    before = (bundle.path / "manifest.json").read_bytes()
    with pytest.raises(ValueError, match="JSON"):
        bundle.update(figure=float("nan"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Bundle.open(bundle.path).update(status="complete")
    assert (bundle.path / "manifest.json").read_bytes() == before
    assert [p.name for p in bundle.path.iterdir()] == ["manifest.json"]


# --- finding ---


def fake_run(root: Path, run_id: str, created: int) -> Path:
    (root / run_id).mkdir(parents=True)
    manifest = {"schema_version": 1, "run_id": run_id, "created_unix_ns": created}
    (root / run_id / "manifest.json").write_text(json.dumps(manifest))
    return root / run_id


def test_runs_are_found_by_path_id_prefix_and_latest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = fake_run(tmp_path, "20240101-000000-aaaa", 1)
    second = fake_run(tmp_path, "20250101-000000-ffff", 2)
    third = fake_run(tmp_path, "20250101-000000-0000", 3)  # the same second, made later
    (tmp_path / "other").mkdir()
    assert list_runs(tmp_path) == [third, second, old]
    assert newest(tmp_path) == third == resolve("latest", tmp_path)
    assert resolve(str(old)) == old and resolve(old.name, tmp_path) == old and resolve("2024", tmp_path) == old
    with pytest.raises(UserError, match="start of 2 run ids"):
        resolve("2025", tmp_path)
    for wrong in ("2023", "", "other"):
        with pytest.raises(UserError, match="newest runs: 20250101-000000-0000"):
            resolve(wrong, tmp_path)
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    assert resolve("latest") == third
    assert newest(tmp_path / "none") is None
    with pytest.raises(UserError, match="no run yet"):
        resolve("latest", tmp_path / "none")


def test_the_order_of_runs_is_that_of_their_starts_whatever_the_folders_are_called(tmp_path: Path) -> None:
    newest_run = fake_run(tmp_path, "20250101-000000-aaaa", 1_735_689_600_000_000_002)
    copied = fake_run(tmp_path, "copy-of-a-run", 1_735_689_600_000_000_001)
    later_name = fake_run(tmp_path, "20991231-235959-bbbb", 1_735_689_600_000_000_000)
    same_moment = fake_run(tmp_path, "20200101-000000-cccc", 1_735_689_600_000_000_000)
    assert list_runs(tmp_path) == [newest_run, copied, later_name, same_moment]
    assert resolve("latest", tmp_path) == newest_run
    # Where the manifest says nothing, the id's time stands in; a name without a time is the oldest.
    for name, text in (("20300101-000000-dddd", "{"), ("nameless", '{"created_unix_ns": "now"}'), ("list", "[]")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest.json").write_text(text)
    found = [path.name for path in list_runs(tmp_path)]
    assert found[:2] == ["20300101-000000-dddd", newest_run.name] and found[-2:] == ["nameless", "list"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "not JSON"),
        ("[]", "not a manifest"),
        ("{}", "not a manifest"),
        ('{"schema_version": 9}', "schema version 9"),
    ],
)
def test_a_manifest_that_cannot_be_read_says_why(tmp_path: Path, text: str, said: str) -> None:
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UserError, match=said) as caught:
        Bundle.open(tmp_path)
    assert caught.value.where == str(tmp_path / "manifest.json")


# --- texts ---


@pytest.mark.parametrize(("keep", "kept"), [("none", []), ("wrong", [1, 2]), ("all", [0, 1, 2, 3]), (None, [1, 2])])
def test_texts_are_kept_by_choice(tmp_path: Path, keep: str | None, kept: list[int]) -> None:
    bundle = Bundle.create(tmp_path, {} if keep is None else {"keep_text": keep}, scheduled=4)
    with bundle.writer("requests", "w") as writer:
        writer.append(answered_row(0))
        writer.append(answered_row(1, special_leaks=1))
        writer.append(answered_row(2, canary_kind="golden"))
        writer.append(dropped_row(3, text="partial"))
    bundle.compact()
    table = bundle.table("requests")
    assert [row["index"] for row in table.to_pylist() if row["text"] is not None] == kept
    assert table.num_rows == 4
    if keep == "none":
        assert b"answer 1" not in (bundle.path / "requests" / "data.parquet").read_bytes()


def test_requests_come_sorted_whatever_wrote_them(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=50, status="running")
    assert len(list((bundle.path / "requests").glob("*.arrow"))) == 2
    index = bundle.table("requests", ["index"]).column("index").to_pylist()
    assert index == list(range(50))
    bundle.compact()
    assert bundle.table("requests", ["index"]).column("index").to_pylist() == index


# --- verdicts ---


def test_verdicts_are_kept_and_made_anew_when_their_basis_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bundle = make_bundle(tmp_path, n=60)
    facts = (bundle.path / "requests" / "data.parquet").read_bytes()
    demo, chat = slo.load("demo"), slo.load("chat")
    first = bundle.verdicts(demo)
    assert (bundle.path / f"verdicts-{demo.hash[:12]}.parquet").is_file()
    bundle.verdicts(chat)
    assert (bundle.path / "requests" / "data.parquet").read_bytes() == facts
    with monkeypatch.context() as patched:
        patched.setattr(bundles.outcomes, "judge", lambda *_, **__: pytest.fail("judged again"))
        assert bundle.verdicts(demo).equals(first)
    bundle.update(scheduled=61)
    assert bundle.verdicts(demo).num_rows == 61


def test_verdicts_of_a_running_bundle_are_not_kept(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=20, status="running")
    bundle.update(scheduled=40)
    assert bundle.verdicts(slo.load("demo")).num_rows == 20
    assert not list(bundle.path.glob("verdicts-*"))


# --- repair ---


def killed_run(root: Path) -> tuple[Path, int]:
    """A real process that writes a bundle, killed with -9 in mid-write; its folder and the rows it had flushed."""
    script = """
import sys
import time
from telemetry import slo
from telemetry.bundle import Bundle
from tests.bundles import answered_row
bundle = Bundle.create(sys.argv[1], {}, scheduled=100_000, slo=slo.load("demo").manifest_entry())
writer = bundle.writer("requests", "w0")
index = 0
while True:
    for _ in range(20):
        writer.append(answered_row(index, index * 0.01))
        index += 1
    writer.flush()
    print(index, bundle.path, flush=True)
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", script, str(root)], stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment
    ) as child:
        assert child.stdout is not None
        lines = [child.stdout.readline() for _ in range(15)]
        path = Path(lines[0].split()[1])
        with pytest.raises(UserError, match=f"still being written by process {child.pid}"):
            Bundle.open(path).repair()
        child.send_signal(signal.SIGKILL)
        lines += child.stdout.read().split("\n")[:-1]
        child.wait()
    return path, int(lines[-1].split()[0])


def test_a_killed_run_is_brought_back(tmp_path: Path) -> None:
    path, flushed = killed_run(tmp_path)
    bundle = Bundle.open(path)
    assert bundle.status == "running" and not bundle.writer_alive()
    assert bundle.table("requests").num_rows >= flushed
    assert bundle.repair()
    manifest = Bundle.open(path).manifest
    rows = bundle.table("requests").num_rows
    assert rows >= flushed and manifest["repaired"]["rows"] == rows
    assert manifest["status"] == "incomplete" and manifest["validity"]["verdict"] == "INCOMPLETE"
    assert f"cut after {rows} of 100000" in manifest["validity"]["reasons"][0]
    assert [p.name for p in (path / "requests").iterdir()] == ["data.parquet"]
    before = (path / "manifest.json").read_bytes()
    assert not bundle.repair()
    assert (path / "manifest.json").read_bytes() == before
    labels = bundle.verdicts(slo.load("demo")).column("label").to_pylist()
    assert labels.count("good") == rows and labels.count("invalid") == 100_000 - rows


def test_repair_of_a_torn_bundle_counts_what_was_lost(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=40, status="running")
    part = bundle.path / "requests" / "part-worker-0.arrow"
    part.write_bytes(part.read_bytes()[:-100])
    bundle.update(writer={"pid": 1, "host": socket.gethostname(), "started": 0})
    assert bundle.repair()
    account: dict[str, Any] = bundle.manifest["repaired"]
    assert account["torn_bytes"] > 0 and account["rows"] == 20  # that worker's one flush
    assert not bundle.repair()


def test_repair_of_a_complete_bundle_with_loose_parts_keeps_its_status(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=10)
    with bundle.writer("series", "late") as writer:
        writer.append({"t_s": 99.0, "name": "x", "value": 1.0})
    assert bundle.repair() and bundle.status == "complete"
    assert not bundle.repair()


def test_a_full_disk_while_repairing_loses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle = make_bundle(tmp_path, n=30, status="running")
    bundle.update(writer={})
    with monkeypatch.context() as patched:
        patched.setattr(parts.pq, "ParquetWriter", _no_room)
        with pytest.raises(UserError, match="its parts are untouched"):
            bundle.repair()
    assert bundle.table("requests").num_rows == 30 and bundle.status == "running"
    assert bundle.repair() and bundle.table("requests").num_rows == 30


def _no_room(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def test_a_folder_that_is_no_bundle_is_named_itself(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no run bundle") as told:
        resolve(tmp_path, tmp_path / "runs")
    assert told.value.where == str(tmp_path)


def test_a_run_that_another_host_writes_lives_while_it_writes(tmp_path: Path) -> None:
    bundle = Bundle.create(tmp_path, {}, scheduled=1)
    bundle.update(writer={**bundle.manifest["writer"], "host": "another container"})
    writer = bundle.writer("requests", "w")
    assert bundle.writer_alive()
    with pytest.raises(UserError, match="still being written"):
        bundle.repair()
    for path in (bundle.path / "manifest.json", writer.path):
        os.utime(path, (time.time() - 31, time.time() - 31))
    assert not bundle.writer_alive()
    writer.close()
