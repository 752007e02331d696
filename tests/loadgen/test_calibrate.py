"""Fitting the load to a target: the probe against a server of known speed, and the choice of the scales."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import pytest

from loadgen.arrivals import ArrivalModel
from loadgen.bodies import Sampling
from loadgen.calibrate import ENOUGH, Speed, fit, measure, utilisation
from loadgen.prompts import PromptMaker
from loadgen.schedule import build
from loadgen.traces import registry
from loadgen.traces.catalogue import SHIPPED_FOLDER
from loadgen.transforms import Transforms
from models.errors import UserError
from models.store import Reference, load_reference
from models.tiny import write_tiny

TRACE = registry.read(SHIPPED_FOLDER / "synthetic-conv.csv")
MINUTE = Transforms(seed=0, duration_s=60.0, min_input=35, max_context=8192)


def speed(prefill: float, decode: float) -> Speed:
    return Speed(prefill, decode, 0, 8, 12, 5.0)


@pytest.mark.parametrize("share", [0.5, 1.5])
def test_a_slow_target_gets_short_requests_at_the_lowest_rate_that_gives_enough(share: float) -> None:
    chosen = fit(TRACE, MINUTE, speed(400.0, 80.0), share)
    assert chosen.predicted == pytest.approx(share, rel=0.05)
    assert ENOUGH <= chosen.requests <= ENOUGH * 1.1
    assert chosen.length_scale < 0.3
    again = build(TRACE, Transforms(0, 0.0, 60.0, 1.0, chosen.rate_scale, chosen.length_scale, "skip", 8192, 35))
    assert len(again) == chosen.requests
    assert utilisation(again, speed(400.0, 80.0)) == pytest.approx(chosen.predicted)


def test_a_faster_target_gets_longer_requests_then_more_of_them_then_the_trace_itself() -> None:
    slow, middle = fit(TRACE, MINUTE, speed(400, 80), 0.5), fit(TRACE, MINUTE, speed(3000, 500), 0.5)
    assert slow.length_scale < middle.length_scale <= 1.0
    fast = fit(TRACE, MINUTE, speed(8000, 2000), 0.5)
    assert fast.length_scale == 1.0
    assert slow.rate_scale < fast.rate_scale < 1.0
    assert fast.predicted == pytest.approx(0.5, rel=0.05)
    huge = fit(TRACE, MINUTE, speed(1e6, 1e5), 0.5)
    assert (huge.rate_scale, huge.length_scale) == (1.0, 1.0)
    assert "no more than" in huge.sentence()


def test_a_very_slow_target_keeps_the_least_lengths_and_says_so() -> None:
    chosen = fit(TRACE, MINUTE, speed(40, 8), 0.5)
    schedule = build(TRACE, Transforms(0, 0.0, 60.0, 1.0, chosen.rate_scale, chosen.length_scale, "skip", 8192, 35))
    assert schedule.input_tokens.mean() >= 35 + 16
    assert schedule.output_tokens.mean() >= 4
    assert "is more" in chosen.sentence()


def test_a_scale_that_the_user_fixed_stays() -> None:
    assert fit(TRACE, MINUTE, speed(400, 80), 0.5, rate=0.8).rate_scale == 0.8
    assert fit(TRACE, MINUTE, speed(400, 80), 0.5, length=0.05).length_scale == 0.05
    with pytest.raises(UserError, match="not a utilisation"):
        fit(TRACE, MINUTE, speed(400, 80), 0.0)


def test_an_arrival_model_keeps_its_rate_and_only_lengths_are_fitted() -> None:
    asked = replace(MINUTE, arrivals=ArrivalModel.parse("poisson:rate=4", "test"))
    chosen = fit(TRACE, asked, speed(4000, 800), 0.5)
    assert chosen.rate_scale == 1.0 and chosen.requests > 1.5 * ENOUGH
    assert chosen.length_scale < 1 and chosen.predicted == pytest.approx(0.5, rel=0.05)


def test_what_the_prefix_cache_saves_is_left_out() -> None:
    schedule = build(TRACE, MINUTE)
    plain = utilisation(schedule, speed(400, 1e9))
    assert utilisation(schedule, Speed(400, 1e9, 16, 8, 12, 5.0)) == pytest.approx(
        plain - 16 * len(schedule) / 400 / 60, rel=1e-3
    )


PREFILL, DECODE = 2000.0, 400.0  # tokens per second of the server below


class Engine(BaseHTTPRequestHandler):
    """Does one thing at a time: prefills alone, decodes shared.  now_s: its clock, which its work alone moves on."""

    lock = threading.Lock()
    now_s: ClassVar[float] = 0.0
    reference: Reference
    drawn: ClassVar[set[tuple[float, float | None]]] = set()  # temperature and top_p that were asked for

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        tokens = len(self.reference.tokenizer.encode(self.reference.template.render(body["messages"])))
        self.drawn.add((body["temperature"], body.get("top_p")))
        with self.lock:
            Engine.now_s += tokens / PREFILL + (body["max_tokens"] - 1) / DECODE
        usage = {"prompt_tokens": tokens, "completion_tokens": body["max_tokens"]}
        answer = json.dumps({"usage": usage}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, PromptMaker]]:
    """Its address, and who makes prompts for it; the probe reads its clock."""
    monkeypatch.setattr("loadgen.calibrate.time", SimpleNamespace(monotonic=lambda: Engine.now_s))
    reference = load_reference(str(write_tiny(tmp_path)))
    Engine.reference = reference
    server = ThreadingHTTPServer(("127.0.0.1", 0), Engine)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield (
        f"http://127.0.0.1:{server.server_address[1]}",
        PromptMaker(reference.tokenizer, reference.template, seed=0, salt="probe"),
    )
    server.shutdown()
    server.server_close()
    thread.join()


def test_the_probe_finds_the_speed_of_a_server(engine: tuple[str, PromptMaker]) -> None:
    target, maker = engine
    found = measure(target, {}, maker, "tiny", 4096)
    assert found.prefill_per_s == pytest.approx(PREFILL, rel=0.001)
    assert found.decode_per_s == pytest.approx(DECODE * 20 / 19, rel=0.001)  # the first token is the prefill's
    assert 0 < found.probe_s < 8


def test_the_probe_asks_for_tokens_drawn_as_those_of_the_load(engine: tuple[str, PromptMaker]) -> None:
    target, maker = engine
    Engine.drawn.clear()
    measure(target, {}, maker, "tiny", 4096, sampling=Sampling("tiny", 0, 0.7, 0.9, True))
    assert Engine.drawn == {(0.7, 0.9)}


def test_a_target_that_is_not_there_is_named(engine: tuple[str, PromptMaker]) -> None:
    with pytest.raises(UserError, match=r"probe of http://127\.0\.0\.1:1 failed") as caught:
        measure("http://127.0.0.1:1", {}, engine[1], "tiny", 4096)
    assert "--rate-scale" in (caught.value.remedy or "")
