"""The report on a run: sentence, exit code, objectives, JSON, and how it looks at 100 columns."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.summary import Summary, format_seconds, summarize
from telemetry.terminal import render, render_list
from tests.bundles import answered_row, dropped_row, make_bundle

DEMO = slo.load("demo")
SNAPSHOTS = Path(__file__).parent / "snapshots"


def bundle_of(root: Path, rows: list[dict[str, Any]], **manifest: Any) -> Bundle:
    bundle = Bundle.create(root, {}, scheduled=len(rows), trace={"name": "made"}, slo=DEMO.manifest_entry())
    with bundle.writer("requests", "w") as writer:
        writer.append(rows)
    bundle.update(**{"status": "complete", **manifest})
    bundle.compact()
    return bundle


def text_of(summary: Summary) -> str:
    out = io.StringIO()
    Console(file=out, width=100, highlight=False, color_system=None).print(render(summary))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


@pytest.mark.parametrize("kind", ["healthy", "overload"])
def test_how_it_looks(tmp_path: Path, kind: str) -> None:
    """Compare with tests/telemetry/snapshots; when the layout changes on purpose, write them anew and look at them."""
    bundle = make_bundle(tmp_path, overload=kind == "overload")
    text = text_of(summarize(bundle, DEMO)).replace(str(bundle.path), "PATH").replace(bundle.run_id, "RUN")
    assert text == (SNAPSHOTS / f"{kind}.txt").read_text()
    assert max(len(line) for line in text.splitlines()) <= 100
    lines = text.splitlines()
    assert lines[0].startswith("Run VALID") and lines[1].startswith(("SLO held", "SLO broken"))


def test_json_round_trip(tmp_path: Path) -> None:
    summary = summarize(make_bundle(tmp_path, overload=True), DEMO)
    text = json.dumps(summary.to_dict(), allow_nan=False)
    found = json.loads(text)
    assert found == summary.to_dict()
    assert found["labels"]["late"] == summary.labels["late"] and found["exit_code"] == 1
    ttft = next(row for row in found["latencies"] if row["measure"] == "ttft")
    assert ttft["scheduled"][3]["n"] == 200 and {"value", "low", "high", "certified"} <= set(ttft["scheduled"][3])
    assert found["phases"][2]["parts"][names.QUEUE] > 1


def test_the_labels_sum_and_the_goodput_follows(tmp_path: Path) -> None:
    summary = summarize(make_bundle(tmp_path), DEMO)
    assert sum(summary.labels.values()) == summary.attempted == 200
    assert summary.goodput == summary.labels["good"] / summary.judged
    assert summary.held and summary.exit_code == names.EXIT_OK


def test_nothing_listens(tmp_path: Path) -> None:
    rows = [dropped_row(i, i * 0.1) for i in range(50)]
    summary = summarize(bundle_of(tmp_path, rows), DEMO)
    assert summary.validity.verdict == names.VALID
    assert summary.exit_code == names.EXIT_SLO_BROKEN
    assert "0 of 50 good (0.0 %" in summary.sentence and "50 dropped (refused)" in summary.sentence
    ttft = summary.latencies[0]
    assert ttft.scheduled[0].unbounded and ttft.scheduled[0].value is None and ttft.survivors[0].n == 0
    text = text_of(summary)
    assert "unbounded" in text and "sent 0 of 50 (50 attempted)" in text


@pytest.mark.parametrize(
    ("manifest", "late", "code"),
    [
        ({}, False, names.EXIT_OK),
        ({}, True, names.EXIT_SLO_BROKEN),
        ({"generator": {"cpu_ratio": 0.95}}, False, names.EXIT_RUN_NOT_VALID),
        ({"generator": {"cpu_ratio": 0.95}}, True, names.EXIT_RUN_NOT_VALID),
        ({"status": "incomplete"}, False, names.EXIT_RUN_NOT_VALID),
        ({"status": "interrupted"}, True, names.EXIT_INTERRUPTED),
    ],
)
def test_exit_codes(tmp_path: Path, manifest: dict[str, Any], late: bool, code: int) -> None:
    changes = {"first_token_s": 50.0, "last_token_s": 51.0, "end_s": 51.0} if late else {}
    rows = [answered_row(i, 1.0 + i * 0.01, **changes) for i in range(40)]
    summary = summarize(bundle_of(tmp_path, rows, **manifest), DEMO)
    assert summary.exit_code == code
    if summary.validity.verdict != names.VALID:
        assert "the run is not valid" in text_of(summary)


def test_no_rows_at_all(tmp_path: Path) -> None:
    summary = summarize(bundle_of(tmp_path, [], status="interrupted"), DEMO)
    assert summary.sentence.startswith("No verdict") and not summary.held
    assert json.dumps(summary.to_dict(), allow_nan=False) and "INCOMPLETE" in text_of(summary)


def test_300_requests_cannot_certify_p99_and_say_so(tmp_path: Path) -> None:
    summary = summarize(bundle_of(tmp_path, [answered_row(i, i * 0.1) for i in range(300)]), DEMO)
    assert not summary.latencies[0].scheduled[3].certified
    assert "cannot certify p99: n = 300, 662 needed" in text_of(summary)


def test_latency_is_from_the_intended_send_and_the_other_stands_beside(tmp_path: Path) -> None:
    rows = [answered_row(i, 1.0, sent_s=2.0, first_token_s=2.5, last_token_s=3.0, end_s=3.0) for i in range(20)]
    ttft, tpot, e2e = summarize(bundle_of(tmp_path, rows), DEMO).latencies
    assert ttft.scheduled[0].value == pytest.approx(1.5) and ttft.from_send[0].value == pytest.approx(0.5)
    assert e2e.scheduled[0].value == pytest.approx(2.0) and e2e.from_send[0].value == pytest.approx(1.0)
    assert tpot.from_send == ()


def test_undefined_tpot_is_left_out_never_zero(tmp_path: Path) -> None:
    rows = [answered_row(i, tpot_s=None if i < 4 else 0.05) for i in range(10)]
    summary = summarize(bundle_of(tmp_path, rows), DEMO)
    tpot = summary.latencies[1]
    assert (tpot.scheduled[0].n, tpot.undefined, tpot.scheduled[0].value) == (6, 4, pytest.approx(0.05))
    assert "TPOT is undefined for 4 answers" in text_of(summary)


def test_objectives_by_class_phase_and_share(tmp_path: Path) -> None:
    policy = slo.parse(
        """
classes: {default: {}, batch: {}}
objectives:
  - {class: batch, objective: ttft p50 <= 1 s}
  - {class: default, objective: ttft p50 <= 1 s}
  - queue p90 <= 100 ms
  - {class: batch, objective: dropped <= 10 %}
  - goodput >= 60 %
""",
        "t.yaml",
    )
    rows = [answered_row(i) for i in range(8)]
    rows += [answered_row(i, **{"class": "batch", "first_token_s": 4.0, "phase_queue_s": 3.0}) for i in range(8, 10)]
    rows += [dropped_row(10, **{"class": "batch"})]
    found = summarize(bundle_of(tmp_path, rows), policy)
    assert [one.holds for one in found.objectives] == [False, True, False, False, True]
    assert [one.n for one in found.objectives] == [3, 8, 11, 3, 11]
    assert found.objectives[3].value == pytest.approx(1 / 3)
    assert not found.held and "10 of 11 good (90.9 %)" in found.sentence


def test_an_objective_without_data_is_not_kept(tmp_path: Path) -> None:
    policy = slo.parse("classes: {default: {}, b: {}}\nobjectives: [{class: b, objective: ttft p50 <= 1 s}]", "t.yaml")
    found = summarize(bundle_of(tmp_path, [answered_row(0)]), policy)
    assert not found.held and "no data" in text_of(found)


def test_the_worst_are_the_slowest_and_then_the_dropped(tmp_path: Path) -> None:
    rows = [answered_row(0), answered_row(1, end_s=9.0, last_token_s=9.0), dropped_row(2), dropped_row(3, end_s=30.0)]
    worst = summarize(bundle_of(tmp_path, rows), DEMO).worst
    assert [one.index for one in worst] == [1, 0, 3]
    assert sum(worst[0].parts.values()) == pytest.approx(worst[0].e2e_s)
    assert worst[2].detail == "made for a test: refused"


def test_a_server_without_an_account(tmp_path: Path) -> None:
    blank = {"server_duration_s": None} | {f"phase_{name}_s": None for name in names.PHASES}
    text = text_of(summarize(bundle_of(tmp_path, [answered_row(i, i * 0.1, **blank) for i in range(40)]), DEMO))
    assert "gives no account" in text and "wait_first_token" in text


def test_a_list_of_runs(tmp_path: Path) -> None:
    summary = summarize(make_bundle(tmp_path), DEMO)
    out = io.StringIO()
    Console(file=out, width=120, color_system=None).print(render_list([("run-a", summary), ("run-b", "not JSON")]))
    assert re.search(r"run-a .*complete .*synthetic .*200 .*98\.5 % .*VALID .*demo held", out.getvalue())
    assert re.search(r"run-b .*unreadable(?s:.*)run-b: not JSON", out.getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"), [(123.4, "123 s"), (4.123, "4.12 s"), (0.3123, "312 ms"), (0.0004, "0.4 ms"), (0.0, "0.0 ms")]
)
def test_seconds_as_a_person_writes_them(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_a_run_that_failed_by_itself_is_no_lost_worker(tmp_path: Path) -> None:
    workers = [{"name": "worker-0", "status": "cut"}]
    rows = [answered_row(i) for i in range(5)]
    bundle = bundle_of(tmp_path, rows, scheduled=9, status="incomplete", failure="TypeError: made", workers=workers)
    run = summarize(bundle, DEMO)
    assert run.validity.verdict == names.INCOMPLETE and run.exit_code == names.EXIT_RUN_NOT_VALID
    assert run.validity.reasons == (
        "ended by an internal error of the generator after 5 of 9 requests: TypeError: made",
    )
    assert run.reasons[names.INVALID] == {names.CUT_BY_END: 4}


def test_an_objective_without_a_request_is_open_and_an_overload_that_held_is_not_called_one(tmp_path: Path) -> None:
    ours = [dropped_row(i, error=names.BAD_REQUEST) for i in range(9)]
    nothing = text_of(summarize(bundle_of(tmp_path / "none", ours), DEMO))
    assert "no data" in nothing and "FAIL" not in nothing and "open" in nothing
    grown = [
        answered_row(i, float(i), phase_queue_s=0.01 * i, server_duration_s=1.126 + 0.01 * i,
                     **{f"{name}_s": i + 0.2 + 0.01 * i + more
                        for name, more in (("first_token", 0.0), ("last_token", 0.95), ("end", 1.0))})
        for i in range(90)
    ]  # fmt: skip
    held = summarize(bundle_of(tmp_path / "grown", grown), DEMO)
    assert held.held and held.growth is not None and held.growth.last.total_s > 2 * held.growth.first.total_s
    assert held.overload is None
