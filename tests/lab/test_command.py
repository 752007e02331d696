"""The lab's commands, from the command line in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

import tailspan
from loadgen.lab.blind import reveal
from models.errors import UserError


def test_scenarios_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert tailspan.main(["lab", "list"]) == 0
    text = capsys.readouterr().out
    assert "S12  dropped · retries" in text and "(not: organic load)" in text
    assert tailspan.main(["lab", "list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"id": "S29", "label": "none"}.items() <= next(one for one in found if one["id"] == "S29").items()


def test_a_trial_is_played_explained_and_scored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "m.md"
    words = ["lab", "run", "S14", "--seeds", "1", "--load", "0.6", "--requests", "150", "--pairs", "2", "--json"]
    assert tailspan.main([*words, "--runs", str(tmp_path / "r"), "--markdown", str(out), "--keep", "none"]) == 0
    read = capsys.readouterr()
    found = json.loads(read.out)
    assert found["score"]["trials"] == 1 and found["trials"][0]["truth"] == ["dropped", "stream_cut"]
    assert found["trials"][0]["said"] == ["dropped", "stream_cut"]
    assert "S14" in read.err and out.read_text().startswith("| truth |")
    assert not any((tmp_path / "r").iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["lab", "run"], "no scenario is named"),
        (["lab", "run", "S99"], "no scenario 'S99'"),
        (["lab", "run", "S19"], "cannot be played this way"),
        (["lab", "run", "S9", "--way", "dream"], "'dream' is no way"),
        (["lab", "run", "S9", "--keep", "some"], "'some' is no choice"),
        (["lab", "proxy", "--target", "http://127.0.0.1:1", "--fault", "melt"], "no fault of the proxy"),
        (["lab", "proxy", "--target", "http://127.0.0.1:1", "--fault", "cut", "--replica", "1"], "replica 1 of 1"),
    ],
)
def test_what_cannot_be_played_is_refused(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert tailspan.main(words) == 4
    assert said in capsys.readouterr().err


def test_a_blind_trial_tells_nothing_until_it_is_asked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    truth = tmp_path / "truth.json"
    words = ["lab", "blind", "--seed", "4", "--requests", "60", "--pairs", "1", "--runs", str(tmp_path / "b")]
    assert tailspan.main([*words, "--truth", str(truth)]) == 0
    said = capsys.readouterr().out
    ((name, was),) = json.loads(truth.read_text()).items()
    scenario = was["scenario"]
    for word in (scenario["id"], scenario["title"], scenario["cause"]):
        assert word not in said
    for folder, _, files in os.walk(tmp_path / "b"):
        assert scenario["cause"] not in folder
        for file in files:
            if file.endswith(".json"):
                assert scenario["cause"] not in (Path(folder) / file).read_text()
    assert reveal(name, (scenario["label"], scenario["cause"]), truth).startswith("right")
    assert reveal(name, (scenario["label"], "else"), truth).startswith("the class is right")
    assert reveal(name, ("else", "else"), truth).startswith("wrong")
    with pytest.raises(UserError, match="no trial 'x'"):
        reveal("x", ("late", "a"), truth)
    with pytest.raises(UserError, match="cannot be read"):
        reveal(name, ("late", "a"), tmp_path / "none.json")
