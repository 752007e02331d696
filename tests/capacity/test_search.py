"""The search alone, against servers of known capacity: which rate comes next, and how it ends."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from loadgen.capacity import search
from loadgen.capacity.answer import EXIT_OF
from loadgen.capacity.point import DESCENT, OVERLOAD, SEARCH, Point
from loadgen.capacity.search import Bounds, believe, ended, next_step
from models.errors import UserError
from telemetry import names
from telemetry.objective import BROKEN, HELD, UNDECIDED

Server = Callable[[float, random.Random], tuple[str, float]]  # rate -> verdict, margin


def point(rate: float, verdict: str, margin: float = 0.0, kind: str = SEARCH) -> Point:
    return Point(kind, rate, 0, "run", verdict, margin, 1000, 60.0, 0.96, 100.0, 400.0, {}, "goodput >= 95 %")


def server(capacity: float, steepness: float = 0.02, client: float = math.inf) -> Server:
    """An SLO that breaks by one standard error every ``steepness`` beyond its capacity, and a client's own limit."""

    def answer(rate: float, draw: random.Random) -> tuple[str, float]:
        if rate >= client:
            return names.CLIENT_LIMITED, 0.0
        margin = math.log(capacity / rate) / steepness + draw.gauss(0, 1)
        margin = max(-8.0, min(8.0, margin))
        return (HELD if margin > 0 else BROKEN), margin

    return answer


def run(answer: Server, bounds: Bounds, seed: int = 0, begun: Sequence[Point] = ()) -> list[Point]:
    points = list(begun)
    while (step := next_step(points, bounds)) is not None:
        draw = random.Random(1000 * seed + len(points))
        if step.after is not None:
            points.append(point(step.after, *answer(step.after, draw), OVERLOAD))
        points.append(point(step.rate, *answer(step.rate, draw), step.kind))
        assert len(points) <= bounds.most_runs
    return points


@pytest.mark.parametrize("start", [1.0, 9.0, 60.0])
@pytest.mark.parametrize("steepness", [0.004, 0.02])
def test_it_finds_the_capacity_from_anywhere_and_says_how_surely(start: float, steepness: float) -> None:
    inside = 0
    for seed in range(20):
        points = run(server(10.0, steepness), Bounds(start, 0.03), seed)
        belief = believe(points)
        assert belief is not None and belief.rate == pytest.approx(10.0, rel=0.05)
        assert ended(points, Bounds(start, 0.03)) in (search.FOUND, search.ROUGH)
        inside += belief.low <= 10.0 <= belief.high
    assert inside >= 17  # 90 % of 20


def test_it_doubles_to_a_bracket_and_then_stays_inside() -> None:
    points = run(server(10.0, 0.001), Bounds(1.0))
    rates = [one.rate for one in points if one.kind == SEARCH]
    assert rates[:5] == [1.0, 2.0, 4.0, 8.0, 16.0]
    assert all(8.0 < rate < 16.0 for rate in rates[5:])


def test_it_comes_down_after_an_overload_and_sees_hysteresis() -> None:
    bounds = Bounds(5.0)
    healthy = run(server(10.0), bounds)
    assert [one.kind for one in healthy[-2:]] == [OVERLOAD, DESCENT]
    assert healthy[-1].verdict == HELD and healthy[-2].rate > 1.3 * healthy[-1].rate

    fine, broken = server(10.0), server(7.0)
    overloaded = False

    def metastable(rate: float, draw: random.Random) -> tuple[str, float]:
        nonlocal overloaded
        overloaded = overloaded or rate > 13.0
        return (broken if overloaded else fine)(rate, draw)

    points = run(metastable, Bounds(9.0))
    tries = [one.rate for one in points if one.kind == DESCENT]
    assert len(tries) >= 2 and tries[1] == pytest.approx(0.9 * tries[0])
    assert points[-1].verdict == BROKEN or points[-1].rate < 8.0
    belief = believe(points)
    assert belief is not None and belief.rate == pytest.approx(10.0, rel=0.06), "the way down does not move the rest"


def test_a_search_that_was_interrupted_goes_on_as_if_it_had_not_been() -> None:
    bounds = Bounds(3.0)
    whole = run(server(10.0), bounds)
    for cut in (1, 3, 5):
        assert run(server(10.0), bounds, begun=whole[:cut]) == whole


def test_a_client_that_is_the_limit_is_refused_as_a_point() -> None:
    bounds = Bounds(2.0)
    points = run(server(100.0, client=20.0), bounds)
    assert ended(points, bounds) == search.CLIENT_LIMITED and EXIT_OF[search.CLIENT_LIMITED] == 3
    limited = [one.rate for one in points if one.verdict == names.CLIENT_LIMITED]
    assert min(limited) >= 20.0 and len(limited) <= 6, "each is tried twice"
    assert max(one.rate for one in points if one.verdict == HELD) > 17.0
    # below its limit the server is found all the same
    points = run(server(10.0, client=20.0), bounds)
    belief = believe(points)
    assert belief is not None and belief.rate == pytest.approx(10.0, rel=0.06)
    assert ended(points, bounds) == search.FOUND
    # and a client that can do nothing ends it
    points = run(server(10.0, client=0.0), bounds)
    assert ended(points, bounds) == search.CLIENT_LIMITED and believe(points) is None


def test_a_client_that_was_disturbed_once_gets_another_try() -> None:
    calls: list[float] = []

    def disturbed(rate: float, draw: random.Random) -> tuple[str, float]:
        calls.append(rate)
        return (names.CLIENT_LIMITED, 0.0) if len(calls) == 2 else server(10.0)(rate, draw)

    points = run(disturbed, Bounds(4.0))
    assert calls[1] == calls[2] == 8.0
    belief = believe(points)
    assert belief is not None and belief.rate == pytest.approx(10.0, rel=0.06)
    assert search.ceiling(points) == math.inf, "it delivered that rate in the end"


def test_a_server_that_holds_nothing_and_one_that_holds_all() -> None:
    bounds = Bounds(4.0)
    points = run(server(1e-6), bounds)
    assert ended(points, bounds) == search.NONE_HOLDS and EXIT_OF[search.NONE_HOLDS] == 1
    points = run(server(1e9), bounds)
    assert ended(points, bounds) == search.UNBOUNDED and believe(points) is None
    assert EXIT_OF[search.UNBOUNDED] == 0, "at least so much is an answer"


@pytest.mark.parametrize("most", range(3, 9))
def test_no_run_is_kept_for_a_way_down_that_there_is_not(most: int) -> None:
    bounds = Bounds(4.0, most_runs=most)
    for never in (1e-6, 1e9):
        assert len(run(server(never), bounds)) == most, "all are used to find both sides"
    # The last run finds the other side: the answer is rough, and no way down is played.
    found = run(server(4.0 * 2 ** (most - 1.5), 0.001), bounds)
    assert [one.verdict for one in found] == [HELD] * (most - 1) + [BROKEN]
    assert ended(found, bounds) == search.ROUGH and believe(found) is not None
    # With both sides known in time, two are kept for it, and played.
    found = run(server(5.0, 0.001), Bounds(4.0, 0.005, most_runs=most))
    kinds = [one.kind for one in found]
    assert kinds[-2:] == [OVERLOAD, DESCENT] if most > 3 else OVERLOAD not in kinds


@pytest.mark.parametrize(("verdict", "how"), [(UNDECIDED, search.TOO_FEW), (names.INCOMPLETE, search.INCOMPLETE)])
def test_a_run_that_says_nothing_ends_the_search(verdict: str, how: str) -> None:
    bounds = Bounds(4.0)
    points = [point(4.0, HELD, 8.0), point(8.0, verdict)]
    assert next_step(points, bounds) is None and ended(points, bounds) == how
    assert EXIT_OF[how] == 3


def test_a_surer_point_moves_the_belief_more() -> None:
    around = [point(5.0, HELD, 8.0), point(20.0, BROKEN, -8.0)]
    wide, weak, sure = (believe([*around, *more]) for more in ([], [point(10.0, HELD, 0.3)], [point(10.0, HELD, 8.0)]))
    assert wide is not None and weak is not None and sure is not None
    assert weak.rate == pytest.approx(10.0, rel=0.1), "so close to its bound it lies at the capacity"
    assert sure.rate > weak.rate and sure.low > 9.5
    assert weak.width < wide.width
    flipped = believe([replace(one, margin=-one.margin, verdict=HELD if one.verdict == BROKEN else BROKEN)
                       for one in around])  # fmt: skip
    assert flipped is not None, "a contradiction is noise, no error"


@pytest.mark.parametrize("values", [{"start": 0.0}, {"start": math.nan}, {"precision": 0.9}, {"most_runs": 13}])
def test_bounds_that_make_no_sense(values: dict[str, float]) -> None:
    with pytest.raises(UserError, match="--"):
        Bounds(**({"start": 1.0} | values))  # type: ignore[arg-type]
