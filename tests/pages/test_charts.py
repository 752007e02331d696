"""Queries agree with a plain count, stacks end where they should, colours stay apart for colour-blind eyes."""

from __future__ import annotations

import itertools
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboards import charts, markup, palette, queries
from telemetry import names
from telemetry.phases import CLIENT_PARTS, E2E_PARTS, OTHER, TTFT_PARTS

# Machado, Oliveira, Fernandes 2009, severity 1.0: linear RGB as seen by red-, green- and blue-blind eyes.
EYES = {
    "all cones": np.eye(3),
    "protanopia": np.array(
        [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]]
    ),
    "deuteranopia": np.array(
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
    ),
    "tritanopia": np.array(
        [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]]
    ),
}
#: "Network and rest" of the time to first token is network's colour on purpose: they never share a stack.
PHASES_APART = {name: colour for name, colour in palette.PHASE_COLOURS.items() if name != OTHER}
LIGHT, DARK = "#ffffff", "#0e1117"  # Streamlit's grounds


def linear(colour: str) -> np.ndarray:
    c = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(c <= 0.04045, c / 12.92, ((c + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ np.clip(rgb, 0, 1) / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(a: str, b: str) -> float:
    dim, bright = sorted(float(np.array([0.2126, 0.7152, 0.0722]) @ linear(colour)) for colour in (a, b))
    return (bright + 0.05) / (dim + 0.05)


@pytest.mark.parametrize("eye", EYES)
@pytest.mark.parametrize(("colours", "apart"), [(palette.LABEL_COLOURS, 18.0), (PHASES_APART, 8.0)])
def test_every_pair_of_colours_stays_apart(eye: str, colours: dict[str, str], apart: float) -> None:
    seen = {name: lab(EYES[eye] @ linear(colour)) for name, colour in colours.items()}
    distances = {pair: float(np.linalg.norm(seen[pair[0]] - seen[pair[1]])) for pair in itertools.combinations(seen, 2)}
    assert {pair: d for pair, d in distances.items() if d < apart} == {}


@pytest.mark.parametrize("ground", [LIGHT, DARK])
def test_every_colour_shows_on_both_grounds(ground: str) -> None:
    weak = {c for c in (*palette.LABEL_COLOURS.values(), *palette.PHASE_COLOURS.values()) if contrast(c, ground) < 1.7}
    assert weak == set()


def test_every_name_has_a_colour_and_words() -> None:
    assert set(palette.LABEL_COLOURS) == set(names.LABELS)
    every = {*E2E_PARTS, *TTFT_PARTS, *CLIENT_PARTS, palette.UNACCOUNTED}
    assert set(palette.PHASE_COLOURS) == set(palette.PHASE_WORDS) == set(palette.PHASE_MEANING) == every
    assert [name for name in palette.PHASE_COLOURS if name in E2E_PARTS] == list(E2E_PARTS)
    assert [name for name in palette.PHASE_COLOURS if name in TTFT_PARTS] == list(TTFT_PARTS)


def tables(intended: list[float], labels: list[str]) -> tuple[pa.Table, pa.Table]:
    n = len(intended)
    requests = pa.table(
        {
            "index": pa.array(range(n), pa.int64()),
            "intended_s": pa.array(intended, pa.float64()),
            "end_s": pa.array([at + 1 + k for k, at in enumerate(intended)], pa.float64()),
            "first_token_s": pa.array(
                [None if k % 3 == 2 else at + 0.5 for k, at in enumerate(intended)], pa.float64()
            ),
        }
    )
    verdicts = pa.table(
        {
            "index": pa.array(range(n), pa.int64()),
            "label": pa.array(labels, pa.string()),
            "reason": pa.array([None] * n, pa.string()),
        }
    )
    return requests, verdicts


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 500), st.sampled_from(names.LABELS)), max_size=60))
def test_bins_hold_every_request_once_and_shares_end_at_one(made: list[tuple[float, str]]) -> None:
    requests, verdicts = tables([at for at, _ in made], [label for _, label in made])
    width = queries.bin_width(queries.span_s(requests), len(made))
    outcomes = queries.outcomes_over_time(requests, verdicts, width)
    counted: Counter[str] = Counter()
    for row in outcomes:
        counted[row["label"]] += row["requests"]
    assert counted == Counter(label for _, label in made)
    load = queries.load_over_time(requests, width)
    assert sum(row["requests"] for row in load) == len(made)
    assert len(load) <= 45
    for start, rows in itertools.groupby(outcomes, key=lambda row: row["start_s"]):
        stacked = list(rows)
        assert stacked[0]["share_low"] == 0
        assert stacked[-1]["share_high"] == 1
        assert all(low["share_high"] == high["share_low"] for low, high in itertools.pairwise(stacked))
        assert [row["requests"] for row in load if row["start_s"] == start] == [stacked[0]["of"]]
        places = [names.LABELS.index(row["label"]) for row in stacked]
        assert places == sorted(places)


def test_the_worst_are_the_slowest_of_those_that_got_so_far() -> None:
    requests, verdicts = tables([0.0, 1.0, 2.0, 3.0], ["good", "late", "dropped", "late"])
    by_end = queries.worst(requests, verdicts, by="e2e", label=None, limit=2)
    assert [(row["index"], row["label"], row["e2e_s"]) for row in by_end] == [(3, "late", 4.0), (1, "late", 2.0)]
    by_all = queries.worst(requests, verdicts, by="e2e", label=None, limit=9)
    assert [row["index"] for row in by_all] == [3, 1, 0, 2]  # those without an answer after the others
    assert [row["index"] for row in queries.worst(requests, verdicts, by="ttft", label=None, limit=9)] == [0, 1, 3]
    assert [row["index"] for row in queries.worst(requests, verdicts, by="e2e", label="late", limit=9)] == [3, 1]


def test_bin_widths_are_readable() -> None:
    assert queries.bin_width(60, 120) == 2
    assert queries.bin_width(60, 6000) == 2
    assert queries.bin_width(3600, 100_000) == 120
    assert queries.bin_width(0, 0) == 0.1


def test_a_stack_ends_at_the_sum_of_its_phases() -> None:
    rows = charts.stack_rows("p50", {names.DECODE: 2.0, names.QUEUE: 1.0, names.STALL: 0.0, names.CLIENT_WAIT: 0.5})
    assert [row["phase"] for row in rows] == [names.CLIENT_WAIT, names.QUEUE, names.DECODE]
    assert [(row["start_s"], row["end_s"]) for row in rows] == [(0.0, 0.5), (0.5, 1.5), (1.5, 3.5)]
    assert {row["total_s"] for row in rows} == {3.5}


def test_a_chart_refuses_more_marks_than_a_page_can_draw() -> None:
    row = charts.stack_rows("p50", {names.DECODE: 2.0})[0]
    with pytest.raises(ValueError, match="3001 marks"):
        charts.phase_stacks([row] * (charts.MAX_MARKS + 1), ["p50"])


def test_what_a_bundle_says_is_escaped() -> None:
    tile = markup.Tile("late", "<late>", 3, 0.5, "#123456", "<script>alert(1)</script>")
    shown = markup.tiles([tile]) + markup.verdict("<b>", '"', "red") + markup.legend({"<i>": "red"})
    assert "<script>" not in shown
    assert "<b>" not in shown
    assert 'title="&lt;i&gt;"' in shown
