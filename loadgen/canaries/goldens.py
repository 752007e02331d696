"""W1: golden prompts.  Which prompts are stable enough to be golden, and what a changed answer means.

Owns admission and the verdict on one answer; plain functions, no server.  Must always hold: a prompt is admitted only
with the tokens over which all baseline runs, idle and loaded, agreed and over which the choice at every step was clear
(``margin``); what was left out says why; a change is never called broken where rounding could have made it.

The answer is kept up to the first step that was not clear: the steps before it are as good as a whole answer.
How an answer changed is told from its first divergence: there the old token led by ``margin`` nats before and trails by
some nats now.  The sum, *movement*, is how far the two logits moved against each other.  Fewer bits move them by tenths
to two nats; another template, tokenizer or layer moves them by many.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import asdict, dataclass
from typing import Any, Final

from loadgen.canaries.client import Answer
from telemetry.distributions import binomial_at_least

RUNS: Final = 20  # baseline runs: half idle, half loaded
TOKENS: Final = 32
LEAST_TOKENS: Final = 8
LEAST_ENDED: Final = 4  # of an answer that the model ended by itself: its end is worth some tokens
MARGIN_FLOOR: Final = 0.05  # nats
MARGIN_FACTOR: Final = 10  # of the measured noise
BROKEN_MOVEMENT: Final = 4.0  # nats
ALPHA: Final = 0.01  # of the sign test between two rounds
BROKEN_SHARE: Final = 1 / 3  # of the answers that have another text now

SAME: Final = "same"
NUMERIC: Final = "numeric"
BROKEN: Final = "broken"


@dataclass(frozen=True, slots=True)
class Golden:
    """A prompt and the tokens that a healthy server answers; margins and logprobs of each, in nats.

    ended: they are the whole answer, which the model ended by itself.
    """

    id: str
    prompt: str
    tokens: tuple[str, ...]
    margins: tuple[float, ...]
    logprobs: tuple[float, ...]
    prompt_tokens: int | None
    ended: bool = False

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Left:
    """A prompt that was not admitted, and why."""

    id: str
    reason: str

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Compared:
    """What became of one golden.  step: of the first divergence, None without one.  movement: nats, at that step.

    shift: the largest change of a log-probability over the steps that agree.
    """

    id: str
    kind: str
    step: int | None
    movement: float | None
    shift: float
    note: str

    @property
    def diverged(self) -> bool:
        """Another text, or another prompt; not the same tokens by other probabilities alone."""
        return self.kind == BROKEN or self.step is not None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def noise(runs: Sequence[Sequence[Answer]]) -> float:
    """The largest difference of one token's log-probability between baseline runs that agree up to it, in nats."""
    most = 0.0
    for answers in zip(*runs, strict=True):
        first = answers[0]
        for other in answers[1:]:
            for a, b in zip(first.tokens, other.tokens, strict=False):
                if a.text != b.text:
                    break
                most = max(most, abs(a.logprob - b.logprob))
    return most


def admit(prompts: Sequence[tuple[str, str]], runs: Sequence[Sequence[Answer]]) -> tuple[list[Golden], list[Left]]:
    """Goldens from baseline runs.  prompts: (id, text).  runs: one list of answers per run, in the prompts' order."""
    needed = max(MARGIN_FLOOR, MARGIN_FACTOR * noise(runs))
    admitted: list[Golden] = []
    left: list[Left] = []
    for (name, prompt), answers in zip(prompts, zip(*runs, strict=True), strict=True):
        first = answers[0]
        if not first.tokens:
            left.append(Left(name, "the server gives no logprobs, so nothing tells a clear choice from a narrow one"))
            continue
        agreed = _agreed(answers)
        clear = next((step for step, token in enumerate(first.tokens[:agreed]) if token.margin < needed), agreed)
        ended = clear == len(first.tokens) and all(answer.finish_reason == "stop" for answer in answers)
        if clear < (LEAST_ENDED if ended else LEAST_TOKENS):
            if clear < agreed:
                why = f"step {clear}: margin {first.tokens[clear].margin:.3f} nats, {needed:.3f} needed"
            elif agreed < len(first.tokens):
                why = f"step {agreed}: the baseline runs disagree"
            else:
                why = f"the answer has {agreed} tokens"
            left.append(Left(name, f"{why} (at least {LEAST_TOKENS} clear tokens wanted)"))
            continue
        kept = first.tokens[:clear]
        admitted.append(
            Golden(
                id=name,
                prompt=prompt,
                tokens=tuple(token.text for token in kept),
                margins=tuple(min(token.margin, 1e3) for token in kept),
                logprobs=tuple(token.logprob for token in kept),
                prompt_tokens=first.prompt_tokens,
                ended=ended,
            )
        )
    return admitted, left


def compare(golden: Golden, answer: Answer, tolerated: float) -> Compared:
    """One answer against its golden.  tolerated: change of a log-probability that baseline runs show as well, nats."""
    shift = 0.0
    if None not in (golden.prompt_tokens, answer.prompt_tokens) and golden.prompt_tokens != answer.prompt_tokens:
        note = f"the prompt has {answer.prompt_tokens} tokens, not {golden.prompt_tokens}: tokenizer or template"
        return Compared(golden.id, BROKEN, None, None, shift, note)
    for step, expected in enumerate(golden.tokens):
        if step >= len(answer.tokens):
            return Compared(golden.id, BROKEN, step, None, shift, f"the answer ends after {step} tokens")
        token = answer.tokens[step]
        if token.text != expected:
            return _diverged(golden, step, answer, shift)
        shift = max(shift, abs(token.logprob - golden.logprobs[step]))
    if golden.ended and answer.finish_reason == "length" and len(answer.tokens) > len(golden.tokens):
        note = f"it goes on where it ended after {len(golden.tokens)} tokens"
        return Compared(golden.id, BROKEN, len(golden.tokens), None, shift, note)
    if shift > tolerated:
        note = f"the same tokens, but their log-probabilities moved by up to {shift:.3g} nats"
        return Compared(golden.id, NUMERIC, None, None, shift, note)
    return Compared(golden.id, SAME, None, None, shift, "")


def _diverged(golden: Golden, step: int, answer: Answer, shift: float) -> Compared:
    token, expected = answer.tokens[step], golden.tokens[step]
    leading = max(token.top.values(), default=token.logprob)
    if expected in token.top:
        behind, seen = leading - token.top[expected], ""
    else:  # below the likeliest that are told: at least as far behind as the last of them
        behind, seen = leading - min(token.top.values(), default=leading), "at least "
    movement = golden.margins[step] + behind
    kind = BROKEN if movement >= BROKEN_MOVEMENT else NUMERIC
    note = f"step {step}: {token.text!r}, not {expected!r}; the two moved by {seen}{movement:.2f} nats"
    return Compared(golden.id, kind, step, movement, shift, note)


def called_broken(broken: int, diverged: int) -> bool:
    """Are so many broken among the answers with another text more than rounding makes?

    Rounding moves many answers, each by little: of 21 that 4-bit weights changed, one moved by 4.03 nats, the others by
    less than 4.  What is broken moves each answer that it touches by far more.
    """
    return broken >= BROKEN_SHARE * diverged > 0


def mostly_beyond(here: Set[str], there: Set[str]) -> bool:
    """Are most of the goldens that break here those that hold there, and is that no chance (exact sign test)?

    Where nothing breaks there, any that breaks here is enough: the answers of a healthy server do not change.
    """
    only, back = len(here - there), len(there - here)
    if not only or 2 * only <= len(here):
        return False
    return not there or binomial_at_least(only, only + back, 0.5) <= ALPHA


def _agreed(answers: Sequence[Answer]) -> int:
    """How many first tokens all answers share."""
    count = 0
    for tokens in zip(*(answer.tokens for answer in answers), strict=False):
        if len({token.text for token in tokens}) > 1:
            break
        count += 1
    return count
