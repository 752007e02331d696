"""Fluidity: its definition by hand, the fast form against it, and what it is for: early stalls hurt more than late."""

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import fluidity, slo
from tests.bundles import answered_row
from tests.telemetry.test_outcomes import judge

TYPE = {"chunk_s": pa.list_(pa.float32()), "chunk_tokens": pa.list_(pa.int16())}


def rows_of(*answers: tuple[list[float] | None, list[int] | None]) -> pa.Table:
    return pa.table({
        "chunk_s": pa.array([answer[0] for answer in answers], TYPE["chunk_s"]),
        "chunk_tokens": pa.array([answer[1] for answer in answers], TYPE["chunk_tokens"]),
    })  # fmt: skip


def paced(tokens: int, pace: float, first: float = 0.5, stall_at: int | None = None, stall: float = 0.0) -> list[float]:
    moments = first + pace * np.arange(tokens)
    if stall_at is not None:
        moments[stall_at:] += stall
    return [float(moment) for moment in moments]


@pytest.mark.parametrize(
    ("moments", "tokens", "first_due", "share"),
    [
        ([0.5, 0.6, 0.7, 0.8], [1, 1, 1, 1], 1.0, 1.0),  # early and ahead
        ([1.0, 1.1, 1.2, 1.3], [1, 1, 1, 1], 1.0, 1.0),  # exactly on time
        ([1.05, 1.15], [1, 1], 1.0, 1 / 2),  # the first is late and misses one deadline; the clock starts anew
        ([1.25, 1.35], [1, 1], 1.0, 1 / 4),  # late by two and a half paces: three deadlines missed, one met
        ([1.0, 2.05], [1, 1], 1.0, 1 / 11),  # a stall of 1.05 s misses each of the ten deadlines it covers
        ([0.5, 2.0], [16, 1], 0.5, 17 / 17),  # sixteen tokens at once: 1.6 s of slack carry over 1.5 s of silence
        ([0.5, 2.5], [16, 1], 0.5, 16 / (16 + 4)),
        ([0.7, 0.8], [1, 1], math.inf, 1.0),  # no ttft deadline: due when it comes
        ([0.5], [1], 1.0, 1.0),
    ],
)  # fmt: skip
def test_by_hand(moments: list[float], tokens: list[int], first_due: float, share: float) -> None:
    assert fluidity.of_one(moments, tokens, first_due, 0.1) == pytest.approx(share)
    found = fluidity.of_rows(rows_of((moments, tokens)), np.array([first_due]), np.array([0.1]))
    assert found[0] == pytest.approx(share)


def test_the_same_stall_early_hurts_more_than_late() -> None:
    """P90 of the gaps and TPOT see no difference between the two; fluidity does."""
    early, late = paced(100, 0.05, stall_at=2, stall=2.0), paced(100, 0.05, stall_at=90, stall=2.0)
    assert np.percentile(np.diff(early), 90) == pytest.approx(np.percentile(np.diff(late), 90))
    shares = [fluidity.of_one(moments, [1] * 100, 1.0, 0.1) for moments in (early, late)]
    assert shares[0] < 0.9 < shares[1] == 1.0


answers = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 5)), min_size=0, max_size=30)


@settings(deadline=None)
@given(
    st.lists(st.tuples(answers, st.sampled_from([0.3, 1.0, math.inf]), st.sampled_from([0.25, 1.0])), max_size=12),
    st.sampled_from([1 << 21, 40, 1]),
)
def test_rows_equal_the_definition(found: list[tuple[list[tuple[int, int]], float, float]], cells: int) -> None:
    """Moments on a grid of 1/32 s, where float32 and both orders of summing are exact."""
    table = rows_of(*[
        ([float(m) / 32 for m in np.cumsum([gap for gap, _ in one])], [count for _, count in one])
        for one, _, _ in found
    ])  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fluidity, "CELLS", cells)
        patch.setattr(fluidity, "SLICE", 3 if cells == 1 else 20_000)
        due, pace = np.array([d for _, d, _ in found]), np.array([p for _, _, p in found])
        shares = fluidity.of_rows(table, due, pace)
    for place, row in enumerate(table.to_pylist()):
        expected = fluidity.of_one(row["chunk_s"], row["chunk_tokens"], due[place], pace[place])
        np.testing.assert_allclose(shares[place], expected)


def test_without_chunks_or_pace_there_is_none() -> None:
    table = rows_of((None, None), ([], []), ([0.5], None), ([0.5], [1]), ([0.5], [0]))
    pace = np.array([0.1, 0.1, 0.1, np.nan, 0.1])
    assert np.isnan(fluidity.of_rows(table, np.full(5, 1.0), pace)).all()
    assert len(fluidity.of_rows(table.slice(0, 0), np.empty(0), np.empty(0))) == 0
    assert fluidity.of_rows(table.slice(3, 1), np.array([1.0]), np.array([0.1]))[0] == 1.0


POLICY = slo.parse(
    """
classes:
  default: {ttft: {base_s: 1.0}, fluidity: {per_token_s: 0.1, at_least: 0.9}}
objectives: [goodput >= 90 %]
""",
    "f.yaml",
)


def test_a_fluidity_below_the_bound_is_lateness_of_the_kind_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.telemetry.test_outcomes.POLICY", POLICY)
    smooth = {"chunk_s": paced(20, 0.05), "chunk_tokens": [1] * 20, "first_token_s": 1.5}
    stalled = {**smooth, "chunk_s": paced(20, 0.05, stall_at=1, stall=3.0)}
    good, late, silent = judge(answered_row(0, **smooth), answered_row(1, **stalled), answered_row(2, chunk_s=None))
    assert (good["label"], good["fluidity"]) == ("good", 1.0)
    assert (late["label"], late["reason"]) == ("late", "gap") and late["fluidity"] < 0.9
    assert silent["fluidity"] is None and silent["label"] == "good"
