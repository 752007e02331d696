"""The lab's commands, from the command line in."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path

import pytest

import tailspan
from loadgen.lab.blind import reveal
from loadgen.lab.scenario import causes_of
from models.errors import UserError
from telemetry.compare.sides import read_group
from telemetry.explain import explain


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
    assert [one.name for one in (tmp_path / "r").iterdir()] == ["trials.jsonl"]


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


def test_a_blind_trial_tells_nothing_until_it_is_asked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = tmp_path / "truth.json"
    words = ["lab", "blind", "--seed", "5", "--requests", "60", "--pairs", "1", "--runs", str(tmp_path / "b")]
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
    other = next(one for one in causes_of(scenario["label"]) if one != scenario["cause"])
    assert reveal(name, (scenario["label"], other), truth).startswith("the class is right")
    assert reveal(name, ("none", "no_change"), truth).startswith("wrong")
    with pytest.raises(UserError, match="no trial 'x'") as caught:
        reveal("x", ("late", "arrivals"), truth)
    assert name in (caught.value.remedy or "")
    commands = [shlex.split(line.partition("  ")[2]) for line in said.splitlines() if "tailspan " in line]
    assert [one[one.index("tailspan") + 1] for one in commands] == ["compare", "explain", "page", "lab"]
    a, b = read_group(name, tmp_path / "b" / name)
    assert [len(a), len(b)] == [1, 1] and a[0].manifest["group"]["side"] == "A", "the pages show all pairs"
    variable, value = commands[0][0].split("=", 1)
    monkeypatch.setenv(variable, value)
    assert tailspan.main(commands[0][2:]) in (0, 2, 3)  # it runs as it stands
    answer = {"LABEL": "none", "CAUSE": "no_change"}
    assert tailspan.main([answer.get(word, word) for word in commands[3][1:]]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("wrong: ")


def test_an_answer_that_nobody_can_give_is_refused_with_those_that_can(tmp_path: Path) -> None:
    truth = tmp_path / "truth.json"
    with pytest.raises(UserError, match="no blind trial is known here") as caught:
        reveal("x", ("late", "arrivals"), truth)
    assert "Errno" not in str(caught.value) and "tailspan lab blind" in str(caught.value)
    truth.write_text("{")
    with pytest.raises(UserError, match="cannot be read: it is no JSON"):
        reveal("x", ("late", "arrivals"), truth)
    was = {"id": "S1", "title": "t", "label": "late", "cause": "arrivals", "trap": ""}
    truth.write_text(json.dumps({"x": {"scenario": was}}))
    with pytest.raises(UserError, match="no class is called 'slow'") as caught:
        reveal("x", ("slow", "arrivals"), truth)
    assert "late, dropped" in str(caught.value)
    with pytest.raises(UserError, match="no cause of late is called 'reset'") as caught:
        reveal("x", ("late", "reset"), truth)
    assert "kv_pressure" in str(caught.value)


def test_a_run_that_was_stopped_says_what_is_kept_and_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = ["lab", "run", "S29", "--seeds", "2", "--load", "0.5", "--requests", "60", "--pairs", "1", "--json"]
    words += ["--runs", str(tmp_path), "--keep", "all"]
    asked = []

    def stopped(*sides: object, **options: object) -> object:
        asked.append(sides)
        if len(asked) == 2:
            raise KeyboardInterrupt
        return explain(*sides, **options)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr("telemetry.explain.explain", stopped)
        assert tailspan.main(words) == 130
    said = capsys.readouterr().err
    assert f"1 of 2 trials are done and kept in {tmp_path / 'trials.jsonl'}" in said and "--resume" in said
    assert sum(one.is_dir() for one in tmp_path.iterdir()) == 1  # of the half trial nothing is left
    assert tailspan.main([*words, "--resume"]) == 0
    read = capsys.readouterr()
    assert read.err.count("(kept)") == 1
    assert [one["seed"] for one in json.loads(read.out)["trials"]] == [0, 1]
    assert tailspan.main([*words, "--resume"]) == 0
    again = capsys.readouterr()
    assert again.err.count("(kept)") == 2 and again.out == read.out
