"""Objectives joined by AND and OR, minimum samples, fluidity in a file, presets, and what explain says."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tailspan
from models.errors import UserError
from telemetry import slo
from telemetry.objective import (
    ALL,
    ANY,
    BROKEN,
    HELD,
    UNDECIDED,
    Group,
    certifying_sample,
    parse_sentence,
)
from telemetry.slo_explain import explain

RULES = """\
name: joined
period: 4w
min_requests: 50
classes:
  default:
    ttft: {base_s: 1.0}
    fluidity: {per_token_s: 0.1, at_least: 90 %}
objectives:
  - goodput >= 95 %
  - any:
      - e2e p95 <= 9 s
      - all:
          - {class: default, objective: ttft p95 <= 2 s, min_requests: certify}
          - fluidity p5 >= 0.9
"""
VERDICTS = (HELD, BROKEN, UNDECIDED)


def test_a_file_joins_objectives_and_says_so() -> None:
    policy = slo.parse(RULES, "x.yaml")
    joined = "goodput >= 95 % AND (e2e p95 <= 9 s OR (ttft p95 <= 2 s (class default) AND fluidity p5 >= 0.9))"
    assert policy.rule.words(policy.objectives) == joined
    assert [one.min_requests for one in policy.objectives] == [50, 50, 130, 50]
    assert policy.period_s == 28 * 86_400
    assert policy.classes["default"].fluidity_at_least == 0.9


@pytest.mark.parametrize(("a", "b"), list(product(VERDICTS, VERDICTS)))
def test_the_three_valued_logic_in_full(a: str, b: str) -> None:
    both, either = Group(ALL, (0, 1)).decide([a, b]), Group(ANY, (0, 1)).decide([a, b])
    if BROKEN in (a, b):
        assert both == BROKEN
    else:
        assert both == (UNDECIDED if UNDECIDED in (a, b) else HELD)
    if HELD in (a, b):
        assert either == HELD
    else:
        assert either == (UNDECIDED if UNDECIDED in (a, b) else BROKEN)


@given(st.lists(st.sampled_from(VERDICTS), min_size=4, max_size=4))
def test_more_requests_never_turn_a_decision_around(verdicts: list[str]) -> None:
    """Whatever an undecided objective turns out to be, a decision that stands already stays."""
    rule = slo.parse(RULES, "x.yaml").rule
    decided = rule.decide(verdicts)
    if decided == UNDECIDED:
        return
    open_places = [place for place, verdict in enumerate(verdicts) if verdict == UNDECIDED]
    for values in product((HELD, BROKEN), repeat=len(open_places)):
        later = list(verdicts)
        for place, value in zip(open_places, values, strict=True):
            later[place] = value
        assert rule.decide(later) == decided


def test_the_hash_follows_the_rule_and_the_samples() -> None:
    base = slo.parse(RULES, "x.yaml").hash
    assert slo.parse(RULES.replace("any:", "all:"), "x.yaml").hash != base
    assert slo.parse(RULES.replace("min_requests: 50", "min_requests: 60"), "x.yaml").hash != base
    assert slo.parse(RULES.replace("90 %", "91 %"), "x.yaml").hash != base
    assert slo.parse(RULES.replace("period: 4w", "period: 7d"), "x.yaml").hash == base  # changes no verdict


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("period: 4w", "period: soon", 2, "'soon' is not a period"),
        ("period: 4w", "period: 9w9", 2, "is not a period"),
        ("period: 4w", "period: 9000d", 2, "is not a period"),
        ("min_requests: 50", "min_requests: -5", 3, "'-5' is not a number of requests"),
        ("min_requests: 50", "min_requests: many", 3, "'many' is not a number of requests"),
        ("at_least: 90 %", "at_least: 900 %", 7, "not a share"),
        ("at_least: 90 %", "at_most: 90 %", 7, "unknown key 'at_most'"),
        ("{per_token_s: 0.1, at_least: 90 %}", "{at_least: 90 %}", 7, "needs a pace"),
        ("    fluidity: {per_token_s: 0.1, at_least: 90 %}\n", "", 5, "no class of it says how fast"),
        ("  - any:\n", "  - {any: [], all: []}\n  - any:\n", 10, "unknown key 'all'"),
        ("  - any:\n", "  - any: []\n  - any:\n", 10, "'any' of nothing"),
        ("fluidity p5 >= 0.9", "fluidity >= 0.9", 14, "needs a percentile"),
        ("fluidity p5 >= 0.9", "fluidity p5 <= 0.9", 14, "reward the worse"),
        ("fluidity p5 >= 0.9", "fluidity p5 >= 2 s", 14, "share of token deadlines"),
    ],
)
def test_errors_name_the_line(old: str, new: str, line: int, said: str) -> None:
    assert RULES.count(old) == 1
    with pytest.raises(UserError) as caught:
        slo.parse(RULES.replace(old, new), "my.yaml")
    assert said in caught.value.message
    assert caught.value.where == f"my.yaml:{line}"
    assert caught.value.remedy


def test_groups_may_not_nest_without_end() -> None:
    deep = "goodput >= 95 %"
    for _ in range(12):
        deep = f"{{any: [{deep}]}}"
    with pytest.raises(UserError, match="nested more than 8 deep"):
        slo.parse(f"classes: {{default: {{}}}}\nobjectives: [{deep}]", "my.yaml")


@pytest.mark.parametrize(
    ("sentence", "sample"),
    [
        ("ttft p99 <= 1 s", 662),
        ("ttft p95 <= 1 s", 130),
        ("fluidity p5 >= 90 %", 130),
        ("dropped <= 1 %", 299),
        ("goodput >= 95 %", 59),
        ("wrong <= 0 %", 1),
        ("goodput >= 0 %", 1),
    ],
)
def test_the_sample_that_certifies(sentence: str, sample: int) -> None:
    assert certifying_sample(parse_sentence(sentence)) == sample
    assert parse_sentence(sentence, min_requests="certify").min_requests == sample


@pytest.mark.parametrize("name", slo.presets())
def test_every_preset_is_sound_and_explained(name: str) -> None:
    policy = slo.load(name)
    assert policy.name == name and policy.description
    assert slo.parse(policy.text, policy.where).hash == policy.hash
    found = explain(policy)
    assert json.loads(json.dumps(found.facts)) == found.facts
    text = "\n".join(found.lines)
    for objective in policy.objectives:
        assert objective.sentence in text
    first = found.facts["deadlines"][0]
    assert first["ttft_s"] == policy.deadlines("default", 100, 50).ttft
    longest = max(entry["ttft_s"] for entry in found.facts["deadlines"])
    assert found.facts["client_timeouts_s"]["ttft"] == 3 * longest


def test_the_presets_are_the_four_kinds_of_use_and_the_demo() -> None:
    assert slo.presets() == ["batch", "chat", "code", "demo", "voice"]


def test_the_command_checks_explains_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(RULES)
    bad.write_text(RULES.replace("goodput >= 95 %", "goodput <= 95 %"))
    assert tailspan.main(["slo", "check", str(good), "chat"]) == 0
    assert "joined, 1 class, 4 objectives" in capsys.readouterr().out
    assert tailspan.main(["slo", "check", str(good), str(bad)]) == 4
    told = capsys.readouterr()
    assert f"{bad}:9" in told.err and "remedy: use >=" in told.err and "ok    " in told.out
    assert tailspan.main(["slo", "check", "--json", str(bad)]) == 4
    assert json.loads(capsys.readouterr().out)[0]["ok"] is False
    assert tailspan.main(["slo", "explain", str(good), "--request", "1000:11"]) == 0
    assert "1,000 in, 11 out: first token 1 s" in capsys.readouterr().out
    assert tailspan.main(["slo", "explain", str(good), "--request", "1000"]) == 4
    assert tailspan.main(["slo", "export", str(good), "--to", "xml"]) == 4
    assert tailspan.main(["slo", "list"]) == 0
