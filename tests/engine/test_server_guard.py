"""What an operator relies on: every metric there from the start, logs for machines, options that are checked."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families as parse_text

from engine.commands import serve_command
from engine.config import EngineConfig
from engine.server.__main__ import main
from engine.server.logs import JsonLines, set_up
from models.errors import UserError
from telemetry import names
from telemetry.names import EXIT_USAGE, SECONDS_BUCKETS
from tests.engine.serving import client, serving, until

CHAT = "/v1/chat/completions"
GENERATOR = ("tailspan_requests", "tailspan_client_", "tailspan_run_", "tailspan_watch_")  # served by others


def ask(**more: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": "hello", "max_tokens": 12, "ignore_eos": True, **more}


def test_every_metric_of_the_table_of_names_is_served() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            await http.post("/v1/completions", json=ask())
            gc.collect()
            await http.post("/v1/completions", json=ask(max_tokens=40))
            text = await (await http.get("/metrics")).text()
            families = {family.name: family for family in parse_text(text)}
            declared = {value for key, value in vars(names).items() if key.startswith("M_")}
            for name in sorted(declared):
                if not name.startswith(GENERATOR):
                    assert name in families, name
            bounds = [repr(float(bound)) for bound in SECONDS_BUCKETS] + ["+Inf"]
            for family in families.values():
                if family.type == "histogram" and family.name.endswith("_seconds"):
                    series = [sample for sample in family.samples if sample.name.endswith("_bucket")]
                    assert [s.labels["le"] for s in series[: len(bounds)]] == bounds or not series, family.name
            counts = {s.name: s.value for family in families.values() for s in family.samples if "le" not in s.labels}
            assert counts[names.M_GC_PAUSE + "_count"] >= 1
            assert server.service.engine.admission.model.steps == counts[names.M_ITERATION_TOKENS + "_count"]
            assert counts[names.M_STEP_MODEL_ERROR] > 0

    asyncio.run(go())


def test_divergences_and_laws_are_served() -> None:
    async def go() -> None:
        async with serving(shadow=1.0, check_every=2) as server, client(server) as http:
            for _ in range(3):
                await http.post("/v1/completions", json=ask())
            shadow = server.service.engine.shadow
            await until(lambda: shadow.compared == 3, "three shadows")
            found = await (await http.get("/debug/divergences")).json()
            assert found == {"share": 1.0, "compared": 3, "diverged": 0, "forgotten": 0, "divergences": []}
            laws = await (await http.get("/debug/invariants")).json()
            assert laws["checks"]["made"] > 15 and laws["checks"]["every"] == 2 and laws["checks"]["first"] == []
            # a wrong answer, made by hand: it is found, served and counted
            remember = shadow.remember

            def forged(request: Any) -> None:
                request.tokens[-2] += 1
                remember(request)

            shadow.remember = forged
            answer = await (await http.post("/v1/completions", json=ask())).json()
            await until(lambda: shadow.compared == 4, "the fourth")
            found = await (await http.get("/debug/divergences")).json()
            assert found["diverged"] == 1
            one = found["divergences"][0]
            assert (one["request_id"], one["at"], one["served"] - one["alone"]) == (answer["id"], 10, 1)
            text = await (await http.get("/metrics")).text()
            assert f'{names.M_DIVERGENCE}_total{{engine="r1",model_name="tiny"}} 1.0' in text

    asyncio.run(go())


def test_policy_priority_and_deadline_reach_the_queue() -> None:
    async def go() -> None:
        from tests.engine.serving import Gate

        for policy in ("priority", "deadline"):
            async with serving(max_batch=1, policy=policy) as server, client(server) as http:
                gate, ended = Gate(server), []

                async def one(who: str, *, http: Any = http, ended: list[str] = ended, **more: Any) -> None:
                    headers = {names.DEADLINE_HEADER: str(more.pop("header"))} if "header" in more else {}
                    answer = await http.post("/v1/completions", json=ask(**more), headers=headers)
                    assert answer.status == 200, await answer.text()
                    ended.append(who)

                engine = server.service.engine
                tasks = [asyncio.create_task(one("first"))]
                await gate.arrived()
                asked: list[tuple[str, dict[str, Any]]] = [
                    ("slack", {"priority": 1, "deadline_ms": 500_000}),
                    ("none", {}),
                    ("header", {"priority": -1, "header": 20_000}),
                ]
                for n, (who, more) in enumerate(asked):
                    tasks.append(asyncio.create_task(one(who, **more)))
                    await until(lambda n=n, engine=engine: engine.stats().waiting == n + 1, "it waits")  # type: ignore[misc]
                gate.open()
                await asyncio.gather(*tasks)
                assert ended == ["first", "header", "none", "slack"]

    asyncio.run(go())


@pytest.mark.parametrize("value", ["0", "-1", "1.5", "soon", "", "99999999999"])
def test_a_deadline_header_that_is_none_is_named(value: str) -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            answer = await http.post("/v1/completions", json=ask(), headers={names.DEADLINE_HEADER: value})
            assert answer.status == 400
            assert (await answer.json())["error"]["param"] == names.DEADLINE_HEADER

    asyncio.run(go())


def test_logs_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    record = logging.makeLogRecord({"name": "tailspan.server", "levelno": 40, "levelname": "ERROR", "msg": "no\nway"})
    try:
        raise ValueError("é")
    except ValueError:
        record.exc_info = sys.exc_info()
    line = JsonLines().format(record)
    assert "\n" not in line
    read = json.loads(line)
    assert (read["level"], read["logger"], read["message"]) == ("error", "tailspan.server", "no\nway")
    assert read["exception"].endswith("ValueError: é") and read["time"].endswith("+00:00")
    with pytest.raises(UserError, match="--log-format"):
        set_up("info", "xml")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--policy", "lifo"), "lifo"),
        (("--queue-tokens", "0"), "queue_tokens"),
        (("--max-predicted-ttft", "0"), "max_predicted_ttft"),
        (("--shadow", "1.5"), "shadow"),
        (("--check-every", "-1"), "check_every"),
        (("--log-format", "xml"), "--log-format"),
        (("--enable-faults", "--host", "0.0.0.0"), "--enable-faults"),
    ],
)
def test_options_that_cannot_be(
    options: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["serve", "--no-spans", "--port", "0", *options])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == EXIT_USAGE
    assert said in capsys.readouterr().err


def test_every_option_reaches_its_place(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []
    monkeypatch.setattr("engine.server.lifecycle.serve", lambda options, say: seen.append(options) or 0)
    serve_command(
        policy="deadline",
        queue_tokens=9,
        max_predicted_ttft=1.5,
        check_every=7,
        shadow=0.25,
        stream_buffer=4096,
        enable_faults=True,
        no_spans=True,
        otlp_endpoint="",
    )
    config: EngineConfig = seen[0].config
    assert (config.policy, config.queue_tokens, config.max_predicted_ttft) == ("deadline", 9, 1.5)
    assert (config.check_every, config.shadow) == (7, 0.25)
    assert (seen[0].limits.stream, seen[0].enable_faults) == (4096, True)
