"""`tailspan traces`: what a person is told about a trace, and fetching one whose size is not known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tailspan
from loadgen.traces.commands import plot
from loadgen.traces.find import folders
from models.errors import did_you_mean
from telemetry.names import EXIT_OK, EXIT_USAGE


def mooncake(folder: Path) -> Path:
    """Three rows at each tick of 3 s; the first block heads every row, the second every other."""
    path = folder / "m.jsonl"
    rows = [
        {"timestamp": tick * 3000, "input_length": 1000 + n, "output_length": 9, "hash_ids": [0, n % 2 + 1]}
        for tick in range(60)
        for n in range(3)
    ]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path


def test_verify_finds_what_a_replay_must_know(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = mooncake(tmp_path)
    assert tailspan.main(["traces", "verify", str(path), "--max-context", "1010", "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    assert (found["format"], found["rows_read"], found["rows_kept"], found["block_size"]) == ("mooncake", 180, 180, 512)
    assert (found["equal_stamps"], found["tick_s"], found["peak_1s"], found["over_limit"]) == (120, 3.0, 3, 60)
    assert found["iod"]["10"] is not None and found["gap_cv"] == pytest.approx(2**0.5, rel=0.01)
    assert found["prefix_seen"] == pytest.approx((2 * 180 - 3) / 360)
    assert found["prefix_hit_bound"] == pytest.approx(2 * 178 / 360)
    assert len(found["curve"]) > 10
    assert tailspan.main(["traces", "verify", str(path), "--max-context", "1010"]) == EXIT_OK
    text = capsys.readouterr().out
    for word in ("quantised clock: 66.7%", "--dequantise 3", "60 of 180 rows exceed", "blocks of 512", "█", "/s"):
        assert word in text


def test_texts_are_counted_under_two_tokenizers(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from models.store import load_reference

    tokenizer = load_reference(str(model)).tokenizer
    texts = ["The ferry leaves at six.", "Bread.", "A small boat waits in the harbor."]
    rows = [{"t": n, "i": len(tokenizer.encode_plain(text)), "o": 3, "words": text} for n, text in enumerate(texts)]
    rows[1]["i"] = 500
    path = tmp_path / "own.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    options = ["--columns", "time=t,input=i,output=o,text=words", "--time-unit", "s"]
    both = ["--tokenizer", str(model), "--tokenizer", str(model)]
    assert tailspan.main(["traces", "verify", str(path), *options, *both, "--json"]) == EXIT_OK
    counted = json.loads(capsys.readouterr().out)["tokenizers"]
    assert [(one["texts"], one["equal"]) for one in counted] == [(3, 2), (3, 2)]
    assert counted[0]["tokens"] == sum(len(tokenizer.encode_plain(text)) for text in texts)
    assert tailspan.main(["traces", "verify", str(path), *options, *both]) == EXIT_OK
    assert "times what the file claims" in capsys.readouterr().out
    assert tailspan.main(["traces", "verify", str(path), *options[2:], "--tokenizer", str(model)]) == EXIT_USAGE
    assert "no text column" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (["--columns", "time"], "maps no column"),
        (["--trace-format", "x"], "is not a choice"),
        (["--columns", "time=t,input=i,output=o"], "is not given"),
    ],
)
def test_options_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], word: str
) -> None:
    assert tailspan.main(["traces", "show", str(mooncake(tmp_path)), *options]) == EXIT_USAGE
    err = capsys.readouterr().err
    assert word in err and "remedy" in err


def test_a_plot_is_as_wide_as_its_curve_and_empty_without_one() -> None:
    lines = plot((1.0, 4.0, 2.0), 30.0)
    assert [line[11:14] for line in lines[:-1]] == [" █ ", " █ ", " █ ", " ██", "▄██", "███"]
    assert "30 s" in lines[-1]
    assert plot((), 0.0) == [] and plot((0.0,), 1.0) == []


@pytest.mark.skipif(not folders(), reason="TAILSPAN_TRACES names no folder")
@pytest.mark.parametrize(
    ("name", "figures"),
    [
        (
            "mooncake-conversation",
            {"gap_cv": 3.03, "peak_1s": 28, "peak_60s": 247, "tick_s": 3.0, "prefix_seen": 0.366},
        ),
        ("azure-2023-conv", {"gap_cv": 1.09, "peak_1s": 16, "peak_60s": 507}),
        ("azure-2023-code", {"gap_cv": 13.2, "peak_1s": 67, "peak_60s": 632}),
    ],
)
def test_the_real_traces_have_their_known_figures(
    name: str, figures: dict[str, float], capsys: pytest.CaptureFixture[str]
) -> None:
    assert tailspan.main(["traces", "verify", name, "--json"]) == EXIT_OK
    found = json.loads(capsys.readouterr().out)
    if found["synthetic"]:
        pytest.skip(f"no {name} in TAILSPAN_TRACES")
    for key, value in figures.items():
        assert found[key] == pytest.approx(value, rel=0.01), key


@pytest.mark.parametrize(
    ("words", "blamed", "meant"),
    [
        (["traces", "show", "azure-2023-cov"], "traces show", "azure-2023-conv"),
        (["traces", "verify", "moon-cake-conversation"], "traces verify", "mooncake-conversation"),
        (["traces", "fetch", "Azure-2023-Code"], "traces fetch", "azure-2023-code"),
        (["run", "one-persn"], "one-persn", "one-person"),
        (["run", "--target", "http://127.0.0.1:9", "--trace", "azure-2023-conw"], "--trace", "azure-2023-conv"),
        (["run", "--target", "http://127.0.0.1:9", "--model", "smolm2"], "model", "smollm2"),
        (["slo", "check", "chatt"], "chatt", "chat"),
    ],
)
def test_an_unknown_name_is_blamed_where_it_stands_and_the_near_one_named(
    words: list[str], blamed: str, meant: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tailspan.main(words) == EXIT_USAGE
    told = capsys.readouterr().err
    assert f"{blamed}: " in told and f"did you mean {meant!r}?" in told


def test_a_near_name_is_found_in_any_case_and_a_far_one_is_not_guessed() -> None:
    assert did_you_mean("h100-sxm", ["H100-SXM", "A100"]) == "did you mean 'H100-SXM'? "
    assert did_you_mean("zzz", ["H100-SXM", "A100"]) == ""
