"""Part files: torn tails, killed writers, full disks, crashes while compacting, and versions."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from models.errors import UserError
from telemetry import parts
from telemetry.part_writer import PartWriter
from telemetry.parts import END_OF_STREAM, VERSION_KEY, compact, read_table

SCHEMA = pa.schema(
    [pa.field("index", pa.int64(), nullable=False), ("text", pa.string()), ("gaps", pa.list_(pa.float32()))]
)
ROOT = Path(__file__).parents[2]


def rows(*indices: int) -> list[dict[str, Any]]:
    return [{"index": i, "text": f"row {i}", "gaps": [0.5] * (i % 3)} for i in indices]


def indices(folder: Path) -> list[int]:
    return read_table(folder, SCHEMA).table.column("index").to_pylist()


def test_rows_come_back_after_every_flush(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, SCHEMA, "w")
    writer.append(rows(0)[0])
    writer.append(rows(1, 2))
    assert indices(tmp_path) == []
    assert writer.flush()
    assert indices(tmp_path) == [0, 1, 2]
    writer.append({"index": 3})
    writer.close()
    writer.close()
    read = read_table(tmp_path, SCHEMA)
    assert read.torn_bytes == 0
    assert read.table.to_pylist() == [*rows(0, 1, 2), {"index": 3, "text": None, "gaps": None}]


def test_a_tail_torn_at_any_byte_costs_only_its_own_message(tmp_path: Path) -> None:
    """Every prefix of a part gives exactly the flushes it holds whole, and says how many bytes it left out."""
    writer = PartWriter(tmp_path / "whole", SCHEMA, "w")
    ends = [writer.path.stat().st_size]
    for index in range(3):
        writer.append(rows(index))
        writer.flush()
        ends.append(writer.path.stat().st_size)
    writer.close()
    data = writer.path.read_bytes()
    assert data.endswith(END_OF_STREAM)
    torn = tmp_path / "torn"
    torn.mkdir()
    for cut in range(len(data) + 1):
        (torn / "part-w.arrow").write_bytes(data[:cut])
        read = read_table(torn, SCHEMA)
        whole = sum(1 for end in ends[1:] if cut >= end)
        intact = max((end for end in ends if cut >= end), default=0)
        assert read.table.num_rows == whole, cut
        assert read.torn_bytes == (0 if cut == len(data) else cut - intact), cut


def test_garbage_behind_whole_messages_is_ignored_and_counted(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, SCHEMA, "w")
    writer.append(rows(0, 1))
    writer.flush()
    with writer.path.open("ab") as file:
        file.write(b"\x00" * 4096)  # what a power cut leaves: the length grew, the data did not
    read = read_table(tmp_path, SCHEMA)
    assert (read.table.num_rows, read.torn_bytes) == (2, 4096)


@pytest.mark.parametrize("bad", [{"index": "three"}, {"text": "no index"}, {"index": 1, "text": 5}])
def test_a_row_that_does_not_fit_costs_only_itself(tmp_path: Path, bad: dict[str, Any]) -> None:
    writer = PartWriter(tmp_path, SCHEMA, "w")
    writer.append([*rows(0), bad, *rows(2)])
    with pytest.raises(ValueError, match="1 rows do not fit"):
        writer.flush()
    assert indices(tmp_path) == [0, 2]
    writer.close()


def test_an_unknown_column_is_refused_at_once(tmp_path: Path) -> None:
    with PartWriter(tmp_path, SCHEMA, "w") as writer, pytest.raises(ValueError, match="indx"):
        writer.append({"indx": 1})


def test_a_restarted_worker_gets_a_part_of_its_own(tmp_path: Path) -> None:
    for index in range(3):
        with PartWriter(tmp_path, SCHEMA, "w") as writer:
            writer.append(rows(index))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["part-w-2.arrow", "part-w-3.arrow", "part-w.arrow"]
    assert sorted(indices(tmp_path)) == [0, 1, 2]


def run_script(script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", script, *arguments], stdout=subprocess.PIPE, text=True, cwd=ROOT, env={**os.environ}
    )


def test_kill_9_loses_at_most_what_was_not_flushed(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
import pyarrow as pa
from telemetry.part_writer import PartWriter
writer = PartWriter(Path(sys.argv[1]), pa.schema([("index", pa.int64()), ("text", pa.string())]), "w")
index = 0
while True:
    for _ in range(50):
        writer.append({"index": index, "text": "x" * 200})
        index += 1
    writer.flush()
    print(index, flush=True)
"""
    with run_script(script, str(tmp_path)) as child:
        assert child.stdout is not None
        said = 0
        while said < 1000:
            said = int(child.stdout.readline())
        child.send_signal(signal.SIGKILL)
        rest = child.stdout.read().split("\n")[:-1]  # what it managed to say before it died
        child.wait()
    said = int(rest[-1]) if rest else said
    schema = pa.schema([("index", pa.int64()), ("text", pa.string())])
    found = read_table(tmp_path, schema).table.column("index").to_pylist()
    assert len(found) >= said
    assert found == list(range(len(found)))


def test_a_full_disk_harms_nothing_and_is_tried_again(tmp_path: Path) -> None:
    """A file size limit stands for the full disk: the write fails half-way, as ENOSPC does."""
    script = """
import resource, sys
from pathlib import Path
import pyarrow as pa
from models.errors import UserError
from telemetry.part_writer import PartWriter
from telemetry.parts import read_table
folder, schema = Path(sys.argv[1]), pa.schema([("index", pa.int64()), ("text", pa.string())])
writer = PartWriter(folder, schema, "w")
index, whole = 0, True
_, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
good = 0
while whole:
    good = index
    for _ in range(20):
        writer.append({"index": index, "text": "x" * 100})
        index += 1
    whole = writer.flush()
read = read_table(folder, schema)
assert (read.table.num_rows, read.torn_bytes) == (good, 0), (read.table.num_rows, good)
assert writer.error == "File too large", writer.error
assert not writer.flush()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
assert writer.flush() and writer.error is None
assert read_table(folder, schema).table.num_rows == index
resource.setrlimit(resource.RLIMIT_FSIZE, (writer.path.stat().st_size + 10, hard))
writer.append({"index": index, "text": "y" * 1000})
try:
    writer.close()
    raise SystemExit("close said nothing")
except UserError as problem:
    assert "File too large" in str(problem)
assert read_table(folder, schema).table.num_rows == index
print("fine")
"""
    with run_script(script, str(tmp_path)) as child:
        assert child.stdout is not None
        assert child.stdout.read() == "fine\n"


# --- compaction ---


def bundle_of_parts(folder: Path) -> None:
    for worker in range(3):
        with PartWriter(folder, SCHEMA, f"w{worker}") as writer:
            for index in range(worker * 10, worker * 10 + 10):
                writer.append(rows(index))
                writer.flush()


def test_compaction_keeps_every_row_and_leaves_one_file(tmp_path: Path) -> None:
    bundle_of_parts(tmp_path)
    before = read_table(tmp_path, SCHEMA).table.sort_by("index")
    assert compact(tmp_path, SCHEMA)
    assert [p.name for p in tmp_path.iterdir()] == ["data.parquet"]
    assert read_table(tmp_path, SCHEMA).table.sort_by("index").equals(before)
    assert not compact(tmp_path, SCHEMA)
    with PartWriter(tmp_path, SCHEMA, "w0") as writer:  # a late part, of a name that was there before
        writer.append(rows(99))
    assert compact(tmp_path, SCHEMA)
    assert sorted(indices(tmp_path)) == [*range(30), 99]


class Crash(BaseException):
    """Stands for a kill -9 at that moment: nothing catches it."""


@pytest.mark.parametrize("point", ["before rename", "after rename", "first removal", "second removal"])
def test_a_crash_while_compacting_neither_loses_nor_doubles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    bundle_of_parts(tmp_path)
    calls = {"unlink": 0}
    real_replace, real_unlink = Path.replace, Path.unlink

    def replace(self: Path, target: Path) -> Path:
        if point == "before rename":
            raise Crash
        real_replace(self, target)
        if point == "after rename":
            raise Crash
        return target

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self.suffix == ".arrow":
            calls["unlink"] += 1
            if (point, calls["unlink"]) in (("first removal", 1), ("second removal", 2)):
                raise Crash
        real_unlink(self, missing_ok=missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "replace", replace)
        patched.setattr(Path, "unlink", unlink)
        with pytest.raises(Crash):
            compact(tmp_path, SCHEMA)
    assert sorted(indices(tmp_path)) == list(range(30))
    assert compact(tmp_path, SCHEMA)
    assert sorted(indices(tmp_path)) == list(range(30))
    assert [p.name for p in tmp_path.iterdir()] == ["data.parquet"]


def test_no_room_to_compact_leaves_the_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundle_of_parts(tmp_path)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(parts, "sync_folder", full)
    with pytest.raises(UserError, match="No space left"):
        compact(tmp_path, SCHEMA)
    assert sorted(indices(tmp_path)) == list(range(30))


def test_torn_bytes_are_remembered_by_the_compacted_file(tmp_path: Path) -> None:
    bundle_of_parts(tmp_path)
    part = tmp_path / "part-w1.arrow"
    part.write_bytes(part.read_bytes()[:-20])
    torn = read_table(tmp_path, SCHEMA).torn_bytes
    assert torn > 0
    compact(tmp_path, SCHEMA)
    assert read_table(tmp_path, SCHEMA).torn_bytes == torn


def test_a_part_shipped_twice_counts_once(tmp_path: Path) -> None:
    bundle_of_parts(tmp_path)
    shutil.copy(tmp_path / "part-w1.arrow", tmp_path / "part-w1-again.arrow")
    assert sorted(indices(tmp_path)) == list(range(30))
    compact(tmp_path, SCHEMA)
    assert sorted(indices(tmp_path)) == list(range(30))


# --- versions ---


def test_columns_that_an_older_part_lacks_are_null_and_newer_ones_kept(tmp_path: Path) -> None:
    with PartWriter(tmp_path, pa.schema([("index", pa.int64())]), "old") as writer:
        writer.append({"index": 0})
    with PartWriter(tmp_path, SCHEMA.append(pa.field("later", pa.int8())), "new") as writer:
        writer.append({"index": 1, "text": "a", "later": 7})
    for _ in range(2):
        table = read_table(tmp_path, SCHEMA).table.sort_by("index")
        assert table.column("text").to_pylist() == [None, "a"]
        assert table.column("later").to_pylist() == [None, 7]
        assert read_table(tmp_path, SCHEMA, ["text"]).table.column_names == ["text"]
        compact(tmp_path, SCHEMA)


@pytest.mark.parametrize(("version", "said"), [(b"99", "table schema 99"), (b"x", "version is x"), (None, "missing")])
def test_an_unknown_version_says_why(tmp_path: Path, version: bytes | None, said: str) -> None:
    table = pa.table({"index": [1]})
    pq.write_table(table.replace_schema_metadata({VERSION_KEY: version} if version else None), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=said):
        read_table(tmp_path, SCHEMA)


def test_a_part_that_grows_while_it_is_read(tmp_path: Path) -> None:
    writer = PartWriter(tmp_path, SCHEMA, "w")
    writer.append(rows(0))
    writer.flush()
    stream = parts._Stream(writer.path)  # Arrow knows the size from here on, and goes on reading beyond it
    for n in range(1, 50):
        writer.append(rows(n))
        writer.flush()
    assert sum(batch.num_rows for batch in stream) == 50
    assert stream.torn_bytes == 0
    writer.close()
