"""Cases of the load generator's design that end in a verdict, each by its number."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from models.tiny import write_tiny
from telemetry import names, slo
from telemetry.bundle import Bundle, newest
from telemetry.summary import summarize
from tests.bundles import answered_row
from tests.loadgen.place import ROOT, script
from tests.loadgen.stub import StubThread
from tests.telemetry.test_summary import bundle_of, text_of


def test_case_14_a_generator_on_one_core_asked_for_20000_rps_says_client_limited(tmp_path: Path) -> None:
    """Exit code 3, not 1: the server is not judged by what the client could not send."""
    if shutil.which("taskset") is None:
        pytest.skip("taskset is missing")
    model = write_tiny(tmp_path / "tiny")
    trace = tmp_path / "trace.csv"
    stamps = (f"2031-02-03 04:05:{n / 20_000:010.7f},40,2" for n in range(6000))
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *stamps]), encoding="utf-8")
    (tmp_path / "slo.yaml").write_text("classes: {default: {ttft: {base_s: 20}}}\nobjectives: [goodput >= 90 %]")
    core = str(min(os.sched_getaffinity(0)))
    with StubThread(script(model, wait=0.0)) as stub:
        words = [
            "taskset",
            "-c",
            core,
            sys.executable,
            "-m",
            "tailspan",
            "run",
            "--target",
            stub.url,
            "--trace",
            str(trace),
        ]
        words += ["--slo", "slo.yaml", "--model", str(model), "--otlp-port", "0", "--runs", str(tmp_path / "runs")]
        words += ["--summary", str(tmp_path / "s.md")]
        done = subprocess.run(
            words, cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(ROOT), "PYTHONSAFEPATH": "1"},
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip
    assert done.returncode == names.EXIT_RUN_NOT_VALID, done.stdout + done.stderr
    assert done.stdout.startswith("Run CLIENT_LIMITED")
    assert (tmp_path / "s.md").read_text().startswith("### tailspan: no verdict")
    path = newest(tmp_path / "runs")
    assert path is not None
    manifest = Bundle.open(path).manifest
    assert manifest["scheduled"] == 6000 and manifest["validity"]["verdict"] == "CLIENT_LIMITED"
    assert manifest["validity"]["figures"]["attempted"] == 6000  # late, not skipped


def test_case_17_300_requests_cannot_certify_p99(tmp_path: Path) -> None:
    bundle = bundle_of(tmp_path, [answered_row(i, i * 0.1) for i in range(300)])
    summary = summarize(bundle, slo.load("demo"))
    p99 = summary.latencies[0].scheduled[3]
    assert (p99.p, p99.n, p99.certified) == (99.0, 300, False)
    assert "cannot certify p99: n = 300, 662 needed" in text_of(summary)
    strict = slo.parse(
        "classes: {default: {}}\nobjectives: [{objective: ttft p99 <= 9 s, min_requests: certify}]", "c.yaml"
    )
    found = summarize(bundle, strict)
    assert found.decision == "undecided" and found.exit_code == names.EXIT_RUN_NOT_VALID
    assert "ttft p99 <= 9 s needs 662 requests, 300 there" in found.sentence
