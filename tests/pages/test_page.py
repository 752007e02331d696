"""The run page without a browser: an empty installation, a chosen run, one that is going or was cut."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from dashboards import view
from telemetry import names, slo
from telemetry.bundle import MANIFEST, Bundle
from telemetry.summary import summarize
from tests.bundles import TARGET, answered_row, dropped_row, make_bundle
from tests.pages.opening import open_page, text_of

Open = Callable[..., AppTest]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Open:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))

    return lambda **query: open_page("run", **query)


def made(root: Path, rows: list[dict[str, object]], *, status: str, scheduled: int) -> Bundle:
    policy = slo.load("demo")
    bundle = Bundle.create(root, {"trace": "made"}, slo=policy.manifest_entry(), scheduled=scheduled, targets=[TARGET])
    with bundle.writer("requests", "worker-0") as writer:
        for row in rows:
            writer.append(row)
    bundle.update(status=status)
    return bundle


def test_an_empty_installation_tells_how_to_make_a_first_run(opened: Open) -> None:
    text = text_of(opened())
    assert "No run yet" in text
    assert "make demo" in text
    assert "TAILSPAN_RUNS" in text


def test_the_newest_run_is_shown_with_the_numbers_of_the_command_line(opened: Open, tmp_path: Path) -> None:
    make_bundle(tmp_path, n=60, seed=1)
    newest = make_bundle(tmp_path, n=80, seed=2, overload=True)
    summary = summarize(newest, slo.load("demo"))
    text = text_of(opened())
    assert summary.sentence in text
    assert "The run is VALID" in text
    for label in names.LABELS:
        tile = text.split(f'data-testid="tile-{label}"')[1].split("</div></div>")[0]
        assert f'"ts-count">{summary.labels[label]:,} <' in tile
    assert summary.overload is None or summary.overload in text


def test_the_address_chooses_the_run(opened: Open, tmp_path: Path) -> None:
    old = make_bundle(tmp_path, n=60, seed=1)
    make_bundle(tmp_path, n=80, seed=2)
    page = opened(run=old.run_id)
    assert summarize(old, slo.load("demo")).sentence in text_of(page)
    assert page.sidebar.selectbox[0].value == old.run_id


def test_choosing_in_the_sidebar_changes_page_and_address(opened: Open, tmp_path: Path) -> None:
    old = make_bundle(tmp_path, n=60, seed=1)
    make_bundle(tmp_path, n=80, seed=2)
    page = opened()
    page.sidebar.selectbox[0].set_value(old.run_id).run()
    assert not page.exception
    assert summarize(old, slo.load("demo")).sentence in text_of(page)
    assert page.query_params["run"] == old.run_id


@pytest.mark.parametrize("asked", ["20200101-000000-dead", "../../etc", "/etc"])
def test_a_run_that_is_not_there_is_said_and_the_newest_shown(opened: Open, tmp_path: Path, asked: str) -> None:
    newest = make_bundle(tmp_path, n=60, seed=1)
    page = opened(run=asked)
    assert "There is no run" in page.warning[0].value
    assert summarize(newest, slo.load("demo")).sentence in text_of(page)


def test_a_bundle_outside_the_runs_folder_cannot_be_asked_for(opened: Open, tmp_path: Path) -> None:
    inside = make_bundle(tmp_path, n=60, seed=1)
    outside = make_bundle(tmp_path.parent / f"{tmp_path.name}-outside", n=80, seed=2)
    page = opened(run=str(outside.path))
    assert inside.run_id[-4:] in text_of(page)
    assert "There is no run" in page.warning[0].value


def test_a_run_that_is_going_says_so_and_how_far_it_is(opened: Open, tmp_path: Path) -> None:
    made(tmp_path, [answered_row(k, 1.0 + k) for k in range(5)], status="running", scheduled=40)
    text = text_of(opened())
    assert "Still running: 5 of 40 requests so far" in text
    assert "--repair" not in text


def test_a_run_that_has_just_begun(opened: Open, tmp_path: Path) -> None:
    made(tmp_path, [], status="running", scheduled=40)
    page = opened()
    assert "No request has ended yet." in page.info[0].value


def test_a_run_whose_writer_died_tells_the_repair(opened: Open, tmp_path: Path) -> None:
    bundle = made(tmp_path, [answered_row(k, 1.0 + k) for k in range(5)], status="running", scheduled=40)
    manifest = json.loads((bundle.path / MANIFEST).read_text())
    manifest["writer"]["started"] -= 9_999
    assert manifest["writer"]["pid"] == os.getpid()
    (bundle.path / MANIFEST).write_text(json.dumps(manifest))
    text = text_of(opened())
    assert f"tailspan runs check {bundle.run_id} --repair" in text
    assert "has gone" in text


def test_a_run_that_was_interrupted_gives_no_verdict_on_the_server(opened: Open, tmp_path: Path) -> None:
    made(tmp_path, [answered_row(k, 1.0 + k) for k in range(5)], status="interrupted", scheduled=40)
    text = text_of(opened())
    assert "The run is INCOMPLETE and gives no verdict on the server" in text
    assert "5 of 40 requests" in text


def test_a_run_in_which_nothing_was_answered(opened: Open, tmp_path: Path) -> None:
    made(tmp_path, [dropped_row(k, 1.0 + k) for k in range(20)], status="complete", scheduled=20)
    text = text_of(opened())
    assert "connection refused 20" in text
    assert "No request was answered" in text
    assert "no answer" in text  # the time of the slowest: nobody accounts for it


def test_a_run_on_a_server_without_an_account_shows_what_the_client_saw(opened: Open, tmp_path: Path) -> None:
    nothing = {f"phase_{name}_s": None for name in names.PHASES} | {"server_duration_s": None}
    made(tmp_path, [answered_row(k, 1.0 + k, **nothing) for k in range(20)], status="complete", scheduled=20)
    text = text_of(opened())
    assert "The server gives no account of its own" in text
    assert "wait for first token" in text


def test_a_broken_manifest_is_named_with_the_remedy(opened: Open, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=60, seed=1)
    (bundle.path / MANIFEST).write_text("{")
    page = opened()
    assert "cannot be read" in page.error[0].value
    assert "manifest.json" in page.error[0].value
    assert "Remedy" in text_of(page)


def test_what_a_bundle_says_cannot_become_markup(opened: Open, tmp_path: Path) -> None:
    evil = "<img src=x onerror=alert(1)>"
    row = answered_row(0, 1.0, replica=evil, error_detail=evil)
    bundle = made(tmp_path, [row], status="complete", scheduled=1)
    bundle.update(trace={"name": evil, "rows_kept": 1, "rows_read": 1}, command=evil)
    page = opened()
    raw = "\n".join(element.proto.body for element in page.get("html"))
    assert "<img" not in raw
    assert "&lt;img" in raw


def test_ranking_and_outcome_choose_the_slowest(opened: Open, tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=80, seed=2, overload=True)
    page = opened()
    assert [slow.index for slow in view.slowest(bundle.path, by="e2e", label=None)[:3]] == [
        request.index for request in summarize(bundle, slo.load("demo")).worst
    ]
    page.selectbox(key="label").set_value(names.DROPPED).run()
    assert not page.exception
    dropped = view.slowest(bundle.path, by="e2e", label=names.DROPPED)
    assert dropped
    table = next(element.proto.body for element in page.get("html") if "most of it" in element.proto.body)
    assert [f"#{slow.index}<" in table for slow in dropped] == [True] * len(dropped)
    assert table.count("<tr>") == len(dropped) + 1


def test_parts_of_the_slowest_sum_to_their_time(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=80, seed=3)
    for slow in view.slowest(bundle.path, by="e2e", label=None):
        assert sum(slow.parts.values()) == pytest.approx(slow.total_s, abs=1e-6)
    for splits in view.load(bundle.path).splits.values():
        for split in splits:
            assert sum(split.parts.values()) == pytest.approx(split.total_s, abs=1e-9)
