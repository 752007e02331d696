"""Why more requests got no answer: by the reasons of the drops, and by what the server did meanwhile.

A timeout or a rejection looks like lack of capacity at first.  It is one only where more was asked than the server did
in the same time before (``loads``), or where it became slower; a server that carried this load in A and turns it away
in B has another policy, a smaller or a fragmented pool, one request that holds it up, or clients that ask again.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pyarrow.compute as pc

from telemetry import names
from telemetry.explain import measured, step_times
from telemetry.explain.causes import CAUSES, UNKNOWN
from telemetry.explain.loads import GROWN, LoadChange
from telemetry.explain.result import Hypothesis
from telemetry.explain.side import Run, values_of

EXAMPLES: Final = 5
NAMED: Final = 0.2  # share of the additional drops from which their reason is explained
AMPLIFIED: Final = 1.3  # attempts a request, against A's
HOLDS: Final = 0.3  # share of the pool that one over-long context holds
UNDER_IT: Final = 0.7  # share of the drops that fall into its time
TIMEOUTS: Final = (names.TIMEOUT_FIRST_TOKEN, names.TIMEOUT_TOTAL, names.TIMEOUT_CONNECT)
#: Reasons that are causes themselves.
DIRECT: Final = {
    names.STREAM_CUT: "stream_cut", names.RESET: "reset", names.REFUSED: "refused", names.HANG: "hang",
    names.CONTEXT_OVERFLOW: "context_overflow", names.SERVER_ERROR: "server_error",
}  # fmt: skip


def hypotheses(a: Sequence[Run], b: Sequence[Run], change: LoadChange | None) -> list[Hypothesis]:
    """At most three, for the reasons that make most of the additional drops."""
    before, after = (_reasons(side) for side in (a, b))
    more = {reason: after[reason] - before.get(reason, 0.0) for reason in after}
    rise = sum(value for value in more.values() if value > 0)
    found: dict[str, Hypothesis] = {}
    for reason, value in sorted(more.items(), key=lambda one: -one[1]):
        if value <= 0 or value < NAMED * rise:
            continue
        name, evidence = _cause(reason, a, b, change)
        rows = [int(one) for one in _indices(b[0], reason)[:EXAMPLES]]
        said = f"{reason}: {_percent(before.get(reason, 0.0))} -> {_percent(after[reason])} of the requests"
        share = value / rise
        if name in found:
            old = found[name]
            found[name] = Hypothesis(
                name, old.words, old.layer, (*old.evidence, said), old.disprove, (old.share or 0) + share,
                old.requests, old.steps,
            )  # fmt: skip
            continue
        cause = CAUSES.get(name)
        found[name] = Hypothesis(
            name, cause.words if cause else f"requests are dropped for {reason}, and nothing else tells why",
            cause.layer if cause else "", (said, *evidence), cause.disprove if cause else "ask the server's own log",
            share, tuple(rows), _steps(b[0], rows),
        )  # fmt: skip
    ranked = sorted(found.values(), key=lambda one: -(one.share or 0.0))
    return ranked[:3]


def _cause(reason: str, a: Sequence[Run], b: Sequence[Run], change: LoadChange | None) -> tuple[str, list[str]]:
    long_one = _long_context(b[0], reason)
    if reason in (names.KV_OOM, names.REJECTED, *TIMEOUTS) and long_one is not None:
        return "long_context", [long_one]
    if reason == names.KV_OOM:
        return _pool(a, b)
    stalled = [_stalled(side) for side in (a, b)]
    # requests that fell into a pause are those of a hang only if it did not end: else they are time-outs like others
    stood_still = reason == names.HANG and not _went_on(b, stalled)
    if reason in DIRECT and (stood_still or reason != names.HANG):
        return DIRECT[reason], _details(b, reason)
    attempts = [_attempts(side) for side in (a, b)]
    if attempts[1] > AMPLIFIED * attempts[0] and reason in (*TIMEOUTS, names.REJECTED, names.HANG):
        said = [f"attempts a request {attempts[0]:.2f} -> {attempts[1]:.2f}"]
        if stalled[1][1] > stalled[0][1] + 0.5:
            said.append(f"the longest pause of the engine: {stalled[0][1]:.2f} -> {stalled[1][1]:.2f} s")
        if change is not None:
            said.append(change.sentence)
        # where the users themselves ask for more than A could do, their retries are not the root
        if change is None or change.asked < GROWN:
            return "retries", said
    beyond = [] if change is None else [change.sentence]
    if reason == names.HANG:
        return "hang", [f"the longest pause of the engine: {stalled[0][1]:.2f} -> {stalled[1][1]:.2f} s", *beyond]
    if change is not None and change.load >= GROWN:
        return "capacity", beyond
    if reason == names.REJECTED:
        peaks = [_waiting(side) for side in (a, b)]
        said = [] if None in peaks else [f"most requests that waited at once: {peaks[0]:.0f} -> {peaks[1]:.0f}"]
        return "rejected", [*said, *beyond, *_details(b, reason)]
    if reason in TIMEOUTS:
        if stalled[1][1] > max(1.0, 2 * stalled[0][1]):
            said = [f"the longest pause of the engine: {stalled[0][1]:.2f} -> {stalled[1][1]:.2f} s"]
            return "hang", [*said, *beyond]
        return "capacity", beyond
    return UNKNOWN, beyond


def _pool(a: Sequence[Run], b: Sequence[Run]) -> tuple[str, list[str]]:
    """Out of KV memory: was as much free as the request needed?"""
    pages = [[measured.limits(one)[2] for run in side for one in run.steps] for side in (a, b)]
    pools = [max((one for one in side if one is not None), default=None) for side in pages]
    said = [f"KV pages {pools[0]} -> {pools[1]}"] if None not in pools else []
    run = b[0]
    rows = np.flatnonzero(_with_reason(run, names.KV_OOM))
    fits = 0
    for row in rows:
        need = (run["input_tokens"][row] + run["expected_output_tokens"][row]) / 16
        free = _free_at(run, float(run["intended_s"][row]))
        fits += free is not None and need < 0.8 * free
    if len(rows) and fits > len(rows) / 2:
        return "kv_fragmentation", [
            *said,
            f"{fits} of {len(rows)} were refused while more pages were free than they need",
        ]
    return "kv_oom", said


def _free_at(run: Run, moment: float) -> float | None:
    """Free KV pages of the fullest replica at a moment of the generator's clock."""
    found = []
    for steps in run.steps:
        if not len(steps):
            continue
        place = int(np.searchsorted(steps["start_ns"] / 1e9 + run.clock_s(steps), moment)) - 1
        value = steps["kv_free"][max(0, place)]
        if np.isfinite(value):
            found.append(float(value))
    return min(found, default=None)


def _long_context(run: Run, reason: str) -> str | None:
    """Whether drops fall into the time of one request that holds a large part of the pool."""
    dropped = run["intended_s"][_with_reason(run, reason)]
    pages = [measured.limits(one)[2] for one in run.steps]
    pool = max((one for one in pages if one is not None), default=None)
    if len(dropped) < 3 or pool is None:
        return None
    tokens = np.nan_to_num(run["input_tokens"]) + np.nan_to_num(run["expected_output_tokens"])
    largest = int(np.argmax(np.where(run.counted, tokens, 0)))
    usual = float(np.median(tokens[run.counted]))
    if tokens[largest] < HOLDS * pool * 16 or tokens[largest] < 10 * usual:
        return None
    begin, end = run["intended_s"][largest], run["end_s"][largest]
    length = max(1e-9, float(np.ptp(run["intended_s"])))
    inside = float(((dropped >= begin) & (dropped <= end)).mean())
    if inside < UNDER_IT or inside < 1.5 * (end - begin) / length:
        return None
    return (
        f"request {run.index[largest]} has {tokens[largest]:.0f} tokens, {100 * tokens[largest] / (16 * pool):.0f} % of"
        f" the pool; {100 * inside:.0f} % of the drops fall into its {end - begin:.1f} s"
    )


def _reasons(side: Sequence[Run]) -> dict[str, float]:
    """Share of all requests per reason of a drop."""
    n = sum(int(run.counted.sum()) for run in side)
    found: dict[str, float] = {}
    for run in side:
        for reason, count in values_of(run.reason, run.is_label(names.DROPPED) & run.counted).items():
            found[reason] = found.get(reason, 0.0) + count / max(1, n)
    return found


def _with_reason(run: Run, reason: str) -> np.ndarray:
    same = np.asarray(pc.fill_null(pc.equal(run.reason, reason), False).to_numpy(zero_copy_only=False)).astype(np.bool_)
    found: np.ndarray = same & run.is_label(names.DROPPED) & run.counted
    return found


def with_reasons(run: Run, reasons: Sequence[str]) -> np.ndarray:
    """Which requests were dropped for one of these reasons."""
    found = np.zeros(len(run.index), dtype=np.bool_)
    for reason in reasons:
        found |= _with_reason(run, reason)
    return found


def _indices(run: Run, reason: str) -> np.ndarray:
    found: np.ndarray = run.index[_with_reason(run, reason)]
    return found


def _details(b: Sequence[Run], reason: str) -> list[str]:
    said = values_of(b[0].texts["error_detail"], _with_reason(b[0], reason))
    return [f"the server says: {text[:120]} ({count} times)" for text, count in list(said.items())[:1]]


def _attempts(side: Sequence[Run]) -> float:
    tries = np.concatenate([run["attempts"][run.counted] for run in side])
    tries = tries[~np.isnan(tries)]
    return float(tries.mean()) if len(tries) else 1.0


def _stalled(side: Sequence[Run]) -> tuple[float, float]:
    """Seconds of stalls in all, and the longest pause: between steps, or a step far beyond the others."""
    total, longest = 0.0, 0.0
    for run in side:
        for steps in run.steps:
            if len(steps):
                gaps = np.nan_to_num(steps["gap_ns"]) / 1e9
                total += float(gaps[step_times.stalls(steps)].sum())
                longest = max(longest, float(gaps.max()), float(steps.seconds.max()))
    return total, longest


def _went_on(b: Sequence[Run], stalled: Sequence[tuple[float, float]]) -> bool:
    """Did the engine make tokens again after the pause that requests were lost in?

    A pause stands in the step log only once a step has followed it.  Without a log: was anything answered that was sent
    after the first of them gave up?
    """
    if any(len(steps) for run in b for steps in run.steps):
        return stalled[1][1] > max(1.0, 2 * stalled[0][1])
    for run in b:
        lost = _with_reason(run, names.HANG)
        if lost.any() and bool((run["sent_s"][run.answered] > run["end_s"][lost].min()).any()):
            return True
    return False


def _waiting(side: Sequence[Run]) -> float | None:
    found = [float(np.nanmax(one["waiting"])) for run in side for one in run.steps if len(one)]
    return max(found, default=None)


def _steps(run: Run, rows: Sequence[int]) -> tuple[int, ...]:
    """The step that ran when each example was sent."""
    found = []
    for index in rows:
        moment = float(run["intended_s"][np.flatnonzero(run.index == index)[0]])
        for steps in run.steps[:1]:
            if len(steps):
                place = int(np.searchsorted(steps["start_ns"] / 1e9 + run.clock_s(steps), moment)) - 1
                found.append(int(steps["step"][max(0, place)]))
    return tuple(dict.fromkeys(found))


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"
