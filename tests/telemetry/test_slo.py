"""SLO files: deadlines, objectives, the hash, and an error with its line for everything that is not understood."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.errors import UserError
from telemetry import slo
from telemetry.schema import REQUESTS

GOOD = """\
name: test
classes:
  default:
    ttft: {base_s: 1.0, per_input_token_s: 0.01}
    gap_s: 0.5
    e2e: {per_output_token_s: 0.1}
  batch:
    gap_s: 9
objectives:
  - goodput >= 95 %
  - ttft p95 <= 2 s
  - {class: batch, objective: queue p99.9 <= 500 ms}
"""


def test_deadlines_follow_the_formulas() -> None:
    policy = slo.parse(GOOD, "x.yaml")
    assert policy.deadlines("default", 100, 21) == slo.Deadlines(2.0, 0.5, 4.0)
    assert policy.deadlines("unknown class", 0, 1) == slo.Deadlines(1.0, 0.5, 1.0)
    assert policy.deadlines("default", 0, None) == slo.Deadlines(1.0, 0.5, None)
    assert policy.deadlines("batch", 100, 21) == slo.Deadlines(None, 9.0, None)


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([None, "default", "batch", "other"]),
            st.one_of(st.none(), st.integers(0, 10_000)),
            st.one_of(st.none(), st.integers(0, 2_000)),
        ),
        max_size=20,
    )
)
def test_columns_of_deadlines_equal_those_of_each_request(
    rows: list[tuple[str | None, int | None, int | None]],
) -> None:
    policy = slo.parse(GOOD, "x.yaml")
    table = pa.Table.from_pylist(
        [
            {"index": 0, "intended_s": 0.0, "class": c, "input_tokens": i, "expected_output_tokens": o}
            for c, i, o in rows
        ],
        schema=REQUESTS,
    )
    columns = policy.deadline_columns(table)
    for at, (traffic_class, inputs, outputs) in enumerate(rows):
        one = policy.deadlines(traffic_class, inputs or 0, outputs)
        for column, value in zip(columns, (one.ttft, one.gap, one.e2e), strict=True):
            np.testing.assert_allclose(column[at], np.inf if value is None else value)


def test_objectives_are_read_with_their_units() -> None:
    goodput, ttft, queue = slo.parse(GOOD, "x.yaml").objectives
    assert (goodput.measure, goodput.percentile, goodput.op, goodput.bound) == ("goodput", None, ">=", 0.95)
    assert (ttft.percentile, ttft.bound, ttft.traffic_class) == (95.0, 2.0, None)
    assert (queue.measure, queue.percentile, queue.bound, queue.traffic_class) == ("queue", 99.9, 0.5, "batch")
    assert ttft.holds(2.0) and not ttft.holds(2.1)
    assert not ttft.holds(None) and not ttft.holds(1.0, unbounded=True)
    assert goodput.holds(0.95) and not goodput.holds(0.94)


def test_the_hash_covers_the_content_alone() -> None:
    base = slo.parse(GOOD, "x.yaml").hash
    reordered = "# comment\n" + GOOD.replace("name: test\n", "").replace("95 %", "0.95") + "name: other\n"
    assert slo.parse(reordered, "y.yaml").hash == base
    assert slo.parse(GOOD.replace("gap_s: 0.5", "gap_s: 0.6"), "x.yaml").hash != base
    assert slo.parse(GOOD.replace("ttft p95", "ttft p90"), "x.yaml").hash != base


@pytest.mark.parametrize("name", ["chat", "demo", "demo.yaml", None])
def test_presets_load(name: str | None) -> None:
    policy = slo.load(name)
    assert policy.name == (name or "chat").removesuffix(".yaml")
    assert slo.parse(policy.text, policy.where).hash == policy.hash
    assert slo.of_manifest({"slo": policy.manifest_entry()}).hash == policy.hash


@pytest.mark.parametrize(
    ("old", "new", "line", "said"),
    [
        ("gap_s: 0.5", "gaps: 0.5", 5, "unknown key 'gaps'"),
        ("gap_s: 0.5", "gap_s: soon", 5, "'soon' is not a number of seconds"),
        ("gap_s: 0.5", "gap_s: -1", 5, "'-1' is not"),
        ("gap_s: 0.5", "gap_s: .nan", 5, "'.nan' is not"),
        ("gap_s: 0.5", "gap_s: [1]", 5, "plain text"),
        ("gap_s: 9", "gap_s: 9\n    gap_s: 8", 9, "stands here twice"),
        ("{base_s: 1.0, per_input_token_s: 0.01}", "{per_input_token_s: 0.01}", 4, "no 'base_s'"),
        ("{base_s: 1.0, per_input_token_s: 0.01}", "1.0", 4, "'key: value'"),
        ("    ttft: {base_s: 1.0, per_input_token_s: 0.01}\n", "", 5, "builds on ttft"),
        ("{per_output_token_s: 0.1}", "{}", 6, "no 'per_output_token_s'"),
        ("  default:", "  chat:", 3, "no class 'default'"),
        ("goodput >= 95 %", "goodput <= 95 %", 10, "reward the worse"),
        ("goodput >= 95 %", "goodput >= 950 %", 10, "not a share"),
        ("goodput >= 95 %", "goodput p95 >= 95 %", 10, "is a share"),
        ("ttft p95 <= 2 s", "ttft <= 2 s", 11, "needs a percentile"),
        ("ttft p95 <= 2 s", "ttft p100 <= 2 s", 11, "needs a percentile"),
        ("ttft p95 <= 2 s", "ttft p95 <= 2", 11, "needs a unit"),
        ("ttft p95 <= 2 s", "ttft p95 < 2 s", 11, "cannot understand"),
        ("ttft p95 <= 2 s", "speed p95 <= 2 s", 11, "no measure 'speed'"),
        ("{class: batch,", "{class: bulk,", 12, "no class 'bulk'"),
        ("{class: batch,", "{klass: batch,", 12, "unknown key 'klass'"),
        ("name: test", "nmae: test", 1, "unknown key 'nmae'"),
        ("  - goodput >= 95 %", "  - [", 11, "not YAML"),
    ],
)
def test_errors_name_the_line_and_the_remedy(old: str, new: str, line: int, said: str) -> None:
    assert GOOD.count(old) == 1
    with pytest.raises(UserError) as caught:
        slo.parse(GOOD.replace(old, new), "my.yaml")
    assert said in caught.value.message
    assert caught.value.where == f"my.yaml:{line}"
    assert caught.value.remedy


@pytest.mark.parametrize(
    "text", ["", "just text", "[]", "classes: {default: {}}", "objectives: []", "[" * 1500, "\x00"]
)
def test_what_is_no_slo_file_is_refused(text: str) -> None:
    with pytest.raises(UserError) as caught:
        slo.parse(text, "my.yaml")
    assert caught.value.where is not None and caught.value.where.startswith("my.yaml")


def test_a_missing_file_names_the_presets(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="batch, chat, code, demo, voice"):
        slo.load(tmp_path / "none.yaml")
    with pytest.raises(UserError):
        slo.load(tmp_path)
    (tmp_path / "latin.yaml").write_bytes(b"name: \xff")
    with pytest.raises(UserError, match="UTF-8"):
        slo.load(tmp_path / "latin.yaml")
