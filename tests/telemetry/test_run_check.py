"""``tailspan runs check``: a sound bundle passes, and each kind of damage is called by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.check import Finding, check
from telemetry.commands import app
from telemetry.schema import SCHEMA_VERSION
from tests.bundles import TARGET, answered_row, dropped_row, make_bundle, spans_of

Rows = list[dict[str, Any]]


def failed(bundle: Bundle) -> dict[str, Finding]:
    return {finding.name: finding for finding in check(bundle, slo.load("demo")) if not finding.ok}


def bundle_of(root: Path, rows: Rows, spans: Rows | None = None, *, ours: bool = True, **manifest: Any) -> Bundle:
    bundle = Bundle.create(root, {}, scheduled=len(rows))
    if ours:
        with bundle.writer("series", "s") as writer:
            writer.append({"t_s": 0.0, "source": TARGET + "/metrics", "name": names.M_BUILD_INFO, "value": 1.0})
    with bundle.writer("requests", "w") as writer:
        writer.append(rows)
    if spans is None:
        spans = [span for row in rows for span in spans_of(row)]
    with bundle.writer("spans", "r") as writer:
        writer.append(spans)
    bundle.update(**{"status": "complete", **manifest})
    bundle.compact()
    return bundle


@pytest.mark.parametrize("overload", [False, True])
def test_a_sound_bundle_passes(tmp_path: Path, overload: bool) -> None:
    bundle = make_bundle(tmp_path, overload=overload)
    findings = check(bundle, slo.load("demo"))
    assert [finding for finding in findings if not finding.ok] == []
    told = {finding.name: finding.message for finding in findings}
    assert "198 of 198 answered rows carry all 9" in told["phases"]
    assert "198 of 198 sampled requests agree" in told["server spans"]
    assert "200 of 200 sampled requests agree" in told["client spans"]
    assert "= 200 of 200" in told["labels"]


@pytest.mark.parametrize(
    ("damage", "name", "said"),
    [
        (lambda rows: rows.append(dict(rows[3])), "indices", "1 request has several rows"),
        (lambda rows: rows[3].update(index=77), "indices", "1 row is outside"),
        (lambda rows: rows[3].update(phase_queue_s=None), "phases", "9 of 10 answered rows"),
        (lambda rows: rows[3].update(phase_queue_s=0.022), "phase sums", "1 ms allowed"),
        (lambda rows: rows[3].update(server_duration_s=5.0, phase_decode_s=4.804), "network", "1 of 10 answers"),
        (lambda rows: rows[3].update(first_token_s=0.5), "moments", "1 row goes back"),
    ],
)
def test_damaged_rows_are_named(tmp_path: Path, damage: Callable[[Rows], None], name: str, said: str) -> None:
    rows = [answered_row(i) for i in range(10)]
    spans = [span for row in rows for span in spans_of(row)]
    damage(rows)
    bundle = bundle_of(tmp_path, rows, spans)
    bundle.update(scheduled=10)
    found = failed(bundle)
    assert name in found and said in found[name].message
    assert found[name].rows in ((3,), (77,))


@pytest.mark.parametrize(
    ("span", "change", "name", "said"),
    [
        ("chat toy", {"longer": 2_000_000}, "client spans", "client span 1"),
        ("chat toy", {"span_id": "f" * 16}, "client spans", "1 have no span"),
        ("llm_request", {"name": "other"}, "server spans", "1 have no span"),
        ("llm_request", {"parent_span_id": "0" * 16}, "server spans", "not a child"),
        ("llm_request", {"longer": 2_000_000}, "server spans", "server span 1"),
        ("llm_request", {"attributes": "{}"}, "server spans", "tailspan.phase.ingress is missing"),
        ("queue", {"longer": 5_000_000}, "server spans", "children"),
        ("decode", {"attributes": '{"tailspan.phase.duration_ns": 1}'}, "server spans", "child spans of decode"),
    ],
)
def test_spans_that_say_something_else_are_named(
    tmp_path: Path, span: str, change: dict[str, Any], name: str, said: str
) -> None:
    rows = [answered_row(i) for i in range(5)]
    spans = [one for row in rows for one in spans_of(row)]
    chosen = next(one for one in spans if one["trace_id"] == rows[2]["trace_id"] and one["name"] == span)
    chosen["end_unix_ns"] += change.get("longer", 0)
    chosen.update({key: value for key, value in change.items() if key != "longer"})
    found = failed(bundle_of(tmp_path, rows, spans))
    assert list(found) == [name]
    assert said in found[name].message and found[name].rows == (2,)


def test_a_killed_run_may_lack_its_last_spans(tmp_path: Path) -> None:
    rows = [answered_row(i) for i in range(3)]
    assert failed(bundle_of(tmp_path / "a", rows, [], status="incomplete")) == {}
    assert set(failed(bundle_of(tmp_path / "b", rows, []))) == {"client spans", "server spans"}


def test_unanswered_rows_need_no_phases_but_a_client_span(tmp_path: Path) -> None:
    assert failed(bundle_of(tmp_path, [answered_row(0), dropped_row(1), dropped_row(2, error=names.BAD_REQUEST)])) == {}


def test_other_servers_give_no_account(tmp_path: Path) -> None:
    blank = {"server_duration_s": None} | {f"phase_{name}_s": None for name in names.PHASES}
    bundle = bundle_of(tmp_path, [answered_row(i, sampled=False, **blank) for i in range(3)], [], ours=False)
    assert failed(bundle) == {}
    assert set(failed(bundle_of(tmp_path, [answered_row(0, sampled=False, **blank)], []))) == {"phases"}
    assert any("gives no account" in finding.message for finding in check(bundle, slo.load("demo")))


def test_torn_and_loose_parts_of_a_complete_run(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=20)
    bundle.update(writer={})  # it is gone
    with bundle.writer("series", "late") as writer:
        writer.append({"t_s": 1.0})
    writer.path.write_bytes(writer.path.read_bytes()[:-9])
    found = failed(bundle)
    assert set(found) == {"intact", "compacted"}
    assert "--repair" in str(found["compacted"].remedy)


def test_a_table_that_cannot_be_read_stops_there(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=20)
    path = bundle.path / "requests" / "data.parquet"
    path.write_bytes(path.read_bytes()[:500])
    found = failed(bundle)
    assert list(found) == ["readable"] and found["readable"].message.startswith("requests")
    table = pq.read_table(bundle.path / "steps" / "data.parquet")
    version = {b"tailspan.schema_version": str(SCHEMA_VERSION + 1).encode()}
    pq.write_table(table.replace_schema_metadata(version), bundle.path / "steps" / "data.parquet")
    assert f"table schema {SCHEMA_VERSION + 1}" in [f for f in check(bundle, slo.load("demo")) if not f.ok][1].message


# --- the commands ---


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_commands_on_a_sound_run(tmp_path: Path) -> None:
    root = str(tmp_path)
    assert run("list", "--root", root) == (0, f"no runs under {root}; make one: tailspan demo\n")
    bundle = make_bundle(tmp_path, n=30)
    code, text = run("check", "--root", root)
    assert code == 0 and "checks hold for run" in text and "FAIL" not in text
    code, text = run("check", bundle.run_id, "--root", root, "--repair", "--json")
    assert code == 0 and all(finding["ok"] for finding in json.loads(text)["findings"])
    code, text = run("show", "latest", "--root", root, "--json", "--slo", "chat")
    assert code == 0 and json.loads(text)["slo"] == "chat"
    code, text = run("show", bundle.run_id[:12], "--root", root)
    assert code == 0 and text.startswith("Run VALID")
    code, text = run("list", "--root", root, "--json")
    assert json.loads(text)[0]["run_id"] == bundle.run_id


def test_check_repairs_and_fails_with_exit_code_3(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=30, status="running")
    bundle.update(writer={})
    code, text = run("check", str(bundle.path))
    assert code == names.EXIT_RUN_NOT_VALID and "its writer is gone" in text and "--repair" in text
    code, text = run("check", str(bundle.path), "--repair")
    assert code == 0 and "repaired: 30 rows of 30 requests are back" in text
    code, text = run("check", str(bundle.path), "--repair")
    assert code == 0 and "nothing to repair" in text


def test_a_run_that_goes_on_is_sound_and_needs_no_repair(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=30, status="running")
    code, text = run("check", str(bundle.path))
    assert code == 0 and "repair" not in text and "FAIL" not in text
    bundle.update(status="complete")  # all answers are there, the parts are not gathered yet
    code, text = run("check", str(bundle.path))
    assert code == 0 and "repair" not in text and "its writer is still closing it" in text
    bundle.update(writer={"pid": 1, "host": "elsewhere"}, status="running")
    code, text = run("check", str(bundle.path))
    assert code == 0 and "its writer on elsewhere says" in text


def test_list_shows_runs_that_cannot_be_read(tmp_path: Path) -> None:
    make_bundle(tmp_path, n=10)
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "manifest.json").write_text("{")
    code, text = run("list", "--root", str(tmp_path))
    assert code == 0 and "unreadable" in text
