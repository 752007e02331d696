"""Percentiles against brute force, censored ones, bands, and what n certifies."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from telemetry.stats import band_ranks, binomial_quantile, needed_to_certify, percentile, percentiles

values = st.lists(st.floats(0, 1e6, allow_nan=False), max_size=60)
ps = st.one_of(st.sampled_from([50.0, 90.0, 95.0, 99.0, 99.9]), st.floats(0.1, 99.9))


@settings(deadline=None)
@given(values, ps, st.integers(0, 20))
def test_nearest_rank_against_its_definition(sample: list[float], p: float, dropped: int) -> None:
    """The smallest value that at least p percent of the sample do not exceed."""
    found = percentile(sample, p, dropped)
    everything = sorted(sample) + [math.inf] * dropped
    assert found.n == len(everything)
    if not everything:
        assert (found.value, found.unbounded) == (None, False)
        return
    expected = next(
        v for k, v in enumerate(everything, 1) if k / len(everything) >= p / 100 - 1e-12 or k == len(everything)
    )
    assert found.unbounded == math.isinf(expected)
    assert found.value == (None if math.isinf(expected) else expected)
    if found.value is not None:
        assert found.low is None or found.low <= found.value
        assert found.high is None or found.high >= found.value


def test_97_answers_and_3_failures() -> None:
    p95, p99 = percentiles([1.0] * 97, [95, 99], dropped=3)
    assert (p95.value, p95.unbounded) == (1.0, False)
    assert (p99.value, p99.unbounded) == (None, True)
    assert percentile([1.0] * 97, 99).value == 1.0


def test_rounding_moves_no_rank() -> None:
    """0.95 * 20 and the like are a hair above a whole number in floating point."""
    for n in range(1, 500):
        for p in (10, 50, 90, 95, 99):
            assert percentile(list(range(1, n + 1)), p).value == max(1, -(-p * n // 100))


@pytest.mark.parametrize(("p", "n"), [(50, 11), (90, 64), (95, 130), (99, 662), (99.9, 6636)])
def test_what_certifies_a_percentile(p: float, n: int) -> None:
    """662 for p99 and 64 for p90 are the figures of MLPerf LoadGen's early stopping."""
    assert needed_to_certify(p) == n
    q = p / 100
    for size, enough in ((n, True), (n - 1, False)):
        assert (sum(math.comb(size, k) * (1 - q) ** k * q ** (size - k) for k in (0, 1)) <= 0.01) == enough
    assert percentile([1.0] * n, p).certified
    assert not percentile([1.0] * (n - 1), p).certified
    assert band_ranks(n, p)[1] is not None


def test_300_requests_cannot_certify_p99() -> None:
    found = percentile(np.arange(300.0), 99)
    assert not found.certified and found.high is None and found.low is not None


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 300), ps, st.floats(0.01, 0.99))
def test_binomial_quantile_against_exact_sums(n: int, p: float, level: float) -> None:
    q = p / 100
    total, expected = 0.0, n
    for k in range(n + 1):
        total += math.comb(n, k) * q**k * (1 - q) ** (n - k)
        if abs(total - level) < 1e-9:
            return  # too close to the edge for floating point
        if total > level:
            expected = k
            break
    assert binomial_quantile(level, n, q) == expected


def test_binomial_quantile_of_a_million_is_the_normal_one() -> None:
    n, q = 1_000_000, 0.99
    expected = n * q + NormalDist().inv_cdf(0.975) * math.sqrt(n * q * (1 - q))
    assert abs(binomial_quantile(0.975, n, q) - expected) < 3


@pytest.mark.parametrize(("n", "p"), [(60, 50), (200, 90), (700, 99)])
def test_the_band_covers_the_true_percentile(n: int, p: float) -> None:
    rng = np.random.default_rng(1)
    truth = -math.log(1 - p / 100)  # of the exponential distribution
    low, high = band_ranks(n, p)
    assert low is not None and high is not None
    samples = np.sort(rng.exponential(size=(4000, n)), axis=1)
    covered = float(((samples[:, low - 1] <= truth) & (truth <= samples[:, high - 1])).mean())
    assert covered >= 0.945  # 95 % less three standard errors of 4,000 trials are 94 %


def test_percentiles_of_workers_are_those_of_their_union() -> None:
    rng = np.random.default_rng(2)
    workers = [rng.exponential(size=size) for size in (10, 400, 3, 77)]
    union = np.concatenate(workers)
    assert percentile(np.concatenate(workers[::-1]), 95) == percentile(union, 95)


def test_misuse_raises() -> None:
    with pytest.raises(ValueError, match="NaN"):
        percentile([1.0, math.nan], 50)
    for p in (0, 100, -1):
        with pytest.raises(ValueError, match="between 0 and 100"):
            percentile([1.0], p)
