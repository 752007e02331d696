"""Phases: rows and percentiles sum, other servers fall back to the client's view, growth names the queue."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry import names, phases, slo
from telemetry.bundle import Bundle
from telemetry.schema import REQUESTS
from tests.bundles import answered_row, dropped_row, make_bundle


@pytest.fixture(scope="module")
def overload(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("runs"), n=300, overload=True)


def answered(bundle: Bundle) -> pa.Table:
    return phases.answered_rows(bundle.table("requests"), bundle.verdicts(slo.load("demo")))


@pytest.mark.parametrize("measure", [phases.E2E, phases.TTFT])
def test_the_parts_of_every_row_sum_to_its_whole(overload: Bundle, measure: str) -> None:
    table = phases.row_parts(answered(overload), measure)
    assert table.num_rows == answered(overload).num_rows > 250
    parts = np.sum([table.column(name).to_numpy() for name in table.column_names[2:]], axis=0)
    np.testing.assert_allclose(parts, table.column("total_s").to_numpy(), atol=1e-9)
    for name in table.column_names[2:]:
        assert table.column(name).to_numpy().min() > -1e-9


@pytest.mark.parametrize("measure", [phases.E2E, phases.TTFT])
@pytest.mark.parametrize("p", [1, 50, 90, 99, 99.9])
def test_the_parts_of_a_percentile_sum_to_it(overload: Bundle, measure: str, p: float) -> None:
    rows = answered(overload)
    split = phases.phases_at_percentile(rows, p, measure)
    assert split is not None and split.from_server and split.n == rows.num_rows
    assert sum(split.parts.values()) == pytest.approx(split.total_s, rel=1e-12)
    times = np.sort(phases.row_parts(rows, measure).column("total_s").to_numpy())
    assert split.total_s == times[max(0, int(np.ceil(p / 100 * len(times) - 1e-9)) - 1)]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(0, 5), min_size=1, max_size=30), st.floats(1, 99))
def test_any_set_of_rows_sums(queues: list[float], p: float) -> None:
    rows = []
    for index, queue in enumerate(queues):
        row = answered_row(index)
        row["phase_queue_s"] = queue
        row["server_duration_s"] = sum(row[f"phase_{name}_s"] for name in names.PHASES)
        row["end_s"] = row["sent_s"] + 0.001 + row["server_duration_s"]
        rows.append(row)
    split = phases.phases_at_percentile(pa.Table.from_pylist(rows, schema=REQUESTS), p)
    assert split is not None
    assert sum(split.parts.values()) == pytest.approx(split.total_s)


def test_a_server_without_an_account_is_split_by_what_the_client_saw() -> None:
    blank = {"server_duration_s": None} | {f"phase_{name}_s": None for name in names.PHASES}
    rows = pa.Table.from_pylist([answered_row(i, **blank) for i in range(5)], schema=REQUESTS)
    for measure in (phases.E2E, phases.TTFT):
        split = phases.phases_at_percentile(rows, 50, measure)
        assert split is not None and not split.from_server
        assert sum(split.parts.values()) == pytest.approx(split.total_s)
    assert phases.phases_at_percentile(REQUESTS.empty_table(), 50) is None


def test_growth_names_the_queue_in_an_overload(overload: Bundle) -> None:
    growth = phases.growth_through_run(answered(overload))
    assert growth is not None and growth.last.total_s > 3 * growth.first.total_s
    share = growth.share(names.QUEUE)
    assert share is not None and share > 0.8


def test_growth_needs_rows() -> None:
    rows = pa.Table.from_pylist([answered_row(i, i * 0.1) for i in range(29)], schema=REQUESTS)
    assert phases.growth_through_run(rows) is None
    steady = pa.Table.from_pylist([answered_row(i, i * 0.1) for i in range(60)], schema=REQUESTS)
    growth = phases.growth_through_run(steady)
    assert growth is not None and abs(growth.total_s) < 1e-9


def test_dropped_invalid_and_canaries_are_left_out() -> None:
    rows = [answered_row(0), dropped_row(1), answered_row(2, lag_s=1.0), answered_row(3, canary_kind="golden")]
    table = pa.Table.from_pylist(rows, schema=REQUESTS)
    from telemetry.outcomes import judge

    verdicts = judge(table, slo.load("demo"), 4, "complete")
    assert phases.answered_rows(table, verdicts).column("index").to_pylist() == [0]
