"""What a name on the command line that stands for no run gets: the name, who was asked, what there is, the nearest."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tailspan
from telemetry import names
from telemetry.bundle import Bundle, list_runs
from telemetry.slo import load


def _runs(root: Path) -> str:
    """Two runs and a baseline "main"; returns the newest run's id."""
    for _ in range(2):
        Bundle.create(root, {}, slo=load("demo").manifest_entry(), scheduled=0)
    newest = list_runs(root)[0].name
    (root / "baselines").mkdir()
    (root / "baselines" / "main.json").write_text(json.dumps({"name": "main", "runs": [newest]}))
    return newest


@pytest.mark.parametrize(
    ("words", "asked"),
    [
        (["compare", "mian"], "tailspan compare"),
        (["compare", "mian", "latest"], "tailspan compare"),
        (["compare", "latest", "mian"], "tailspan compare"),
        (["compare", "mian", "--history"], "tailspan compare"),
        (["explain", "mian"], "tailspan explain"),
        (["explain", "latest", "mian"], "tailspan explain"),
        (["gate", "latest", "--baseline", "mian"], "--baseline"),
    ],
)
def test_a_name_that_stands_for_nothing(
    words: list[str], asked: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = _runs(tmp_path)
    assert tailspan.main([*words, "--root", str(tmp_path)]) == names.EXIT_USAGE
    said = capsys.readouterr().err
    assert said.startswith(f"error: {asked}: no baseline and no run 'mian'; baselines: main; newest runs: {newest}")
    assert "did you mean 'main'?" in said


def test_a_run_that_is_named_almost_right(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    newest = _runs(tmp_path)
    assert tailspan.main(["runs", "show", f"x{newest}", "--root", str(tmp_path)]) == names.EXIT_USAGE
    assert f"did you mean {newest!r}?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["compare", "explain"])
def test_one_side_alone_is_told_so_by_the_command_that_was_asked(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _runs(tmp_path)
    assert tailspan.main([command, "main", "--root", str(tmp_path)]) == names.EXIT_USAGE
    assert f"error: tailspan {command}: 'main' is one side, and no group" in capsys.readouterr().err


def test_a_run_with_a_broken_manifest_is_not_called_absent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _runs(tmp_path)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    assert tailspan.main(["compare", "broken", "latest", "--root", str(tmp_path)]) == names.EXIT_USAGE
    assert "not JSON" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"runs": []}', '{"runs": [3]}', "\x00\xff", None])
def test_a_baseline_file_that_cannot_be_read_is_named_and_the_others_listed(
    content: str | None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    newest = _runs(tmp_path)
    bad = tmp_path / "baselines" / "bad.json"
    bad.mkdir() if content is None else bad.write_bytes(content.encode("latin-1"))
    for more, shown in ((["--json"], {"main": [newest]}), ([], f"main: {newest}\n")):
        assert tailspan.main(["runs", "baseline", "list", "--root", str(tmp_path), *more]) == 0
        said = capsys.readouterr()
        assert (json.loads(said.out) if more else said.out) == shown
        assert f"error: {bad}: cannot be read" in said.err and "set it anew" in said.err
    # A name that stands for nothing is still answered with the baselines that can be read; the bad one names itself.
    assert tailspan.main(["compare", "nope", "latest", "--root", str(tmp_path)]) == names.EXIT_USAGE
    assert "baselines: main;" in capsys.readouterr().err
    if content is not None:
        assert tailspan.main(["compare", "bad", "latest", "--root", str(tmp_path)]) == names.EXIT_USAGE
        assert str(bad) in capsys.readouterr().err
