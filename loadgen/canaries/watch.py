"""Canaries among the load, judged while it goes and when it is over.

Owns the verdict of a run's canaries: *broken* outranks *numeric drift* outranks *same*, as in ``check``.  Goldens are
compared token by token with the recording; the draws at temperature 1.2 must differ among themselves.  Two sequential
tests watch (broken, changed); a golden that has failed on a replica is not counted there again.  Broken answers are
believed only where they are a good part of the changed ones (``goldens.called_broken``).

Must always hold: a row is seen once; answers that did not come, or were cut, are no evidence of wrong; what is said of
a cache hit rests on what the server says of the hit, not on the order of asking.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from loadgen.canaries import goldens
from loadgen.canaries.client import Answer, tokens_of
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.goldens import Compared
from loadgen.canaries.mixed import DRAW, GOLDEN, HIT, MISS, PLAIN
from loadgen.canaries.probes import HOT
from loadgen.canaries.verdict import BROKEN, NUMERIC, SAME, Finding, tolerance
from telemetry.sequential import Watch

COLUMNS: Final = (
    "index", "canary_kind", "canary_id", "canary_place", "target", "error", "finish_reason", "prompt_tokens_reported",
    "cached_tokens", "completion_tokens_reported", "output_chars", "logprobs", "output_sha",
)  # fmt: skip
LEAST_DRAWS: Final = 3  # equal draws of fewer say nothing


@dataclass(frozen=True, slots=True)
class Seen:
    """One golden among the load.  place: miss, hit or plain, as the server's cache had it; target: its replica.

    hit: something of it was cached, by the server's account where it gives one.
    """

    index: int
    place: str
    target: str
    compared: Compared
    hit: bool


@dataclass(slots=True)
class CanaryWatch:
    """recorded: what the answers are held against.  salted: every miss was meant to be one."""

    recorded: CanaryFile
    broken: Watch = field(default_factory=Watch)
    changed: Watch = field(default_factory=Watch)
    seen: list[Seen] = field(default_factory=list)
    draws: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))  # target -> output_sha
    asked: int = 0
    unanswered: Counter[str] = field(default_factory=Counter)  # by reason
    unreadable: int = 0  # without logprobs: nothing to compare

    def take(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """More rows (COLUMNS), of which canaries count."""
        known = {one.id: one for one in self.recorded.goldens}
        failed = {(one.target, one.compared.id) for one in self.seen if one.compared.kind == goldens.BROKEN}
        moved = {(one.target, one.compared.id) for one in self.seen if one.compared.kind != goldens.SAME}
        for row in rows:
            if row["canary_kind"] is None:
                continue
            self.asked += 1
            if row["error"] is not None:
                self.unanswered[row["error"]] += 1
                continue
            if row["canary_place"] == DRAW:
                self.draws[row["target"]].append(row["output_sha"] or "")
                continue
            if row["canary_kind"] != GOLDEN or row["canary_id"] not in known:
                continue
            answer = _answer(row)
            if answer is None:
                self.unreadable += 1
                continue
            compared = goldens.compare(known[row["canary_id"]], answer, tolerance(self.recorded))
            hit = row["canary_place"] != MISS if row["cached_tokens"] is None else row["cached_tokens"] > 0
            place = PLAIN if row["canary_place"] == PLAIN else HIT if hit else MISS
            one = Seen(row["index"], place, row["target"], compared, hit)
            key = (one.target, compared.id)
            self.seen.append(one)
            if key not in failed:
                self.broken.see(compared.kind == goldens.BROKEN)
            if key not in moved:
                self.changed.see(compared.kind != goldens.SAME)
            if compared.kind == goldens.BROKEN:
                failed.add(key)
            if compared.kind != goldens.SAME:
                moved.add(key)

    @property
    def alarm(self) -> str | None:
        """broken or numeric drift, as soon as a test has alarmed; None: nothing so far."""
        diverged = {(one.target, one.compared.id) for one in self.seen if one.compared.diverged}
        if self.broken.alarm_at is not None and goldens.called_broken(self.broken.wrong, len(diverged)):
            return BROKEN
        return NUMERIC if self.changed.alarm_at is not None else None

    def odd(self) -> list[str]:
        """The goldens whose answers changed, those that broke first."""
        kinds: dict[str, str] = {}
        for one in self.seen:
            if one.compared.kind != goldens.SAME and kinds.get(one.compared.id) != goldens.BROKEN:
                kinds[one.compared.id] = one.compared.kind
        return sorted(kinds, key=lambda name: (kinds[name] != goldens.BROKEN, name))

    def findings(self) -> list[Finding]:
        """What they say together; an all-clear says what it could have seen."""
        found, lost = [], self.unanswered.total()
        if self.seen:
            alarm, moved = self.alarm, [one for one in self.seen if one.compared.kind != goldens.SAME]
            first = f"; first: {moved[0].compared.id}, {moved[0].compared.note}" if moved else ""
            if alarm == BROKEN:
                kind, where = self._where()
                found.append(Finding(BROKEN, kind, f"goldens: {self.broken.sentence()}{where}{first}"))
            elif alarm == NUMERIC:
                said = f"goldens: {self.changed.wrong} of {self.changed.seen} answers moved{first}"
                found.append(Finding(NUMERIC, "golden", said))
            else:
                found.append(Finding(SAME, "golden", f"goldens: {self.broken.sentence()}"))
        else:
            why = f"{self.unreadable} without logprobs, " if self.unreadable else ""
            found.append(Finding(SAME, "golden", f"goldens: none compared ({why}{lost} of {self.asked} unanswered)"))
        for target, answers in sorted(self.draws.items()):
            if len(answers) >= LEAST_DRAWS:
                alike = len(set(answers)) == 1
                said = (
                    f"sampling: {len(set(answers))} different answers of {len(answers)} at temperature {HOT} ({target})"
                )
                found.append(Finding(BROKEN if alike else SAME, "sampling", said))
        return found

    def pairs(self) -> dict[str, dict[str, dict[str, int]]]:
        """Goldens of each kind by place and by replica: what pairs are read from."""
        found: dict[str, dict[str, dict[str, int]]] = {"place": {}, "replica": {}}
        for one in self.seen:
            for side, key in (("place", one.place), ("replica", one.target)):
                counts = found[side].setdefault(key, dict.fromkeys((goldens.SAME, goldens.NUMERIC, goldens.BROKEN), 0))
                counts[one.compared.kind] += 1
        return found

    def _where(self) -> tuple[str, str]:
        """The kind of the broken ones, and whether they are of one side of a pair alone: it says where to look."""
        ill = [one for one in self.seen if one.compared.kind == goldens.BROKEN]
        total: Counter[str] = Counter(one.place for one in self.seen)
        broken: Counter[str] = Counter(one.place for one in ill)
        misses = sum(not one.hit for one in self.seen)
        lengths = {one.id: len(one.tokens) for one in self.recorded.goldens}
        kind = said = ""
        # The pairs first: what a wrong page makes the model say, even nothing, is its consequence.
        if total[HIT] > 1 and total[PLAIN] > 1 and bool(broken[HIT]) != bool(broken[PLAIN]):
            kind = "streaming"
            said = f"; only where the answer is {'streamed' if broken[HIT] else 'not streamed'}"
        elif misses > 1 and all(one.hit for one in ill):
            kind, said = "cache", "; only on hits of the prefix cache"
        elif all(one.compared.step == 0 and one.compared.movement is None for one in ill):
            kind, said = "empty", "; nothing was said"
        elif all(one.compared.step == lengths[one.compared.id] for one in ill):
            kind, said = "no-end", "; answers do not end"
        hurt = {one.target for one in ill}
        if len(hurt) < len({one.target for one in self.seen}):
            said += f"; only on {', '.join(sorted(hurt))}"
        return kind or "golden", said


def _answer(row: Mapping[str, Any]) -> Answer | None:
    """The row as an answer; None without logprobs (an empty answer has none and is compared all the same)."""
    try:
        tokens = tokens_of(json.loads(row["logprobs"])) if row["logprobs"] else ()
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if not tokens and row["output_chars"]:
        return None
    return Answer(
        text="",
        tokens=tokens,
        finish_reason=row["finish_reason"],
        prompt_tokens=row["prompt_tokens_reported"],
        cached_tokens=row["cached_tokens"],
        completion_tokens=row["completion_tokens_reported"],
        choices=(),
    )
