"""What a sender notes and what is read of it: the same rows, whatever an answer was, and none lost or made twice."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen import spool as spools
from loadgen.failure import Failure
from loadgen.job import Call
from loadgen.recorder import RowParts, clear
from loadgen.recover import recover
from loadgen.row_maker import RowMaker
from loadgen.spool import ANSWER_FIELDS, CALL_FIELDS, FOLDER, Common, Kept, Spool, SpoolReader, folder_for
from loadgen.stream import Answer
from models.errors import UserError
from telemetry import names
from telemetry.parts import read_table
from telemetry.schema import ATTEMPTS, REQUESTS

COMMON = Common(worker=3, model="m", keep_text="all", tokenizer_ref="", zero_ns=1_000)
#: Of an answer that has ended no row takes these.
OF_READING = {"_between", "_body", "_body_size", "_marks", "_reader", "_usual", "line_limit"}


def call(index: int = 0, **more: Any) -> Call:
    return Call(
        index, 100 + index, "chat", 0.5, b"{}", "/v1/chat/completions", 5, 3, 5, "0" * 32, "1" * 16, False, **more
    )


def ended(index: int = 0, *pieces: str, of_call: dict[str, Any] | None = None, **more: Any) -> Kept:
    answer = Answer()
    answer.head(200, {b"content-type": b"text/event-stream"}, 2_000)
    answer.pieces.extend(pieces)
    answer.stamps.extend(3_000 + n for n in range(len(pieces)))
    answer.end_ns = 9_000
    for name, value in more.items():
        setattr(answer, name, value)
    return Kept(call(index, **(of_call or {})), answer, "http://a:1", "replica", 1, 1_500, 1_500, 1_600, None, False)


def made(one: Kept) -> dict[str, Any]:
    """Its row."""
    rows: list[dict[str, Any]] = []

    class Sink:
        def append(self, row: dict[str, Any]) -> None:
            rows.append(row)

        def flush(self) -> bool:
            return True

    maker = RowMaker(Sink(), COMMON.worker, None, model=COMMON.model, keep_text=COMMON.keep_text)
    maker.zero_ns = COMMON.zero_ns
    maker.make(one)
    return rows[0]


def filled(folder: Path, *records: Kept | dict[str, Any]) -> Path:
    """A spool, closed, with these in it."""
    place = folder_for(folder, "worker-3", COMMON.keep_text)
    spool = Spool(place, COMMON)
    spool.start(COMMON.zero_ns)
    for one in records:
        spool.put_attempt(one) if isinstance(one, dict) else spool.put(one)
    spool.close()
    assert spool.error is None
    return place


def read(place: Path) -> list[Kept | dict[str, Any]]:
    reader = SpoolReader(place)
    found = list(reader.records())
    reader.close()
    return found


def test_all_that_a_row_could_take_is_kept() -> None:
    assert set(ANSWER_FIELDS) | OF_READING | {"failure"} == {*Answer.__slots__, "usage_marks"}
    assert {*CALL_FIELDS, "body", "path", "target"} == {one.name for one in fields(Call)}


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters(), max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
any_text = st.text(st.one_of(st.characters(), st.sampled_from("\ud800\udfff\0")), max_size=6)


@given(
    st.lists(any_text, max_size=5),
    st.dictionaries(st.text(max_size=4), json_values, max_size=3),
    st.lists(json_values, max_size=2),
    st.none() | st.builds(Failure, st.sampled_from([names.RESET, names.STREAM_CUT]), any_text),
    st.none() | st.integers(-(2**70), 2**70),
    st.none() | st.frozensets(st.sampled_from(["Latin", "Greek", "Han"])),
)
def test_a_row_is_the_same_behind_the_spool(
    pieces: list[str],
    account: dict[str, Any],
    logprobs: list[Any],
    failure: Failure | None,
    number: int | None,
    scripts: frozenset[str] | None,
) -> None:
    import tempfile

    one = ended(
        7, *pieces, of_call={"input_scripts": scripts, "input_sketch": [1, 2]},
        account={**account, "duration_ns": number}, logprobs=logprobs, failure=failure,
        completion_tokens=len(pieces), model="m\ud800",
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as name:
        (found,) = read(filled(Path(name), one))
    assert isinstance(found, Kept)
    before, after = made(one), made(found)
    if json.dumps(spools._packable(logprobs)) != json.dumps(logprobs):  # numbers beyond 64 bits
        before.pop("logprobs"), after.pop("logprobs")
    assert before == after


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


@pytest.mark.parametrize("value", [2**64, -(2**64), 10**400, deep(600), {"a": deep(600)}])
def test_what_cannot_be_packed_costs_itself_alone(tmp_path: Path, value: Any) -> None:
    place = filled(tmp_path, ended(0, "a"), ended(1, "b", logprobs=[value]), ended(2, "c"))
    found = read(place)
    assert [one.call.index for one in found if isinstance(one, Kept)] == [0, 1, 2]
    assert [made(one)["text"] for one in found if isinstance(one, Kept)] == ["a", "b", "c"]


def test_segments_are_read_while_they_are_written_and_go_when_their_rows_are_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spools, "SEGMENT_BYTES", 2_000)
    place = folder_for(tmp_path, "worker-3", "all")
    spool, reader = Spool(place, COMMON), SpoolReader(place)
    spool.start(5)
    assert list(reader.records()) == []
    seen: list[int] = []
    for index in range(60):
        spool.put(ended(index, "x" * 40))
        spool.flush()
        seen += [one.call.index for one in reader.records() if isinstance(one, Kept)]
    spool.close()
    seen += [one.call.index for one in reader.records() if isinstance(one, Kept)]
    assert seen == list(range(60))
    assert reader.common is not None and reader.common.zero_ns == 5
    assert len(list(place.glob("*.msgpack"))) > 5
    reader.forget()
    assert len(list(place.glob("*.msgpack"))) == 1, "the last may still be written to"


def test_who_stops_reading_goes_on_where_that_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spools, "SEGMENT_BYTES", 2_000)
    monkeypatch.setattr(spools, "BLOB_BYTES", 1_000)
    reader = SpoolReader(filled(tmp_path, *(ended(index, "x" * 40) for index in range(30))))
    seen: list[int] = []
    while found := next(iter(reader.records()), None):
        assert isinstance(found, Kept)
        seen.append(found.call.index)
    assert seen == list(range(30))


def test_a_torn_record_costs_itself_alone(tmp_path: Path) -> None:
    (segment,) = filled(tmp_path, *(ended(index, "abc") for index in range(5))).glob("*.msgpack")
    whole = segment.read_bytes()
    counts = []
    for size in range(len(whole) + 1):
        segment.write_bytes(whole[:size])
        counts.append(len(read(segment.parent)))
    assert counts == sorted(counts) and set(counts) == set(range(6))


def test_a_full_disk_costs_no_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = folder_for(tmp_path, "worker-3", "all")
    spool = Spool(place, COMMON)
    spool.start(0)
    real, full = os.pwrite, [True]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if full[0]:
            real(fd, data[: len(data) // 2], offset)  # as much as there is room for
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(fd, data, offset)

    monkeypatch.setattr(spools.os, "pwrite", pwrite)
    for index in range(4):
        spool.put(ended(index, "abc"))
        spool.flush()
    while spool.error is None:
        os.sched_yield()
    assert spool.error == "No space left on device"
    assert read(place) == []
    full[0] = False
    spool.close()
    assert spool.error is None
    assert [one.call.index for one in read(place) if isinstance(one, Kept)] == [0, 1, 2, 3]


def test_a_disk_that_stays_full_is_told_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def pwrite(fd: int, data: bytes, offset: int) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(spools.os, "pwrite", pwrite)
    spool = Spool(folder_for(tmp_path, "worker-3", "all"), COMMON)
    spool.start(0)
    spool.put(ended(0, "abc"))
    with pytest.raises(UserError, match="could not be noted: No space left"):
        spool.close()


def test_what_a_machine_that_went_down_left_behind_whole_records_costs_itself_alone(tmp_path: Path) -> None:
    (segment,) = filled(tmp_path, *(ended(index, "abc") for index in range(5))).glob("*.msgpack")
    segment.write_bytes(segment.read_bytes() + bytes(4096))
    assert recover(tmp_path) == 5


def test_a_spool_of_another_version_is_told_and_left_alone(tmp_path: Path) -> None:
    (segment,) = filled(tmp_path, ended(0, "abc")).glob("*.msgpack")
    later = segment.read_bytes().replace(b"\xa7version\x01", b"\xa7version\x02", 1)
    segment.write_bytes(later)
    with pytest.raises(UserError, match="no segment of this version"):
        recover(tmp_path)
    assert segment.read_bytes() == later


def test_no_text_reaches_the_folder_of_a_bundle_that_keeps_none(tmp_path: Path) -> None:
    place = folder_for(tmp_path, "worker-0", "none")
    assert place.is_symlink() and not place.resolve().is_relative_to(tmp_path)
    target = place.resolve()
    assert target.stat().st_mode & 0o077 == 0
    clear(place)
    assert not target.exists() and list(tmp_path.iterdir()) == []


def attempt(index: int, number: int) -> dict[str, Any]:
    return {"index": index, "attempt": number, "worker": 3, "target": "http://a:1", "verdict": "retried"}


@pytest.mark.parametrize("there", [0, 1, 3, 5])
def test_recovering_makes_what_is_missing_and_nothing_twice(tmp_path: Path, there: int) -> None:
    noted: list[Kept | dict[str, Any]] = [ended(index, "abc") for index in range(5)]
    noted += [attempt(index, 0) for index in range(5)] + [attempt(1, 1)]
    filled(tmp_path, *noted)
    parts = RowParts(tmp_path, "worker-3", COMMON, None, attempts=True)
    for one in [*noted[:there], *noted[5 : 5 + there]]:
        parts.add(one, COMMON.zero_ns)
    parts.close()
    assert recover(tmp_path) == 5 - there
    assert recover(tmp_path) == 0
    assert not (tmp_path / FOLDER).exists()
    rows = read_table(tmp_path / "requests", REQUESTS).table.to_pylist()
    assert sorted(row["index"] for row in rows) == [0, 1, 2, 3, 4]
    assert {row["text"] for row in rows} == {"abc"}
    tried = read_table(tmp_path / "attempts", ATTEMPTS).table.to_pylist()
    assert sorted((row["index"], row["attempt"]) for row in tried) == [(0, 0), (1, 0), (1, 1), (2, 0), (3, 0), (4, 0)]


def test_recovering_ends_where_memory_was_lost_with_the_machine(tmp_path: Path) -> None:
    place = folder_for(tmp_path, "worker-0", "none")
    place.resolve().rmdir()
    assert recover(tmp_path) == 0
    assert not place.is_symlink()
