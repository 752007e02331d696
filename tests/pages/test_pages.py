"""Every page without a browser: its figures, what it says where a run has no data, and that its views are links."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.big_bundle import REPLICAS, write_bundle
from dashboards import markup, oncall, palette
from dashboards.facts import changed, judged_anew, one_request, pairs, timeline, who
from dashboards.figures import change
from dashboards.source import open_source
from telemetry import names, slo
from telemetry.bundle import Bundle
from telemetry.compare import compare
from telemetry.compare.sides import write_group
from telemetry.explain import explain
from telemetry.explain.text import headline
from telemetry.summary import Summary, format_seconds, summarize
from tests.bundles import TARGET, answered_row, dropped_row, make_bundle
from tests.pages.opening import PAGES, open_page, text_of, tile


@pytest.fixture(scope="module")
def summary(root: Path) -> Summary:
    run = open_source(root / "20260101-000002-aaaa")
    return summarize(run.bundle, run.policy)


def test_the_pages_of_the_issue_are_there() -> None:
    assert set(PAGES) == {
        "triage", "live", "run", "requests", "request", "heatmap", "engine", "dropped", "quality", "slo", "compare",
        "explain", "traces", "share",
    }  # fmt: skip


@pytest.mark.parametrize("name", PAGES)
def test_every_page_says_which_run_it_shows_and_breaks_on_none(root: Path, name: str) -> None:
    text = text_of(open_page(name))
    assert "2026-01-01 00:00:02 · aaaa" in text
    assert "synthetic-surge" in text


@pytest.mark.parametrize("name", PAGES)
def test_every_page_speaks_chinese(root: Path, name: str) -> None:
    text = text_of(open_page(name, lang="zh"))
    assert any("\u4e00" <= letter <= "\u9fff" for letter in text)


def test_triage_answers_what_is_asked_on_call(root: Path, summary: Summary) -> None:
    page = open_page("triage")
    text = text_of(page)
    assert summary.sentence in text
    for label in (names.LATE, names.WRONG, names.DROPPED):
        assert tile(page, label) == f"{summary.labels[label]:,}"
    allowed = next(one.objective.bound for one in summary.objectives if one.objective.measure == names.DROPPED)
    burnt = summary.labels[names.DROPPED] / summary.judged / allowed
    assert f"burns {100 * burnt:.0f} % of its budget" in text or f"burns {burnt:.0f}× of its budget" in text
    assert f"{summary.judged:,} requests, 95 % interval" in text
    assert "from run aaaa (A) to this one (B)" in text
    run = open_source(root / "20260101-000002-aaaa")
    for request in who.examples(run):
        assert request["label"] in (names.LATE, names.WRONG, names.DROPPED)
        assert oncall.example_line(request) in text
    assert oncall.next_check(summary, who.late_phase(run)).command in text


def test_triage_of_a_run_alone_compares_its_thirds_and_claims_no_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    make_bundle(tmp_path, n=120, seed=2, overload=True)
    text = text_of(open_page("triage"))
    assert "from the first third of the run (A) to its last (B)" in text
    assert "One run alone shows no change" in text
    assert "No earlier run of this trace" in text


def next_page(bundle: Bundle) -> str:
    run = open_source(bundle.path)
    return oncall.next_check(summarize(bundle, run.policy), who.late_phase(run)).page


def test_next_check_follows_what_is_worst(tmp_path: Path) -> None:
    refused = made(tmp_path, [dropped_row(k, 1.0 + k) for k in range(20)])
    assert next_page(refused) == "dropped"
    fine = made(tmp_path, [answered_row(k, 1.0 + k) for k in range(20)])
    assert next_page(fine) == "slo"
    misread = made(tmp_path, [answered_row(k, 1.0 + k, prompt_tokens_reported=7) for k in range(20)])
    assert next_page(misread) == "quality"
    late = made(tmp_path, [answered_row(k, 1.0 + k, lag_s=9.0, sent_s=10.0 + k) for k in range(20)])
    assert next_page(late) == "run"
    queued = make_bundle(tmp_path, n=120, seed=2, overload=True)
    assert next_page(queued) == "requests"


def test_requests_are_those_in_the_window_of_the_address(root: Path) -> None:
    page = open_page("requests", at="12", length="5")
    assert page.number_input(key="at").value == 12.0
    run = open_source(root / "20260101-000002-aaaa")
    total = timeline.how_many(run, timeline.Chosen(), 12.0, 5.0)
    shown = len(timeline.in_flight(run, timeline.Chosen(), 12.0, 5.0))
    assert (f"{shown} of {total:,} in this window" in text_of(page)) == (total > shown)
    assert "right within" in text_of(page)
    page.selectbox(key="replica").set_value(REPLICAS[1]).run()
    assert not page.exception
    assert page.query_params["replica"] == REPLICAS[1]
    assert page.query_params["at"] == "12"
    assert f"Engine steps of {markup.plain(REPLICAS[1])}" in text_of(page)


def test_request_shows_what_each_layer_saw(root: Path, summary: Summary) -> None:
    worst = summary.worst[0]
    text = text_of(open_page("request", request=str(worst.index)))
    assert f"#{worst.index}: {worst.label}" in text
    assert worst.e2e_s is not None
    assert format_seconds(worst.e2e_s) in text
    for layer in one_request.LAYERS:
        assert f'ts-card-name">{layer}<' in text or layer in text.split("No account from: ")[1]
    page = open_page("request")
    assert page.number_input(key="request").value == worst.index
    page.number_input(key="request").set_value(5).run()
    assert page.query_params["request"] == "5"
    assert "#5: " in text_of(page)


def test_the_heatmap_counts_what_its_edges_enclose(root: Path, summary: Summary) -> None:
    assert f"In the whole map: {summary.attempted:,}" in text_of(open_page("heatmap"))
    late = summary.labels[names.LATE]
    page = open_page("heatmap", label="late")
    assert f"In the whole map: {late:,}" in text_of(page)
    page.number_input(key="low").set_value(2.0).run()
    run = open_source(root / "20260101-000002-aaaa")
    slow = run.ask("SELECT count(*) AS n FROM rows WHERE label = 'late' AND e2e_s >= 2")[0]["n"]
    assert 0 < slow < late
    assert f"In the region: {slow:,}" in text_of(page)
    assert page.query_params["low"] == "2"
    by_phase = text_of(open_page("heatmap", colour="phase", by="ttft"))
    assert "preempted" in by_phase or "queue" in by_phase


def test_engine_tells_the_floor_of_every_kind_of_step(root: Path) -> None:
    text = text_of(open_page("engine"))
    for kind in ("decode", "prefill", "mixed"):
        assert f"<td>{kind}</td>" in text
    assert "45%" in text  # what benchmarks.big_bundle says of every step


def test_dropped_counts_by_reason_and_attempts(root: Path, summary: Summary) -> None:
    text = text_of(open_page("dropped"))
    for reason, n in summary.reasons[names.DROPPED].items():
        assert f"<td>{palette.reason_words(reason)}</td><td>{n:,}</td>" in text
    assert "attempts a request" in text


def test_moved_deadlines_move_labels_and_stand_in_the_address(root: Path, summary: Summary) -> None:
    page = open_page("slo")
    assert "These are the deadlines that the run was judged by." in text_of(page)
    page.number_input(key="default.ttft").set_value(0.2).run()
    assert not page.exception
    assert page.query_params["default.ttft"] == "0.2"
    run = open_source(root / "20260101-000002-aaaa")
    after = summarize(run.bundle, judged_anew.changed(run.policy, {"default": {"ttft": 0.2}}))
    text = text_of(page)
    assert after.sentence in text
    assert after.sentence != summary.sentence
    moved = sum(abs(after.labels[label] - summary.labels[label]) for label in names.LABELS) // 2
    assert f"**{moved:,} of {summary.attempted:,} requests**" in text
    assert after.sentence in text_of(open_page("slo", **{"default.ttft": "0.2"}))


def test_compare_puts_both_runs_side_by_side(root: Path, summary: Summary) -> None:
    text = text_of(open_page("compare"))
    run = open_source(root / "20260101-000001-aaaa")
    other = summarize(run.bundle, run.policy)
    assert f"A: {other.sentence}" in text
    assert f"B: {summary.sentence}" in text
    for name, a, b in pairs.paired_percentiles(other, summary):
        row = text.split(f"<td>{name}</td>")[-1].split("</tr>")[0]
        for value in (a, b):
            assert ("unbounded" if value.unbounded else format_seconds(value.value or 0)) in row
    assert "seeds schedule" in text
    swapped = text_of(open_page("compare", run="20260101-000001-aaaa", base="20260101-000002-aaaa"))
    assert f"A: {summary.sentence}" in swapped


def test_compare_and_explain_say_what_the_analyses_say(root: Path) -> None:
    a, b = (Bundle.open(root / f"20260101-00000{number}-aaaa") for number in (1, 2))
    compared = compare([a], [b], same_load=False)
    text = text_of(open_page("compare"))
    assert compared.sentence in text and "APPROXIMATE" in text
    assert "Changes, with intervals that hold for all at once" in text
    paths = ((str(a.path),), (str(b.path),))
    points = changed.scatter(open_source(b.path), paths, "e2e")
    assert 500 < len(points) <= changed.POINTS
    assert len(change.forest(compared.effects).to_dict()["layer"]) == 3
    assert len(change.scatter(points).to_dict()["layer"]) == 2
    explained = explain([a], [b])
    text = text_of(open_page("explain"))
    assert headline(explained) in text
    for one in explained.hypotheses:
        assert one.disprove in text and all(said in text for said in one.evidence)
    swapped = text_of(open_page("explain", run=a.run_id, base=b.run_id))
    assert headline(explain([b], [a])) in swapped


def test_a_run_of_a_group_stands_for_all_its_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    runs = [make_bundle(tmp_path, 60, seed=k) for k in (1, 1, 2, 2)]
    write_group("pairs", [runs[0].run_id, runs[2].run_id], [runs[1].run_id, runs[3].run_id], tmp_path)
    for run in runs:
        run.update(group={"id": "pairs"})
    text = text_of(open_page("compare", run=runs[3].run_id))
    assert "Student's t of 2 pairs" in text and "2 pairs of replays stand behind this" in text
    assert "Two runs are one pair" not in text
    (tmp_path / "groups" / "pairs.json").unlink()
    text = text_of(open_page("compare", run=runs[3].run_id))
    assert "are too few for 10 blocks" in text and "Two runs are one pair" in text


def test_another_base_is_chosen_from_the_list(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    first, second, third = (make_bundle(tmp_path, n=40, seed=seed) for seed in (1, 2, 3))
    page = open_page("compare", run=third.run_id)
    box = page.selectbox(key="compared with")
    assert box.value == second.run_id
    box.set_value(first.run_id).run()
    assert not page.exception
    assert page.query_params["base"] == first.run_id
    assert f"A: {summarize(first, slo.load('demo')).sentence}" in text_of(page)


def test_explain_names_the_largest_part_of_the_difference(root: Path, summary: Summary) -> None:
    run = open_source(root / "20260101-000001-aaaa")
    other = summarize(run.bundle, run.policy)
    a, b = (pairs.find_split(one.phases, 90.0) for one in (other, summary))
    assert a is not None
    assert b is not None
    changes = {name: b.parts[name] - a.parts[name] for name in a.parts}
    largest = max(changes, key=lambda name: abs(changes[name]))
    assert f"the largest part of it: {palette.PHASE_WORDS[largest]}" in text_of(open_page("explain"))
    within = text_of(open_page("explain", how="within"))
    assert summary.growth is not None
    assert f"From {format_seconds(summary.growth.first.total_s)} (first third)" in within


def test_quality_does_not_call_unchecked_answers_right(root: Path, summary: Summary) -> None:
    text = text_of(open_page("quality"))
    assert f"**{summary.labels[names.WRONG]:,} of" in text
    assert "No answer was verified in depth" in text
    assert "This run sent no canaries" in text


def test_traces_tell_the_traffic(root: Path, summary: Summary) -> None:
    text = text_of(open_page("traces"))
    assert f"**{summary.attempted:,} requests" in text
    assert "benchmarks.big_bundle" in text


def test_share_gives_the_figures_of_the_command_line(root: Path, summary: Summary) -> None:
    page = open_page("share")
    text = text_of(page)
    assert f"**{summary.sentence}**" in text
    assert f"tailspan runs show {summary.run_id} --json" in text
    assert "?run=" in text
    assert "tar -C" in text


def test_live_finds_the_run_that_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    make_bundle(tmp_path, n=40, seed=1)
    assert "No run is going here." in text_of(open_page("live"))
    going = make_bundle(tmp_path, n=40, seed=2, status="running")
    going.update(scheduled=100)
    page = open_page("live")
    text = text_of(page)
    assert "of them not good" in text
    assert going.run_id[-4:] in text
    assert "40 of 100 requests so far" in page.get("progress")[0].proto.text


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One run on a server that gives no account at all: no phases, no steps, no metrics, no spans."""
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    nothing = {f"phase_{name}_s": None for name in names.PHASES} | {"server_duration_s": None, "step_first": None}
    rows = [answered_row(k, 1.0 + k, **nothing) for k in range(20)] + [dropped_row(20, 21.0)]
    made(tmp_path, rows)
    return tmp_path


@pytest.mark.parametrize(
    ("name", "said", "how"),
    [
        ("requests", "There is no step log", "tailspan serve"),
        ("engine", "There is no step log", "tailspan floor --run"),
        ("quality", "counts neither divergence", "tailspan serve --help"),
        ("dropped", "No queue length was scraped", "/metrics"),
        ("compare", "There is only one run here", "tailspan run"),
        ("explain", "There is only one run here", "tailspan run"),
        ("request", "No step of the engine is known", "other servers do not"),
    ],
)
def test_what_is_missing_is_said_with_the_way_to_get_it(bare: Path, name: str, said: str, how: str) -> None:
    text = text_of(open_page(name))
    assert said in text
    assert how in text


def test_no_phases_no_heatmap_of_phases(bare: Path) -> None:
    text = text_of(open_page("heatmap", colour="phase"))
    assert "gave no account of its phases" in text
    assert "tailspan serve" in text


@pytest.mark.parametrize("name", PAGES)
def test_no_page_breaks_on_a_run_without_anything(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    made(tmp_path, [])
    open_page(name)


@pytest.mark.parametrize("name", ["requests", "request", "compare", "share", "engine", "live"])
def test_what_a_bundle_says_cannot_make_a_page_ask_a_stranger(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    evil = "![x](http://evil.test/x.png)"
    made(tmp_path, [answered_row(k, 1.0 + k, replica=evil) for k in range(3)])
    bundle = write_bundle(tmp_path, 60, seed=1)
    bundle.update(trace={"name": evil}, plan={"keep_text": evil}, status="running" if name == "live" else "complete")
    page = open_page(name)
    said = [getattr(element, "value", "") for kind in ("markdown", "caption", "info", "warning", "error")
            for element in page.get(kind)]  # fmt: skip
    assert said
    assert not any("![x](" in str(text) for text in said)


@pytest.mark.parametrize("name", PAGES)
def test_no_page_breaks_on_a_broken_manifest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    bundle = made(tmp_path, [])
    (bundle.path / "manifest.json").write_text("{")
    page = open_page(name)
    if name != "live":
        assert "cannot be read" in page.error[0].value


@pytest.mark.parametrize(
    ("name", "query"),
    [
        ("requests", {"at": "later", "length": "-3", "label": "fine", "replica": "nobody"}),
        ("request", {"request": "99999999"}),
        ("heatmap", {"by": "x", "colour": "x", "from": "nan", "low": "1e99"}),
        ("explain", {"p": "1000", "how": "", "base": "../.."}),
        ("slo", {"default.ttft": "soon"}),
        ("triage", {"base": "/etc"}),
    ],
)
def test_nonsense_in_the_address_is_taken_for_the_default(root: Path, name: str, query: dict[str, str]) -> None:
    page = open_page(name, **query)
    for key in query:
        if key != "base":
            assert key not in page.query_params, key


def test_the_language_of_the_address_is_kept_by_links_and_the_switch(root: Path) -> None:
    page = open_page("triage", lang="zh")
    assert "谁受影响？" in text_of(page)
    links = [element.proto.query_string for element in page.get("page_link")]
    assert links
    assert all("lang=zh" in link and "run=" in link for link in links)


def made(root: Path, rows: list[dict[str, object]]) -> Bundle:
    policy = slo.load("demo")
    bundle = Bundle.create(
        root, {"trace": "made"}, slo=policy.manifest_entry(), scheduled=len(rows), targets=[TARGET],
        generator={"cpu_ratio": 0.1},
    )  # fmt: skip
    with bundle.writer("requests", "worker-0") as writer:
        for row in rows:
            writer.append(row)
    bundle.update(status="complete")
    return bundle
