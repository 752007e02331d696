"""SLOs as OpenSLO documents and as Prometheus rules: round trips, promtool's word, and alerts that fire when they
must."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

import tailspan
from models.errors import UserError
from telemetry import burn_rate, names, slo
from telemetry.judged import bad_requests, judge_objectives
from telemetry.objective import parse_sentence
from telemetry.openslo import from_openslo, to_openslo
from telemetry.prometheus_rules import duration, not_exported, ratio_of, rules, slug, text
from tests.bundles import answered_row, dropped_row
from tests.telemetry.test_summary import bundle_of

EXPORTABLE = ("chat", "batch", "demo")


@pytest.fixture(scope="module")
def promtool() -> str:
    found = shutil.which("promtool")
    if found is None:
        assert not os.environ.get("CI"), "promtool is missing: apt-get install prometheus"
        pytest.skip("promtool is missing: apt-get install prometheus")
    return found


# --- OpenSLO ---


@pytest.mark.parametrize("name", EXPORTABLE)
def test_out_and_in_again_judges_alike(name: str) -> None:
    policy = slo.load(name)
    back = slo.parse(from_openslo(to_openslo(policy), "x.yaml"), "x.yaml")
    assert back.hash == policy.hash
    assert back.period_s == policy.period_s and back.classes == policy.classes


def test_documents_have_the_shape_of_the_specification() -> None:
    documents = list(yaml.safe_load_all(to_openslo(slo.load("chat"))))
    assert len(documents) == 5
    for document in documents:
        assert document["apiVersion"] == "openslo/v1" and document["kind"] == "SLO"
        assert (
            len(document["metadata"]["name"]) <= 63
            and slug(document["metadata"]["name"]) == document["metadata"]["name"]
        )
        spec = document["spec"]
        assert set(spec) == {"description", "service", "indicator", "timeWindow", "budgetingMethod", "objectives"}
        ratio = spec["indicator"]["spec"]["ratioMetric"]
        assert ratio["counter"] is True and set(ratio) == {"counter", "good", "total"}
        assert 0 < spec["objectives"][0]["target"] < 1
    goodput = documents[0]["spec"]
    assert goodput["objectives"][0]["target"] == 0.95
    assert goodput["timeWindow"] == [{"duration": "30d", "isRolling": True}]
    query = goodput["indicator"]["spec"]["ratioMetric"]["good"]["metricSource"]["spec"]["query"]
    assert query == 'sum(tailspan_requests_total{outcome="good"})'


def test_an_or_cannot_be_exported_and_what_has_no_metric_is_named() -> None:
    with pytest.raises(UserError, match="joins objectives by OR"):
        to_openslo(slo.load("code"))
    voice = to_openslo(slo.load("voice"))
    assert "# fluidity p5 >= 95 %: no metric carries it" in voice
    only = slo.parse("classes: {default: {gap_s: 1}}\nobjectives: [gap p95 <= 1 s]", "g.yaml")
    with pytest.raises(UserError, match="no objective has a metric"):
        to_openslo(only)


FOREIGN = """\
apiVersion: openslo/v1
kind: Service
metadata: {name: chat}
spec: {description: of somebody else}
---
apiVersion: openslo/v1
kind: SLO
metadata: {name: availability}
spec:
  service: chat
  indicatorRef: ok-answers
  timeWindow: [{duration: 4w, isRolling: true}]
  budgetingMethod: Occurrences
  objectives: [{target: 0.99}]
---
apiVersion: openslo/v1
kind: SLI
metadata: {name: ok-answers}
spec:
  ratioMetric:
    good: {metricSource: {type: Prometheus, spec: {query: 'sum(http_requests_total{code!~"5.."})'}}}
    total: {metricSource: {type: Prometheus, spec: {query: sum(http_requests_total)}}}
---
apiVersion: openslo/v1
kind: SLO
metadata: {name: first-token}
spec:
  service: chat
  indicator:
    spec:
      ratioMetric:
        good: {metricSource: {spec: {query: 'sum(vllm:time_to_first_token_seconds_bucket{le="2.5"})'}}}
        total: {metricSource: {spec: {query: sum(vllm:time_to_first_token_seconds_count)}}}
  timeWindow: [{duration: 4w, isRolling: true}]
  objectives: [{targetPercent: 95}]
---
apiVersion: openslo/v1
kind: SLO
metadata: {name: whole}
spec:
  service: chat
  indicator:
    spec:
      thresholdMetric:
        metricSource:
          type: Prometheus
          spec: {query: 'histogram_quantile(0.9, sum by (le) (rate(vllm:e2e_request_latency_seconds_bucket[5m])))'}
  objectives: [{op: lte, value: 30, target: 0.99}]
"""


def test_documents_of_others_are_read_by_their_metric() -> None:
    policy = slo.parse(from_openslo(FOREIGN, "f.yaml"), "f.yaml")
    assert [one.text for one in policy.objectives] == ["dropped <= 1 %", "ttft p95 <= 2.5 s", "e2e p90 <= 30 s"]
    assert policy.name == "chat" and policy.period_s == 28 * 86_400


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("http_requests_total{code!~\"5..\"}", "things_total", 6, "cannot tell what 'good' counts"),
        ("indicatorRef: ok-answers", "indicatorRef: other", 6, "'other' is not in this file"),
        ("target: 0.99}]\n---", "target: 99}]\n---", 6, "target 99"),
        ("kind: Service", "kind: Servce", 1, "kind 'Servce'"),
        ("op: lte", "op: gte", 37, "cannot tell which time"),
        ("4w, isRolling: true}]\n  budgeting", "7d, isRolling: true}]\n  budgeting", 24, "several time windows"),
    ],
)  # fmt: skip
def test_what_is_not_understood_is_refused_with_its_line(old: str, new: str, line: int, said: str) -> None:
    assert FOREIGN.count(old) == 1
    with pytest.raises(UserError) as caught:
        from_openslo(FOREIGN.replace(old, new), "f.yaml")
    assert said in caught.value.message and caught.value.where == f"f.yaml:{line}" and caught.value.remedy


@pytest.mark.parametrize("junk", ["", "a: [", "- 1", "apiVersion: openslo/v1alpha\nkind: SLO", "kind: SLO", "x: 1"])
def test_junk_is_refused(junk: str) -> None:
    with pytest.raises(UserError):
        from_openslo(junk, "j.yaml")


def test_the_commands_write_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, back = tmp_path / "sub" / "open.yaml", tmp_path / "back.yaml"
    assert tailspan.main(["slo", "export", "chat", "-o", str(out)]) == 0
    assert tailspan.main(["slo", "import", str(out), "-o", str(back)]) == 0
    assert slo.load(back).hash == slo.load("chat").hash
    assert tailspan.main(["slo", "import", str(tmp_path / "none.yaml")]) == 4
    assert "cannot be read" in capsys.readouterr().err


# --- Prometheus ---


def test_buckets_are_those_that_the_engine_has() -> None:
    ratio = ratio_of(parse_sentence("ttft p95 <= 2 s"))
    assert ratio is not None and ratio.note is not None
    bound = float(ratio.good.split('le="')[1].split('"')[0])
    assert bound in names.SECONDS_BUCKETS and bound <= 2
    queue = ratio_of(parse_sentence("queue p90 <= 500 ms"))
    assert queue is not None and queue.good == 'tailspan_request_phase_seconds_bucket{phase="queue",le="0.5"}'
    assert queue.total == 'tailspan_request_phase_seconds_count{phase="queue"}' and queue.note is None
    assert ratio_of(parse_sentence("gap p90 <= 500 ms")) is None
    assert ratio_of(parse_sentence("ttft p95 <= 2 s", "batch")) is None
    assert ratio_of(parse_sentence("ttft p95 <= 0.01 ms")) is None
    share = ratio_of(parse_sentence("dropped <= 1 %", "batch"))
    assert (
        share is not None
        and share.good == 'tailspan_requests_total{outcome!="dropped",outcome!="invalid",class="batch"}'
    )


@pytest.mark.parametrize("name", slo.presets())
def test_promtool_takes_the_rules(name: str, promtool: str, tmp_path: Path) -> None:
    policy = slo.load(name)
    file = tmp_path / "rules.yml"
    file.write_text(text(policy))
    done = subprocess.run([promtool, "check", "rules", str(file)], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    exported = [one for one in policy.objectives if ratio_of(one) is not None]
    assert len(rules(policy)["groups"]) == len(exported)
    for objective in policy.objectives:
        if objective not in exported:
            assert any(line.startswith(objective.sentence) for line in not_exported(policy))


SIMPLE = slo.parse("name: t\nclasses: {default: {}}\nobjectives: [goodput >= 99 %]", "t.yaml")


def test_promtool_sees_the_alerts_fire_and_stay_quiet(promtool: str, tmp_path: Path) -> None:
    """At 10 requests/s: 20 % bad burn 20 times too fast and alert in all windows; 0.5 % bad burn nothing."""
    found = rules(SIMPLE)
    for group in found["groups"]:
        for rule in group["rules"]:
            rule.pop("annotations", None)  # promtool would compare their words too
    (tmp_path / "rules.yml").write_text(yaml.safe_dump(found))

    def case(bad: int, fires: list[tuple[str, str]]) -> dict[str, Any]:
        labels = {"slo": "t", "objective": "goodput >= 99 %"}
        alerts = [{"exp_labels": {**labels, "severity": severity, "long_window": w}} for severity, w in fires]
        return {
            "interval": "1m",
            "input_series": [
                {"series": 'tailspan_requests_total{outcome="good"}', "values": f"0+{600 - bad}x90"},
                {"series": 'tailspan_requests_total{outcome="dropped"}', "values": f"0+{bad}x90"},
                {"series": 'tailspan_requests_total{outcome="invalid"}', "values": "0+500x90"},
            ],
            "alert_rule_test": [{"eval_time": "80m", "alertname": "TailspanBudgetBurn", "exp_alerts": alerts}],
        }

    every = [("page", "1h"), ("page", "6h"), ("ticket", "1d"), ("ticket", "3d")]
    without_good = case(600, every)  # nothing is good, so the series of the good ones never begins
    without_good["input_series"].pop(0)
    tests = {
        "rule_files": ["rules.yml"],
        "evaluation_interval": "1m",
        "tests": [case(120, every), case(3, []), without_good],
    }
    (tmp_path / "test.yml").write_text(yaml.safe_dump(tests))
    done = subprocess.run(
        [promtool, "test", "rules", "test.yml"], cwd=tmp_path, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_durations_as_prometheus_writes_them() -> None:
    assert [duration(s) for s in (300, 1800, 3600, 7200, 86_400, 259_200, 2_592_000, 90)] == [
        "5m", "30m", "1h", "2h", "1d", "3d", "30d", "90s",
    ]  # fmt: skip


# --- burn rates of a run ---


def test_the_four_alerts_are_those_of_the_sre_workbook() -> None:
    alerts = burn_rate.alerts_of(parse_sentence("goodput >= 99 %"), 30 * 86_400)
    assert [(a.long_s, a.short_s, pytest.approx(a.factor), a.severity) for a in alerts] == [
        (3600, 300, 14.4, "page"), (21_600, 1800, 6, "page"),
        (86_400, 7200, 3, "ticket"), (259_200, 21_600, 1, "ticket"),
    ]  # fmt: skip
    assert burn_rate.alerts_of(parse_sentence("wrong <= 0 %"), 30 * 86_400) == []
    # 14.4 times a budget of 10 % is more than all: that alert can never fire.
    assert burn_rate.alerts_of(parse_sentence("goodput >= 90 %"), 30 * 86_400)[0].long_s == 21_600


def fired(tmp_path: Path, rows: list[dict[str, Any]], policy: slo.Slo = SIMPLE) -> list[burn_rate.Fired]:
    bundle = bundle_of(tmp_path, rows)
    return burn_rate.replay(policy, bundle.table("requests"), bundle.verdicts(policy))


def bad_share(rows: list[dict[str, Any]], second: int) -> float:
    ended = [row for row in rows if row["end_s"] <= second]
    return sum(1 for row in ended if row.get("error")) / len(ended) if ended else 0.0


def test_which_alerts_would_have_fired_and_when(tmp_path: Path) -> None:
    """600 s at 1/s, all refused from 300 s on: the share over the run so far passes 1 %, 3 %, 6 % and 14.4 % in
    turn."""
    rows = [answered_row(i, float(i)) for i in range(300)] + [dropped_row(i, float(i)) for i in range(300, 600)]
    found = fired(tmp_path, rows)
    assert [(one.long_s, one.severity) for one in found] == [
        (259_200, "ticket"), (86_400, "ticket"), (21_600, "page"), (3600, "page"),
    ]  # fmt: skip
    for one in found:  # all windows are longer than what counts here: the share of bad among all that ended
        alert = next(a for a in burn_rate.alerts_of(SIMPLE.objectives[0], SIMPLE.period_s) if a.long_s == one.long_s)
        over = (second for second in range(1, 700) if bad_share(rows, second) > alert.threshold(SIMPLE.objectives[0]))
        assert one.first_s == next(over)
    assert found[-1].worst > 14.4


def test_a_healthy_run_fires_nothing_and_a_small_sample_none(tmp_path: Path) -> None:
    assert fired(tmp_path, [answered_row(i, float(i)) for i in range(100)]) == []
    guarded = slo.parse(
        "classes: {default: {}}\nobjectives: [{objective: goodput >= 99 %, min_requests: 500}]", "g.yaml"
    )
    assert fired(tmp_path, [dropped_row(i, float(i)) for i in range(100)], guarded) == []
    assert fired(tmp_path, [dropped_row(i, float(i)) for i in range(100)]) != []
    assert fired(tmp_path, []) == []


def test_the_budget_that_a_run_spent(tmp_path: Path) -> None:
    policy = slo.parse(
        "classes: {default: {}}\nobjectives: [goodput >= 90 %, ttft p95 <= 1 s, dropped <= 5 %, wrong <= 0 %]", "b.yaml"
    )
    rows = [answered_row(i, float(i)) for i in range(98)] + [dropped_row(98), dropped_row(99)]
    bundle = bundle_of(tmp_path, rows)
    judged = judge_objectives(policy, bundle.table("requests"), bundle.verdicts(policy))
    spent = [one.budget_spent for one in judged]
    assert spent[:3] == [pytest.approx(0.2), pytest.approx(0.4), pytest.approx(0.4)] and spent[3] is None
    assert judged[2].low == pytest.approx(0.0024, abs=1e-4) and judged[2].high == pytest.approx(0.0704, abs=1e-4)


def test_canaries_spend_no_budget_of_speed(tmp_path: Path) -> None:
    policy = slo.parse(
        "classes: {default: {ttft: {base_s: 9}, fluidity: {per_token_s: 1}}}\n"
        "objectives: [ttft p90 <= 1 s, fluidity p10 >= 90 %, dropped <= 10 %]",
        "c.yaml",
    )
    slow = {"first_token_s": 5.0, "last_token_s": 6.0, "end_s": 6.0, "chunk_s": [0.1, 99.0], "chunk_tokens": [1, 1]}
    rows = [answered_row(i, 0.5) for i in range(50)]
    rows += [answered_row(i, 0.5, canary_kind="golden", **slow) for i in range(50, 80)]
    bundle = bundle_of(tmp_path, rows)
    judged = judge_objectives(policy, bundle.table("requests"), bundle.verdicts(policy))
    assert [one.n for one in judged] == [50, 50, 80] and [one.budget_spent for one in judged] == [0, 0, 0]
    for objective, n in zip(policy.objectives, (50, 50, 80), strict=True):
        index, bad = bad_requests(objective, bundle.table("requests"), bundle.verdicts(policy))
        assert (len(index), int(bad.sum())) == (n, 0)


def test_requests_without_a_row_are_counted_as_they_were_judged(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [answered_row(3), dropped_row(5)], scheduled=8)
    for objective in slo.load("demo").objectives:
        index, bad = bad_requests(objective, bundle.table("requests"), bundle.verdicts(slo.load("demo")))
        assert set(index.tolist()) == {3, 5} and bad.sum() == (0 if objective.measure == "wrong" else 1)
