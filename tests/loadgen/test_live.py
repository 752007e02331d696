"""The live side of a run: /metrics of the master, the page, the clocks, retries end to end."""

from __future__ import annotations

import contextlib
import http.client
import json
import urllib.request
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.live import METRICS_FILE, Live, counted
from loadgen.progress import Totals
from telemetry import names, outcomes, slo
from telemetry.receiver import Receiver
from telemetry.schema import REQUESTS
from tests.bundles import make_bundle
from tests.loadgen.place import COUNT, WAIT_S, Place, chats, children, script, wait_for
from tests.loadgen.stub import Request, Step, StubThread, plain

BROKEN: list[Step] = [plain("500 Oops", {"error": {"message": "boom"}})]


def requests_total(text: str) -> dict[tuple[str, str, str, str], int]:
    """The outcome counter of an exposition."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == f"{names.M_OUTCOMES}_total":
                labels = sample.labels
                key = (labels["outcome"], labels["reason"], labels["class"], labels["replica"])
                found[key] = int(sample.value)
    return found


def get(url: str) -> str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return str(answer.read().decode())
    except OSError:
        return ""


def test_metrics_of_the_master_equal_the_bundle_at_the_end(place: Place, model: Path, tmp_path: Path) -> None:
    good = script(model)

    def play(request: Request) -> list[Step]:
        fails = request.path == "/v1/chat/completions" and request.number % 9 == 4
        return BROKEN if fails else good(request)

    with StubThread(play) as stub, Receiver(tmp_path / "collector") as collector:
        listen = ("--listen", "127.0.0.2", "--forward-spans", collector.url)
        process = place.start(stub.url, "--workers", "2", "--linger", "60", "--json", *listen)
        bundle = wait_for(lambda: place.runs.is_dir() and any(place.runs.glob("*/manifest.json")), "bundle")
        bundle = place.bundle()
        file = wait_for(lambda: bundle.path / METRICS_FILE if (bundle.path / METRICS_FILE).exists() else None, "end")
        assert process.stderr is not None
        line = next(line for line in process.stderr if line.startswith("metrics"))
        url = line.split()[1].rstrip(",")
        served = get(url)
        process.send_signal(2)  # ends the linger
        process.communicate(timeout=WAIT_S)
    assert served == file.read_text(encoding="utf-8")
    assert url.startswith("http://127.0.0.2:")
    rows = bundle.table("requests", ["index", "class", "replica"])
    bundle.reload()
    expected = dict(counted(rows, bundle.verdicts(slo.of_manifest(bundle.manifest))))
    assert requests_total(served) == expected
    assert sum(expected.values()) == COUNT and len({key[0] for key in expected}) >= 2
    figures = {s.name: s.value for family in text_string_to_metric_families(served) for s in family.samples}
    assert figures[f"{names.M_CLIENT_SENT}_total"] == COUNT
    assert figures[names.M_CLIENT_INFLIGHT] == 0
    assert figures[names.M_CLIENT_LAG_BOUND] == bundle.manifest["validity"]["figures"]["lag_bound_s"]
    [info] = [s for f in text_string_to_metric_families(served) for s in f.samples if s.name == names.M_RUN_INFO]
    assert info.labels["run"] == bundle.run_id and info.labels["slo"] == bundle.manifest["slo"]["name"]
    spans = bundle.manifest["spans"]
    assert spans["forwarded"] == {"sent": spans["received"], "dropped": 0} and spans["received"] == collector.spans > 0
    for worker in bundle.manifest["workers"]:
        clock = worker["clock"]
        assert clock["same_machine"] is True
        assert abs(clock["offset_ns"]) <= clock["round_trip_ns"] < 5e9


@pytest.mark.parametrize("preset", slo.presets())
def test_rows_are_judged_as_they_come_and_each_once(tmp_path: Path, preset: str) -> None:
    source = make_bundle(tmp_path / "made", n=120)
    rows = source.table("requests").to_pylist()
    rule = slo.load(preset)
    bundle = type(source).create(tmp_path / "live", {}, scheduled=len(rows))
    live = Live(bundle, rule, len(rows))
    writers = [bundle.writer("requests", f"worker-{n}") for n in range(2)]
    seen = []
    for place, row in enumerate(rows):
        writers[place % 2].append({key: value for key, value in row.items() if key in REQUESTS.names})
        if place % 17 == 0:
            writers[0].flush()
            live.update()
            seen.append(sum(live.counts.values()))
    for writer in writers:
        writer.close()
    live.update()
    live.update()
    assert sum(live.counts.values()) == len(rows) and seen == sorted(seen)
    bundle.update(status="complete")
    by_row = dict(live.counts)
    live.finish()
    assert dict(live.counts) == by_row
    assert dict(live.labels) == {k: v for k, v in outcomes.counts(bundle.verdicts(rule)).items() if v}
    assert "tailspan_requests_total" in live.exposition(Totals()).decode()
    assert {row["outcome"] for row in live.table()} == set(live.labels)


def test_the_page_of_locust_has_our_columns(place: Place, model: Path) -> None:
    with StubThread(script(model)) as stub:
        process = place.start(stub.url, "--web-ui", "--speed", "0.2", "--json")
        wait_for(lambda: len(chats(stub)) >= 5, "request")
        master = children(process, "--master")[0].cmdline()
        page = f"http://127.0.0.1:{master[master.index('--web-port') + 1]}"

        def rows() -> list[dict[str, Any]]:
            text = get(f"{page}/stats/requests")
            extended = json.loads(text).get("extended_stats", []) if text else []
            return extended[0]["data"] if extended else []

        found = wait_for(rows, "row of ours")
        assert {"outcome", "reason", "class", "replica", "requests"} <= set(found[0])
        assert "tailspan" in get(page)
        with contextlib.suppress(http.client.RemoteDisconnected):  # the page goes with the run
            urllib.request.urlopen(f"{page}/stop", data=b"", timeout=30).close()
        process.communicate(timeout=WAIT_S)


def test_a_plan_with_patience_writes_its_attempts(place: Place, model: Path) -> None:
    good = script(model)
    refused: set[bytes] = set()

    def play(request: Request) -> list[Step]:
        if request.path == "/v1/chat/completions" and request.body not in refused and len(refused) < 4:
            refused.add(request.body)
            return BROKEN
        return good(request)

    plan = place.folder / "plan.yaml"
    plan.write_text("patience: {retries: 1, backoff_s: 0.05, budget: 1.0}\n", encoding="utf-8")
    with StubThread(play) as stub:
        code, out, err = place.run(stub.url, "--json", "--", str(plan))
    assert code == 0, err
    summary = json.loads(out)
    assert summary["labels"][names.GOOD] == COUNT
    assert summary["retries"]["requests"] == COUNT
    assert summary["retries"]["attempts"] == COUNT + 4
    assert summary["retries"]["amplification"] > 1
    assert place.bundle().table("attempts").num_rows == COUNT + 4
