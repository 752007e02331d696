"""Faults on server processes: what is asked of the server, when, and that it is over afterwards."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from types import SimpleNamespace
from typing import Any

import pytest

from loadgen.lab import processes
from loadgen.lab.processes import Server, _proxied, _spoilt, _with_load
from loadgen.options import Options
from tests.loadgen.stub import Request, StubThread, plain

OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def answering(request: Request) -> list[bytes]:
    return [plain("200 OK", {"path": request.path})]


def server_at(url: str) -> Any:
    """A Server without a process of its own."""
    made = SimpleNamespace(url=url)
    made.faults = lambda method, body=None: Server.faults(made, method, body)  # type: ignore[arg-type]
    return made


def asked(stub: StubThread) -> list[tuple[str, Any]]:
    return [(one.method, one.json if one.body else None) for one in stub.requests if one.path == "/debug/faults"]


def test_faults_are_in_force_inside_and_out_of_it_afterwards() -> None:
    with StubThread(answering) as stub:
        with _spoilt({"faults": [{"name": "slow_step", "size": 20.12341}]}, server_at(stub.url), 10.0) as url:
            assert url == stub.url
            assert asked(stub) == [("PUT", {"name": "slow_step", "size": 20.1234})]
        assert asked(stub)[1:] == [("DELETE", None)]


def test_a_fault_may_come_in_mid_run_and_go_again() -> None:
    fault = {"name": "frozen_scheduler", "at": 0.5, "for_s": 0.1}
    with StubThread(answering) as stub:
        with _spoilt({"faults": [fault]}, server_at(stub.url), 0.2):
            assert asked(stub) == []
            end = time.monotonic() + 10
            while len(asked(stub)) < 2 and time.monotonic() < end:
                time.sleep(0.01)
        assert asked(stub) == [("PUT", {"name": "frozen_scheduler"}), ("DELETE", None), ("DELETE", None)]


def test_a_run_that_fails_leaves_no_fault_behind() -> None:
    with StubThread(answering) as stub:
        with pytest.raises(ZeroDivisionError), _spoilt({"faults": [{"name": "slow_step"}]}, server_at(stub.url), 1.0):
            raise ZeroDivisionError
        assert asked(stub)[-1] == ("DELETE", None)


def test_a_bad_wire_stands_before_the_server() -> None:
    with StubThread(answering) as stub, _proxied(stub.url, {"kind": "reject", "size": 3.0}) as url:
        assert url != stub.url
        with OPENER.open(f"{url}/v1/models", timeout=10) as answer:
            assert json.loads(answer.read()) == {"path": "/v1/models"}
        request = urllib.request.Request(f"{url}/v1/chat/completions", data=b"{}")
        with pytest.raises(urllib.error.HTTPError) as refused:
            OPENER.open(request, timeout=10)
        assert refused.value.code == 429 and refused.value.headers["Retry-After"] == "3"
        refused.value.close()


def test_the_load_of_the_other_side_is_the_fitted_one_changed() -> None:
    base = Options(speed=1.0, length_scale=0.2, rate_scale=3.0)
    changed = _with_load(base, {"speed": 1.5, "length_scale": 2.0})
    assert (changed.speed, changed.length_scale, changed.rate_scale) == (1.5, 0.4, 3.0)
    assert _with_load(base, {}) == base


def test_ctrl_c_in_a_replay_ends_the_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run ends in good order by itself when it is interrupted: what plays the next one has to be told."""
    servers = object.__new__(processes.Servers)
    played = []

    def run(*_: Any, repeat: int, **__: Any) -> tuple[Any, None]:
        played.append(repeat)
        return SimpleNamespace(status="complete" if repeat == 0 else "interrupted", path=None), None

    monkeypatch.setattr(processes, "run", run)
    monkeypatch.setattr(processes, "prepare", lambda *_: None)
    servers._replay(Options(), server_at(""), 0, {})
    with pytest.raises(KeyboardInterrupt):
        servers._replay(Options(), server_at(""), 1, {})
    assert played == [0, 1]
