"""The Azure 2023 reader and the registry: exact stamps, every row accounted for, files that are no trace named."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loadgen.traces import registry
from loadgen.traces.find import folders
from loadgen.traces.statistics import describe
from models.errors import UserError

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"


def write(folder: Path, text: str | bytes) -> Path:
    path = folder / "trace.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_edge_row_1_seven_digits_crlf_no_last_newline(tmp_path: Path) -> None:
    rows = ["2031-02-03 04:05:06.1000001,40,7", "2031-02-03 04:05:06.1000005,41,8", "2031-02-03 04:05:07.3500001,9,1"]
    trace = registry.read(write(tmp_path, "\r\n".join([HEADER, *rows])))
    assert trace.format == "azure-2023"
    assert trace.arrival_ns.tolist() == [0, 400, 1_250_000_000]
    assert trace.input_tokens.tolist() == [40, 41, 9]
    assert trace.output_tokens.tolist() == [7, 8, 1]
    assert (trace.rows_read, trace.rows_kept, trace.rows_dropped) == (3, 3, {})


def test_columns_are_read_by_name(tmp_path: Path) -> None:
    text = "GeneratedTokens,Region,TIMESTAMP,ContextTokens\n7,eu,2031-02-03 04:05:06.1000001,40\n"
    trace = registry.read(write(tmp_path, text))
    assert (trace.input_tokens[0], trace.output_tokens[0]) == (40, 7)


def test_equal_stamps_keep_file_order_and_an_inversion_is_sorted_and_counted(tmp_path: Path) -> None:
    lines = [HEADER, *(f"2031-02-03 04:05:0{s}.0000000,{n},1" for s, n in ((6, 1), (6, 2), (8, 3), (7, 4)))]
    trace = registry.read(write(tmp_path, "\n".join(lines)))
    assert trace.input_tokens.tolist() == [1, 2, 4, 3]
    assert trace.row.tolist() == [0, 1, 3, 2]
    assert trace.inversions == 1


GOOD = "\n".join(f"2031-02-03 04:05:{s:02d}.0000000,10,5" for s in range(30))


@pytest.mark.parametrize(
    ("row", "reason", "place"),
    [
        ('2031-02-03 04:05:06.1000001,"1,024",7', "not_a_count", "line 32, column ContextTokens: '1,024'"),
        ("2031-02-03 04:05:06.1000001,NaN,7", "missing_count", "line 32, column ContextTokens: 'NaN'"),
        ("2031-02-03 04:05:06.1000001,12,-3", "negative_count", "line 32, column GeneratedTokens: '-3'"),
        ("2031-02-03 04:05:06.1000001,12,0", "zero_tokens", "line 32, column GeneratedTokens: '0'"),
        ("2031-02-03 04:05:06.1000001,1.5,7", "not_a_count", "line 32, column ContextTokens: '1.5'"),
        ("2031-02-03 04:05:06.1000001,99999999999,7", "count_too_large", "line 32, column ContextTokens"),
        ("2031-13-03 04:05:06.1000001,12,7", "bad_stamp", "line 32, column TIMESTAMP"),
        ("yesterday,12,7", "bad_stamp", "line 32, column TIMESTAMP: 'yesterday'"),
        ("2031-02-03 04:05:06.1000001,12,7,9", "wrong_field_count", "line 32"),
        ("2031-02-03 04:05:0", "half_line", "line 32"),
    ],
)
def test_a_bad_row_is_dropped_with_its_reason_and_place(tmp_path: Path, row: str, reason: str, place: str) -> None:
    trace = registry.read(write(tmp_path, f"{HEADER}\n{GOOD}\n{row}"))
    assert trace.rows_dropped == {reason: 1}
    assert trace.first_drop[reason].startswith(place)
    assert trace.rows_read == trace.rows_kept + 1 == 31
    assert reason in trace.account()


def test_a_bom_and_blank_lines_at_the_end_do_no_harm(tmp_path: Path) -> None:
    trace = registry.read(write(tmp_path, b"\xef\xbb\xbf" + f"{HEADER}\n{GOOD}\n\n\r\n".encode()))
    assert trace.rows_kept == 30
    assert trace.rows_dropped == {"blank_line": 2}
    assert any("byte-order mark" in note for note in trace.notes)


def test_it_warns_from_5_percent_and_refuses_from_50(tmp_path: Path) -> None:
    bad = "\n2031-02-03 04:05:06.1000001,x,7"
    assert not registry.read(write(tmp_path, f"{HEADER}\n{GOOD}{bad}")).notes
    assert "6.2%" in registry.read(write(tmp_path, f"{HEADER}\n{GOOD}{bad * 2}")).notes[0]
    path = write(tmp_path, f"{HEADER}\n{GOOD}{bad * 30}")
    with pytest.raises(UserError) as caught:
        registry.read(path)
    assert caught.value.where == f"{path}:32"
    assert "30 of 60 rows" in caught.value.message
    assert "ContextTokens" in caught.value.message
    assert caught.value.remedy


@pytest.mark.parametrize(
    ("content", "word"),
    [
        (b"", "empty"),
        (b"<!DOCTYPE html><html>", "web page"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git-LFS pointer"),
        (b"\x1f\x8b\x08\x00", "compressed"),
        (b"PAR1\x00\x00\x00", "binary"),
        (b"a,b,c\n1,2,3\n", "no known trace format"),
    ],
)
def test_a_file_that_is_no_such_trace_is_refused_by_what_it_is(tmp_path: Path, content: bytes, word: str) -> None:
    path = write(tmp_path, content)
    with pytest.raises(UserError, match=word) as caught:
        registry.read(path)
    assert caught.value.where == f"{path}:1"
    assert caught.value.remedy


def test_a_header_alone_a_folder_and_a_missing_file_are_refused(tmp_path: Path) -> None:
    for path in (write(tmp_path, HEADER), tmp_path, tmp_path / "absent.csv"):
        with pytest.raises(UserError) as caught:
            registry.read(path)
        assert caught.value.remedy


def test_a_file_without_line_ends_is_refused_early(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="longer than"):
        registry.read(write(tmp_path, f"{HEADER}\n2031-02-03 04:05:06.1000001,1,{'1' * 100_000}"))


@settings(max_examples=150, deadline=None)
@given(
    st.lists(
        st.one_of(st.binary(max_size=40), st.sampled_from([b"2031-02-03 04:05:06.1,4,5", b"1,2,3", b'"'])), max_size=8
    )
)
def test_no_content_crashes_it_or_loses_a_row_in_silence(
    tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("fuzz") / "t.csv"
    path.write_bytes(b"\n".join([HEADER.encode(), *lines]))
    try:
        trace = registry.read(path)
    except UserError:
        return
    assert trace.rows_read == trace.rows_kept + sum(trace.rows_dropped.values())
    assert (np.diff(trace.arrival_ns) >= 0).all()


def test_the_shipped_trace_is_synthetic_by_name_and_has_the_statistics_of_the_real_one() -> None:
    from loadgen.traces import make_synthetic
    from loadgen.traces.catalogue import KNOWN, SHIPPED_FOLDER

    path = SHIPPED_FOLDER / KNOWN["synthetic-conv"].file
    assert path.read_text(encoding="utf-8") == make_synthetic.text(), "the script no longer makes the shipped file"
    trace = registry.read(path)
    assert (trace.name, trace.synthetic, len(trace)) == ("synthetic-conv", True, KNOWN["synthetic-conv"].rows)
    figures = describe(trace.arrival_ns / 1e9, trace.input_tokens, trace.output_tokens)
    assert figures.rate_per_s == pytest.approx(5.53, rel=0.05)
    assert figures.gap_cv == pytest.approx(1.09, abs=0.06)
    assert figures.iod["1"] == pytest.approx(1.39, abs=0.2)
    assert figures.iod["10"] == pytest.approx(3.87, abs=0.8)
    assert figures.input_tokens["p50"] == pytest.approx(1020, rel=0.05)
    assert figures.output_tokens["p90"] == pytest.approx(424, rel=0.05)


@pytest.mark.skipif(not folders(), reason="TAILSPAN_TRACES names no folder")
@pytest.mark.parametrize(
    ("file", "name", "rows", "cv", "peak", "longest", "p50"),
    [
        ("AzureLLMInferenceTrace_conv.csv", "azure-2023-conv", 19_366, 1.09, 16, 4.3, 1020),
        ("AzureLLMInferenceTrace_code.csv", "azure-2023-code", 8_819, 13.2, 67, 217, 1469),
    ],
)
def test_the_real_traces_have_their_known_figures(
    file: str, name: str, rows: int, cv: float, peak: int, longest: float, p50: int
) -> None:
    path = next((folder / file for folder in folders() if (folder / file).exists()), None)
    if path is None:
        pytest.skip(f"no {file} in {os.environ['TAILSPAN_TRACES']}")
    trace = registry.read(path)
    assert (trace.name, len(trace), trace.rows_dropped) == (name, rows, {})
    figures = describe(trace.arrival_ns / 1e9, trace.input_tokens, trace.output_tokens)
    assert figures.gap_cv == pytest.approx(cv, rel=0.01)
    assert figures.peak_1s == peak
    assert figures.longest_gap_s == pytest.approx(longest, rel=0.01)
    assert figures.input_tokens["p50"] == p50
