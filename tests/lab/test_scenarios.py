"""The scenario files, what is drawn from them, and the score of trials."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.lab import kept, matrix
from loadgen.lab.changes import CHANGES
from loadgen.lab.proxy import KINDS
from loadgen.lab.run import in_turn
from loadgen.lab.scenario import REAL, VIRTUAL, Scenario, drawn, find, read, shipped
from loadgen.lab.trial import Trial
from models.errors import UserError
from telemetry.explain.causes import CAUSES, CLIENT, NO_CHANGE, UNKNOWN

#: Of the design's table; S3b is its note on S3.
TABLE = (
    "S1", "S3", "S3b", "S4", "S5", "S6", "S7", "S9", "S11", "S12", "S13", "S14", "S15", "S16", "S17", "S19", "S20",
    "S22", "S23", "S24", "S26", "S28", "S29",
)  # fmt: skip


def test_every_scenario_of_the_table_is_there_and_can_be_played() -> None:
    found = {one.id: one for one in shipped()}
    assert set(TABLE) <= set(found)
    for one in found.values():
        assert one.ways, one.id
        assert len(one.loads) >= 2, one.id


def test_each_truth_is_a_cause_that_can_be_said() -> None:
    for one in shipped():
        if one.cause == NO_CHANGE:
            assert one.label == "none"
        elif one.cause == CLIENT:
            assert one.label == "invalid"
        else:
            assert CAUSES[one.cause].label == one.label, one.id


def test_what_is_done_is_known_to_those_who_do_it() -> None:
    from engine.faults import KINDS as FAULTS
    from engine.faults import make

    for one in shipped():
        if one.virtual:
            assert one.virtual["change"] in CHANGES
        asked = drawn(dict(one.real), random.Random(0))
        for fault in asked.get("faults", ()):
            assert fault["name"] in FAULTS
            make({key: value for key, value in fault.items() if key not in ("at", "for_s", "of_peak")})
        if "wire" in asked:
            assert asked["wire"]["kind"] in KINDS


def test_canaries_need_a_model_that_computes() -> None:
    for one in shipped():
        if one.real.get("canaries"):
            assert one.ways == (REAL,)


def test_numbers_are_drawn_within_their_range_and_by_the_seed() -> None:
    value = {"a": [1.0, 4.0], "b": [{"size": [2, 8]}], "c": "text", "d": [0, 10]}
    many = [drawn(value, random.Random(seed)) for seed in range(200)]
    assert all(1 <= one["a"] <= 4 and 2 <= one["b"][0]["size"] <= 8 for one in many)
    assert all(type(one["b"][0]["size"]) is int for one in many)
    assert drawn(value, random.Random(3)) == drawn(value, random.Random(3))
    # evenly in the logarithm: as many below 2 as above
    assert 60 <= sum(one["a"] < 2 for one in many) <= 140
    assert len({one["a"] for one in many}) == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id: Q\ntitle: t\nexpect: {label: late, cause: x}\n", "neither virtual nor real"),
        ("id: Q\ntitle: t\nexpect: {label: slow, cause: x}\nvirtual: {change: nothing}\n", "expect is"),
        ("id: Q\nexpect: {label: late, cause: x}\nvirtual: {change: nothing}\n", "title is missing"),
        ("id: Q\ntitle: t\nwrong: 1\n", "unknown key 'wrong'"),
        ("id: Q\ntitle: t\nexpect: {label: late, cause: x}\nvirtual: {chance: nothing}\n", "unknown key 'chance'"),
        ("id: Q\ntitle: t\nexpect: {label: late, cause: x}\nloads: [9]\nvirtual: {change: nothing}\n", "loads are"),
        ("id: Q\ntitle: t\nexpect: {label: late, cause: reset}\nvirtual: {change: nothing}\n", "no cause of late"),
        ("id: Q\ntitle: t\nexpect: {label: late, cause: arrivals, then: x}\nreal: {load: {}}\n", "no cause of late"),
        ("id: Q\ntitle: t\nexpect: {label: late, cause: arrivals}\nvirtual: {size: 2}\n", "no change is named"),
        ("- a\n", "a block of"),
        ("a: [\n", "not YAML"),
    ],
)
def test_a_bad_file_is_refused_with_its_place(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "q.yaml"
    file.write_text(text)
    with pytest.raises(UserError, match=said) as error:
        read(file)
    assert "q.yaml" in str(error.value)


def test_scenarios_are_found_by_id_or_file(tmp_path: Path) -> None:
    file = tmp_path / "q.yaml"
    file.write_text("id: Q\ntitle: t\nexpect: {label: late, cause: arrivals}\nvirtual: {change: arrivals, size: 1.5}\n")
    assert [one.id for one in find(["s9", str(file)])] == ["S9", "Q"]
    with pytest.raises(UserError, match="no scenario 'S99'"):
        find(["S99"])


# --- the score ---
def trial(truth: tuple[str, str], said: tuple[str, str], scenario: str = "S") -> Trial:
    return Trial(scenario, VIRTUAL, 0.5, 0, 1.0, truth, said, "", 1.0, "")


LATE, LOAD, NONE = ("late", "engine_speed"), ("late", "arrivals"), ("none", NO_CHANGE)


def test_right_answers_score_one() -> None:
    found = matrix.score([trial(one, one) for one in (LATE, LOAD, NONE)])
    assert (found.right, found.labels, found.unknown, found.f1) == (3, 3, 0, 1.0)


def test_a_fault_taken_for_load_and_a_load_taken_for_a_fault_cost_recall_and_precision() -> None:
    trials = [trial(LATE, LATE), trial(LATE, LOAD), trial(LOAD, LATE), trial(NONE, NONE)]
    found = matrix.score(trials)
    assert (found.precision, found.recall, found.f1) == (0.5, 0.5, 0.5)
    assert (found.right, found.labels) == (2, 4)


def test_unknown_is_a_column_and_counts_as_wrong() -> None:
    trials = [trial(LATE, ("late", UNKNOWN)), trial(LATE, LATE)]
    rows, columns, counts = matrix.matrix(trials)
    assert columns[-1] == UNKNOWN and counts[("late · engine_speed", UNKNOWN)] == 1
    assert rows == ["late · engine_speed"]
    found = matrix.score(trials)
    assert (found.right, found.labels, found.unknown, found.recall) == (1, 2, 1, 0.5)


def test_an_invalid_run_says_nothing_of_faults() -> None:
    trials = [trial(("invalid", "client"), ("invalid", "client")), trial(NONE, NONE)]
    assert matrix.score(trials).f1 == 1.0


def test_two_faults_count_when_both_are_named_in_their_order() -> None:
    def two(second: str, said: tuple[str, str] = LOAD) -> Trial:
        return Trial("D", VIRTUAL, 0.5, 0, 1.0, LOAD, said, second, 1.0, "", then="engine_speed")

    found = matrix.score([two("engine_speed"), two(""), two("arrivals", LATE), trial(NONE, NONE)])
    assert (found.two, found.ordered, found.right) == (3, 1, 3)
    assert "two at once in their order 1 of 3" in found.sentence()


def test_load_and_fault_at_once_are_neither_a_hit_nor_a_miss() -> None:
    both = Trial("D", VIRTUAL, 0.5, 0, 1.0, LOAD, LATE, "arrivals", 1.0, "", then="engine_speed")
    assert matrix.score([both, trial(LATE, LATE), trial(LOAD, LOAD)]).f1 == 1.0


def test_markdown_and_json_agree_with_the_text() -> None:
    trials = [trial(LATE, LOAD, "S9"), trial(LATE, LATE, "S9"), trial(NONE, NONE, "S29")]
    lines = matrix.markdown(trials).splitlines()
    assert lines[0].count("|") == lines[2].count("|")
    assert "| S9 | late · engine_speed | 0.5 | 2 | 1 | 2 | late · arrivals 1 |" in lines
    found = matrix.to_dict(trials)
    assert found["matrix"]["late · engine_speed"] == {"late · engine_speed": 1, "late · arrivals": 1}
    assert matrix.score(trials).sentence() == lines[-1] == matrix.text(trials).splitlines()[-1]


def test_a_scenario_says_how_it_can_be_played() -> None:
    one = Scenario("Q", "t", "late", "arrivals", real={"load": {}})
    assert one.ways == ("simulated", "real")


def test_a_scenario_that_is_no_yaml_is_one_line_with_its_place(tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text("id: S1\nexpect: {label: [\n")
    with pytest.raises(UserError, match="not YAML") as caught:
        read(file)
    assert caught.value.where == f"{file}:3" and caught.value.remedy and "\n" not in caught.value.message


# --- trials on disk, and their order ---
def test_each_seed_plays_every_scenario_at_each_of_its_loads_before_the_next() -> None:
    chosen = find(["S9", "S13"])
    found = [(one.id, load, seed) for one, load, seed in in_turn(chosen, None, [4, 5])]
    assert found[:4] == [("S9", 0.5, 4), ("S9", 0.8, 4), ("S13", 0.9, 4), ("S13", 1.1, 4)]
    assert [seed for *_, seed in found] == [4] * 4 + [5] * 4
    assert [one.id for one, *_ in in_turn(chosen, [0.7], [1])] == ["S9", "S13"]


def test_trials_are_taken_over_only_for_the_same_question_and_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [one] = find(["S9"])

    def asked(**changes: object) -> str:
        told = {"load": 0.5, "seed": 0, "pairs": 5, "requests": 400, "twin": False} | changes
        return kept.question_of(one, VIRTUAL, **told)  # type: ignore[arg-type]

    question = asked()
    others = [asked(load=0.8), asked(seed=1), asked(pairs=3), asked(requests=60), asked(twin=True)]
    assert len({question, *others}) == 6
    played = replace(trial(LATE, LOAD, "S9"), a=("x",), b=("y",), size=[1.5, {"at": 2}])
    file = kept.Kept(tmp_path, resume=False)
    file.add(question, played)
    with file.path.open("a") as end:
        end.write('{"question": "torn')
    again = kept.Kept(tmp_path, resume=True)
    assert again.known(question) == played and again.known(others[0]) is None
    assert kept.Kept(tmp_path, resume=False).known(question) is None
    monkeypatch.setattr(kept, "code", lambda: "another")
    assert kept.Kept(tmp_path, resume=True).known(question) is None


def test_trials_cannot_be_kept_where_no_folder_can_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match=r"(?i)exists|not a directory"):
        kept.Kept(tmp_path / "file", resume=False)
