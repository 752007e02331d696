"""The arrays that a comparison rests on, against the rows one by one."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from telemetry import names
from telemetry.bundle import COMPLETE, Bundle
from telemetry.compare import Facts
from telemetry.outcomes import label_places
from telemetry.slo import load, of_manifest
from tests.bundles import answered_row, dropped_row

CUT = 90  # the last rows never came


def _bundle(root: Path) -> Bundle:
    """Answered, dropped, canaries, one token only, unknown lengths, and rows missing at the end and in the middle."""
    bundle = Bundle.create(root, {"keep_text": "wrong"}, slo=load("demo").manifest_entry(), scheduled=100, length_s=9.0)
    with bundle.writer("requests", "worker-0") as writer:
        for index in range(CUT):
            if index % 31 == 5:
                continue
            row = dropped_row(index, index / 10) if index % 7 == 3 else answered_row(index, index / 10)
            changes: dict[str, Any] = {}
            if index % 11 == 2:
                changes["canary_kind"] = "golden"
            if index % 13 == 4:
                changes["input_tokens"] = None
            if index % 17 == 6:
                changes |= {"tpot_s": None}
            if index % 19 == 8:
                changes |= {"first_token_s": None, "first_content_s": None}
            writer.append(row | changes)
    bundle.update(status=COMPLETE)
    bundle.compact()
    return bundle


def test_facts_are_those_of_the_rows(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path)
    verdicts = {one["index"]: one["label"] for one in bundle.verdicts(of_manifest(bundle.manifest)).to_pylist()}
    rows = [
        row for row in bundle.table("requests").to_pylist() if verdicts.get(row["index"], "invalid") != names.INVALID
    ]
    found = Facts.of(bundle)

    assert found.index.tolist() == [row["index"] for row in rows] and len(rows) < CUT
    assert found.input_tokens.tolist() == [-1 if row["input_tokens"] is None else row["input_tokens"] for row in rows]
    assert found.output_tokens.tolist() == [row["expected_output_tokens"] for row in rows]
    assert [names.LABELS[at] for at in found.label] == [verdicts[row["index"]] for row in rows]
    assert {names.GOOD, names.DROPPED} <= {names.LABELS[at] for at in found.label}
    for measure, of_row in (
        ("ttft", lambda row: (row["first_token_s"], row["intended_s"])),
        ("e2e", lambda row: (row["end_s"], row["intended_s"])),
        ("tpot", lambda row: (row["tpot_s"], 0.0)),
    ):
        expected = []
        for row in rows:
            end, start = of_row(row)
            dropped = verdicts[row["index"]] == names.DROPPED
            expected.append(
                math.nan if row["canary_kind"] else math.inf if dropped else math.nan if end is None else end - start
            )
        np.testing.assert_array_equal(found.times[measure], expected)


def test_named_columns_of_verdicts_are_the_same_whether_kept_or_made(tmp_path: Path) -> None:
    bundle = _bundle(tmp_path)
    policy = of_manifest(bundle.manifest)
    made = bundle.verdicts(policy, ("index", "label"))
    kept = bundle.verdicts(policy, ("index", "label"))
    assert made.column_names == kept.column_names == ["index", "label"] and made.equals(kept)
    assert [names.LABELS[at] for at in label_places(made)] == bundle.verdicts(policy).column("label").to_pylist()
    assert len(label_places(made.slice(0, 0))) == 0
