"""W4: has the population of inputs or outputs shifted?  Suspicion only, never a verdict.

Owns the tests between two runs: lengths (two-sample Kolmogorov and Smirnov), scripts, finish reasons and tokens
(chi-square on counts), and shares such as that of cached tokens (permutation of requests).  Inputs matter as much as
outputs: a tokenizer, a template or a prompt that changed in deployment moves no metric of the server, but it moves
these.

Must always hold: over all features tested at most ``RATE`` of the findings are false on average (Benjamini and
Hochberg); a feature also has to move by an amount that means something, since with enough requests everything is
significant; requests are exchanged whole, tokens of one request never count as independent.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry.distributions import chi_square_tail, false_discovery, kolmogorov_tail
from telemetry.scripts import scripts

RATE: Final = 0.05
MIN_REQUESTS: Final = 30
MIN_EXPECTED: Final = 5.0  # counts below it are gathered into one cell, the usual rule for chi-square
#: The least effect that is worth a word: distance of two distribution curves, or total variation, or a share's change.
MIN_EFFECT: Final = 0.05
PERMUTATIONS: Final = 999
TOP_TOKENS: Final = 200
SEED: Final = 7
MOST_BAGS: Final = 1000  # requests whose bags are exchanged: more would cost seconds and see little more
#: Feature -> column of facts.
CATEGORIES: Final = {
    "finish reason": "finish_reason", "model name": "model", "fingerprint": "fingerprint",
    "script of the prompts": "input_script", "script of the answers": "output_script",
}  # fmt: skip
SKETCHES: Final = {"bytes of the prompts": "input_sketch", "tokens of the answers": "output_sketch"}

TEXTS_KEPT: Final = 0.9
SAMPLE_COLUMNS: Final = (
    "error", "canary_kind", "prompt_tokens_reported", "input_tokens", "completion_tokens_reported",
    "completion_tokens_counted", "cached_tokens", "text", "finish_reason", "model", "fingerprint", "input_script",
    "output_script", "input_sketch", "output_sketch",
)  # fmt: skip

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Shift:
    """One feature.  effect: distance of the two distributions in 0..1.  suspicious: significant among all, and large.

    before, after: medians, shares or what grew most, in words.
    """

    feature: str
    effect: float
    p_value: float
    suspicious: bool
    before: str
    after: str
    n: int

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}


@dataclass(frozen=True, slots=True)
class Sample:
    """What is known of one run's requests, a feature each: numbers, categories, or a bag of words per request.

    numbers: such as input length, output length, cached share.  categories: such as finish reason, script of the text.
    bags: per request a count of tokens (or of scripts).
    """

    numbers: Mapping[str, Sequence[float]]
    categories: Mapping[str, Sequence[str]]
    bags: Mapping[str, Sequence[Mapping[str, int]]]


def sample_of(requests: pa.Table) -> Sample:
    """What the answered requests of a run say of its population (columns SAMPLE_COLUMNS); canaries are left out.

    Tokens and bytes are known by the sketches of loadgen.textfacts, which keep no text; the letters of each script only
    where the texts of nine in ten answers were kept: those of wrong answers alone are no population.
    """
    rows = requests.filter(pc.and_(pc.is_null(requests.column("error")), pc.is_null(requests.column("canary_kind"))))
    prompt = pc.cast(pc.coalesce(rows.column("prompt_tokens_reported"), rows.column("input_tokens")), pa.float64())
    answer = pc.cast(
        pc.coalesce(rows.column("completion_tokens_reported"), rows.column("completion_tokens_counted")), pa.float64()
    )
    cached = pc.divide(pc.cast(rows.column("cached_tokens"), pa.float64()), prompt)
    numbers = {"prompt tokens": prompt, "answer tokens": answer, "cached share": cached}
    texts = pc.drop_null(rows.column("text")).to_pylist()
    kept = len(texts) >= TEXTS_KEPT * max(1, rows.num_rows)
    categories = {
        name: found for name, column in CATEGORIES.items() if (found := pc.drop_null(rows.column(column)).to_pylist())
    }
    bags: dict[str, Sequence[Mapping[str, int]]] = {
        name: [{str(place): count for place, count in enumerate(one) if count} for one in found]
        for name, column in SKETCHES.items()
        if (found := _some(pc.drop_null(rows.column(column)).to_pylist()))
    }
    if kept:
        bags["scripts of the answers"] = [scripts(text) for text in _some(texts)]
    return Sample(
        numbers={name: found for name, column in numbers.items() if len(found := _finite(column))},
        categories=categories,
        bags=bags,
    )


def _some(values: list[Any]) -> list[Any]:
    """At most MOST_BAGS of them, evenly chosen."""
    return values[:: -(-len(values) // MOST_BAGS)] if values else []


def _finite(column: pa.ChunkedArray) -> list[float]:
    values = pc.drop_null(column).to_numpy()
    found: list[float] = values[np.isfinite(values)].tolist()
    return found


def compare(before: Sample, after: Sample, rate: float = RATE) -> list[Shift]:
    """Test every feature that both samples have with at least 30 requests; the most significant first."""
    found: list[Shift] = []
    for name in before.numbers.keys() & after.numbers.keys():
        a, b = np.asarray(before.numbers[name], float), np.asarray(after.numbers[name], float)
        if min(len(a), len(b)) >= MIN_REQUESTS:
            found.append(_numbers(name, a, b))
    for name in before.categories.keys() & after.categories.keys():
        x, y = before.categories[name], after.categories[name]
        if min(len(x), len(y)) >= MIN_REQUESTS:
            found.append(_categories(name, Counter(x), Counter(y)))
    for name in before.bags.keys() & after.bags.keys():
        s, t = before.bags[name], after.bags[name]
        if min(len(s), len(t)) >= MIN_REQUESTS:
            found.append(_bags(name, s, t))
    found.sort(key=lambda shift: (shift.p_value, shift.feature))
    kept = false_discovery([one.p_value for one in found], rate)
    return [
        Shift(s.feature, s.effect, s.p_value, keep and s.effect >= MIN_EFFECT, s.before, s.after, s.n)
        for s, keep in zip(found, kept, strict=True)
    ]


def _numbers(name: str, a: Floats, b: Floats) -> Shift:
    """Kolmogorov and Smirnov; ties make it careful rather than bold."""
    a, b = np.sort(a), np.sort(b)
    points = np.concatenate([a, b])
    distance = float(np.abs(
        np.searchsorted(a, points, side="right") / len(a) - np.searchsorted(b, points, side="right") / len(b)
    ).max())  # fmt: skip
    scale = math.sqrt(len(a) * len(b) / (len(a) + len(b)))
    p = kolmogorov_tail((scale + 0.12 + 0.11 / scale) * distance)  # Stephens 1970
    words = [f"median {np.median(side):.4g}" for side in (a, b)]
    return Shift(name, distance, p, False, words[0], words[1], min(len(a), len(b)))


def _categories(name: str, a: Counter[str], b: Counter[str]) -> Shift:
    cells = _gathered(a, b)
    n, m = a.total(), b.total()
    value = 0.0
    for x, y in cells.values():
        together = (x + y) / (n + m)
        value += (x - n * together) ** 2 / (n * together) + (y - m * together) ** 2 / (m * together)
    p = chi_square_tail(value, len(cells) - 1) if len(cells) > 1 else 1.0
    return Shift(name, _variation(a, b), p, False, *_grown(a, b), min(n, m))


def _bags(name: str, a: Sequence[Mapping[str, int]], b: Sequence[Mapping[str, int]]) -> Shift:
    """Total variation between the pooled bags, against what exchanging whole requests gives."""
    total: Counter[str] = Counter()
    for bag in (*a, *b):
        total.update(bag)
    tokens = {token: place for place, (token, _) in enumerate(total.most_common(TOP_TOKENS))}
    table = np.zeros((len(a) + len(b), len(tokens) + 1))
    for row, bag in enumerate((*a, *b)):
        for token, count in bag.items():
            table[row, tokens.get(token, len(tokens))] += count

    def distance(chosen: npt.NDArray[np.bool_]) -> float:
        x, y = table[chosen].sum(axis=0), table[~chosen].sum(axis=0)
        return float(np.abs(x / max(x.sum(), 1) - y / max(y.sum(), 1)).sum() / 2)

    mine = np.arange(len(table)) < len(a)
    seen = distance(mine)
    rng = np.random.default_rng(SEED)
    as_far = sum(distance(rng.permutation(mine)) >= seen for _ in range(PERMUTATIONS))
    pooled = [sum((Counter(bag) for bag in side), Counter()) for side in (a, b)]
    return Shift(name, seen, (1 + as_far) / (1 + PERMUTATIONS), False, *_grown(*pooled), min(len(a), len(b)))


def _gathered(a: Counter[str], b: Counter[str]) -> dict[str, tuple[int, int]]:
    """Cells of both sides; those with less than five expected on either side become one."""
    n, m = a.total(), b.total()
    cells: dict[str, tuple[int, int]] = {}
    rare = (0, 0)
    for key in sorted(a.keys() | b.keys()):
        share = (a[key] + b[key]) / (n + m)
        if min(n, m) * share < MIN_EXPECTED:
            rare = (rare[0] + a[key], rare[1] + b[key])
        else:
            cells[key] = (a[key], b[key])
    if sum(rare):
        cells["\0rare"] = rare
    return cells


def _variation(a: Counter[str], b: Counter[str]) -> float:
    n, m = max(1, a.total()), max(1, b.total())
    return sum(abs(a[key] / n - b[key] / m) for key in a.keys() | b.keys()) / 2


def _grown(a: Counter[str], b: Counter[str]) -> tuple[str, str]:
    """The cell whose share changed most, on each side, in words."""
    n, m = max(1, a.total()), max(1, b.total())
    keys = sorted(a.keys() | b.keys())
    if not keys:
        return "none", "none"
    most = max(keys, key=lambda key: abs(b[key] / m - a[key] / n))
    return f"{most!r} {100 * a[most] / n:.1f} %", f"{most!r} {100 * b[most] / m:.1f} %"
