"""What the events of OpenAI's Responses API mean, in the words of chat completions.

Owns the names of those events alone; loadgen.stream decides what counts as a token.  A stream ends with
`response.completed`, `.incomplete` or `.failed`; there is no [DONE].  Events that we do not know say nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

PREFIX: Final = "response."
#: Deltas a user sees, and those read as reasoning.
SPOKEN: Final = (
    "response.output_text.delta", "response.refusal.delta", "response.function_call_arguments.delta",
)  # fmt: skip
THOUGHT: Final = ("response.reasoning_text.delta", "response.reasoning_summary_text.delta")
COMPLETED: Final = "response.completed"
INCOMPLETE: Final = "response.incomplete"
FAILED: Final = "response.failed"
ERROR: Final = "error"
LIMIT: Final = "max_output_tokens"


@dataclass(frozen=True, slots=True)
class Meaning:
    """One event.  finish: a finish reason of chat completions; usage: in its field names; error: an error object."""

    spoken: str = ""
    thought: str = ""
    finish: str | None = None
    usage: dict[str, Any] | None = None
    error: Any = None
    about: dict[str, Any] | None = None  # the response object, for its id and model


def is_event(found: dict[str, Any]) -> bool:
    """Is this an event of the Responses API?"""
    kind = found.get("type")
    return isinstance(kind, str) and (kind.startswith(PREFIX) or (kind == ERROR and "choices" not in found))


def meaning(found: dict[str, Any]) -> Meaning:
    """What an event says."""
    kind = found["type"]
    if kind in SPOKEN or kind in THOUGHT:
        delta = found.get("delta")
        text = delta if isinstance(delta, str) else ""
        return Meaning(spoken=text) if kind in SPOKEN else Meaning(thought=text)
    if kind == ERROR:
        return Meaning(error={key: found.get(key) for key in ("message", "code")})
    response = found.get("response")
    if not isinstance(response, dict):
        return Meaning()
    return of_response(response) if kind in (COMPLETED, INCOMPLETE, FAILED) else Meaning(about=response)


def of_response(response: dict[str, Any]) -> Meaning:
    """What a finished response object says, from the end of a stream or a plain answer."""
    status = response.get("status")
    if status == "failed":
        return Meaning(error=response.get("error") or {"message": "the response failed"}, about=response)
    finish = None
    if status == "completed":
        finish = "stop"
    elif status == "incomplete":
        details = response.get("incomplete_details")
        reason = details.get("reason") if isinstance(details, dict) else None
        finish = "length" if reason == LIMIT else str(reason or "incomplete")
    return Meaning(finish=finish, usage=_usage(response.get("usage")), about=response)


def texts(response: dict[str, Any]) -> str:
    """The visible text of a whole response object."""
    found: list[str] = []
    for item in response.get("output") or ():
        for part in (item.get("content") or ()) if isinstance(item, dict) else ():
            if isinstance(part, dict) and isinstance(part.get("text"), str):
                found.append(part["text"])
    return "".join(found)


def _usage(usage: Any) -> dict[str, Any] | None:
    if not isinstance(usage, dict):
        return None
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
    }
