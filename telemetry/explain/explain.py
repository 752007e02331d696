"""All layers in order: is the run to be believed, what rose, where the time went, why, and for whom.

    invalid   the generator did not keep up: nothing is said of the server
    dropped   more requests without an answer            -> drops
    wrong     more wrong answers, or canaries that say so -> wrongs
    late      a percentile rose                           -> contributions, counterfactual, attributes, late
    none      nothing that the comparison tells from noise

Where dropped and wrong both rose, the larger rise is explained; a percentile where neither did, or where drops are but
the time-outs of a much larger rise of late.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np

from models.errors import UserError
from telemetry import names
from telemetry.bundle import Bundle
from telemetry.compare.blocks import compare_blocks
from telemetry.compare.figures import FIGURES
from telemetry.compare.replays import ALPHA, TOLERANCE, WARM_UP, compare_facts, other_load
from telemetry.compare.result import SAME, WORSE, Comparison, Effect
from telemetry.distributions import binomial_at_least
from telemetry.explain import drops, late, queue_model, wrongs
from telemetry.explain.attributes import partitions
from telemetry.explain.causes import CLIENT, DROPPED, INVALID, LATE, NO_CHANGE, NOTHING, TOOLING, UNKNOWN, WRONG
from telemetry.explain.contributions import contributions, measure_of
from telemetry.explain.counterfactual import causes
from telemetry.explain.loads import LoadChange, load_change
from telemetry.explain.result import Explanation, Hypothesis, Phases
from telemetry.explain.server_model import Replay, through_twin
from telemetry.explain.side import Run, same_requests
from telemetry.slo import Slo
from telemetry.twin import Twin

CERTAIN: Final = 1e-6  # a rise of dropped in a single pair that no queue makes by chance
#: What replays the what-ifs: its name, and how many requests it may replay (tens of seconds).
QUEUE_MODEL: Final = ("queue model", 300_000)
ENGINE_TWIN: Final = ("engine's twin", 60_000)
_FIGURES: Final = {one.name: one for one in FIGURES}
Windows = tuple[tuple[float, float], tuple[float, float]]


def explain(
    a: Sequence[Bundle],
    b: Sequence[Bundle],
    *,
    slo: Slo | None = None,
    twin: Twin | None = None,
    windows: Windows | None = None,
    chosen: Sequence[int] | None = None,
    figure: str | None = None,
    warm_up: float = WARM_UP,
    alpha: float = ALPHA,
    tolerance: float = TOLERANCE,
) -> Explanation:
    """Explain what changed from A to B; pair i is a[i], b[i], and a single pair will do, with wider limits.

    slo: judges both sides (default: each bundle's own).  twin: replays the what-ifs through the engine; None: the queue
    model does.  windows: (start, end) seconds of A and of B; then no warm-up is left out.  chosen: indices of B's
    requests to look at alone.  figure: what to explain ("e2e p99"); None: what got worse most.
    UserError: no runs, no such figure, or none of the chosen requests is there.
    """
    if not a or not b:
        raise UserError("a side has no runs", where="tailspan explain", remedy="name two sides, or a group of pairs")
    if figure is not None and (figure not in _FIGURES or _FIGURES[figure].p is None):
        known = ", ".join(one.name for one in FIGURES if one.p is not None)
        raise UserError(f"there is no figure {figure!r}", where="--figure", remedy=f"one of {known}")
    sides = [[Run.of(one, slo) for one in side] for side in (a, b)]
    whole = sides
    if windows is not None:
        sides = [[run.between(*window) for run in side] for side, window in zip(sides, windows, strict=True)]
        warm_up = 0.0
    if chosen is not None:
        sides = _only(sides, chosen)
        warm_up = 0.0
    replay = queue_model.replay if twin is None else through_twin(twin)
    through = QUEUE_MODEL if twin is None else ENGINE_TWIN
    comparison = _compare(sides, warm_up, alpha, tolerance, windowed=windows is not None or chosen is not None)
    return _Explainer(whole, sides, comparison, replay, through, warm_up, figure).explain()


class _Explainer:
    """One explanation under way."""

    def __init__(
        self,
        whole: Sequence[Sequence[Run]],
        sides: Sequence[Sequence[Run]],
        comparison: Comparison,
        replay: Replay,
        through: tuple[str, int],
        warm_up: float,
        figure: str | None,
    ) -> None:
        self.whole, (self.a, self.b) = whole, sides
        self.comparison, self.replay, self.through = comparison, replay, through
        self.warm_up, self.asked = warm_up, figure

    def explain(self) -> Explanation:
        not_valid = [one for side in self.whole for one in side if not one.facts.valid]
        if not_valid:
            return self._invalid(not_valid)
        change = load_change(self.a, self.b)
        if self.asked is not None:
            return self._late(self.asked, change)
        dropped, wrong = self._dropped_more(), wrongs.rise(self.a, self.b)
        if wrongs.signs(self.a, self.b) and not wrong:
            wrong = 1e-9  # canaries or counters say so; the rows' own verdicts do not know
        if wrongs.nonfinite(self.a, self.b):
            wrong = max(wrong, dropped + 1e-9)  # what fails for that reason is garbage that was caught
        if dropped > 0 and dropped >= wrong and not self._far_end_of_late():
            return self._failed(DROPPED, drops.hypotheses(self.a, self.b, change), change)
        if wrong > 0:
            return self._failed(WRONG, wrongs.hypotheses(self.a, self.b), change)
        figure = worst_figure(self.comparison)
        return self._nothing(change) if figure is None else self._late(figure, change)

    def _dropped_more(self) -> float:
        """How much larger the share of dropped requests is, where that is told from noise; else 0."""
        effect = self._effect(names.DROPPED)
        if effect is not None and effect.verdict == WORSE:
            return effect.change or 0.0
        counts = [[int(run.is_label(names.DROPPED).sum()) for run in side] for side in (self.a, self.b)]
        sizes = [sum(int(run.counted.sum()) for run in side) for side in (self.a, self.b)]
        x, y = (sum(one) for one in counts)
        if not min(sizes) or not y or (len(self.a) > 1 and effect is not None):
            return 0.0
        more = y / sizes[1] - x / sizes[0]
        return more if binomial_at_least(y, x + y, sizes[1] / sum(sizes)) < CERTAIN and more > 0 else 0.0

    def _far_end_of_late(self) -> bool:
        """Are the additional drops nothing but the time-outs of a much larger rise of late?

        Who waits in a queue is late first and times out in the end.  What makes less than NAMED of a rise is not
        what it is named after, here as among the reasons of drops.
        """
        late, dropped, out = (
            rise_of(self.a, self.b, which)
            for which in (
                lambda run: run.is_label(names.LATE),
                lambda run: run.is_label(names.DROPPED),
                lambda run: drops.with_reasons(run, drops.TIMEOUTS),
            )
        )
        waited = out >= (1 - drops.NAMED) * dropped
        return waited and 0 < dropped < drops.NAMED * (dropped + late) and worst_figure(self.comparison) is not None

    def _late(self, figure: str, change: LoadChange | None) -> Explanation:
        effect = self._effect(figure)
        p = _FIGURES[figure].p or 99.0
        measure = measure_of(figure)
        layer1 = [contributions(self.a, self.b, measure, p, self.warm_up)]
        layer1 += [contributions(self.a, self.b, measure, q, self.warm_up) for q in (50.0, 90.0, 99.0) if q != p]
        phases = tuple(one for one in layer1 if one is not None)
        main = layer1[0]
        layer2 = causes(self.a, self.b, figure, self.replay, *self.through, self.warm_up)
        threshold = self._threshold(figure)
        layer3 = partitions(self.a, self.b, _FIGURES[figure].measure, threshold, self.warm_up) if threshold else ()
        if effect is not None and self.asked is not None and effect.verdict != WORSE:
            found = [self._no_change(effect)]
            label = NOTHING
        else:
            found = late.hypotheses(self.a, self.b, main, layer2, layer3, change, figure)
            label = LATE
        return self._made(label, figure, found, change, phases, layer2, layer3)

    def _failed(self, label: str, found: list[Hypothesis], change: LoadChange | None) -> Explanation:
        phases: tuple[Phases, ...] = ()
        figure = worst_figure(self.comparison)
        if figure is not None:
            one = contributions(self.a, self.b, measure_of(figure), _FIGURES[figure].p or 99.0, self.warm_up)
            phases = (one,) if one is not None else ()
        unknown = Hypothesis(
            UNKNOWN, f"more requests are {label}, and nothing tells why", "", (), "ask the server's log"
        )
        return self._made(label, label, found or [unknown], change, phases)

    def _nothing(self, change: LoadChange | None) -> Explanation:
        better = [one.figure for one in self.comparison.changed]
        said = [f"better: {', '.join(better)}"] if better else []
        refused = [one.message for one in self.comparison.refusals]
        if self.comparison.refused or not self.comparison.effects:
            hypothesis = Hypothesis(
                UNKNOWN, "the data cannot tell whether anything changed", "", tuple(refused),
                "; ".join(one.remedy for one in self.comparison.refusals),
            )  # fmt: skip
            return self._made(NOTHING, "", [hypothesis], change)
        hypothesis = Hypothesis(
            NO_CHANGE, "nothing got worse that can be told from noise", "", (*said, *self._not_ruled_out(), *refused),
            f"{self._more_pairs()} smaller changes: tailspan run … --repeats K --against URL",
        )  # fmt: skip
        return self._made(NOTHING, "", [hypothesis], change)

    def _no_change(self, effect: Effect) -> Hypothesis:
        return Hypothesis(
            NO_CHANGE, f"{effect.figure} did not get worse by more than noise", "", (self.comparison.sentence,),
            f"{self._more_pairs()} smaller changes: tailspan run … --repeats K --against URL",
        )  # fmt: skip

    def _more_pairs(self) -> str:
        needed, effect = self.comparison.needed, self.comparison.effect
        return "more pairs see" if needed is None else f"{needed} pairs see a change of {100 * effect:.0f} %, more see"

    def _not_ruled_out(self) -> list[str]:
        """The largest change for the worse that the data leave open, where it is more than the one looked for."""
        open_ = [
            (one.high, one)
            for one in self.comparison.effects
            if one.relative and one.verdict == SAME and one.high is not None and one.high > self.comparison.effect
        ]
        if not open_:
            return []
        high, widest = max(open_, key=lambda one: one[0])
        seen = 100 * (widest.change or 0.0)
        return [f"not ruled out: {widest.figure} up to {100 * high:+.0f} % (seen: {seen:+.0f} %)"]

    def _invalid(self, runs: Sequence[Run]) -> Explanation:
        verdicts = {(one.bundle.manifest.get("validity") or {}).get("verdict") for one in runs}
        cut = verdicts == {names.INCOMPLETE}
        evidence = tuple(
            f"run {one.facts.run}: {reason}" for one in runs for reason in one.facts.reasons or ("not valid",)
        )
        words = "the load generator did not keep up: the times are partly its own" if not cut else "a run was cut short"
        hypothesis = Hypothesis(
            UNKNOWN if cut else CLIENT, words, TOOLING, evidence,
            "run the generator on a quiet machine: if it is VALID there and slow, it is the server",
        )  # fmt: skip
        return self._made(INVALID, "", [hypothesis], None)

    def _made(
        self,
        label: str,
        figure: str,
        found: Sequence[Hypothesis],
        change: LoadChange | None,
        phases: tuple[Phases, ...] = (),
        layer2: Any = None,
        layer3: Any = (),
    ) -> Explanation:
        effect = self._effect(figure) if figure else None
        a, b = (effect.a, effect.b) if effect is not None else (None, None)
        figures: dict[str, Any] = {"load": None if change is None else change.to_dict()}
        figures["labels"] = [
            {name: sum(int(run.is_label(name).sum()) for run in side) for name in names.LABELS}
            for side in (self.a, self.b)
        ]
        return Explanation(
            label, figure, a, b, tuple(found[:3]), self.comparison, phases, layer2, tuple(layer3),
            tuple(self._limits(label, phases, layer2)), figures,
        )  # fmt: skip

    def _limits(self, label: str, phases: Sequence[Phases], layer2: Any) -> list[str]:
        found: list[str] = []
        if label == INVALID:
            return found
        if len(self.a) == 1:
            found.append("a single pair: noise is guessed from blocks of time; six pairs make the verdict exact")
        if not self.comparison.same_load:
            found.append("the two sides had other loads: what is compared is server and load together")
        if label == LATE:
            if layer2 is None:
                found.append("no step log on a side: causes inside the engine are told by rates alone")
            elif layer2.error > 0.25:
                found.append(
                    f"the {layer2.through} misses A's own figure by {100 * layer2.error:.0f} %: its shares are rough"
                )
            if not phases:
                found.append("a side gives no account of its phases")
            elif not phases[0].from_server:
                found.append("no account of phases from the server: the parts are the client's view")
        return found

    def _threshold(self, figure: str) -> float | None:
        effect = self._effect(figure)
        return None if effect is None else effect.a

    def _effect(self, figure: str) -> Effect | None:
        return next((one for one in self.comparison.effects if one.figure == figure), None)


def rise_of(a: Sequence[Run], b: Sequence[Run], which: Callable[[Run], np.ndarray]) -> float:
    """How much larger the share of such requests is in B."""
    shares = [
        sum(int((which(run) & run.counted).sum()) for run in side) / max(1, sum(int(run.counted.sum()) for run in side))
        for side in (a, b)
    ]
    return shares[1] - shares[0]


def worst_figure(comparison: Comparison) -> str | None:
    """The percentile that got worse most, relatively; one that became unbounded only where no other did."""
    worse = [one for one in comparison.effects if one.verdict == WORSE and one.relative]
    bounded = [one for one in worse if one.change is not None]
    if bounded:
        return max(bounded, key=lambda one: one.change or 0.0).figure
    return worse[0].figure if worse else None


def _compare(
    sides: Sequence[Sequence[Run]], warm_up: float, alpha: float, tolerance: float, *, windowed: bool
) -> Comparison:
    a, b = ([one.facts for one in side] for side in sides)
    if windowed and len(a) == len(b) == 1:
        paired = a[0].run != b[0].run and other_load(a, b) is None
        return compare_blocks(
            a[0], b[0], paired=paired, alpha=alpha, tolerance=tolerance, figures=FIGURES
        )  # fmt: skip
    return compare_facts(a, b, warm_up=warm_up, alpha=alpha, tolerance=tolerance, same_load=False)


def _only(sides: Sequence[Sequence[Run]], chosen: Sequence[int]) -> list[list[Run]]:
    """B's chosen requests, and the same ones of A where both sent the same."""
    wanted = np.unique(np.asarray(chosen, dtype=np.int64))
    a, b = sides
    if not any(np.isin(run.index, wanted).any() for run in b):
        raise UserError(f"none of the {len(wanted)} chosen requests is in B", where="--requests", remedy="name others")
    same = same_requests(a, b)
    left = [run.only(np.isin(run.index, wanted)) if same else run for run in a]
    return [left, [run.only(np.isin(run.index, wanted)) for run in b]]
