"""Metrics: every request and every step counted once, phases that sum, exemplars that lead to a trace."""

from __future__ import annotations

import asyncio
import shutil
import subprocess
from typing import Any

import pytest
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from telemetry import names
from tests.engine.serving import client, serving

CHAT = "/v1/chat/completions"
OPENMETRICS = {"Accept": "application/openmetrics-text; version=1.0.0"}


def ask(**more: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 12,
        "ignore_eos": True,
        **more,
    }


def values(families: Any) -> dict[tuple[str, tuple[str, ...]], float]:
    """(sample name, extra label values) -> value; without buckets."""
    found = {}
    for family in families:
        for sample in family.samples:
            extra = tuple(value for key, value in sorted(sample.labels.items()) if key not in ("model_name", "engine"))
            if "le" not in sample.labels:
                found[sample.name, extra] = sample.value
    return found


def test_everything_is_counted_once() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            accounts = []
            for _ in range(3):
                answer = await (await http.post(CHAT, json=ask(), headers={"x-tailspan-phases": "1"})).json()
                accounts.append(answer["tailspan"])
            await http.post(CHAT, json=ask(tools=[{}]))
            await http.post(CHAT, json=ask(model="x"))
            text = await (await http.get("/metrics")).text()
            again = values(parse_text(await (await http.get("/metrics")).text()))
            found = values(parse_text(text))
            engine = server.service.engine
            assert found[names.M_KERNEL_COMPILE, ("native",)] >= 0
            engine.runner.compile_seconds = {"gemm_q4": 1.5, "sample": 0.25}  # as a runner with kernels has them
            compiled = values(parse_text(await (await http.get("/metrics")).text()))
            assert compiled[names.M_KERNEL_COMPILE, ("gemm_q4",)] == 1.5
            assert compiled[names.M_KERNEL_COMPILE, ("sample",)] == 0.25
            steps = engine.steps.since(-1)
            assert found[names.M_SERVER_REQUESTS + "_total", ("200",)] == 3
            assert found[names.M_SERVER_REQUESTS + "_total", ("400",)] == 1
            assert found[names.M_SERVER_REQUESTS + "_total", ("404",)] == 1
            assert found[names.M_SUCCESS + "_total", ("length",)] == 3
            for name in (
                names.M_TTFT,
                names.M_E2E,
                names.M_TPOT,
                names.M_QUEUE_TIME,
                names.M_PREFILL_TIME,
                names.M_DECODE_TIME,
                names.M_INFERENCE_TIME,
            ):
                assert found[name + "_count", ()] == 3, name
            assert found[names.M_INTER_TOKEN + "_count", ()] == 3 * 11
            assert found[names.M_E2E + "_sum", ()] == pytest.approx(
                sum(account["duration_ns"] for account in accounts) / 1e9
            )
            for phase in names.PHASES:
                assert found[names.M_PHASE + "_count", (phase,)] == 5
            assert found[names.M_PHASE + "_sum", ("decode",)] == pytest.approx(
                sum(a["phases"]["decode"] for a in accounts) / 1e9
            )
            kinds = [kind for name, kind in found if name == names.M_STEP + "_count"]
            assert sum(found[names.M_STEP + "_count", kind] for kind in kinds) == len(steps) == engine.stats().steps
            assert found[names.M_ITERATION_TOKENS + "_sum", ()] == sum(
                s.decode_tokens + s.prefill_tokens for s in steps
            )
            assert again[names.M_ITERATION_TOKENS + "_count", ()] == len(
                steps
            )  # not counted again by the second scrape
            assert found[names.M_GENERATION_TOKENS + "_total", ()] == 36
            assert found[names.M_RUNNING, ()] == found[names.M_WAITING, ()] == found[names.M_KV_USAGE, ()] == 0
            assert (
                found[names.M_PREFIX_HITS + "_total", ()] == sum(account["cached_tokens"] for account in accounts) > 0
            )
            info = next(f for f in parse_text(text) if f.name == names.M_BUILD_INFO).samples[0].labels
            assert info["model_sha"] == engine.model.shas["model"] and info["quant"] == "fp32"
            assert ("vllm:num_requests_running", ()) in found  # vLLM's dashboards find their names

    asyncio.run(go())


def test_exemplars_lead_to_the_trace() -> None:
    async def go() -> None:
        trace = "0af7651916cd43dd8448eb211c80319c"
        async with serving(otlp="http://127.0.0.1:9") as server, client(server) as http:
            await http.post(CHAT, json=ask(), headers={"traceparent": f"00-{trace}-b7ad6b7169203331-01"})
            plain = await http.get("/metrics")
            assert plain.headers["Content-Type"].startswith("text/plain")
            assert "trace_id" not in await plain.text()
            answer = await http.get("/metrics", headers=OPENMETRICS)
            assert answer.headers["Content-Type"].startswith("application/openmetrics-text")
            families = {family.name: family for family in parse_openmetrics(await answer.text())}
            for name in (names.M_TTFT, names.M_E2E, names.M_PHASE):
                exemplars = [sample.exemplar for sample in families[name].samples if sample.exemplar]
                assert exemplars and all(exemplar.labels == {"trace_id": trace} for exemplar in exemplars), name

    asyncio.run(go())


@pytest.mark.prometheus
@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_reads_every_line() -> None:
    async def go() -> str:
        async with serving() as server, client(server) as http:
            await http.post(CHAT, json=ask())
            return await (await http.get("/metrics")).text()

    checked = subprocess.run(
        ["promtool", "check", "metrics"], input=asyncio.run(go()), capture_output=True, text=True, timeout=60
    )
    # vLLM's names break two of its style rules (colons, _total on a histogram); a line that it cannot read is an error
    assert "error while linting" not in checked.stderr + checked.stdout
    complaints = [line for line in checked.stderr.splitlines() if line and "vllm:" not in line]
    assert complaints == []
