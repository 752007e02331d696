"""Each bound on the generator from both sides, and a run that was cut."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from telemetry import names, slo
from telemetry.schema import REQUESTS
from telemetry.validity import assess, lag_bound
from tests.bundles import answered_row, dropped_row

POLICY = slo.parse("classes: {default: {ttft: {base_s: 1.0}}}\nobjectives: [goodput >= 90 %]", "t.yaml")  # bound 10 ms


def rows(n: int = 200, lag: float = 0.0004, late: int = 0) -> list[dict[str, Any]]:
    """n requests over 20 s; the last ``late`` of them begun ``lag`` after their time."""
    return [answered_row(i, i * 20 / n, lag_s=lag if i >= n - late else 0.0004) for i in range(n)]


def verdict(found: list[dict[str, Any]], **manifest: Any) -> tuple[str, str]:
    table = pa.Table.from_pylist(found, schema=REQUESTS)
    run = assess(table, {"scheduled": len(found), "status": "complete", **manifest}, POLICY)
    assert (run.verdict == names.VALID) == (not run.reasons)
    return run.verdict, "; ".join(run.reasons)


def test_a_healthy_run_is_valid() -> None:
    assert verdict(rows(), generator={"cpu_ratio": 0.5, "loop_lag_p99_s": 0.001})[0] == names.VALID


@pytest.mark.parametrize(
    ("lag", "late", "expected"),
    [
        (0.0099, 200, names.VALID),
        (0.0101, 200, names.CLIENT_LIMITED),
        (0.04, 2, names.VALID),
        (0.04, 3, names.CLIENT_LIMITED),
    ],
)
def test_lag_p99(lag: float, late: int, expected: str) -> None:
    got, why = verdict(rows(lag=lag, late=late))
    assert got == expected
    assert ("lag p99" in why) == (expected != names.VALID)


def test_the_lag_bound_is_5_ms_or_1_percent_of_the_shortest_ttft_deadline() -> None:
    table = pa.Table.from_pylist(rows(5), schema=REQUESTS)
    assert lag_bound(table, POLICY) == pytest.approx(0.010)
    tight = slo.parse("classes: {default: {ttft: {base_s: 0.1}}}\nobjectives: [goodput >= 90 %]", "t.yaml")
    assert lag_bound(table, tight) == 0.005
    none = slo.parse("classes: {default: {gap_s: 1}}\nobjectives: [goodput >= 90 %]", "t.yaml")
    assert lag_bound(table, none) == 0.005


@pytest.mark.parametrize(
    ("generator", "expected", "said"),
    [
        ({"cpu_ratio": 0.79}, names.VALID, ""),
        ({"cpu_ratio": 0.80}, names.CLIENT_LIMITED, "80 % of a core"),
        ({"loop_lag_p99_s": 0.0099}, names.VALID, ""),
        ({"loop_lag_p99_s": 0.0101}, names.CLIENT_LIMITED, "event loop"),
        ({"workers": {"a": {"cpu_ratio": 0.2}, "b": {"cpu_ratio": 0.9}}}, names.CLIENT_LIMITED, "90 % of a core"),
        ({"workers": [{"loop_lag_p99_s": 0.5}]}, names.CLIENT_LIMITED, "event loop"),
        ({"cpu_ratio": None}, names.VALID, ""),
    ],
)
def test_the_senders_own_account(generator: dict[str, Any], expected: str, said: str) -> None:
    got, why = verdict(rows(), generator=generator)
    assert got == expected and said in why


def test_a_rate_that_was_not_delivered() -> None:
    """The last request begins 0.3 s late in 19.9 s: 98.5 % of the asked rate."""
    found = rows(2000)
    found[-1]["lag_s"] = 0.3
    got, why = verdict(found)
    assert got == names.CLIENT_LIMITED and "98.5 % of the asked rate" in why


def test_more_than_one_percent_invalid() -> None:
    def broken(count: int) -> list[dict[str, Any]]:
        return [
            dropped_row(i, i * 0.1, names.BAD_REQUEST) if i < count else answered_row(i, i * 0.1) for i in range(200)
        ]

    assert verdict(broken(2))[0] == names.VALID
    got, why = verdict(broken(3))
    assert got == names.CLIENT_LIMITED and "3 of 200 requests are invalid" in why and "bad_request 3" in why


def test_a_server_that_refuses_everything_leaves_the_run_valid() -> None:
    assert verdict([dropped_row(i, i * 0.1, names.REFUSED) for i in range(100)])[0] == names.VALID


@pytest.mark.parametrize(
    ("manifest", "said"),
    [
        ({"status": "interrupted", "scheduled": 500}, "interrupted after 200 of 500"),
        ({"status": "incomplete", "scheduled": 500}, "cut after 200 of 500"),
        ({"status": "running", "scheduled": 500}, "200 of 500 requests so far"),
        ({"status": "complete", "scheduled": 201}, "1 of 201 requests left no row"),
        ({"workers": [{"name": "w0", "status": "ok"}, {"name": "w1", "status": "lost"}], "scheduled": 250},
         "1 of 2 workers lost: w1"),
    ],
)  # fmt: skip
def test_a_cut_run_is_incomplete(manifest: dict[str, Any], said: str) -> None:
    got, why = verdict(rows(), **manifest)
    assert got == names.INCOMPLETE and said in why


def test_figures_are_plain_numbers() -> None:
    table = pa.Table.from_pylist([dropped_row(0)], schema=REQUESTS)
    figures = assess(table, {"scheduled": 1, "status": "complete"}, POLICY).to_dict()["figures"]
    assert {type(value) for value in figures.values()} <= {int, float, type(None)}
    assert assess(REQUESTS.empty_table(), {"scheduled": 0, "status": "complete"}, POLICY).figures["lag_p99_s"] is None
