"""The YAML plan: every key is an option, unknown ones are refused by line, the command line wins."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadgen.options import Options
from loadgen.plan_file import SEND, TOP, TRANSFORMS, parse, presets, read
from models.errors import UserError
from telemetry import slo
from tests.loadgen.place import COUNT, Place, chats, script
from tests.loadgen.stub import StubThread

WHOLE = """
description: all keys
target: [http://a:1, http://b:2]
trace:
  name: own.jsonl
  format: own-jsonl
  columns: {time: t, input: i, output: o}
  time_unit: ms
slo: chat
model: smollm2
served_model: big
name: whole
seed: 3
salt: x
keep_text: all
repeats: 2
transforms:
  window: [10, 70]
  speed: 2
  rate_scale: 0.5
  length_scale: 0.1
  over_limit: clip
  dequantise: 3
  loop: 2
  share_prefixes: false
classes:
  - {name: chat, share: 0.75}
  - {name: help, share: 0.25, prompts: documents}
patience: {first_token_s: 5, retries: 2, backoff_s: 0.5, budget: 0.1, retry_on: [rejected, reset]}
send:
  api: responses
  workers: 4
  max_concurrency: 9
  connect_timeout: 1
  first_token_timeout: 2
  total_timeout: 3
  exact_output: false
  temperature: 0.2
  headers: {X-Tenant: a}
  api_key_env: KEY
  proxy: http://proxy:3128
  verify_tls: false
"""


def test_every_key_becomes_an_option() -> None:
    options = Options(**parse(WHOLE, "p.yaml"))
    assert options.targets == "http://a:1,http://b:2"
    assert (options.trace, options.choices.format, options.choices.time_unit) == ("own.jsonl", "own-jsonl", "ms")
    assert (options.start_s, options.duration_s, options.loop, options.dequantise_s) == (10.0, 60.0, 2, 3.0)
    assert [one.prompts for one in options.classes] == ["plain", "documents"]
    assert options.patience is not None and options.patience.retry_on == ("rejected", "reset")
    assert (options.api, options.workers, options.headers) == ("responses", 4, ["X-Tenant: a"])
    assert (options.proxy, options.verify_tls, options.share_prefixes) == ("http://proxy:3128", False, False)
    fields = set(Options.__slots__)
    assert {option for option, _ in (*TOP.values(), *TRANSFORMS.values(), *SEND.values())} <= fields


@pytest.mark.parametrize(
    ("text", "line", "word"),
    [
        ("target: http://a\ntragt: x\n", 2, "unknown key 'tragt'"),
        ("target: http://a\ntransforms:\n  sped: 2\n", 3, "unknown key 'sped'"),
        ("send:\n  workers: many\n", 2, "is not a whole number"),
        ("send:\n  workers: 1.5\n", 2, "is not a whole number"),
        ("transforms:\n  window: [5, 5]\n", 2, "is no window"),
        ("transforms:\n  window: [1, 5]\n  start: 2\n", 2, "beside start"),
        ("transforms:\n  arrivals: {model: poisson}\n", 2, "needs 'rate'"),
        ("transforms:\n  arrivals: burst\n", 2, "no arrival model"),
        ("patience:\n  retires: 2\n", 2, "unknown key 'retires'"),
        ("patience: {retry_on: [sadness]}\n", 1, "'sadness' is no reason"),
        ("patience: {retries: -1}\n", 1, "retries: -1"),
        ("classes:\n  - {name: a, share: 2}\n", 2, "not between 0 and 1"),
        ("classes:\n  - {name: a, prompts: poems}\n", 2, "no kind of prompts"),
        ("classes:\n  - {name: a, prompts: file, file: /no/such}\n", 2, "there is no file"),
        ("trace: {format: vidur}\n", 1, "has no name"),
        ("trace: {name: x, failures: maybe}\n", 1, "'maybe' is not a choice"),
        ("target: a\ntarget: b\n", 2, "twice"),
        ("target: [\n", 2, "not YAML"),
    ],
)
def test_what_cannot_be_used_is_refused_with_its_line(text: str, line: int, word: str) -> None:
    with pytest.raises(UserError) as caught:
        parse(text, "p.yaml")
    assert word in caught.value.message
    assert caught.value.where == f"p.yaml:{line}"
    assert caught.value.remedy


def test_an_empty_plan_a_missing_one_and_a_folder_are_refused(tmp_path: Path) -> None:
    for reference in (str(tmp_path), str(tmp_path / "absent.yaml")):
        with pytest.raises(UserError, match="cannot be read") as caught:
            read(reference)
        assert "company-morning" in (caught.value.remedy or "")
    with pytest.raises(UserError, match="empty"):
        parse("# nothing\n", "p.yaml")


def test_the_plans_that_ship_can_be_read() -> None:
    assert set(presets()) == {"one-person", "company-morning", "voice"}
    for name in presets():
        options = Options(**read(name))
        assert options.arrivals is not None and options.patience is not None
        assert slo.load(options.slo).objectives
        length = options.duration_s or options.arrivals.length_s
        assert length is not None and len(options.arrivals.times(length, 0)) > 5


def test_a_plan_is_run_and_the_command_line_wins(place: Place, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import tailspan

    plan = place.folder / "plan.yaml"
    with StubThread(script(model)) as stub:
        plan.write_text(
            f"target: {stub.url}\ntrace: {place.trace}\nmodel: {model}\nseed: 1\n"
            "transforms: {rate_scale: 0.5}\n"
            "classes: [{name: a, share: 0.5}, {name: b, share: 0.5, prompts: documents}]\n",
            encoding="utf-8",
        )
        arguments = ["run", str(plan), "--rate-scale", "1.0", "--seed", "4", "--dry-run", "--json"]
        assert tailspan.main(arguments) == 0
        shown = json.loads(capsys.readouterr().out)
        assert (shown["plan"]["requests"], shown["plan"]["seed"]) == (COUNT, 4)
        assert {row["class"] for row in shown["first"]} <= {"a", "b"}
        assert {"window", "classes"} <= {record["name"] for record in shown["transforms"]}
        assert tailspan.main(["run", str(plan), "--dry-run"]) == 0
        assert "classes" in capsys.readouterr().out
        assert not chats(stub)
