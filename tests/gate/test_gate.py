"""The gate on synthetic bundles: exit codes and their precedence, baselines, regressions, Markdown and JUnit XML."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

import tailspan
from models.errors import UserError
from telemetry import gate_text, names, regression, slo
from telemetry.baseline import Load, list_baselines, resolve_baseline, set_baseline
from telemetry.bundle import Bundle
from telemetry.gate import exit_code, gate
from telemetry.regression import Change
from tests.bundles import answered_row, dropped_row

POLICY = slo.parse(
    """
name: gate
classes:
  default: {ttft: {base_s: 5}}
objectives: [goodput >= 90 %, ttft p95 <= 3 s]
""",
    "gate.yaml",
)


def run_of(root: Path, rows: list[dict[str, Any]], **manifest: Any) -> Bundle:
    bundle = Bundle.create(
        root, {}, scheduled=len(rows), length_s=60.0, trace={"name": "made"}, slo=POLICY.manifest_entry(),
        hashes={"trace": "ab" * 32},
    )  # fmt: skip
    with bundle.writer("requests", "w") as writer:
        writer.append(rows)
    bundle.update(**{"status": "complete", "validity": {"verdict": "VALID"}, **manifest})
    bundle.compact()
    return bundle


def slow(index: int, seconds: float) -> dict[str, Any]:
    """An answer whose first token takes so long; from 0.2 s on."""
    at = index * 0.1
    return answered_row(index, at, first_token_s=at + seconds, last_token_s=at + seconds + 1, end_s=at + seconds + 1)


def served(root: Path, mean: float, seed: int, n: int = 200, **manifest: Any) -> Bundle:
    """A run whose times to first token follow a gamma law of that mean."""
    rng = np.random.default_rng(seed)
    return run_of(root, [slow(i, float(0.2 + rng.gamma(4, mean / 4))) for i in range(n)], **manifest)


# --- exit codes ---


@pytest.mark.parametrize(("valid", "held", "regressed", "interrupted"), list(product((True, False), repeat=4)))
def test_exit_codes_and_their_precedence(valid: bool, held: bool, regressed: bool, interrupted: bool) -> None:
    of_run = names.EXIT_OK if held else names.EXIT_SLO_BROKEN
    of_run = of_run if valid else names.EXIT_RUN_NOT_VALID
    of_run = names.EXIT_INTERRUPTED if interrupted else of_run
    change = Change("ttft p95", 1.0, 2.0, 1.0, 0.1, regressed, False)
    found = exit_code(of_run, (change,))
    if interrupted:
        assert found == 130
    elif not valid:
        assert found == 3
    elif not held:
        assert found == 1
    else:
        assert found == (2 if regressed else 0)


def test_the_command_line_gives_usage_and_internal_errors_their_codes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tailspan.main(["gate", "--root", str(tmp_path)]) == 4  # no run yet
    assert tailspan.main(["gate", "--no-such-option"]) == 4
    served(tmp_path, 0.5, 1)
    assert tailspan.main(["gate", "--root", str(tmp_path)]) == 0
    assert tailspan.main(["gate", "--root", str(tmp_path), "--baseline", "nobody"]) == 4

    def broken(*_: object) -> None:
        raise RuntimeError("made for a test")

    monkeypatch.setattr("telemetry.gate.summarize", broken)
    assert tailspan.main(["gate", "--root", str(tmp_path)]) == 5
    assert "made for a test" in capsys.readouterr().err


def test_too_few_requests_are_no_verdict(tmp_path: Path) -> None:
    policy = slo.parse("classes: {default: {}}\nmin_requests: 500\nobjectives: [goodput >= 90 %]", "m.yaml")
    found = gate(served(tmp_path, 0.5, 1), policy)
    assert found.summary.decision == "undecided" and found.exit_code == 3
    assert "needs 500 requests, 200 there" in found.summary.sentence
    assert "no verdict" in gate_text.markdown(found)
    broken = slo.parse(
        "classes: {default: {}}\nobjectives: [{objective: goodput >= 90 %, min_requests: 500}, ttft p50 <= 1 ms]",
        "m.yaml",
    )
    assert gate(served(tmp_path, 0.5, 1), broken).exit_code == 1  # what is broken stays broken


# --- baselines ---


def test_a_name_stands_for_runs_of_one_load(tmp_path: Path) -> None:
    runs = [served(tmp_path, 0.5, seed) for seed in range(3)]
    assert set_baseline("main", [runs[0].run_id], tmp_path) == [runs[0].run_id]
    ids = set_baseline("main", [runs[1].run_id, str(runs[2].path), runs[0].run_id], tmp_path, add=True)
    assert ids == [runs[1].run_id, runs[2].run_id, runs[0].run_id]  # each once, the newest last
    assert [one.run_id for one in resolve_baseline("main", tmp_path)] == ids
    assert resolve_baseline(runs[0].run_id, tmp_path)[0].path == runs[0].path
    assert list_baselines(tmp_path) == {"main": ids}
    assert set_baseline("main", [runs[2].run_id], tmp_path) == [runs[2].run_id]


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"status": "interrupted"}, "interrupted"),
        ({"validity": {"verdict": "CLIENT_LIMITED"}}, "CLIENT_LIMITED"),
        ({"hashes": {"trace": "cd" * 32}}, "another trace"),
        ({"scheduled": 201}, "201 requests, not 200"),
        ({"length_s": 70.0}, "over 70.0 s, not 60.0 s"),
    ],
)
def test_what_may_not_stand_for_a_baseline(tmp_path: Path, manifest: dict[str, Any], said: str) -> None:
    good, bad = served(tmp_path, 0.5, 1), served(tmp_path, 0.5, 2, **manifest)
    with pytest.raises(UserError) as caught:
        set_baseline("main", [good.run_id, bad.run_id], tmp_path)
    assert said in caught.value.message and caught.value.remedy
    assert list_baselines(tmp_path) == {}


@pytest.mark.parametrize("name", ["", "../main", "a/b", "-x", "a" * 70, "x y"])
def test_names_stay_inside_their_folder(tmp_path: Path, name: str) -> None:
    run = served(tmp_path, 0.5, 1)
    with pytest.raises(UserError):
        set_baseline(name, [run.run_id], tmp_path)


def test_a_baseline_whose_run_is_gone_or_torn_says_so(tmp_path: Path) -> None:
    run = served(tmp_path, 0.5, 1)
    set_baseline("main", [run.run_id], tmp_path)
    run.path.rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="is gone"):
        resolve_baseline("main", tmp_path)
    (tmp_path / "baselines" / "main.json").write_text('{"runs": []}')
    with pytest.raises(UserError, match="cannot be read"):
        resolve_baseline("main", tmp_path)
    with pytest.raises(UserError, match="no baseline and no run 'other'; baselines: main"):
        (tmp_path / "baselines" / "main.json").write_text('{"runs": ["x"]}')
        resolve_baseline("other", tmp_path)


def test_another_load_cannot_be_compared(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="another trace"):
        gate(served(tmp_path, 0.5, 1), POLICY, "main", [served(tmp_path, 0.5, 2, hashes={"trace": "cd" * 32})])
    assert Load("a", 5, None).differences(Load("a", 5, 60.0)) == []


# --- regressions ---


def regressed(changes: list[Change]) -> list[str]:
    return [one.figure for one in changes if one.regressed]


def test_half_as_fast_is_a_regression_and_twice_as_fast_is_none(tmp_path: Path) -> None:
    baseline = [served(tmp_path, 0.5, seed) for seed in range(4)]
    slower = regression.compare(served(tmp_path, 1.0, 9), baseline, POLICY)
    assert {"ttft p50", "ttft p95"} <= set(regressed(slower))
    assert not any(one.approximate for one in slower)
    assert regressed(regression.compare(served(tmp_path, 0.25, 9), baseline, POLICY)) == []
    found = gate(served(tmp_path, 1.0, 10), POLICY, "main", baseline)
    assert found.summary.held and found.exit_code == 2


@pytest.mark.parametrize("runs", [1, 5])
def test_nothing_changed_is_no_regression(tmp_path: Path, runs: int) -> None:
    """Twenty unchanged pairs: none may alarm (the bounds allow about one in twenty at most)."""
    baseline = [served(tmp_path, 0.5, seed) for seed in range(runs)]
    alarms = [regressed(regression.compare(served(tmp_path, 0.5, seed), baseline, POLICY)) for seed in range(100, 120)]
    assert sum(map(bool, alarms)) <= 1


def test_a_drop_of_goodput_and_unbounded_times_are_regressions(tmp_path: Path) -> None:
    baseline = [served(tmp_path, 0.5, seed) for seed in range(3)]
    rows = [slow(i, 0.5) if i % 4 else dropped_row(i, i * 0.1) for i in range(200)]
    changes = {one.figure: one for one in regression.compare(run_of(tmp_path, rows), baseline, POLICY)}
    assert changes["goodput"].regressed and changes["goodput"].change == pytest.approx(-0.25)
    assert changes["ttft p95"].regressed and changes["ttft p95"].value is None
    back = {one.figure: one for one in regression.compare(baseline[0], [run_of(tmp_path, rows)], POLICY)}
    assert not back["ttft p95"].regressed and "unbounded in the baseline" in str(back["ttft p95"].note)


def test_what_the_sample_cannot_certify_is_not_compared(tmp_path: Path) -> None:
    changes = regression.compare(served(tmp_path, 2.0, 1, n=60), [served(tmp_path, 0.5, 2, n=60)], POLICY)
    found = {one.figure: one for one in changes}
    assert "130 needed" in str(found["ttft p95"].note) and not found["ttft p95"].regressed
    assert found["ttft p50"].regressed and found["ttft p50"].approximate


def test_a_change_below_the_tolerance_is_none_however_sure(tmp_path: Path) -> None:
    steady: Callable[[float], list[dict[str, Any]]] = lambda seconds: [slow(i, seconds) for i in range(200)]  # noqa: E731
    baseline = [run_of(tmp_path, steady(1.0)) for _ in range(3)]
    assert regressed(regression.compare(run_of(tmp_path, steady(1.05)), baseline, POLICY)) == []
    assert "ttft p50" in regressed(regression.compare(run_of(tmp_path, steady(1.2)), baseline, POLICY))


def test_a_run_that_is_not_valid_is_never_a_regression(tmp_path: Path) -> None:
    bad = served(tmp_path, 3.0, 5, generator={"cpu_ratio": 0.99})
    found = gate(bad, POLICY, "main", [served(tmp_path, 0.5, 1)])
    assert found.exit_code == 3 and found.changes == ()


def test_a_shift_of_the_inputs_is_a_suspicion_and_no_regression(tmp_path: Path) -> None:
    baseline = [served(tmp_path, 0.5, seed) for seed in range(3)]
    longer = {"prompt_tokens_reported": 140, "input_tokens": 140, "prompt_tokens_expected": 140}
    rows = [slow(i, 0.5) | longer for i in range(200)]
    found = gate(run_of(tmp_path, rows), POLICY, "main", baseline)
    assert [one.feature for one in found.shifts] == ["prompt tokens"] and found.exit_code == 0
    assert "Suspicion: prompt tokens moved (median 100 before, median 140 now" in gate_text.markdown(found)
    assert gate(served(tmp_path, 0.5, 9), POLICY, "main", baseline).shifts == ()


# --- what is written ---


def test_markdown_begins_with_the_verdict_and_holds_every_figure(tmp_path: Path) -> None:
    found = gate(served(tmp_path, 1.0, 9), POLICY, "main", [served(tmp_path, 0.5, seed) for seed in range(4)])
    text = gate_text.markdown(found)
    assert text.startswith("### tailspan: regression against the baseline\n")
    assert "exit code **2**" in text and "Against baseline `main` (4 runs)" in text
    assert "| **FAIL** | ttft p50 |" in text and "| pass | goodput &gt;= 90 % |" in text
    for label, count in found.summary.labels.items():
        assert f"| {label if label != 'good' else 'good (0 verified)'} | {count} |" in text
    for line in text.splitlines():
        assert not line.startswith("|") or line.endswith("|")


def test_texts_of_strangers_cannot_break_markdown_or_xml(tmp_path: Path) -> None:
    policy = slo.parse("name: 'a|b <script>\\x01'\nclasses: {default: {}}\nobjectives: [goodput >= 90 %]", "e.yaml")
    bundle = run_of(
        tmp_path,
        [dropped_row(0)],
        trace={"name": "<img src=x>|\n| evil"},
        workers=[{"name": "\x00<b>|", "status": "lost"}],
    )
    found = gate(bundle, policy)
    text, xml = gate_text.markdown(found), gate_text.junit(found)
    assert "<script>" not in text and "<img" not in text and "\n| evil" not in text
    assert ElementTree.fromstring(xml).find("testsuite") is not None


def test_junit_counts_its_cases(tmp_path: Path) -> None:
    policy = slo.parse(
        "classes: {default: {}}\nobjectives: "
        "[goodput >= 90 %, ttft p50 <= 1 ms, {objective: e2e p50 <= 1 ms, min_requests: 999}]",
        "j.yaml",
    )
    found = gate(served(tmp_path, 1.0, 9), policy, "main", [served(tmp_path, 0.5, seed) for seed in range(4)])
    suite = ElementTree.fromstring(gate_text.junit(found)).find("testsuite")
    assert suite is not None
    cases = {
        (case.get("classname"), case.get("name")): [child.tag for child in case] for case in suite.iter("testcase")
    }
    assert cases["tailspan.run", "the run itself is VALID"] == []
    assert cases["tailspan.slo", "goodput >= 90 %"] == []
    assert cases["tailspan.slo", "ttft p50 <= 1 ms"] == ["failure"]
    assert cases["tailspan.slo", "e2e p50 <= 1 ms"] == ["skipped"]
    assert cases["tailspan.baseline", "ttft p50"] == ["failure"]
    assert int(suite.get("tests", "0")) == len(cases) == 1 + 3 + len(found.changes)
    assert int(suite.get("failures", "0")) == sum(kinds == ["failure"] for kinds in cases.values())
    invalid = gate(served(tmp_path, 0.5, 5, generator={"cpu_ratio": 0.99}), POLICY)
    assert 'errors="1"' in gate_text.junit(invalid)


def test_json_is_plain_and_complete(tmp_path: Path) -> None:
    found = gate(served(tmp_path, 1.0, 9), POLICY, "main", [served(tmp_path, 0.5, seed) for seed in range(3)])
    told = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert told["exit_code"] == 2 and told["gate"]["baseline"]["name"] == "main"
    assert {one["figure"] for one in told["gate"]["changes"]} == {"goodput"} | {
        f"{m} p{p}" for m in ("ttft", "tpot", "e2e") for p in (50, 95)
    }


def test_the_command_writes_its_files_and_the_job_summary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seed in range(3):
        served(tmp_path / "runs", 0.5, seed)
    ids = sorted(path.parent.name for path in (tmp_path / "runs").glob("*/manifest.json"))
    assert tailspan.main(["runs", "baseline", "set", "main", *ids, "--root", str(tmp_path / "runs")]) == 0
    new = served(tmp_path / "runs", 1.0, 9)
    job = tmp_path / "job.md"
    job.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(job))
    words = ["gate", new.run_id, "--root", str(tmp_path / "runs"), "--baseline", "main"]
    words += ["--summary", str(tmp_path / "out" / "s.md"), "--junit", str(tmp_path / "out" / "j.xml")]
    assert tailspan.main(words) == 2
    told = capsys.readouterr().out
    assert "WORSE  ttft p50" in told and "gate    regression against the baseline: exit code 2" in told
    text = (tmp_path / "out" / "s.md").read_text()
    assert job.read_text() == "before\n" + text
    ElementTree.parse(tmp_path / "out" / "j.xml")
    assert tailspan.main([*words[:4], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["gate"]["baseline"] is None
    assert tailspan.main(["runs", "baseline", "list", "--root", str(tmp_path / "runs")]) == 0
    assert tailspan.main(["runs", "baseline", "remove", "main", "--root", str(tmp_path / "runs")]) == 0
    assert tailspan.main(["runs", "baseline", "remove", "main", "--root", str(tmp_path / "runs")]) == 4
