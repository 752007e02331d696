"""Checking a server against recorded canaries, and the verdict with what it could have seen.

Owns the verdict: *broken* outranks *numeric drift* outranks *same*.  Must always hold: each finding carries its
evidence and each all-clear its power; goldens are asked twice in a row (the second finds the prefix cache), and once
more many at a time, since real corruption shows on cache hits and under concurrency only.

* Goldens: two sequential tests over all answers in the order of asking, one for broken ones, one for any change; a
  golden that has failed already is not counted again.
* Drift: KL and agreement on the reference text, against the recorded spread.
* Questions: McNemar's test over all of them (the right ones alone could only be lost).  Worse is broken, unless the
  drift of probabilities says that the arithmetic is another one: fewer bits cost answers too.
* Probes: a failed probe is broken.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

from loadgen.canaries import goldens, probes
from loadgen.canaries.client import Client, Refused, ask_all
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.goldens import Compared
from loadgen.canaries.mixed import BEYOND_END
from loadgen.canaries.probes import Probe
from loadgen.canaries.prompts import REFERENCE
from loadgen.canaries.record import CONCURRENCY, Say
from loadgen.canaries.verdict import BROKEN, NUMERIC, SAME, Finding, joined, tolerance
from models.errors import UserError
from telemetry import drift, paired
from telemetry.question_sets import SETS
from telemetry.questions import score
from telemetry.sequential import Watch

MISS, HIT, LOADED = "first asked", "asked again", "under load"
ROUNDS: Final = (MISS, HIT, LOADED)


@dataclass(slots=True)
class Checked:
    """findings: of each kind of canary.  compared: every golden of every round."""

    findings: list[Finding] = field(default_factory=list)
    compared: dict[str, list[Compared]] = field(default_factory=dict)
    drift: drift.Drift | None = None
    scores: paired.Paired | None = None
    probes: list[Probe] = field(default_factory=list)

    @property
    def verdict(self) -> str:
        return joined(self.findings)

    def to_dict(self) -> dict[str, Any]:
        return {
            "verdict": self.verdict,
            "findings": [one.to_dict() for one in self.findings],
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
        _drift(client, recorded, found)
        _questions(client, recorded, found, concurrency)
    except Refused as refused:
        raise UserError(
            f"the server refuses a canary ({refused.status}): {refused.said[:200]}",
            where=client.target,
            remedy="canaries need chat completions with logprobs; check --model and --header",
        ) from None
    found.probes = probes.run(client)
    failed = [one for one in found.probes if one.passed is False]
    for one in failed:
        found.findings.append(Finding(BROKEN, "probe", f"probe {one.name}: {one.detail}"))
    if not failed:
        known = [one.name for one in found.probes if one.passed]
        found.findings.append(Finding(SAME, "probe", f"probes hold: {', '.join(known) or 'none'}"))
    return found


def _goldens(client: Client, recorded: CanaryFile, found: Checked, concurrency: int, say: Say) -> None:
    asked = [(one.prompt, len(one.tokens) + BEYOND_END * one.ended) for one in recorded.goldens]
    tolerated = tolerance(recorded)
    broken, changed = Watch(), Watch()
    known_broken: set[str] = set()
    known_changed: set[str] = set()
    diverged: set[str] = set()
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
        diverged |= {one.id for one in compared if one.diverged}
        known_changed |= {one.id for one in compared if one.kind != goldens.SAME}
        counts = {kind: sum(one.kind == kind for one in compared) for kind in (goldens.BROKEN, goldens.NUMERIC)}
        say(f"goldens {name}: {counts[goldens.BROKEN]} broken, {counts[goldens.NUMERIC]} numeric of {len(compared)}")
    example = next((one for n in ROUNDS for one in found.compared[n] if one.kind == goldens.BROKEN), None) or next(
        (one for n in ROUNDS for one in found.compared[n] if one.kind == goldens.NUMERIC), None
    )
    first = f"; first: {example.id}, {example.note}" if example else ""
    if broken.alarm_at is not None and goldens.called_broken(broken.wrong, len(diverged)):
        kind, where = _where(found, recorded)
        found.findings.append(Finding(BROKEN, kind, f"goldens: {broken.sentence()}{where}{first}"))
    elif changed.alarm_at is not None:
        said = f"goldens: {changed.wrong} of {changed.seen} answers moved{first}"
        found.findings.append(Finding(NUMERIC, "golden", said))
    else:
        found.findings.append(Finding(SAME, "golden", f"goldens: {broken.sentence()}"))


def _where(found: Checked, recorded: CanaryFile) -> tuple[str, str]:
    """The kind of the broken ones: of cache hits or of load alone, or all alike in how they end."""
    broken = {name: {one.id for one in found.compared[name] if one.kind == goldens.BROKEN} for name in ROUNDS}
    # Beside a load of others the first round is not alone either: then it is hurt as well, but far less.
    if goldens.mostly_beyond(broken[HIT], broken[MISS]):
        return "cache", f"; {len(broken[HIT] - broken[MISS])} only when asked again: the prefix cache"
    if goldens.mostly_beyond(broken[LOADED], broken[MISS] | broken[HIT]):
        return "concurrency", f"; {len(broken[LOADED] - broken[MISS] - broken[HIT])} only under load: concurrency"
    ill = [one for compared in found.compared.values() for one in compared if one.kind == goldens.BROKEN]
    lengths = {one.id: len(one.tokens) for one in recorded.goldens}
    if all(one.step == 0 and one.movement is None for one in ill):
        return "empty", "; nothing was said"
    if all(one.step == lengths[one.id] for one in ill):
        return "no-end", "; answers do not end"
    return "golden", ""


def _questions(client: Client, recorded: CanaryFile, found: Checked, concurrency: int) -> None:
    asked = [question for question in SETS[recorded.questions]() if question.id in recorded.scores]
    answers = ask_all(client, [(q.prompt, q.max_tokens) for q in asked], concurrency, logprobs=False)
    found.scores = paired.compare(recorded.scores, score(asked, [answer.text for answer in answers]))
    said, verdict = f"questions: {found.scores.sentence}", SAME
    if found.scores.worse:
        drifted = any(one.kind == "drift" and one.verdict == NUMERIC for one in found.findings)
        verdict = NUMERIC if drifted else BROKEN
        said += "; fewer right answers go with the drift of its probabilities" if drifted else ""
    found.findings.append(Finding(verdict, "task", said))


def _drift(client: Client, recorded: CanaryFile, found: Checked) -> None:
    found.drift, finding = drift_of(client, recorded)
    if finding is not None:
        found.findings.append(finding)


def drift_of(client: Client, recorded: CanaryFile) -> tuple[drift.Drift | None, Finding | None]:
    """W2: the reference text scored again; no finding where the recording has none."""
    if recorded.reference is None:
        return None, None
    try:
        now = client.score(REFERENCE)
    except Refused as refused:
        return None, Finding(SAME, "drift", f"drift: not checked, prompt_logprobs refused ({refused.status})")
    if len(now) != len(recorded.reference):
        said = f"drift: the reference text has {len(now)} tokens, not {len(recorded.reference)}: another tokenizer"
        return None, Finding(BROKEN, "drift", said)
    measured = drift.measure(recorded.reference, now)
    said = (
        f"drift: KL {measured.kl:.2g} nats (p99 {measured.kl_p99:.2g}), top-1 agreement "
        f"{100 * measured.agreement:.1f} %, perplexity {measured.perplexity_before:.2f} -> "
        f"{measured.perplexity_after:.2f}"
    )
    kinds = {drift.SAME: SAME, drift.NUMERIC: NUMERIC, drift.BROKEN: BROKEN}
    return measured, Finding(kinds[drift.judge(measured, recorded.spread)], "drift", said)
