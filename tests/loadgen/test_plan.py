"""The plan file: round trip, unknown keys by name, no secret in it, options checked."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.commands import time_window
from loadgen.plan import Plan, checked_headers, checked_limits, checked_targets, load_worker
from loadgen.traces.catalogue import SHIPPED_FOLDER
from loadgen.traces.registry import read
from models.errors import UserError
from models.store import load_reference
from models.tiny import write_tiny


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    from loadgen.prompts import PromptMaker
    from loadgen.schedule import build

    folder = write_tiny(tmp_path_factory.mktemp("tiny"))
    reference = load_reference(str(folder))
    path = SHIPPED_FOLDER / "synthetic-conv.csv"
    trace = read(path)
    minimum = PromptMaker(reference.tokenizer, reference.template, seed=0, salt="s").minimum
    made = Plan(
        run_id="run-1",
        seed=0,
        salt="run-1",
        trace_name=trace.name,
        trace_path=str(path),
        trace_format=trace.format,
        trace_sha256=trace.sha256,
        reference=str(folder),
        served_model="tiny",
        max_context=512,
        min_input=minimum,
        requests=0,
        targets=("http://127.0.0.1:1",),
        duration_s=20.0,
        rate_scale=0.5,
        length_scale=0.05,
        api_key_env="TAILSPAN_TEST_KEY",
        headers={"X-Token": "$TAILSPAN_TEST_TOKEN"},
    )
    return replace(made, requests=len(build(trace, made.transforms)))


def test_a_plan_survives_its_file(plan: Plan, tmp_path: Path) -> None:
    plan.write(tmp_path / "plan.json")
    assert Plan.read(tmp_path / "plan.json") == plan


def test_secrets_are_looked_up_in_the_worker_and_never_written(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    plan.write(path)
    with pytest.raises(UserError, match="TAILSPAN_TEST_TOKEN is not set"):
        load_worker(path, 0, 1)
    monkeypatch.setenv("TAILSPAN_TEST_KEY", "sk-very-secret")
    monkeypatch.setenv("TAILSPAN_TEST_TOKEN", "also-secret")
    settings, calls = load_worker(path, 0, 1)
    assert settings.headers == {"Authorization": "Bearer sk-very-secret", "X-Token": "also-secret"}
    assert "secret" not in path.read_text(encoding="utf-8") + repr(settings) + repr(plan)
    assert len(calls) == plan.requests


def test_workers_rebuild_one_schedule_from_the_file(plan: Plan, tmp_path: Path) -> None:
    bare = replace(plan, api_key_env=None, headers={})
    bare.write(tmp_path / "plan.json")
    alone = list(load_worker(tmp_path / "plan.json", 0, 1)[1])
    shared = [call for worker in range(3) for call in load_worker(tmp_path / "plan.json", worker, 3)[1]]
    assert sorted(shared, key=lambda call: call.index) == alone
    assert len(alone) == plan.requests


def test_another_trace_file_or_another_count_is_refused(plan: Plan, tmp_path: Path) -> None:
    for changes, word in (({"trace_sha256": "0" * 64}, "has changed"), ({"requests": 3}, "the plan says 3")):
        replace(plan, **changes).write(tmp_path / "plan.json")  # type: ignore[arg-type]
        with pytest.raises(UserError, match=word):
            load_worker(tmp_path / "plan.json", 0, 1)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"lenght_scale": 0.5}, "unknown key 'lenght_scale'"),
        ({"version": 99}, "version 99"),
        ({"salt": ...}, "'salt'"),
    ],
)
def test_unknown_and_missing_keys_are_refused_by_name(
    plan: Plan, tmp_path: Path, change: dict[str, object], word: str
) -> None:
    values = {key: value for key, value in {**plan.to_dict(), **change}.items() if value is not ...}
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(values), encoding="utf-8")
    with pytest.raises(UserError, match=word) as caught:
        Plan.read(path)
    assert caught.value.where == str(path)


@pytest.mark.parametrize("content", ["{", "[]", '"x"'])
def test_a_file_that_is_no_plan_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "plan.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError):
        Plan.read(tmp_path / "plan.json")


def test_targets() -> None:
    assert checked_targets("http://a:1/, https://b/v1") == ("http://a:1", "https://b")
    assert checked_targets("http://[::1]:8000") == ("http://[::1]:8000",)
    for bad in ("a:1", "ftp://a", "http://", "http://a:99999", "http://user:pw@a", "http://a?x=1", ""):
        with pytest.raises(UserError) as caught:
            checked_targets(bad)
        assert caught.value.where == "--target"
        assert "pw" not in str(caught.value)


def test_a_literal_secret_in_a_header_is_refused() -> None:
    assert checked_headers(["X-Tenant: a:b", "Authorization: $KEY"]) == {"X-Tenant": "a:b", "Authorization": "$KEY"}
    for bad in ("Authorization: Bearer sk-1", "x-api-key: 1", "no colon", "bad name: 1"):
        with pytest.raises(UserError) as caught:
            checked_headers([bad])
        assert caught.value.where == "--header"


def test_limits_name_their_option() -> None:
    good = {"--total-timeout": 10.0}
    checked_limits(1, None, good, "wrong", 0.7)
    for arguments, option in (
        ((0, None, good, "wrong", 0.7), "--workers"),
        ((4, 2, good, "wrong", 0.7), "--max-concurrency"),
        ((1, None, {"--total-timeout": 0.0}, "wrong", 0.7), "--total-timeout"),
        ((1, None, good, "some", 0.7), "--keep-text"),
        ((1, None, good, "wrong", -1.0), "--temperature"),
    ):
        with pytest.raises(UserError) as caught:
            checked_limits(*arguments)  # type: ignore[arg-type]
        assert caught.value.where == option


def test_windows() -> None:
    assert time_window(None, None, None) == (0.0, None)
    assert time_window(None, 5.0, 10.0) == (5.0, 10.0)
    assert time_window("60:120", None, None) == (60.0, 60.0)
    assert time_window(":30", None, None) == (0.0, 30.0)
    assert time_window("30:", None, None) == (30.0, None)
    for bad in ("60", "a:b", "60:60", "60:30"):
        with pytest.raises(UserError) as caught:
            time_window(bad, None, None)
        assert caught.value.where == "--window"
    with pytest.raises(UserError):
        time_window("1:2", 3.0, None)
