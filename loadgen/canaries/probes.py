"""W5: do options do what they say?  Small requests whose answers show it without a recorded baseline.

Owns the probes.  Must always hold: a probe that the server refuses (an option it does not have) is "unsupported", never
a failure; a probe fails only on what no honest server can answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

from loadgen.canaries.client import Client, Refused

STORY: Final = "Write a short story about a fox and a river."
DRAWS: Final = 8
HOT: Final = 1.2


@dataclass(frozen=True, slots=True)
class Probe:
    """passed: None where the server refused the option."""

    name: str
    passed: bool | None
    detail: str

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def run(client: Client) -> list[Probe]:
    """All probes; raises UserError where the server does not answer at all."""
    return [_guarded(name, probe, client) for name, probe in PROBES.items()]


def _greedy_twice(client: Client) -> tuple[bool, str]:
    first, second = (client.chat(STORY, 24).text for _ in range(2))
    return first == second, "the same text" if first == second else f"{first[:40]!r}, then {second[:40]!r}"


def _temperature(client: Client) -> tuple[bool, str]:
    texts = {client.chat(STORY, 24, temperature=HOT).text for _ in range(DRAWS)}
    return len(texts) > 1, f"{len(texts)} different texts of {DRAWS} at temperature {HOT}"


def _max_tokens(client: Client) -> tuple[bool, str]:
    answer = client.chat(STORY, 5)
    honoured = (answer.completion_tokens or 0) <= 5 and answer.finish_reason in ("length", "stop")
    return honoured, f"{answer.completion_tokens} tokens of 5, finish reason {answer.finish_reason}"


def _room(client: Client) -> tuple[bool, str]:
    """A long answer must be possible: a server that caps it in silence ends far below what was asked."""
    answer = client.chat("Count from 1 to 500, separated by commas.", 160)
    cut = answer.finish_reason == "length" and (answer.completion_tokens or 160) < 160
    return not cut, f"{answer.completion_tokens} tokens of 160, finish reason {answer.finish_reason}"


def _stop(client: Client) -> tuple[bool, str]:
    whole = client.chat(STORY, 24).text
    words = whole.split()
    if len(words) < 4:
        return True, "the answer is too short to be stopped"
    stop = words[3]
    text = client.chat(STORY, 24, stop=[stop]).text
    return stop not in text and whole.startswith(text), f"stopped before {stop!r}: {text[:40]!r}"


def _seed(client: Client) -> tuple[bool, str]:
    first, second = (client.chat(STORY, 24, temperature=1.0, seed=1234).text for _ in range(2))
    return first == second, "the same text for the same seed" if first == second else "another text for the same seed"


def _choices(client: Client) -> tuple[bool, str]:
    answer = client.chat(STORY, 8, temperature=1.0, n=3)
    return len(answer.choices) == 3, f"{len(answer.choices)} choices of 3"


PROBES: Final[dict[str, Callable[[Client], tuple[bool, str]]]] = {
    "greedy": _greedy_twice,
    "temperature": _temperature,
    "max_tokens": _max_tokens,
    "room": _room,
    "stop": _stop,
    "seed": _seed,
    "n": _choices,
}


def _guarded(name: str, probe: Callable[[Client], tuple[bool, str]], client: Client) -> Probe:
    try:
        passed, detail = probe(client)
    except Refused as refused:
        if refused.status in (400, 404, 422):
            return Probe(name, None, f"refused ({refused.status}): {refused.said[:120]}")
        return Probe(name, False, f"answered {refused.status}: {refused.said[:120]}")
    return Probe(name, passed, detail)
