"""Checking a server against recorded canaries, and the verdict with what it could have seen.

Owns the verdict: *broken* outranks *numeric drift* outranks *same*.  Must always hold: each finding carries its
evidence and each all-clear its power; goldens are asked twice in a row (the second finds the prefix cache), and once
more many at a time, since real corruption shows on cache hits and under concurrency only.

* Goldens: two sequential tests over all answers in the order of asking, one for broken ones, one for any change; a
  golden that has failed already is not counted again.
* Drift: KL and agreement on the reference text, against the recorded spread.
* Questions: McNemar's test.  It can only say broken: that many answers do not change by rounding.
* Probes: a failed probe is broken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from loadgen.canaries import goldens, probes
from loadgen.canaries.client import Client, Refused, ask_all
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.goldens import Compared
from loadgen.canaries.probes import Probe
from loadgen.canaries.prompts import REFERENCE
from loadgen.canaries.record import CONCURRENCY, Say
from models.errors import UserError
from telemetry import drift, paired
from telemetry.question_sets import SETS
from telemetry.questions import score
from telemetry.sequential import Watch

SAME: Final = "same"
NUMERIC: Final = "numeric drift"
BROKEN: Final = "broken"
_RANK: Final = (SAME, NUMERIC, BROKEN)

MISS, HIT, LOADED = "first asked", "asked again", "under load"
ROUNDS: Final = (MISS, HIT, LOADED)
TOLERANCE_FACTOR: Final = 10  # of the recorded noise: what a log-probability may move
TOLERANCE_FLOOR: Final = 1e-3  # nats


@dataclass(slots=True)
class Checked:
    """findings: (verdict, sentence) of each kind of canary.  compared: every golden of every round."""

    findings: list[tuple[str, str]] = field(default_factory=list)
    compared: dict[str, list[Compared]] = field(default_factory=dict)
    drift: drift.Drift | None = None
    scores: paired.Paired | None = None
    probes: list[Probe] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return max((kind for kind, _ in self.findings), key=_RANK.index, default=SAME)

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "findings": [{"verdict": kind, "said": said} for kind, said in self.findings],
            "goldens": {name: [one.to_dict() for one in found] for name, found in self.compared.items()},
            "drift": None if self.drift is None else self.drift.to_dict(),
            "scores": None if self.scores is None else self.scores.to_dict(),
            "probes": [one.to_dict() for one in self.probes],
        }


def check(
    client: Client, recorded: CanaryFile, *, concurrency: int = CONCURRENCY, say: Say = lambda _: None
) -> Checked:
    """Ask everything again and judge.  UserError where the server does not answer canaries at all."""
    found = Checked()
    try:
        _goldens(client, recorded, found, concurrency, say)
        _questions(client, recorded, found, concurrency)
    except Refused as refused:
        raise UserError(
            f"the server refuses a canary ({refused.status}): {refused.said[:200]}",
            where=client.target,
            remedy="canaries need chat completions with logprobs; check --model and --header",
        ) from None
    _drift(client, recorded, found)
    found.probes = probes.run(client)
    failed = [one for one in found.probes if one.passed is False]
    for one in failed:
        found.findings.append((BROKEN, f"probe {one.name}: {one.detail}"))
    if not failed:
        known = [one.name for one in found.probes if one.passed]
        found.findings.append((SAME, f"probes hold: {', '.join(known) or 'none'}"))
    return found


def _goldens(client: Client, recorded: CanaryFile, found: Checked, concurrency: int, say: Say) -> None:
    asked = [(one.prompt, len(one.tokens)) for one in recorded.goldens]
    tolerated = max(TOLERANCE_FLOOR, TOLERANCE_FACTOR * recorded.noise)
    broken, changed = Watch(), Watch()
    known_broken: set[str] = set()
    known_changed: set[str] = set()
    for name in ROUNDS:
        if name == LOADED:
            answers = ask_all(client, asked, concurrency, logprobs=True)
        elif name == MISS:
            both = [ask_all(client, [one, one], 1, logprobs=True) for one in asked]
            answers, again = [pair[0] for pair in both], [pair[1] for pair in both]
        else:
            answers = again
        compared = [goldens.compare(g, a, tolerated) for g, a in zip(recorded.goldens, answers, strict=True)]
        found.compared[name] = compared
        for one in compared:
            # The same golden failing alike in every round is one piece of evidence, not three.
            if one.id not in known_broken:
                broken.see(one.kind == goldens.BROKEN)
            if one.id not in known_changed:
                changed.see(one.kind != goldens.SAME)
        known_broken |= {one.id for one in compared if one.kind == goldens.BROKEN}
        known_changed |= {one.id for one in compared if one.kind != goldens.SAME}
        counts = {kind: sum(one.kind == kind for one in compared) for kind in (goldens.BROKEN, goldens.NUMERIC)}
        say(f"goldens {name}: {counts[goldens.BROKEN]} broken, {counts[goldens.NUMERIC]} numeric of {len(compared)}")
    example = next((one for n in ROUNDS for one in found.compared[n] if one.kind == goldens.BROKEN), None) or next(
        (one for n in ROUNDS for one in found.compared[n] if one.kind == goldens.NUMERIC), None
    )
    first = f"; first: {example.id}, {example.note}" if example else ""
    if broken.alarm_at is not None:
        found.findings.append((BROKEN, f"goldens: {broken.sentence()}{_where(found)}{first}"))
    elif changed.alarm_at is not None:
        found.findings.append((NUMERIC, f"goldens: {changed.wrong} of {changed.seen} answers moved{first}"))
    else:
        found.findings.append((SAME, f"goldens: {broken.sentence()}"))


def _where(found: Checked) -> str:
    """Whether the broken answers are those of cache hits or of load alone: it says where to look."""
    counts = {name: sum(one.kind == goldens.BROKEN for one in found.compared[name]) for name in ROUNDS}
    if counts[MISS] == 0 and counts[HIT]:
        return "; only when asked again: the prefix cache"
    if counts[MISS] == counts[HIT] == 0:
        return "; only under load: concurrency"
    return ""


def _questions(client: Client, recorded: CanaryFile, found: Checked, concurrency: int) -> None:
    asked = [question for question in SETS[recorded.questions]() if question.id in recorded.scores]
    answers = ask_all(client, [(q.prompt, q.max_tokens) for q in asked], concurrency, logprobs=False)
    found.scores = paired.compare(recorded.scores, score(asked, [answer.text for answer in answers]))
    found.findings.append((BROKEN if found.scores.worse else SAME, f"questions: {found.scores.sentence}"))


def _drift(client: Client, recorded: CanaryFile, found: Checked) -> None:
    if recorded.reference is None:
        return
    judge: Callable[[drift.Drift], str] = lambda one: drift.judge(one, recorded.spread)  # noqa: E731
    try:
        now = client.score(REFERENCE)
    except Refused as refused:
        found.findings.append((SAME, f"drift: not checked, prompt_logprobs refused ({refused.status})"))
        return
    if len(now) != len(recorded.reference):
        said = f"drift: the reference text has {len(now)} tokens, not {len(recorded.reference)}: another tokenizer"
        found.findings.append((BROKEN, said))
        return
    found.drift = drift.measure(recorded.reference, now)
    said = (
        f"drift: KL {found.drift.kl:.2g} nats (p99 {found.drift.kl_p99:.2g}), top-1 agreement "
        f"{100 * found.drift.agreement:.1f} %, perplexity {found.drift.perplexity_before:.2f} -> "
        f"{found.drift.perplexity_after:.2f}"
    )
    kind = {drift.SAME: SAME, drift.NUMERIC: NUMERIC, drift.BROKEN: BROKEN}[judge(found.drift)]
    found.findings.append((kind, said))
