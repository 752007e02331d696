"""The simulated backend: what it draws, what time it takes, and that everything it says is labelled."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from engine import simulated
from engine.backends import build
from engine.commands import serve_command
from engine.config import EngineConfig
from engine.core import Engine
from engine.detokenizer import TextStream
from engine.phase_clock import PhaseClock
from engine.request import Output, Request, SamplingParams
from engine.simulated import ANSWER_TOKENS, RealClock, SimulatedRunner, Simulation, open_reference, words
from engine.step_fit import StepFit
from engine.step_model import Noise
from engine.virtual import Arrival, VirtualClock, VirtualEngine
from loadgen import preflight
from models.devices import DEVICES
from models.errors import UserError
from models.known_shapes import SHAPES
from models.store import LoadedModel
from telemetry import names
from telemetry.slo import load as load_slo
from telemetry.summary import summarize
from tests.bundles import make_bundle
from tests.engine.serving import client, read_stream, serving, until

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SIMULATED: dict[str, Any] = {"backend": "simulated", "device": "H100", "dtype": "bf16"}
LABEL = "tiny bf16 on H100, step times: iron law"


def answer(
    model: LoadedModel, *, mates: int = 0, sim_seed: int = 0, budget: int = 64, **params: Any
) -> tuple[str, list[int]]:
    """Finish reason and tokens of one request beside some mates."""
    config = EngineConfig(**SIMULATED, kv_blocks=256, token_budget=budget, max_context=2048)
    rig = VirtualEngine(
        config,
        Simulation(
            replace(model, shape=replace(model.shape, max_context=2048)), DEVICES["H100"], "bf16", None, sim_seed
        ),
        keep=True,
    )
    for k in range(mates):
        rig.submit(Arrival(0, [9 + k] * 10, SamplingParams(50, seed=k)))
    settings = {"max_tokens": 40, "seed": 1, "ignore_eos": True, **params}
    request = rig.submit(Arrival(0, [7] * 30, SamplingParams(**settings)))
    assert request is not None
    rig.run()
    (life,) = [one for one in rig.lives if one.id == request.id]
    return life.reason, request.output_ids


def test_tokens_depend_on_seed_and_position_alone(tiny: LoadedModel) -> None:
    alone = answer(tiny)
    assert alone[0] == "length" and len(set(alone[1])) > 10
    assert answer(tiny, mates=5) == answer(tiny, mates=9, budget=32) == alone
    assert answer(tiny, sim_seed=5)[1] != alone[1] != answer(tiny, seed=2)[1]
    greedy = answer(tiny, temperature=0.0)
    assert greedy == answer(tiny, temperature=0.0, seed=9) and greedy != alone  # greedy: the prompt decides


def test_answers_are_text_and_end_by_themselves(tiny: LoadedModel) -> None:
    known = set(words(tiny.tokenizer, tiny.shape.vocab))
    lengths = []
    for seed in range(60):
        reason, tokens = answer(tiny, ignore_eos=False, max_tokens=1900, seed=seed + 1)
        assert reason == "stop" or len(tokens) == 1900
        lengths.append(len(tokens))
        *body, last = tokens
        assert set(body) <= known and (last in tiny.shape.eos_token_ids or reason == "length")
        stream = TextStream()
        assert "".join(stream.push(tiny.tokenizer.token_bytes(token)) for token in body).isprintable()
    assert 0.6 * ANSWER_TOKENS < sum(lengths) / len(lengths) < 1.5 * ANSWER_TOKENS


def test_no_answer_ends_below_min_tokens(tiny: LoadedModel) -> None:
    probe = answer(tiny)[1]
    reason, tokens = answer(tiny, stop_token_ids=(probe[3],))
    assert (reason, len(tokens)) == ("stop", probe.index(probe[3]) + 1)
    reason, tokens = answer(tiny, stop_token_ids=(probe[3],), min_tokens=20)
    assert len(tokens) >= 20 and probe[3] not in tokens[:19]
    for seed in range(40):
        assert len(answer(tiny, ignore_eos=False, min_tokens=35, seed=seed + 1)[1]) >= 35


def test_the_real_clock_is_right_in_the_mean(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sleeps that come back late by 3 ms each: the next ones are that much shorter."""
    now = [0]

    def sleep(seconds: float) -> None:
        now[0] += round(seconds * 1e9) + 3_000_000

    monkeypatch.setattr(simulated.time, "monotonic_ns", lambda: now[0])
    monkeypatch.setattr(simulated.time, "sleep", sleep)
    clock = RealClock()
    for _ in range(100):
        clock.wait_until(clock() + 10_000_000)
    assert now[0] == pytest.approx(100 * 10_000_000, rel=0.01)
    now[0] += 10**9  # a pause of the whole machine is not made up for
    before = now[0]
    clock.wait_until(before - 10**9)
    for _ in range(10):
        clock.wait_until(clock() + 10_000_000)
    assert now[0] - before >= 70_000_000


def test_memory_of_the_device_sizes_the_pool_and_bounds_the_model(tiny: LoadedModel) -> None:
    llama = replace(tiny, name="llama-3.1-8b", shape=SHAPES["llama-3.1-8b"].shape)
    what = Simulation(llama, DEVICES["H100"], "bf16")
    # 0.9 of 80 GB less 8.03e9 weights of 2 bytes, 131,072 bytes a token
    assert what.kv_tokens == pytest.approx((72e9 - 16.06e9) / 131_072, rel=0.001)
    runner = SimulatedRunner(EngineConfig(**SIMULATED), what, VirtualClock())
    assert (runner.kv_blocks, runner.max_context) == (what.kv_tokens // 16, 131_072)
    big = Simulation(replace(tiny, name="big", shape=SHAPES["llama-3.1-70b"].shape), DEVICES["H100"], "bf16")
    with pytest.raises(UserError, match="no room for KV in the memory of H100"):
        SimulatedRunner(EngineConfig(**SIMULATED), big, VirtualClock())


def test_a_known_shape_borrows_the_tokenizer_and_says_so(smollm2: Path) -> None:
    model = open_reference("llama-3.1-8b")
    assert (model.name, model.shape.hidden, model.shape.n_layers) == ("llama-3.1-8b", 4096, 32)
    assert model.shape.eos_token_ids == (2,) and "model" not in model.shas
    assert "tokenizer of smollm2" in Simulation(model, DEVICES["H100"], "bf16").label
    with pytest.raises(UserError, match=r"32000 tokens, fewer than the tokenizer of smollm2"):
        open_reference("llama-2-7b")
    with pytest.raises(UserError, match="no model is known as 'llama-9'"):
        open_reference("llama-9")
    assert open_reference("smollm2").shape.n_layers == 30


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"backend": "tpu"}, "'tpu' is unknown"),
        ({"backend": "simulated"}, "no device is named"),
        ({"backend": "simulated", "device": "H100", "shadow": 0.1}, "--shadow"),
        ({"backend": "simulated", "device": "H100", "dtype": "int4-bf16"}, "int4-bf16"),
        ({"device": "H100"}, "--device"),
        ({"sim_fit": "x.json"}, "--sim-fit"),
        ({"sim_seed": 3}, "--sim-seed"),
        ({"dtype": "fp8"}, "fp8"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        EngineConfig(**options)


def test_an_unknown_device_or_a_file_that_is_no_fit_is_named(tiny: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no device is known as 'H900'"):
        build(EngineConfig(backend="simulated", device="H900"), tiny)
    with pytest.raises(UserError, match=r"no\.json"):
        build(EngineConfig(**SIMULATED, sim_fit=str(tmp_path / "no.json")), tiny)


def test_the_options_reach_the_configuration(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("engine.server.lifecycle.serve", lambda options, say: seen.append(options) or 0)
    path = tmp_path / "fit.json"
    serve_command(
        model="llama-3.1-8b",
        backend="simulated",
        device="h100",
        weights="fp8",
        sim_fit=path,
        sim_seed=7,
        no_spans=True,
        otlp_endpoint="",
    )
    config = seen[0].config
    assert (config.backend, config.device, config.dtype) == ("simulated", "h100", "fp8")
    assert (config.sim_fit, config.sim_seed) == (str(path), 7)


def test_a_server_that_computes_nothing_says_so_everywhere() -> None:
    async def go() -> None:
        async with (
            serving(otlp="http://127.0.0.1:9", threads=None, **SIMULATED) as server,
            client(server) as http,
        ):
            exporter = InMemorySpanExporter()
            assert server._provider is not None
            server._provider.add_span_processor(SimpleSpanProcessor(exporter))
            assert "SIMULATED" in server.describe() and LABEL in server.describe()
            body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            whole = await http.post(CHAT, json=body)
            assert whole.headers[names.SIMULATED_HEADER] == LABEL
            said = await whole.json()
            assert said["system_fingerprint"].startswith("simulated_")
            assert said["usage"]["completion_tokens"] in range(1, 6)
            streamed = await http.post(CHAT, json={**body, "stream": True}, headers={"x-tailspan-phases": "1"})
            assert streamed.headers[names.SIMULATED_HEADER] == LABEL
            stream = await read_stream(streamed)
            assert all(chunk["system_fingerprint"].startswith("simulated_") for chunk in stream.chunks)
            assert sum(stream.account["phases"].values()) == stream.account["duration_ns"]
            (card,) = (await (await http.get("/v1/models")).json())["data"]
            assert card[names.SIMULATED_KEY] == LABEL
            assert (await (await http.get("/v1/models/tiny")).json())[names.SIMULATED_KEY] == LABEL
            for path in ("/health", "/health/live", "/health/ready"):
                assert (await (await http.get(path)).json())[names.SIMULATED_KEY] == LABEL
            refused = await http.post(CHAT, json={**body, "logprobs": True})
            assert (refused.status, refused.headers[names.SIMULATED_HEADER]) == (400, LABEL)
            metrics = await (await http.get("/metrics")).text()
            info = next(line for line in metrics.splitlines() if line.startswith(names.M_BUILD_INFO + "{"))
            assert 'kernels="simulated"' in info and 'quant="bf16"' in info
            assert "tailspan_device_info{" in metrics and 'device="H100"' in metrics
            raw = await (await http.get("/debug/steps")).read()
            table = pa.ipc.open_stream(raw).read_all()
            assert table.num_rows > 0 and set(table.column("simulated").to_pylist()) == {True}
            await until(lambda: len(exporter.get_finished_spans()) >= 4, "spans")
            assert all(
                dict(span.attributes or {})[names.ATTR_SIMULATED] == LABEL for span in exporter.get_finished_spans()
            )
            target = await asyncio.to_thread(preflight.look, server.url, {})
            assert target.simulated == LABEL and "SIMULATED" in target.detail

    asyncio.run(go())


def test_a_server_that_computes_says_nothing_of_it() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            answer = await http.get("/v1/models")
            assert names.SIMULATED_HEADER not in answer.headers
            assert names.SIMULATED_KEY not in (await answer.json())["data"][0]
            await http.post(COMPLETIONS, json={"model": "tiny", "prompt": "hi", "max_tokens": 2})
            raw = await (await http.get("/debug/steps")).read()
            assert set(pa.ipc.open_stream(raw).read_all().column("simulated").to_pylist()) == {False}
            target = await asyncio.to_thread(preflight.look, server.url, {})
            assert target.simulated is None and "SIMULATED" not in target.detail

    asyncio.run(go())


def test_a_step_takes_the_time_of_its_model_on_the_real_clock(tiny: LoadedModel) -> None:
    """Steps of 50 ms on an engine with its thread: the step log says what the model said, or a little more."""
    fit = StepFit((0.05, 0, 0, 0, 0, 0, 0), Noise(), 0.0, 100, 0.0, "a test")
    config = EngineConfig(**SIMULATED, kv_blocks=64)
    runner = SimulatedRunner(config, Simulation(tiny, DEVICES["H100"], "bf16", fit))
    engine, over, heard = Engine(config, tiny, runner), threading.Event(), []

    def emit(output: Output) -> None:
        heard.append(output)
        if output.finish_reason is not None:
            over.set()

    engine.start()
    try:
        now = time.monotonic_ns()
        clock = PhaseClock(now)
        clock.parsed(now)
        clock.tokenized(now)
        engine.submit(Request("r", [5] * 9, SamplingParams(4, ignore_eos=True, seed=1), clock, emit))
        assert over.wait(30)
    finally:
        engine.stop()
    durations = [one.end_ns - one.start_ns for one in engine.steps.since(-1)]
    assert len(durations) == len(heard) == 4
    assert sum(durations) >= 0.98 * 4 * 50_000_000  # a late sleep shortens the next, never the sum


def test_faults_that_need_logits_are_refused_and_the_others_act() -> None:
    async def go() -> None:
        async with serving(faults=True, threads=None, **SIMULATED) as server, client(server) as http:
            for name in ("nan_row", "end_suppressed", "race", "broken_cache", "weights", "nan_layer"):
                answer = await http.put("/debug/faults", json={"name": name})
                assert answer.status == 400, name
            assert (await http.put("/debug/faults", json={"name": "output_cap", "size": 2})).status == 200
            body = {"model": "tiny", "prompt": "hi", "max_tokens": 9, "ignore_eos": True}
            said = await (await http.post(COMPLETIONS, json=body)).json()
            assert said["usage"]["completion_tokens"] == 2

    asyncio.run(go())


def test_a_bundle_of_a_simulated_server_says_so_beside_its_verdict(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=20)
    slo = load_slo("demo")
    plain = summarize(bundle, slo)
    assert plain.simulated is None and "SIMULATED" not in plain.sentence
    bundle.update(**{names.SIMULATED_KEY: LABEL})
    found = summarize(bundle, slo)
    assert found.simulated == LABEL
    assert found.sentence == f"{plain.sentence} [SIMULATED: {LABEL}]"
    assert json.loads(json.dumps(found.to_dict()))["simulated"] == LABEL
