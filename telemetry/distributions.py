"""The few distributions that verdicts rest on, from the standard library alone.

Owns: exact binomial tails and intervals, the tails of chi-square, Student's t and Kolmogorov's distribution, and the
correction of several p-values.  Must always hold: a tail is in 0..1, and a bound is exact to what a float carries, not
an approximation by a normal curve: the counts here are small (three wrong answers of three hundred).

Sources: continued fractions and series of the incomplete beta and gamma functions as in Abramowitz and Stegun 26.5.8,
6.5.29 and 6.5.31 (modified Lentz); Clopper and Pearson 1934; Benjamini and Hochberg 1995.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

_STEPS: Final = 500
_SMALL: Final = 1e-300
_PRECISE: Final = 1e-15
_ROOT_PRECISE: Final = 1e-13


def beta_cdf(x: float, a: float, b: float) -> float:
    """The regularised incomplete beta function I_x(a, b)."""
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - front * _beta_fraction(1 - x, b, a) / b
    return front * _beta_fraction(x, a, b) / a


def binomial_at_least(k: int, n: int, p: float) -> float:
    """P(Binomial(n, p) >= k)."""
    if k <= 0:
        return 1.0
    return 0.0 if k > n else beta_cdf(p, k, n - k + 1)


def binomial_interval(k: int, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Clopper and Pearson's two-sided interval of a share of which k in n were seen; (0, 1) for n = 0."""
    tail = (1 - confidence) / 2
    return lower_bound(k, n, 1 - tail), upper_bound(k, n, 1 - tail)


def upper_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """The one-sided exact upper bound of a share: the p at which k or fewer in n have probability 1 - confidence."""
    if k >= n:
        return 1.0
    return _root(lambda p: binomial_at_least(k + 1, n, p) - confidence)


def lower_bound(k: int, n: int, confidence: float = 0.95) -> float:
    """The one-sided exact lower bound of a share."""
    if k <= 0:
        return 0.0
    return _root(lambda p: binomial_at_least(k, n, p) - (1 - confidence))


def chi_square_tail(value: float, degrees: int) -> float:
    """P(chi-square with so many degrees of freedom >= value)."""
    return 1.0 if value <= 0 or degrees <= 0 else _gamma_tail(degrees / 2, value / 2)


def student_tail(value: float, degrees: float) -> float:
    """P(Student's t >= value)."""
    half = beta_cdf(degrees / (degrees + value * value), degrees / 2, 0.5) / 2
    return half if value >= 0 else 1 - half


def student_quantile(confidence: float, degrees: float) -> float:
    """The t with P(T <= t) = confidence; confidence in 0.5..1."""
    high = 1.0
    while student_tail(high, degrees) > 1 - confidence:
        high *= 2
    return high * _root(lambda share: (1 - confidence) - student_tail(share * high, degrees))


def kolmogorov_tail(value: float) -> float:
    """P(K >= value) of Kolmogorov's distribution, the limit of sqrt(n) times the largest distance of two curves."""
    if value < 0.2:  # the series needs many terms there, and the tail is 1 to 12 digits
        return 1.0
    terms = (2 * (-1) ** (k - 1) * math.exp(-2 * k * k * value * value) for k in range(1, 101))
    return min(1.0, max(0.0, math.fsum(terms)))


def normal_tail(value: float) -> float:
    """P(a standard normal >= value)."""
    return math.erfc(value / math.sqrt(2)) / 2


def false_discovery(p_values: Sequence[float], rate: float) -> list[bool]:
    """Benjamini and Hochberg: which findings to keep so that at most ``rate`` of them are false on average."""
    order = sorted(range(len(p_values)), key=lambda place: p_values[place])
    kept = 0
    for rank, place in enumerate(order, start=1):
        if p_values[place] <= rate * rank / len(p_values):
            kept = rank
    chosen = set(order[:kept])
    return [place in chosen for place in range(len(p_values))]


def _root(rising: Callable[[float], float]) -> float:
    """Where a rising function of 0..1 crosses zero, by bisection."""
    low, high = 0.0, 1.0
    for _ in range(100):
        middle = (low + high) / 2
        if rising(middle) < 0:
            low = middle
        else:
            high = middle
        if high - low <= _ROOT_PRECISE * high:
            break
    return (low + high) / 2


def _beta_fraction(x: float, a: float, b: float) -> float:
    c, d = 1.0, 1 / (_away(1 - (a + b) * x / (a + 1)))
    value = d
    for m in range(1, _STEPS):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for numerator in (even, odd):
            d = 1 / _away(1 + numerator * d)
            c = _away(1 + numerator / c)
            change = d * c
            value *= change
        if abs(change - 1) < _PRECISE:
            break
    return value


def _gamma_tail(a: float, x: float) -> float:
    """The upper regularised incomplete gamma function Q(a, x)."""
    front = math.exp(-x + a * math.log(x) - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        for n in range(1, _STEPS * 20):
            term *= x / (a + n)
            total += term
            if term < total * _PRECISE:
                break
        return max(0.0, 1 - total * front)
    b = x + 1 - a
    c, d = 1 / _SMALL, 1 / _away(b)
    value = d
    for n in range(1, _STEPS * 20):
        numerator = -n * (n - a)
        b += 2
        d = 1 / _away(numerator * d + b)
        c = _away(b + numerator / c)
        change = d * c
        value *= change
        if abs(change - 1) < _PRECISE:
            break
    return front * value


def _away(value: float) -> float:
    """Away from zero, for a division."""
    return value if abs(value) > _SMALL else _SMALL
