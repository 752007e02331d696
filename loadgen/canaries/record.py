"""Recording canaries on a server that is trusted: 20 baseline runs, the reference text, the questions.

Owns the order of what is asked.  Must always hold: half of the baseline runs are asked one at a time and half many at a
time, so that what is unstable under load is not admitted; a server without logprobs or prompt_logprobs is recorded as
far as it goes, and the file says what is missing and why.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from loadgen.canaries import goldens
from loadgen.canaries.client import Answer, Client, Refused, ask_all
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.prompts import REFERENCE, golden_prompts
from models.errors import UserError
from models.wording import several
from telemetry import drift
from telemetry.question_sets import SETS
from telemetry.questions import digest, score

CONCURRENCY: Final = 8
SPREAD_RUNS: Final = 3

Say = Callable[[str], None]


def record(
    client: Client,
    *,
    runs: int = goldens.RUNS,
    tokens: int = goldens.TOKENS,
    questions: str = "small",
    concurrency: int = CONCURRENCY,
    say: Say = lambda _: None,
) -> CanaryFile:
    """Record a canary file.  UserError where the server does not answer, or no prompt is stable enough."""
    prompts = golden_prompts()
    asked = [(prompt, tokens) for _, prompt in prompts]
    answers: list[list[Answer]] = []
    try:
        for number in range(runs):
            together = 1 if number < (runs + 1) // 2 else concurrency
            answers.append(ask_all(client, asked, together, logprobs=True))
            say(f"baseline run {number + 1} of {runs}, {'idle' if together == 1 else f'{together} at a time'}")
    except Refused as refused:
        raise UserError(
            f"the server refuses a golden prompt ({refused.status}): {refused.said[:200]}",
            where=client.target,
            remedy="canaries need chat completions with logprobs; check --model and --header",
        ) from None
    admitted, left = goldens.admit(prompts, answers)
    if not admitted:
        raise UserError(
            f"none of {several(len(prompts), 'prompt')} is stable; the first: {left[0].reason}",
            where=client.target,
            remedy="record on a quiet server with logprobs, or with a larger model",
        )
    reference, spread, refused_drift = _drift(client, say)
    asked_questions = SETS[questions]()
    said = ask_all(client, [(q.prompt, q.max_tokens) for q in asked_questions], concurrency, logprobs=False)
    scores = score(asked_questions, [answer.text for answer in said])
    say(f"{sum(scores.values())} of {len(scores)} questions right")
    return CanaryFile(
        model=client.model,
        target=client.target,
        recorded_unix_ns=time.time_ns(),
        runs=runs,
        noise=goldens.noise(answers),
        goldens=tuple(admitted),
        left=tuple(left),
        reference=reference,
        spread=spread,
        drift_refused=refused_drift,
        questions=questions,
        questions_sha256=digest(asked_questions),
        scores=scores,
    )


def _drift(client: Client, say: Say) -> tuple[tuple[drift.Position, ...] | None, tuple[drift.Drift, ...], str | None]:
    """The reference text's probabilities, and how recordings of it differ among themselves."""
    try:
        first = client.score(REFERENCE)
        again = [client.score(REFERENCE) for _ in range(SPREAD_RUNS)]
    except Refused as refused:
        say("no prompt_logprobs: the drift of probabilities cannot be watched")
        return None, (), f"{refused.status}: {refused.said[:200]}"
    spread = tuple(drift.measure(first, other) for other in again)
    say(f"reference text of {len(first)} tokens, perplexity {spread[0].perplexity_before:.2f}")
    return tuple(first), spread, None
