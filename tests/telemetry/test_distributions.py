"""Tails and intervals against values known from elsewhere, against each other, and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from telemetry.canary_estimate import checks_needed, could_have_seen
from telemetry.distributions import (
    binomial_at_least,
    binomial_interval,
    chi_square_tail,
    false_discovery,
    kolmogorov_tail,
    normal_tail,
    student_quantile,
    student_tail,
    upper_bound,
)


@given(st.integers(1, 60), st.floats(0.001, 0.999))
def test_binomial_tails_are_the_sums_of_their_terms(n: int, p: float) -> None:
    terms = [math.comb(n, k) * p**k * (1 - p) ** (n - k) for k in range(n + 1)]
    for k in range(n + 2):
        assert binomial_at_least(k, n, p) == pytest.approx(math.fsum(terms[k:]), abs=1e-12)


@pytest.mark.parametrize(
    ("value", "degrees", "tail"),
    [(3.841459, 1, 0.05), (5.991465, 2, 0.05), (18.307038, 10, 0.05), (135.807, 100, 0.01), (0.0, 5, 1.0), (1e4, 3, 0)],
)
def test_chi_square_as_in_the_tables(value: float, degrees: int, tail: float) -> None:
    assert chi_square_tail(value, degrees) == pytest.approx(tail, rel=1e-4, abs=1e-12)


@pytest.mark.parametrize(
    ("confidence", "degrees", "value"), [(0.975, 1, 12.7062), (0.95, 2, 2.91999), (0.99, 10, 2.76377)]
)
def test_student_as_in_the_tables(confidence: float, degrees: int, value: float) -> None:
    assert student_quantile(confidence, degrees) == pytest.approx(value, rel=1e-5)
    assert student_tail(value, degrees) == pytest.approx(1 - confidence, rel=1e-4)
    assert student_tail(-value, degrees) == pytest.approx(confidence, rel=1e-4)


def test_kolmogorov_and_normal_as_in_the_tables() -> None:
    assert kolmogorov_tail(1.358099) == pytest.approx(0.05, rel=1e-4)
    assert kolmogorov_tail(1.627624) == pytest.approx(0.01, rel=1e-4)
    assert kolmogorov_tail(0.1) == 1.0 and kolmogorov_tail(9) < 1e-60
    assert normal_tail(1.959964) == pytest.approx(0.025, rel=1e-5)


@given(st.integers(0, 50), st.integers(1, 50))
def test_clopper_pearson_covers_by_its_definition(k: int, n: int) -> None:
    k = min(k, n)
    low, high = binomial_interval(k, n)
    assert 0 <= low <= k / n <= high <= 1
    assert low == 0 if k == 0 else binomial_at_least(k, n, low) == pytest.approx(0.025, rel=1e-6)
    assert high == 1 if k == n else 1 - binomial_at_least(k + 1, n, high) == pytest.approx(0.025, rel=1e-6)


def test_the_rule_of_three() -> None:
    assert upper_bound(0, 300) == pytest.approx(3 / 300, rel=0.01)
    assert binomial_interval(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("share", "needed"), [(0.05, 124), (0.02, 313), (0.01, 628), (0.001, 6294)])
def test_canaries_needed_to_see_three_wrong(share: float, needed: int) -> None:
    """The figures of the design: 6.3 / w."""
    assert checks_needed(share) == needed
    seen = could_have_seen(needed)
    assert seen is not None and seen == pytest.approx(share, rel=0.01)
    assert could_have_seen(2) is None


def test_false_discoveries_by_hand() -> None:
    assert false_discovery([0.01, 0.02, 0.03, 0.5], 0.05) == [True, True, True, False]
    assert false_discovery([0.04, 0.05], 0.05) == [True, True]
    assert false_discovery([0.06, 0.04], 0.05) == [False, False]
    assert false_discovery([], 0.05) == []


def test_false_discoveries_stay_at_their_rate() -> None:
    rng = np.random.default_rng(5)
    shares = []
    for _ in range(400):
        p_values = np.concatenate([rng.uniform(size=15), rng.uniform(0, 1e-4, 5)])
        kept = false_discovery(p_values.tolist(), 0.1)
        assert sum(kept[15:]) >= 4
        shares.append(sum(kept[:15]) / sum(kept))
    assert np.mean(shares) < 0.1
