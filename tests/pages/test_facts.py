"""What the pages ask of a run agrees with the command line's own figures and with a plain count."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import big_bundle
from benchmarks.big_bundle import REPLICAS, write_bundle
from dashboards.facts import (
    checks,
    chosen,
    drops,
    engine_steps,
    heat,
    judged_anew,
    one_request,
    pairs,
    timeline,
    traffic,
    under_way,
    who,
)
from dashboards.facts.chosen import Chosen
from dashboards.source import DOMINANT_SQL, PART_SQL, Source, open_source
from telemetry import names, phases, slo
from telemetry.bundle import list_runs
from telemetry.summary import summarize
from tests.bundles import answered_row, dropped_row, make_bundle

N = 2_000


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """Two replicas, a surge, drops and wrong answers."""
    return open_source(write_bundle(tmp_path_factory.mktemp("runs"), N, seed=3).path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return open_source(make_bundle(tmp_path_factory.mktemp("runs"), n=160, seed=2, overload=True).path)


def test_a_generated_run_is_a_sound_one(run: Source) -> None:
    from telemetry.check import check

    assert [finding.message for finding in check(run.bundle, run.policy) if not finding.ok] == []
    labels = summarize(run.bundle, run.policy).labels
    assert min(labels[label] for label in (names.GOOD, names.LATE, names.WRONG, names.DROPPED)) > 0
    again = open_source(write_bundle(run.bundle.path.parent, N, seed=3).path)
    assert again.verdicts.equals(run.verdicts)


def test_every_request_is_in_one_cell(run: Source) -> None:
    for measure, column in chosen.MEASURES.items():
        for by in heat.BY:
            cells = heat.cells(run, Chosen(measure=measure), by)
            assert sum(c["n"] for c in cells) == run.ask(f"SELECT count({column}) AS n FROM rows")[0]["n"]
            assert len(cells) <= heat.MAX_CELLS
            assert all(c["low_s"] < c["high_s"] and c["from_s"] < c["to_s"] for c in cells)


def test_a_cell_says_what_most_of_its_requests_are(run: Source) -> None:
    cell = heat.cells(run, Chosen(), "outcome")[0]
    inside = Chosen(from_s=cell["from_s"], to_s=cell["to_s"], low_s=cell["low_s"], high_s=cell["high_s"])
    counts = chosen.counted(run, inside)
    assert sum(counts.values()) == cell["n"]
    assert counts[cell["name"]] == max(counts.values()) == cell["of"]


def test_chosen_labels_count_as_the_summary_does(run: Source) -> None:
    labels = summarize(run.bundle, run.policy).labels
    assert chosen.counted(run, Chosen()) == {label: n for label, n in labels.items() if n}
    late = chosen.counted(run, Chosen(label=names.LATE, replica=REPLICAS[1]))
    both = chosen.counted(run, Chosen(label=names.LATE))
    assert 0 < late[names.LATE] < both[names.LATE] == labels[names.LATE]


def test_the_dominant_phase_is_the_largest_part(run: Source) -> None:
    table = phases.row_parts(run.bundle.table("requests"))
    parts = np.stack([table.column(f"{name}_s").to_numpy() for name in phases.E2E_PARTS])
    largest = [phases.E2E_PARTS[k] for k in parts.argmax(axis=0)]
    found = {row["index"]: row["phase"] for row in run.ask('SELECT "index", phase FROM rows WHERE phase IS NOT NULL')}
    assert found == dict(zip(table.column("index").to_pylist(), largest, strict=True))
    assert set(PART_SQL) == set(phases.E2E_PARTS)
    assert all(name in DOMINANT_SQL for name in PART_SQL)


def test_bars_of_a_request_end_where_it_ended(run: Source, small: Source) -> None:
    for source in (run, small):
        rows = timeline.in_flight(source, Chosen(), 0.0, 1e9)
        assert timeline.ROWS_SHOWN / 2 < len(rows) <= timeline.ROWS_SHOWN
        bars = timeline.bars(rows)
        for row in rows:
            own = [bar for bar in bars if bar["index"] == row["index"]]
            assert own[0]["start_s"] == row["intended_s"]
            assert own[-1]["end_s"] == pytest.approx(row["end_s"], abs=2e-9 * len(own))
    assert timeline.how_many(run, Chosen(), 0.0, 1e9) == N


def test_only_requests_in_flight_are_shown(run: Source) -> None:
    rows = timeline.in_flight(run, Chosen(), 20.0, 1.0)
    assert rows
    assert all(row["intended_s"] < 21.0 and row["end_s"] >= 20.0 for row in rows)


def test_the_engines_clock_is_found_within_what_is_said(run: Source) -> None:
    clocks = {clock.replica: clock for clock in timeline.clocks(run)}
    assert set(clocks) == set(REPLICAS)
    for replica, truth in zip(REPLICAS, big_bundle._CLOCK_S, strict=True):
        found = clocks[replica]
        assert abs(found.offset_s + truth) <= found.uncertainty_s + 1e-6
        assert found.uncertainty_s < 0.001


def test_a_log_of_other_requests_has_no_place_on_the_clock(small: Source) -> None:
    """tests.bundles gives steps whose times have nothing to do with the requests."""
    assert timeline.clocks(small)[0].uncertainty_s > 1.0


def test_the_strip_counts_who_was_in_the_batch(run: Source) -> None:
    clock = timeline.clocks(run)[0]
    step = run.ask("SELECT step, start_ns, running FROM steps WHERE replica = $r ORDER BY running DESC LIMIT 1",
                   r=clock.replica)[0]  # fmt: skip
    at = step["start_ns"] / 1e9 + clock.offset_s
    shown = timeline.strip(run, clock, at - 0.5, at + 0.5)
    assert len(shown) <= timeline.STRIP_BINS
    assert max(row["running"] for row in shown) == step["running"]
    inside = run.ask(
        "SELECT count(*) AS n FROM requests WHERE replica = $r AND step_first <= $s AND step_last >= $s",
        r=clock.replica, s=step["step"],
    )[0]["n"]  # fmt: skip
    assert inside == step["running"]
    wide = timeline.strip(run, clock, 0.0, 1e4)
    assert len(wide) <= timeline.STRIP_BINS + 1
    total = run.ask("SELECT count(*) AS n FROM steps WHERE replica = $r", r=clock.replica)[0]["n"]
    assert sum(row["steps"] for row in wide) == total


def test_steps_by_batch_and_context_hold_every_step_of_the_run(run: Source) -> None:
    clock = timeline.clocks(run)[0]
    total = run.ask("SELECT count(*) AS n FROM steps WHERE replica = $r", r=clock.replica)[0]["n"]
    for rows in (engine_steps.by_batch(run, clock), engine_steps.by_context(run, clock)):
        assert sum(row["n"] for row in rows) == total
        assert all(row["low_ms"] <= row["mid_ms"] <= row["high_ms"] for row in rows)
        assert all(row["floor_ms"] < row["mid_ms"] for row in rows)
    assert sum(row["steps"] for row in engine_steps.through_run(run, clock)) == total


def test_the_slow_replica_is_named_and_small_groups_are_not(run: Source) -> None:
    groups = who.hit(run, most=20)
    assert all(group.n >= who.MIN_GROUP and group.low > 0 for group in groups)
    counted = {
        (row["replica"], row["label"]): row["n"]
        for row in run.ask("SELECT replica, label, count(*) AS n FROM rows GROUP BY ALL")
    }
    bad = (names.LATE, names.WRONG, names.DROPPED)
    for group in groups:
        if group.dimension == "replica":
            assert group.bad == sum(counted.get((group.name, label), 0) for label in bad)
    assert groups, "a surge on two unequal replicas hits some groups harder"


def test_examples_are_bad_ones_one_of_each_kind_first(run: Source) -> None:
    found = who.examples(run)
    bad = {label for label in (names.LATE, names.WRONG, names.DROPPED) if chosen.counted(run, Chosen(label=label))}
    assert len(found) == 3
    assert {row["label"] for row in found} == bad
    late = next(row for row in found if row["label"] == names.LATE)
    assert late["e2e_s"] == run.ask("SELECT max(e2e_s) AS t FROM rows WHERE label = 'late'")[0]["t"]


def test_the_phase_of_the_late_is_the_one_that_the_summary_blames(run: Source, small: Source) -> None:
    for source in (run, small):
        phase = who.late_phase(source)
        assert f"late, mostly {phase}" in summarize(source.bundle, source.policy).sentence


def test_nobody_is_hit_where_all_is_good(tmp_path: Path) -> None:
    run = open_source(made(tmp_path, [answered_row(k, 1.0 + k) for k in range(40)]))
    assert who.hit(run) == []
    assert who.since(run) == []
    assert who.examples(run) == []
    assert who.late_phase(run) is None


@given(st.integers(0, 400), st.integers(1, 400))
def test_an_interval_holds_the_share(bad: int, more: int) -> None:
    low, high = who.interval(bad, bad + more)
    assert 0 <= low <= bad / (bad + more) <= high <= 1


def test_since_when_is_the_first_of_the_bad(run: Source) -> None:
    for moment in who.since(run):
        times = run.ask("SELECT intended_s AS t FROM rows WHERE label = $label ORDER BY t", label=moment["label"])
        assert (moment["n"], moment["first_s"], moment["last_s"]) == (len(times), times[0]["t"], times[-1]["t"])


def test_drops_by_reason_are_those_of_the_summary(run: Source) -> None:
    expected = summarize(run.bundle, run.policy).reasons[names.DROPPED]
    assert {row["reason"]: row["n"] for row in drops.reasons(run)} == expected
    assert sum(row["n"] for row in drops.over_time(run)) == sum(expected.values())
    assert {row["what"] for row in drops.queue_over_time(run)} == {"waiting", "running"}


def test_attempts_count_every_request_once(run: Source) -> None:
    rows = drops.attempts(run)
    assert sum(row["n"] for row in rows) == N
    found = drops.amplification(run)
    assert found["attempts"] == sum(row["attempts"] * row["n"] for row in rows)
    assert found["factor"] == pytest.approx(found["attempts"] / N)


def test_other_deadlines_move_labels_as_the_command_line_would(run: Source) -> None:
    own = judged_anew.figures(run.policy)
    assert own["default"]["ttft"] == 1.0
    policy = judged_anew.changed(run.policy, {"default": {"ttft": 0.2}})
    assert policy.classes["default"].ttft_base == 0.2
    assert policy.classes["default"].gap == run.policy.classes["default"].gap
    after = open_source(run.bundle.path, policy)
    found = judged_anew.moves(run, after)
    assert sum(found.moves.values()) == sum(found.before.values()) == sum(found.after.values()) == N
    assert found.before == summarize(run.bundle, run.policy).labels
    assert found.after == summarize(run.bundle, policy).labels
    assert found.changed > 0
    assert judged_anew.moves(run, run).changed == 0


def test_steps_of_one_request_are_those_of_its_numbers(run: Source) -> None:
    index = run.ask('SELECT "index" AS i FROM rows WHERE step_last - step_first > 20 ORDER BY i LIMIT 1')[0]["i"]
    row = one_request.find(run, index)
    assert row is not None
    steps = one_request.steps_of(run, row)
    assert [step["step"] for step in steps] == list(range(row["step_first"], row["step_last"] + 1))
    device = one_request.device_of(run, row)
    assert device["took_s"] == pytest.approx(sum(step["took_s"] for step in steps))
    assert device["prefill_tokens"] == sum(step["prefill_tokens"] for step in steps)
    seen = one_request.layers(row, device, run.policy)
    assert list(dict.fromkeys(s.layer for s in seen)) == list(one_request.LAYERS)
    assert one_request.find(run, N + 5) is None


def test_a_request_that_was_refused_was_seen_by_the_application_alone(tmp_path: Path) -> None:
    run = open_source(made(tmp_path, [dropped_row(0)]))
    row = one_request.find(run, 0)
    assert row is not None
    layers = {seen.layer for seen in one_request.layers(row, one_request.device_of(run, row), run.policy)}
    assert one_request.ENGINE not in layers
    assert one_request.DEVICE not in layers
    assert timeline.parts_of(row)


def test_a_long_request_is_drawn_from_some_steps_and_told_from_all(run: Source) -> None:
    row = one_request.find(run, 5)
    assert row is not None
    row |= {"step_first": 0, "step_last": 10_000}  # as a request of the whole run would
    total = run.ask("SELECT count(*) AS n FROM steps WHERE replica = $r", r=row["replica"])[0]["n"]
    assert 600 < one_request.device_of(run, row)["steps"] == total
    assert 0 < len(one_request.steps_of(run, row)) <= 600


def test_spans_of_a_request_are_its_own(small: Source) -> None:
    row = one_request.find(small, 3)
    assert row is not None
    spans = one_request.spans_of(small, row)
    assert {span["service"] for span in spans} == {"loadgen", "tailspan"}
    assert all(span["from_s"] >= 0 and isinstance(span["attributes"], dict) for span in spans)


def test_a_waterfall_ends_at_b_and_hides_nothing(run: Source, small: Source) -> None:
    a, b = (summarize(source.bundle, source.policy).phases[1] for source in (run, small))
    steps = pairs.waterfall(a, b)
    for shown in (steps, pairs.worth_showing(steps, 3)):
        assert shown[0].end_s == a.total_s
        assert shown[-1].end_s == b.total_s
        assert shown[-2].end_s == pytest.approx(b.total_s, abs=1e-9)
        assert sum(s.change_s for s in shown if not s.whole) == pytest.approx(b.total_s - a.total_s, abs=1e-9)


def test_only_what_was_run_differently_is_told(tmp_path: Path) -> None:
    one, two = make_bundle(tmp_path, n=40, seed=1), make_bundle(tmp_path, n=40, seed=1)
    assert pairs.differences(one.manifest, two.manifest) == []
    two.update(versions={"tailspan": "0.2.0"}, seeds={"schedule": 9})
    assert pairs.differences(one.manifest, two.manifest) == [
        ("versions tailspan", "0.1.0", "0.2.0"), ("seeds schedule", "1", "9")
    ]  # fmt: skip


def test_the_run_before_of_the_same_trace_is_compared_with(tmp_path: Path) -> None:
    def named(run_id: str, trace: str, status: str = "complete") -> Path:
        bundle = make_bundle(tmp_path / run_id, n=30, seed=1)
        path = bundle.path.rename(tmp_path / run_id / run_id)
        manifest = json.loads((path / "manifest.json").read_text())
        manifest |= {"trace": {"name": trace}, "status": status, "run_id": run_id, "created_unix_ns": int(run_id)}
        (path / "manifest.json").write_text(json.dumps(manifest))
        return path

    paths = [
        named("20260104", "a"),
        named("20260103", "a", "interrupted"),
        named("20260102", "b"),
        named("20260101", "a"),
    ]
    assert pairs.earlier_run(open_source(paths[0]).bundle, paths) == paths[3]
    assert pairs.earlier_run(open_source(paths[3]).bundle, paths) is None
    assert pairs.earlier_run(open_source(paths[2]).bundle, paths) is None


def test_the_earlier_of_runs_of_one_second_is_the_one_made_before(tmp_path: Path) -> None:
    """The end of a run id is drawn at random, so that names of one second have no order."""
    made = [make_bundle(tmp_path, n=10, seed=seed) for seed in range(6)]
    for before, bundle in itertools.pairwise(made):
        assert pairs.earlier_run(bundle, list_runs(tmp_path)) == before.path


def test_lengths_and_totals_of_the_traffic(run: Source) -> None:
    table = run.bundle.table("requests", ["input_tokens", "expected_output_tokens", "intended_s"])
    found = traffic.totals(run)
    assert found["n"] == N
    assert found["input_mean"] == pytest.approx(pc.mean(table.column("input_tokens")).as_py())
    gaps = np.diff(table.column("intended_s").to_numpy())
    assert found["cv"] == pytest.approx(gaps.std(ddof=1) / gaps.mean())
    rows = traffic.lengths(run)
    for kind in ("prompt", "answer"):
        assert sum(row["n"] for row in rows if row["kind"] == kind) == N
    assert sum(row["n"] for row in traffic.classes(run)) == N


def test_failed_checks_are_the_wrong_ones_of_the_summary(run: Source) -> None:
    expected = summarize(run.bundle, run.policy)
    totals = checks.totals(run)
    assert totals["wrong"] == expected.labels[names.WRONG]
    assert {row["wrong_kind"]: row["n"] for row in checks.kinds(run)} == expected.reasons[names.WRONG]
    assert totals["verified"] == 0
    assert checks.canaries(run) == []


def test_canaries_are_counted_by_kind_and_replica(tmp_path: Path) -> None:
    rows = [answered_row(k, 1.0 + k, canary_kind="golden", replica=f"r{k % 2}") for k in range(10)]
    rows[4]["prompt_tokens_reported"] += 1  # wrong
    found = checks.canaries(open_source(made(tmp_path, rows)))
    assert [(row["replica"], row["n"], row["wrong"]) for row in found] == [("r0", 5, 1), ("r1", 5, 0)]


def test_how_many_answers_must_be_checked() -> None:
    assert [checks.needed_to_see(rate) for rate in (0.05, 0.02, 0.01, 0.001)] == [124, 313, 628, 6294]
    assert checks.unseen_rate(0) is None
    assert checks.unseen_rate(299) == pytest.approx(0.01, abs=1e-4)


def test_a_run_under_way_says_how_things_stand(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=60, seed=1)
    found = under_way.progress(open_source(bundle.path))
    assert found["rows"] == 60
    assert 0 < found["recent"] <= 60
    gauges = {row["name"]: row for row in under_way.gauges(open_source(bundle.path))}
    series = bundle.table("series").to_pylist()
    last = max((s for s in series if s["name"] == names.M_RUNNING), key=lambda s: s["t_s"])
    assert gauges[names.M_RUNNING]["value"] == last["value"]


def test_a_live_run_is_read_from_its_parts_and_old_columns_are_null(tmp_path: Path, run: Source) -> None:
    live = open_source(make_bundle(tmp_path, n=40, seed=1, status="running").path)
    assert list((live.bundle.path / "requests").glob("*.arrow"))
    assert live.ask("SELECT count(*) AS n FROM rows")[0]["n"] == 40
    assert live.ask("SELECT count(floor_ttft_s) AS n FROM requests")[0]["n"] == 0
    empty = open_source(made(tmp_path / "empty", []))
    assert not empty.has("steps")
    assert not empty.has("requests")
    assert heat.cells(empty, Chosen(), "outcome") == []


def made(root: Path, rows: list[dict[str, object]]) -> Path:
    from telemetry.bundle import Bundle

    policy = slo.load("demo")
    bundle = Bundle.create(root, {"trace": "made"}, slo=policy.manifest_entry(), scheduled=len(rows))
    with bundle.writer("requests", "worker-0") as writer:
        for row in rows:
            writer.append(row)
    bundle.update(status="complete")
    return bundle.path
