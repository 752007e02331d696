"""`tailspan run` as a user runs it: real processes of ours and of Locust, real sockets, a scripted or a real server."""

from __future__ import annotations

import contextlib
import http.client
import json
import signal
import urllib.request
from pathlib import Path

import psutil
import pytest

from loadgen.locust_runner import free_port
from loadgen.plan import load_worker
from telemetry import names
from tests.loadgen.place import COUNT, LENGTH, WAIT_S, Place, chats, children, script, wait_for
from tests.loadgen.stub import StubThread, unused_port


def test_a_run_of_two_workers_sends_the_schedule_and_judges_every_request(place: Place, model: Path) -> None:
    with StubThread(script(model)) as stub:
        code, out, err = place.run(stub.url, "--workers", "2", "--json", "--name", "first")
        requests = chats(stub)
    assert code == 0, err
    summary = json.loads(out)
    assert summary["labels"][names.GOOD] == COUNT, summary
    bundle = place.bundle()
    rows = bundle.table("requests").to_pylist()
    assert [row["index"] for row in rows] == list(range(COUNT))
    assert {row["worker"] for row in rows} == {0, 1}
    assert all(row["prompt_tokens_reported"] == row["prompt_tokens_expected"] == row["input_tokens"] for row in rows)
    # One worker alone would have sent the same bytes at the same times.
    alone = list(load_worker(bundle.path / "plan.json", 0, 1)[1])
    assert sorted(request.body for request in requests) == sorted(call.body for call in alone)
    assert [row["intended_s"] for row in rows] == [call.intended_s for call in alone]
    zero = bundle.manifest["clock"]["zero_monotonic_ns"]
    planned = {call.body: call.intended_s for call in alone}
    errors = sorted((request.t_ns - zero) / 1e9 - planned[request.body] for request in requests)
    assert errors[0] > 0, "nothing is sent before its time"
    assert errors[len(errors) // 2] < 0.25
    manifest = bundle.manifest
    assert (manifest["status"], manifest["scheduled"], manifest["name"]) == ("complete", COUNT, "first")
    assert [worker["status"] for worker in manifest["workers"]] == ["ok", "ok"]
    assert manifest["trace"]["rows_read"] == manifest["trace"]["rows_kept"] == COUNT
    assert manifest["plan"]["served_model"] == "stub"
    assert manifest["generator"]["cpu_ratio"] > 0
    assert manifest["validity"]["verdict"] == names.VALID
    assert manifest["spans"]["client"] > COUNT
    series = set(bundle.table("series").column("name").to_pylist())
    assert names.M_CLIENT_CPU in series


def test_a_port_where_nobody_listens_drops_all_and_says_refused(place: Place) -> None:
    code, out, err = place.run(f"http://127.0.0.1:{unused_port()}", "--json")
    assert code == names.EXIT_SLO_BROKEN, err
    summary = json.loads(out)
    assert summary["labels"][names.DROPPED] == COUNT
    assert summary["reasons"][names.DROPPED] == {names.REFUSED: COUNT}
    assert "Traceback" not in err
    assert "no answer" in err


@pytest.mark.parametrize("victim", ["loadgen.sender", "--worker"])
def test_a_killed_worker_makes_the_run_incomplete_in_bounded_time(place: Place, model: Path, victim: str) -> None:
    with StubThread(script(model, wait=0.2)) as stub:
        process = place.start(stub.url, "--workers", "2", "--json")
        wait_for(lambda: len(chats(stub)) >= 10, "request")
        children(process, victim)[0].kill()
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == names.EXIT_RUN_NOT_VALID, err
    assert "is lost" in err
    bundle = place.bundle()
    assert bundle.status == "incomplete"
    assert sorted(worker["status"] for worker in bundle.manifest["workers"]) == ["lost", "ok"]
    summary = json.loads(out)
    assert summary["validity"]["verdict"] == names.INCOMPLETE
    assert sum(summary["labels"].values()) == COUNT
    assert summary["reasons"][names.INVALID].get(names.WORKER_LOST, 0) > 0
    survivor = {row["index"] % 2 for row in bundle.table("requests").to_pylist() if row["intended_s"] > 2.5}
    assert len(survivor) == 1, "the other worker went on to the end"


def test_a_server_that_dies_in_mid_run_ends_the_run_with_reasons(place: Place, model: Path) -> None:
    with StubThread(script(model, wait=0.2)) as stub:
        process = place.start(stub.url, "--json")
        wait_for(lambda: len(chats(stub)) >= 15, "request")
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == names.EXIT_SLO_BROKEN, err
    summary = json.loads(out)
    assert summary["labels"][names.DROPPED] + summary["labels"][names.GOOD] == COUNT
    reasons = summary["reasons"][names.DROPPED]
    assert reasons[names.REFUSED] > 10
    assert set(reasons) <= {names.REFUSED, names.RESET, names.STREAM_CUT}
    assert place.bundle().status == "complete"


def test_ctrl_c_leaves_a_readable_interrupted_bundle(place: Place, model: Path) -> None:
    with StubThread(script(model, wait=0.3)) as stub:
        process = place.start(stub.url, "--json")
        wait_for(lambda: len(chats(stub)) >= 10, "request")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == names.EXIT_INTERRUPTED, err
    assert "Traceback" not in err
    bundle = place.bundle()
    assert bundle.status == "interrupted"
    rows = bundle.table("requests").num_rows
    assert 10 <= rows < COUNT
    assert json.loads(out)["validity"]["verdict"] == names.INCOMPLETE


def test_kill_9_of_the_parent_leaves_no_process_and_all_rows_but_the_last_second(place: Place, model: Path) -> None:
    with StubThread(script(model)) as stub:
        process = place.start(stub.url)
        wait_for(lambda: len(chats(stub)) >= 20, "request")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(children(process, "locust")) == 2, "master and worker"
        assert len(children(process, "loadgen.sender")) == 1
        sent = len(chats(stub))
        process.kill()
        process.communicate(timeout=WAIT_S)
        _, alive = psutil.wait_procs(family, timeout=15)
    assert not alive
    bundle = place.bundle()
    assert bundle.table("requests").num_rows >= sent - COUNT / LENGTH
    assert bundle.compact()


def test_the_stop_button_of_the_web_page_ends_the_run(place: Place, model: Path) -> None:
    with StubThread(script(model, wait=0.2)) as stub:
        process = place.start(stub.url, "--web-ui", "--speed", "0.2", "--json")
        wait_for(lambda: len(chats(stub)) >= 5, "request")
        bundle = place.bundle()
        master = children(process, "--master")[0].cmdline()
        page = f"http://127.0.0.1:{master[master.index('--web-port') + 1]}"
        with urllib.request.urlopen(page, timeout=10) as answer_:
            assert answer_.status == 200
        with contextlib.suppress(http.client.RemoteDisconnected):  # the page goes with the run
            urllib.request.urlopen(f"{page}/stop", data=b"", timeout=30).close()
        _, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == names.EXIT_INTERRUPTED, err
    assert "stopped from the web page" in err
    bundle.reload()
    assert bundle.status == "interrupted"
    assert 5 <= bundle.table("requests").num_rows < COUNT


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--trace", "absent"], ["no trace of that name", "remedy"]),
        (["--slo", "absent.yaml"], ["absent.yaml", "remedy"]),
        (["--slo", "broken.yaml"], ["broken.yaml:2", "remedy"]),
        (["--trace", "broken.csv"], ["broken.csv:2", "remedy"]),
        (["--model", "absent"], ["absent", "remedy"]),
        (["--speed", "0"], ["--speed", "remedy"]),
        (["--workers", "0"], ["--workers", "remedy"]),
        (["--no-such-option"], ["no-such-option", "remedy"]),
        (["--api-key-env", "TAILSPAN_NOT_SET"], ["TAILSPAN_NOT_SET is not set", "remedy"]),
        (["--fit", "0.5"], ["--fit", "remedy"]),
    ],
)
def test_what_cannot_be_used_is_refused_before_a_bundle_exists(
    place: Place,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    words: list[str],
) -> None:
    import tailspan

    monkeypatch.chdir(place.folder)
    (place.folder / "broken.yaml").write_text("name: x\nclassses: {}\n", encoding="utf-8")
    (place.folder / "broken.csv").write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nx,y,z\n", encoding="utf-8")
    base = ["run", "--target", "http://127.0.0.1:1", "--trace", str(place.trace), "--model", str(place.model)]
    code = tailspan.main([*base, "--runs", str(place.runs), *options])
    err = capsys.readouterr().err
    assert code == names.EXIT_USAGE
    assert "Traceback" not in err
    for word in words:
        assert word in err
    assert not place.runs.exists()


def test_a_dry_run_prints_what_would_be_sent_and_sends_nothing(
    place: Place, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import tailspan

    with StubThread(script(model)) as stub:
        base = ["run", "--target", stub.url, "--trace", str(place.trace), "--model", str(place.model)]
        assert tailspan.main([*base, "--runs", str(place.runs), "--rate-scale", "0.5", "--dry-run", "--json"]) == 0
        assert not chats(stub)
    shown = json.loads(capsys.readouterr().out)
    assert shown["plan"]["requests"] < COUNT
    assert [record["name"] for record in shown["transforms"]] == ["window", "rate_scale"]
    assert shown["first"][0]["body"]["messages"][0]["role"] == "user"
    assert not place.runs.exists()


def test_the_real_engine_is_replayed_with_phases_steps_and_spans(place: Place, model: Path) -> None:
    port = free_port()
    receiver = free_port()
    url = f"http://127.0.0.1:{port}"
    words = ["--model", str(model), "--port", str(port), "--threads", "1"]
    engine = place.start("", *words, "--otlp-endpoint", f"http://127.0.0.1:{receiver}", command="serve")
    try:
        wait_for(lambda: answers(f"{url}/health/ready"), "engine")
        code, out, err = place.run(url, "--fit", "0.2", "--otlp-port", str(receiver), "--json")
        assert code in (0, names.EXIT_SLO_BROKEN, names.EXIT_RUN_NOT_VALID), err  # a random model writes nonsense
        assert "token/s decode" in err
        bundle = place.bundle()
        table = bundle.table("requests")
        assert bundle.status == "complete"
        assert table.column("error").null_count == table.num_rows == json.loads(out)["attempted"]
        phases = [table.column(f"phase_{phase}_s").to_pylist() for phase in names.PHASES]
        for duration, *parts in zip(table.column("server_duration_s").to_pylist(), *phases, strict=True):
            assert sum(parts) == pytest.approx(duration, abs=1e-6)
        assert bundle.table("steps").num_rows > 0
        assert names.SERVER_SPAN in bundle.table("spans").column("name").to_pylist()
        assert names.M_RUNNING in bundle.table("series").column("name").to_pylist()
        fit = next(record for record in bundle.manifest["transforms"] if record["name"] == "fit")
        assert fit["speed"]["prefill_per_s"] > 0
    finally:
        engine.send_signal(signal.SIGINT)
        engine.communicate(timeout=WAIT_S)


def test_a_simulated_server_is_named_as_such_from_terminal_to_bundle(place: Place, model: Path) -> None:
    url = f"http://127.0.0.1:{(port := free_port())}"
    words = ["--model", str(model), "--port", str(port), "--backend", "simulated", "--device", "h100", "--no-spans"]
    engine = place.start("", *words, command="serve")
    try:
        wait_for(lambda: answers(f"{url}/health/ready"), "engine")
        code, out, err = place.run(url)
    finally:
        engine.send_signal(signal.SIGINT)
        said, _log = engine.communicate(timeout=WAIT_S)
    assert code in (0, names.EXIT_SLO_BROKEN, names.EXIT_RUN_NOT_VALID), err
    label = f"{model.name} bf16 on H100, step times: iron law"
    assert f"SIMULATED: {label}" in said
    shown = " ".join((out + err).split())  # long lines are wrapped
    assert shown.count(f"SIMULATED: {label}") == 2  # what was found before the run, and beside the verdict
    bundle = place.bundle()
    assert bundle.manifest["simulated"] == bundle.manifest["server"][url]["simulated"] == label
    assert set(bundle.table("steps").column("simulated").to_pylist()) == {True}


def answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer_:
            return bool(answer_.status == 200)
    except OSError:
        return False
