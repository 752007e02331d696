"""A watch beside production: an injected clock, real spans through the real receiver, real bundles."""

from __future__ import annotations

import json
import random
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.preflight import Target
from loadgen.watch.explained import explained
from loadgen.watch.exposition import Exposition
from loadgen.watch.production import row_of
from loadgen.watch.retention import Kept, Retention, surplus
from loadgen.watch.verdict import BROKEN, HELD, Breaches, Look, Recent
from loadgen.watch.watch import BREACH_FILE, Settings, Watch
from telemetry import names, slo
from telemetry.bundle import Bundle, list_runs
from tests.loadgen.stub import StubThread, plain, unused_port
from tests.watch.traffic import ZERO, payload, request_span

SLO = """\
name: watched
classes:
  default: {ttft: {base_s: 1.0}}
objectives:
  - ttft p90 <= 1 s
"""


@pytest.fixture
def policy(tmp_path: Path) -> slo.Slo:
    file = tmp_path / "slo.yaml"
    file.write_text(SLO)
    return slo.load(str(file))


class Clock:
    """Time that passes as a test says, in production and in the watch alike."""

    def __init__(self, watch: Watch) -> None:
        self.watch, self.s, self.count = watch, 0.0, 0
        self.draw = random.Random(7)
        watch.start(0.0, ZERO)

    def run(self, seconds: float, rate: int = 4, **spans: Any) -> None:
        """Seconds of traffic, ``rate`` requests in each, then a tick; spans: of ``request_span``."""
        for _ in range(round(seconds)):
            sent = []
            for _ in range(rate):
                jitter = self.draw.uniform(0.8, 1.2)
                values = {"queue_s": 0.01, "prefill_s": 0.1, **spans}
                values["prefill_s"] *= jitter
                sent.append(request_span(self.count, self.s, **values))
                self.count += 1
            if sent:
                self.watch.receiver.take(payload(sent), "")
            self.s += 1.0
            self.watch.tick(self.s, ZERO + round(self.s * 1e9))


def watch_of(root: Path, policy: slo.Slo, explain: Any = None, url: str = "", **settings: Any) -> Watch:
    target = Target(url or f"http://127.0.0.1:{unused_port()}", True, True, ("m",), None, "here")
    chosen = {"period_s": 100.0, "look_s": 20.0, "judge_s": 5.0, "scrape_s": 1.0, **settings}
    return Watch(target, policy, Settings(root=root, **chosen), explain or (lambda good, bad: ({}, "said")))


def test_a_breach_is_seen_within_two_looks_and_its_comparison_lies_ready(tmp_path: Path, policy: slo.Slo) -> None:
    asked: list[tuple[Any, Any]] = []

    def explain(good: Any, bad: Any) -> tuple[dict[str, Any], str]:
        asked.append((good, bad))
        return explained(good, bad)

    watch = watch_of(tmp_path / "w", policy, explain)
    clock = Clock(watch)
    clock.run(60)
    assert watch.breaches.now is None and watch.look is not None and watch.look.decision == HELD
    clock.run(30, queue_s=3.0)
    breach = watch.breaches.now
    assert breach is not None and breach.seen_s - 60 <= 30
    (folder,) = (tmp_path / "w" / "breaches").iterdir()
    clock.run(25, queue_s=3.0)  # until there is enough to compare
    assert 45 <= breach.from_s <= 75  # about when it began
    assert "ttft p90" in breach.reason
    found = json.loads((folder / BREACH_FILE).read_text())
    assert found["explanation"]["label"] == "late"
    said = (folder / "breach.md").read_text()
    assert "ttft p90" in said and "approximate" in said and "queue" in said and "tailspan explain" in said
    (good, bad) = asked[0]
    good_rows = _rows(good)
    bad_rows = _rows(bad)
    assert max(row["phase_queue_s"] for row in good_rows) < 0.1 and len(good_rows) >= 60
    assert sum(row["phase_queue_s"] > 1 for row in bad_rows) >= len(bad_rows) / 2
    clock.run(60)
    assert watch.breaches.now is None and breach.until_s is not None and watch.breaches.count == 1
    watch.stop(clock.s)


def _rows(part: tuple[Bundle, float, float]) -> list[dict[str, Any]]:
    bundle, start, end = part
    return [row for row in bundle.table("requests").to_pylist() if start <= row["intended_s"] < end]


def test_windows_roll_and_every_request_is_in_one_of_them(tmp_path: Path, policy: slo.Slo) -> None:
    watch = watch_of(tmp_path / "w", policy, period_s=20.0, keep=100)
    clock = Clock(watch)
    clock.run(50, rate=3)
    watch.stop(clock.s)
    bundles = [Bundle.open(path) for path in list_runs(tmp_path / "w" / "windows")]
    assert len(bundles) == 3
    traces = [trace for one in bundles for trace in one.table("requests").column("trace_id").to_pylist()]
    assert len(traces) == len(set(traces)) == 150
    for one in bundles:
        assert one.status == "complete" and one.scheduled == one.table("requests").num_rows
        assert one.table("spans").num_rows == one.table("requests").num_rows
        starts = one.table("requests").column("intended_s").to_pylist()
        assert all(-1.0 <= start <= 20.0 for start in starts)
    assert not (tmp_path / "w" / "early").exists()


def test_disk_is_bounded_and_a_breach_keeps_its_windows(tmp_path: Path, policy: slo.Slo) -> None:
    watch = watch_of(tmp_path / "w", policy, period_s=25.0, keep=1)
    clock = Clock(watch)
    clock.run(26, rate=2)
    clock.run(70, rate=2, queue_s=3.0)
    (folder,) = (tmp_path / "w" / "breaches").iterdir()
    clock.run(300, rate=2)  # long enough for windows that no breach needs
    found = json.loads((folder / BREACH_FILE).read_text())
    for part in ("good", "bad"):
        if part in found:
            assert Path(found[part]["run"]).is_dir()
    watch.stop(clock.s)
    there = list_runs(tmp_path / "w" / "windows")
    assert len(there) <= 1 + 3 + 6 and watch.retention.deleted >= 1
    assert {one.path for one in watch.retention.windows} == set(there)


def test_verdicts_are_served_for_alerts(tmp_path: Path, policy: slo.Slo) -> None:
    watch = watch_of(tmp_path / "w", policy)
    clock = Clock(watch)
    exposition = Exposition(watch, 0)
    try:
        clock.run(30)
        quiet = _samples(exposition.url)
        clock.run(40, queue_s=3.0)
        loud = _samples(exposition.url)
    finally:
        exposition.close()
        watch.stop(clock.s)
    assert quiet["tailspan_watch_breach"] == 0 and loud["tailspan_watch_breach"] == 1
    assert loud["tailspan_watch_breaches_total"] == 1
    (value,) = (number for name, number in loud.items() if name.startswith("tailspan_watch_objective_value"))
    assert value > 3
    assert quiet['tailspan_watch_look_outcomes{outcome="good"}'] > 50
    assert loud["tailspan_watch_silence_seconds"] <= 1


def _samples(url: str) -> dict[str, float]:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    text = opener.open(url, timeout=10).read().decode()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.rpartition(" ")[0]: float(line.rpartition(" ")[2]) for line in lines}


def test_a_silent_server_is_no_breach_of_latency_but_its_silence_is_told(tmp_path: Path, policy: slo.Slo) -> None:
    watch = watch_of(tmp_path / "w", policy)
    clock = Clock(watch)
    clock.run(20)
    clock.run(50, rate=0)
    assert watch.breaches.now is None and watch.silence_s == 50
    watch.stop(clock.s)


def test_spans_that_are_sent_twice_are_one_request(tmp_path: Path, policy: slo.Slo) -> None:
    watch = watch_of(tmp_path / "w", policy)
    watch.start(0.0, ZERO)
    sent = payload([request_span(number, 0.0) for number in range(5)])
    for second in (1, 2):
        watch.receiver.take(sent, "")
        watch.receiver.take(sent, "")
        watch.tick(float(second), ZERO + second * 10**9)
    watch.stop(3.0)
    (path,) = list_runs(tmp_path / "w" / "windows")
    assert Bundle.open(path).scheduled == 5


def test_metrics_of_the_target_go_into_the_window(tmp_path: Path, policy: slo.Slo) -> None:
    with StubThread(lambda request: [plain("200 OK", b"vllm:num_requests_running 3\n")]) as stub:
        watch = watch_of(tmp_path / "w", policy, url=stub.url)
        clock = Clock(watch)
        clock.run(3)
        watch.stop(clock.s)  # a scraper reads once more when it stops
    (path,) = list_runs(tmp_path / "w" / "windows")
    series = Bundle.open(path).table("series").to_pylist()
    assert {row["name"] for row in series} == {"vllm:num_requests_running"}


# --- rows from spans ---
def _span(**changes: Any) -> dict[str, Any]:
    made = request_span(0, 5.0)
    attributes = {**made["attributes"], **changes}
    return {
        "trace_id": "t", "span_id": "s", "parent_span_id": None, "name": names.SERVER_SPAN, "service": "x",
        "start_unix_ns": made["start"], "end_unix_ns": made["end"], "status": "UNSET",
        "attributes": {key: value for key, value in attributes.items() if value is not None},
    }  # fmt: skip


def test_a_span_becomes_a_row_whose_phases_sum_to_its_time() -> None:
    row = row_of(_span(), 3, "http://x", ZERO)
    assert (row["index"], row["intended_s"], row["error"]) == (3, pytest.approx(5.0), None)
    assert row["first_token_s"] == pytest.approx(5.11) and row["tpot_s"] == pytest.approx(0.05)
    assert sum(row[f"phase_{name}_s"] for name in names.PHASES) == pytest.approx(row["server_duration_s"])


@pytest.mark.parametrize(
    ("told", "reason"),
    [
        ({names.ATTR_HTTP_STATUS: 429, names.ATTR_ERROR_TYPE: "queue_full"}, names.REJECTED),
        ({names.ATTR_HTTP_STATUS: 503}, names.REJECTED),
        ({names.ATTR_HTTP_STATUS: 500, names.ATTR_ERROR_TYPE: "engine_error"}, names.SERVER_ERROR),
        ({names.ATTR_HTTP_STATUS: 400, names.ATTR_ERROR_TYPE: "bad"}, names.BAD_REQUEST),
        ({names.ATTR_HTTP_STATUS: None, names.ATTR_ERROR_TYPE: "client_gone"}, names.CUT_BY_END),
        ({names.ATTR_ERROR_TYPE: names.KV_OOM, names.ATTR_HTTP_STATUS: 400}, names.KV_OOM),
    ],
)
def test_a_failed_span_has_a_reason(told: dict[str, Any], reason: str) -> None:
    row = row_of(_span(**told, **{names.ATTR_FINISH_REASONS: None}), 0, "http://x", ZERO)
    assert row["error"] == reason and row["finish_reason"] is None


# --- the parts ---
def _looks(decisions: str) -> Iterator[Look]:
    for at, letter in enumerate(decisions):
        decision = {"h": HELD, "b": BROKEN, "u": "undecided"}[letter]
        yield Look(10.0 * at, 20.0, 50, decision, (), {})


@pytest.mark.parametrize(
    ("decisions", "called"),
    [("hhhh", []), ("hbhh", []), ("hbbh", [2]), ("hbubb", [3]), ("bbbb", [1]), ("hbbhhbb", [2, 6]), ("uuuu", [])],
)
def test_one_broken_look_is_chance_and_two_are_a_breach(decisions: str, called: list[int]) -> None:
    breaches = Breaches()
    found = [at for at, look in enumerate(_looks(decisions)) if breaches.see(look) is not None]
    assert found == called


def test_a_look_forgets_what_is_old(policy: slo.Slo) -> None:
    recent = Recent(policy, 10.0)
    for second in range(30):
        recent.add(float(second), [row_of(_span(), 0, "http://x", ZERO)])
    assert recent.look(29.0).requests == 11
    assert recent.look(100.0).requests == 0


def test_surplus_takes_the_oldest_and_spares_what_a_breach_needs() -> None:
    windows = [Kept(Path(name), 10) for name in "abcde"]
    assert [one.path.name for one in surplus(windows, frozenset(), 3, 1000)] == ["a", "b"]
    assert [one.path.name for one in surplus(windows, frozenset("a"), 3, 1000)] == ["b"]
    # the disk counts more than a breach, but what nobody needs goes first
    assert [one.path.name for one in surplus(windows, frozenset("a"), 9, 20)] == ["b", "c", "d"]
    assert [one.path.name for one in surplus(windows, frozenset("abcd"), 9, 20)] == ["a", "b", "c"]


def test_retention_counts_what_is_there(tmp_path: Path) -> None:
    retention = Retention(2, 10**9)
    for name in "abc":
        folder = tmp_path / name
        folder.mkdir()
        (folder / "data").write_bytes(b"x" * 100)
        retention.closed(folder, frozenset())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"] and retention.bytes == 200
