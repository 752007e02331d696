"""Every trace format by its content, and the edge rows of each; files are written here, no real one is needed."""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from loadgen.traces import azure_rows, order, registry
from loadgen.traces.statistics import Tally
from loadgen.traces.trace import FAILED_EMPTY, FAILED_UNANSWERED, Choices, Trace
from models.errors import UserError

SECOND = 1_000_000_000
AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens"
BURST = "Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type"
BURST_3 = "Timestamp,Session ID,Elapsed time,Model,Request tokens,Response tokens,Total tokens,Log Type"


def write(folder: Path, rows: Sequence[str] | bytes, name: str = "trace.txt") -> Path:
    path = folder / name
    path.write_bytes(rows if isinstance(rows, bytes) else ("\n".join(rows) + "\n").encode())
    return path


def jsonl(*rows: dict[str, Any]) -> list[str]:
    return [json.dumps(row) for row in rows]


def mooncake(stamp: Any, tokens: int = 700, ids: Sequence[int] = (0, 1), output: int = 5) -> dict[str, Any]:
    return {"timestamp": stamp, "input_length": tokens, "output_length": output, "hash_ids": list(ids)}


def bailian(stamp: float, chat: int, parent: int, ids: Sequence[int], tokens: int) -> dict[str, Any]:
    more = {"chat_id": chat, "parent_chat_id": parent, "type": "text", "turn": 1}
    return more | mooncake(stamp, tokens, ids)


def ragpulse(stamp: str, session: str = "s") -> dict[str, Any]:
    ids = {"sys_prompt": [1, 2], "passages_ids": [9, 8], "history": [], "web_search": [], "user_input": [4]}
    return {"timestamp": stamp, "input_length": 30, "output_length": 3, "hash_ids": ids, "session_id": session}


def balanced(trace: Trace) -> bool:
    return trace.rows_read == trace.rows_kept + sum(trace.rows_dropped.values())


# --- the edge rows, by their numbers ---
def test_edge_row_1_seven_digits_crlf_no_last_newline(tmp_path: Path) -> None:
    rows = ["2031-02-03 04:05:06.1000001,40,7", "2031-02-03 04:05:06.1000005,41,8", "2031-02-03 04:05:07.3500001,9,1"]
    trace = registry.read(write(tmp_path, "\r\n".join([AZURE, *rows]).encode()))
    assert trace.format == "azure-2023"
    assert trace.arrival_ns.tolist() == [0, 400, 1_250_000_000]
    assert trace.input_tokens.tolist() == [40, 41, 9]


def test_edge_row_2_offsets_and_mixed_precision(tmp_path: Path) -> None:
    stamps = ["2031-02-03 04:05:06+00:00", "2031-02-03 04:05:06.500000+00:00", "2031-02-03 09:35:07+05:30"]
    trace = registry.read(write(tmp_path, [AZURE, *(f"{stamp},40,7" for stamp in stamps)]))
    assert trace.format == "azure-2024"
    assert trace.arrival_ns.tolist() == [0, SECOND // 2, SECOND]


@pytest.mark.parametrize("failures", ["keep", "drop"])
def test_edge_row_3_zero_token_rows_are_recorded_failures(tmp_path: Path, failures: str) -> None:
    rows = [BURST, "5,ChatGPT,10,20,30,API log", "907,GPT-4,0,0,0,API log", "908,ChatGPT,55,0,55,Conversation log"]
    trace = registry.read(write(tmp_path, rows), choices=Choices(failures=failures))
    assert trace.format == "burstgpt-1/2"
    assert balanced(trace)
    if failures == "keep":
        assert trace.failed is not None and trace.failed.tolist() == [False, True, True]
        assert trace.arrival_ns.tolist() == [0, 902 * SECOND, 903 * SECOND]
        assert "2 recorded failures" in trace.account()
    else:
        assert trace.rows_dropped == {FAILED_EMPTY: 1, FAILED_UNANSWERED: 1}
        assert trace.first_drop[FAILED_UNANSWERED] == "line 4, column Response tokens: '0'"
        assert trace.failed is None and trace.notes == ()


def test_edge_row_4_the_header_of_burstgpt_3_and_an_api_row_without_session(tmp_path: Path) -> None:
    trace = registry.read(write(tmp_path, [BURST_3, "19500000.0,,3,ChatGPT,12,5,17,API log"]))
    assert (trace.format, trace.arrival_ns.tolist(), trace.session) == ("burstgpt-3", [0], None)
    rows = [BURST_3, *(f"{19500000.25 + n},abc,3,GPT-4,12,5,17,Conversation log" for n in range(2))]
    talk = registry.read(write(tmp_path, rows))
    assert talk.session is not None and talk.session.tolist() == [0, 0]
    assert talk.arrival_ns.tolist() == [0, SECOND]


def test_edge_row_5_equal_stamps_keep_file_order_and_their_share_is_reported(tmp_path: Path) -> None:
    rows = jsonl(*(mooncake(3000, ids=[0, n]) for n in (1, 2, 3)))
    path = write(tmp_path, rows)
    trace = registry.read(path)
    assert (trace.format, trace.row.tolist()) == ("mooncake", [0, 1, 2])
    assert trace.prefixes is not None
    assert [trace.prefixes.of(row).tolist() for row in range(3)] == [[0, 1], [0, 2], [0, 3]]
    tally = Tally()
    for batch in registry.stream(path).batches:
        tally.add(batch)
    assert tally.result().equal_stamps == 2


def test_edge_row_6_a_clock_that_starts_again_is_refused_or_appended(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl(*(ragpulse(stamp) for stamp in ("604400", "604450", "0", "31"))))
    with pytest.raises(UserError, match="604,450 to 0 s") as caught:
        registry.read(path)
    assert caught.value.where == f"{path}:3"
    assert "--trace-restart append" in (caught.value.remedy or "")
    trace = registry.read(path, choices=Choices(restart="append"))
    assert (trace.arrival_ns / SECOND + 604_400).tolist() == [604_400, 604_450, 604_800, 604_831]
    assert any("line 3" in note for note in trace.notes)


def test_edge_row_6_a_small_inversion_is_sorted_stably_and_counted(tmp_path: Path) -> None:
    trace = registry.read(write(tmp_path, jsonl(*(ragpulse(stamp) for stamp in ("5.000", "5.003", "5.000", "6")))))
    assert trace.inversions == 1
    assert trace.row.tolist() == [0, 2, 1, 3]
    assert trace.arrival_ns.tolist() == [0, 0, 3_000_000, SECOND]


def test_edge_row_7_seconds_are_never_read_as_milliseconds(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl(mooncake(0.2, 20, [7]), mooncake(3540.25, 20, [7])))
    with pytest.raises(UserError, match=r"0\.2 is no whole number of milliseconds") as caught:
        registry.read(path)
    assert caught.value.where == f"{path}:1"
    assert "--time-unit" in (caught.value.remedy or "")
    trace = registry.read(path, choices=Choices(time_unit="s"))
    assert trace.span_s == pytest.approx(3540.05)


def test_edge_row_8_a_block_size_that_is_impossible_is_inferred_or_refused_on_every_row(tmp_path: Path) -> None:
    good = mooncake(0, 40, [7, 8, 9])
    trace = registry.read(write(tmp_path, jsonl(good, mooncake(5, 64, [7, 8, 9, 3]), mooncake(6, 700, [7, 8]))))
    assert trace.prefixes is not None and trace.prefixes.block_size == 16
    assert any("inferred" in note for note in trace.notes)
    assert trace.rows_dropped == {"block_count": 1}
    assert trace.first_drop["block_count"].startswith("line 3, column hash_ids")
    with pytest.raises(UserError, match="cannot be used"):
        registry.read(write(tmp_path, jsonl(mooncake(0, 3, [1, 2, 3, 4, 5]))))
    with pytest.raises(UserError, match="1024, 2048, 4096, 8192 fit") as caught:
        registry.read(write(tmp_path, jsonl(mooncake(0, 700, [1]))))
    assert "--block-size" in (caught.value.remedy or "")


def test_edge_row_9_a_prompt_over_the_limit_is_decided_and_counted_before_the_run(tmp_path: Path) -> None:
    from loadgen.schedule import build
    from loadgen.transforms import Transforms

    trace = registry.read(write(tmp_path, jsonl(mooncake(0, 191_000, [], 1), mooncake(10, 40, []))))
    assert trace.input_tokens.tolist() == [191_000, 40]
    asked = Transforms(seed=0, max_context=1000, min_input=10)
    for policy, kept in (("skip", [40]), ("clip", [999, 40])):
        schedule = build(trace, replace(asked, over_limit=policy))
        assert schedule.input_tokens.tolist() == kept
        record = schedule.records[-1]
        assert (record["name"], record["policy"], record["count"], record["of"]) == ("over_limit", policy, 1, 2)
    with pytest.raises(UserError, match="1 of 2 requests exceed"):
        build(trace, replace(asked, over_limit="fail"))


GOOD_JSON = [mooncake(n, 40, []) for n in range(40)]


@pytest.mark.parametrize(
    ("row", "reason", "place"),
    [
        ('{"timestamp": 50, "input_length": 40, "outp', "not_json", "line 41: "),
        (json.dumps(mooncake(50) | {"input_length": "1,024"}), "not_a_count", "line 41, column input_length: '1,024'"),
        (json.dumps(mooncake(50) | {"output_length": float("nan")}), "missing_count", "line 41, column output_length"),
        (json.dumps(mooncake(50) | {"output_length": -3}), "negative_count", "line 41, column output_length: '-3'"),
        (json.dumps(mooncake("x")), "bad_stamp", "line 41, column timestamp: 'x'"),
        (json.dumps(mooncake(50) | {"hash_ids": [1, "b"]}), "bad_ids", "line 41, column hash_ids"),
        ("[1, 2]", "not_an_object", "line 41"),
    ],
)
def test_edge_row_10_what_cannot_be_used_is_a_counted_drop_with_its_place(
    tmp_path: Path, row: str, reason: str, place: str
) -> None:
    trace = registry.read(write(tmp_path, [*jsonl(*GOOD_JSON), row]))
    assert trace.rows_dropped == {reason: 1}
    assert trace.first_drop[reason].startswith(place)
    assert balanced(trace)


def test_edge_row_10_bom_blank_lines_and_a_half_written_last_line(tmp_path: Path) -> None:
    text = "\n".join([*jsonl(*GOOD_JSON), "", ' {"timestamp": 5'])
    trace = registry.read(write(tmp_path, b"\xef\xbb\xbf" + text.encode()))
    assert trace.rows_dropped == {"blank_line": 1, "half_line": 1}
    assert trace.first_drop["half_line"].startswith("line 42")
    assert any("byte-order mark" in note for note in trace.notes)


def test_edge_row_10_it_warns_from_5_percent_and_fails_from_50(tmp_path: Path) -> None:
    bad = ["{}"] * 2
    assert not registry.read(write(tmp_path, [*jsonl(*GOOD_JSON), bad[0]])).notes
    assert registry.read(write(tmp_path, [*jsonl(*GOOD_JSON), *bad, "{}"])).notes == ("7.0% of the rows were dropped",)
    path = write(tmp_path, [*jsonl(*GOOD_JSON), *(bad * 20)])
    with pytest.raises(UserError, match="40 of 80 rows cannot be used; first bad_stamp, line 41") as caught:
        registry.read(path)
    assert caught.value.where == f"{path}:41"


@pytest.mark.parametrize(
    ("content", "word"),
    [(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n", "Git-LFS"), (b"\n<html><body>", "web page")],
)
def test_edge_row_10_a_pointer_and_a_page_are_refused_by_name(tmp_path: Path, content: bytes, word: str) -> None:
    with pytest.raises(UserError, match=word):
        registry.read(write(tmp_path, content))


# --- the other formats ---
def test_bailian_has_seconds_16_token_blocks_and_sessions(tmp_path: Path) -> None:
    rows = [bailian(61.114, 55, -1, [1, 2], 20), bailian(62.5, 56, -1, [3], 9), bailian(70.0, 159, 55, [1, 2, 4], 40)]
    trace = registry.read(write(tmp_path, jsonl(*rows)))
    assert trace.format == "bailian"
    assert trace.arrival_ns.tolist() == [0, 1_386_000_000, 8_886_000_000]
    assert trace.session is not None and trace.session.tolist() == [55, 56, 55]
    assert trace.prefixes is not None and trace.prefixes.block_size == 16


def test_ragpulse_counts_components_seen_before(tmp_path: Path) -> None:
    path = write(tmp_path, jsonl(ragpulse("1", "a"), ragpulse("2", "b"), ragpulse("3", "a")))
    source = registry.stream(path)
    tally = Tally()
    for batch in source.batches:
        tally.add(batch)
    assert (source.reader.format, source.rows.block_size) == ("ragpulse", 0)
    figures = tally.result()
    assert (figures.sessions, figures.prefix_seen) == (2, pytest.approx(10 / 15))


def test_vidur_reads_counts_that_pandas_wrote_as_floats(tmp_path: Path) -> None:
    rows = ["arrived_at,num_prefill_tokens,num_decode_tokens", "0.0,374.0,44", "1.314,396,109"]
    trace = registry.read(write(tmp_path, rows))
    assert (trace.format, trace.arrival_ns.tolist()) == ("vidur", [0, 1_314_000_000])
    assert trace.input_tokens.tolist() == [374, 396]


def servegen(folder: Path) -> Path:
    windows = ["0,0,0,,0,0", "600,2.0,3.0,Gamma,0.111,5.0", "1200,1.0,1.5,Weibull,0.7,0.001", "1800,0.5,1,,0,0"]
    tables = {"input_tokens": "{100: 0.25, 300: 0.75}", "output_tokens": "{7: 1.0}", "reason_ratio": "{}"}
    data = {"0": tables, "1200": {**tables, "output_tokens": "{9: 1.0}"}, "9000": {**tables, "input_tokens": "{}"}}
    (folder / "chunk-3-dataset.json").write_text(json.dumps(data), encoding="utf-8")
    return write(folder, windows, "chunk-3-trace.csv")


def test_servegen_generates_its_rate_not_the_mean_of_the_fit(tmp_path: Path) -> None:
    path = servegen(tmp_path)
    trace = registry.read(path)
    assert trace.format == "servegen"
    assert "seed 0" in trace.notes[0] and "3 with a rate" in trace.notes[0]
    seconds = trace.arrival_ns / SECOND
    first = seconds < 590
    second = (seconds > 610) & (seconds < 1190)
    assert first.sum() == pytest.approx(1200, rel=0.25)
    assert second.sum() == pytest.approx(580, rel=0.25), "Weibull with a scale of 0.001 has a thousandfold rate"
    assert set(trace.output_tokens[first].tolist()) == {7} and set(trace.output_tokens[second].tolist()) == {9}
    assert np.mean(trace.input_tokens == 300) == pytest.approx(0.75, abs=0.05)
    again, other = registry.read(path), registry.read(path, choices=Choices(seed=1))
    assert np.array_equal(again.arrival_ns, trace.arrival_ns)
    assert not np.array_equal(other.arrival_ns[:50], trace.arrival_ns[:50])


def test_servegen_without_its_lengths_is_refused(tmp_path: Path) -> None:
    path = servegen(tmp_path)
    (tmp_path / "chunk-3-dataset.json").unlink()
    with pytest.raises(UserError, match=r"chunk-3-dataset\.json"):
        registry.read(path)


OWN = Choices(columns={"time": "t", "input": "in", "output": "out", "session": "user"}, time_unit="ms")


@pytest.mark.parametrize("kind", ["own-csv", "own-jsonl", "own-parquet"])
def test_an_own_file_is_read_through_its_column_map(tmp_path: Path, kind: str) -> None:
    rows = [{"user": f"u{n % 2}", "t": 1500 * n, "in": 10 + n, "out": 3, "more": "x"} for n in range(4)]
    path = tmp_path / "own"
    if kind == "own-csv":
        write(tmp_path, ["user,t,in,out,more", *(",".join(map(str, row.values())) for row in rows)], "own")
    elif kind == "own-jsonl":
        write(tmp_path, jsonl(*rows), "own")
    else:
        pq.write_table(pa.Table.from_pylist(rows), path)
    trace = registry.read(path, choices=OWN)
    assert trace.format == kind
    assert trace.arrival_ns.tolist() == [0, 1_500_000_000, 3_000_000_000, 4_500_000_000]
    assert trace.input_tokens.tolist() == [10, 11, 12, 13]
    assert trace.session is not None and trace.session.tolist() == [0, 1, 0, 1]


def test_an_own_file_can_have_written_dates_and_prefix_ids(tmp_path: Path) -> None:
    rows = [{"t": f"2031-02-03T04:05:0{n}Z", "in": 40, "out": 3, "ids": [1, 2, n]} for n in range(3)]
    choices = Choices(columns={"time": "t", "input": "in", "output": "out", "ids": "ids"}, time_unit="iso")
    trace = registry.read(write(tmp_path, jsonl(*rows)), choices=replace(choices, block_size=16))
    assert trace.arrival_ns.tolist() == [0, SECOND, 2 * SECOND]
    assert trace.prefixes is not None and trace.prefixes.block_size == 16
    assert registry.read(write(tmp_path, jsonl(*rows)), choices=choices).prefixes is not None


@pytest.mark.parametrize(
    ("choices", "where"),
    [
        (replace(OWN, time_unit=None), "--time-unit"),
        (replace(OWN, columns={"time": "t", "input": "in"}), "--columns"),
        (replace(OWN, columns={**OWN.columns, "speed": "x"}), "--columns"),
        (Choices(format="azure"), "--trace-format"),
        (Choices(failures="maybe"), "--trace-failures"),
        (Choices(restart="sort"), "--trace-restart"),
        (Choices(block_size=0), "--block-size"),
    ],
)
def test_a_choice_that_cannot_be_used_names_its_option(tmp_path: Path, choices: Choices, where: str) -> None:
    with pytest.raises(UserError) as caught:
        registry.read(write(tmp_path, ["t,in,out,user", "1,2,3,a"]), choices=choices)
    assert caught.value.where == where
    assert caught.value.remedy


def test_a_file_that_two_formats_fit_is_not_guessed(tmp_path: Path) -> None:
    header = f"{AZURE},arrived_at,num_prefill_tokens,num_decode_tokens"
    path = write(tmp_path, [header, "2031-02-03 04:05:06.1000001,40,7,12.5,41,8"])
    with pytest.raises(UserError, match="fits 2 formats: azure-2023, vidur") as caught:
        registry.read(path)
    assert "--trace-format" in (caught.value.remedy or "")
    assert registry.read(path, choices=Choices(format="vidur")).input_tokens.tolist() == [41]


def test_no_format_is_taken_for_another(tmp_path: Path) -> None:
    heads = {
        "azure-2023": [AZURE, "2031-02-03 04:05:06.1000001,40,7"],
        "azure-2024": [AZURE, "2031-02-03 04:05:06+00:00,40,7"],
        "burstgpt-1/2": [BURST, "5,ChatGPT,10,20,30,API log"],
        "burstgpt-3": [BURST_3, "19500000.0,,3,ChatGPT,12,5,17,API log"],
        "mooncake": jsonl(mooncake(0)),
        "bailian": jsonl(bailian(1.5, 1, -1, [1], 9)),
        "ragpulse": jsonl(ragpulse("0")),
        "servegen": ["0,0,0,,0,0", "600,2.0,3.0,Gamma,0.111,5.0"],
        "vidur": ["arrived_at,num_prefill_tokens,num_decode_tokens", "0.0,374,44"],
    }
    assert set(heads) == {reader.format for reader in registry.READERS}
    for name, rows in heads.items():
        assert registry.recognise("\n".join(rows).encode(), tmp_path).format == name


# --- large files ---
def test_a_block_read_by_arrow_says_the_same_as_line_by_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    rows = [
        f"2024-05-10 {n // 600:02d}:{n // 10 % 60:02d}:{n % 10:02d}{frac}+00:00,{rng.integers(1, 9000)},{n % 90 + 1}"
        for n, frac in zip(range(5000), ["", ".5", ".009930", ".1234567"] * 1250, strict=True)
    ]
    path = write(tmp_path, [AZURE, *rows])
    fast = registry.read(path)
    monkeypatch.setattr(azure_rows, "_by_arrow", lambda *_: None)
    slow = registry.read(path)
    for name in ("arrival_ns", "input_tokens", "output_tokens", "row"):
        assert np.array_equal(getattr(fast, name), getattr(slow, name))


def test_drops_in_a_file_of_many_blocks_keep_their_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(azure_rows, "BLOCK", 1000)
    rows = [f"2031-02-03 04:{n // 60:02d}:{n % 60:02d}.0000000,{n + 1},5" for n in range(600)]
    rows[431] = "2031-02-03 04:07:11.0000000,NaN,5"
    trace = registry.read(write(tmp_path, [AZURE, *rows]))
    assert trace.first_drop == {"missing_count": "line 433, column ContextTokens: 'NaN'"}
    assert trace.row.tolist() == [n for n in range(600) if n != 431]


def many(folder: Path, count: int) -> Path:
    path = folder / "many.csv"
    with path.open("w", encoding="ascii") as file:
        file.write(AZURE + "\n")
        for n in range(count):
            second, micro = divmod(n * 3_137, 1_000_000)
            clock = f"{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}"
            file.write(f"2024-05-10 {clock}.{micro:06d}+00:00,{n % 2000 + 1},{n % 300 + 1}\n")
    return path


def test_a_long_file_streams_through_in_bounded_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(order, "REORDER", 20_000)
    monkeypatch.setattr(registry, "InOrder", lambda path: order.InOrder(path, 20_000))
    monkeypatch.setattr(azure_rows, "BLOCK", 256 << 10)
    peaks = []
    for count in (60_000, 240_000):
        path = many(tmp_path, count)
        tracemalloc.start()
        tally = Tally(1000)
        for batch in registry.stream(path).batches:
            tally.add(batch)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        assert tally.result().arrivals == count
    assert peaks[1] < 1.25 * peaks[0], "four times the rows need no more memory"
    trace = registry.read(path, start_s=100.0, duration_s=10.0)
    assert (trace.rows_read, trace.rows_kept) == (240_000, 240_000)
    assert len(trace) == pytest.approx(3188, abs=1)
    assert trace.arrival_ns[0] >= 100 * SECOND and trace.arrival_ns[-1] < 110 * SECOND


def test_a_window_of_a_file_is_that_part_of_the_whole(tmp_path: Path) -> None:
    from loadgen.schedule import build
    from loadgen.transforms import Transforms

    path = many(tmp_path, 5000)
    asked = Transforms(seed=1, start_s=3.0, duration_s=5.0, rate_scale=0.5, dequantise_s=0.5)
    whole, part = registry.read(path), registry.read(path, start_s=3.0, duration_s=5.0)
    first, second = build(whole, asked), build(part, asked)
    assert len(part) < len(whole)
    assert np.array_equal(first.intended_s, second.intended_s)
    assert np.array_equal(first.trace_row, second.trace_row)


def test_a_row_too_far_from_its_place_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "InOrder", lambda path: order.InOrder(path, 100))
    rows = [f"{n}.5,10,5" for n in range(1000)]
    rows[900] = "3.25,10,5"
    path = write(tmp_path, ["arrived_at,num_prefill_tokens,num_decode_tokens", *rows])
    monkeypatch.setattr("loadgen.traces.trace.BATCH_ROWS", 50)
    with pytest.raises(UserError, match="data row 900 is"):
        registry.read(path)


def test_a_quoted_line_end_is_a_bad_row_not_a_crash(tmp_path: Path) -> None:
    good = "\n".join(f"2031-02-03 04:05:{s:02d}.0000000,10,5" for s in range(30))
    trace = registry.read(write(tmp_path, f'{AZURE}\n{good}\n"2031"\r-02,10,5\n'.encode()))
    assert trace.rows_dropped == {"bad_quotes": 1}
    with pytest.raises(UserError):
        registry.read(write(tmp_path, b'"a"\rb,c\n1,2\n'))
