"""One colour and one plain-word name per label and per phase, the same on every page and in both themes.

Based on Okabe and Ito's palette (https://jfly.uni-koeln.de/color/), shifted in lightness so that every pair of labels
stays apart for red-, green- and blue-blind eyes (CIE76 distance under Machado et al. 2009; tests/pages asserts it), and
every colour shows on white and on Streamlit's dark ground.  Colour is never the only carrier: names stand beside it.
"""

from __future__ import annotations

from typing import Final

from telemetry import hard_checks, names
from telemetry.phases import CLIENT_PARTS, OTHER

LABEL_COLOURS: Final = {
    names.GOOD: "#3A97D4",
    names.LATE: "#EBB400",
    names.WRONG: "#A8529B",
    names.DROPPED: "#D55E00",
    names.INVALID: "#8C8C8C",
}

#: Time of a request that got no token at all, from the send to its end: nobody accounted for it.
UNACCOUNTED: Final = "unaccounted"
_WAIT_FIRST, _STREAM = CLIENT_PARTS[1:]

#: In the order in which they happen, which is the order in every stack and legend.
PHASE_COLOURS: Final = {
    names.CLIENT_WAIT: "#6F6F6F",
    names.NETWORK: "#B8B8B8",
    names.INGRESS: "#7A5230",
    names.TOKENIZE: "#D8C08A",
    names.QUEUE: "#E69F00",
    names.PREFILL: "#0072B2",
    OTHER: "#B8B8B8",  # network for the most part, which is never in the same stack
    names.DECODE: "#56B4E9",
    names.PREEMPTED: "#E58FC0",
    names.RECOMPUTE: "#94318A",
    names.STALL: "#D55E00",
    names.SEND: "#00A37A",
    _WAIT_FIRST: "#A28E4E",
    _STREAM: "#8A5CD6",
    UNACCOUNTED: "#5A5560",
}

PHASE_WORDS: Final = {
    names.CLIENT_WAIT: "client wait",
    names.NETWORK: "network",
    names.INGRESS: "ingress",
    names.TOKENIZE: "tokenize",
    names.QUEUE: "queue",
    names.PREFILL: "prefill",
    OTHER: "network and rest",
    names.DECODE: "decode",
    names.PREEMPTED: "preempted",
    names.RECOMPUTE: "recompute",
    names.STALL: "stall",
    names.SEND: "send",
    _WAIT_FIRST: "wait for first token",
    _STREAM: "stream",
    UNACCOUNTED: "no answer",
}

PHASE_MEANING: Final = {
    names.CLIENT_WAIT: "from the intended send time until the generator sent it",
    names.NETWORK: "client duration minus server duration",
    names.INGRESS: "request head read to body parsed",
    names.TOKENIZE: "text to token ids",
    names.QUEUE: "waiting for the first engine step",
    names.PREFILL: "reading the prompt, up to the first token",
    OTHER: "network, and what of stalls and preemptions lies before the first token",
    names.DECODE: "writing the answer, first to last token",
    names.PREEMPTED: "thrown out for lack of KV memory",
    names.RECOMPUTE: "restoring what preemption lost",
    names.STALL: "ready to run, but the engine ran no step",
    names.SEND: "last token to last byte",
    _WAIT_FIRST: "sent to first token; the server gave no account of it",
    _STREAM: "first token to end; the server gave no account of it",
    UNACCOUNTED: "sent to the end, without a token",
}

#: Reasons and kinds as people say them; anything else is shown with its underscores as spaces.
_REASON_WORDS: Final = {
    names.REFUSED: "connection refused",
    names.REJECTED: "rejected (429/503)",
    names.TIMEOUT_CONNECT: "timeout connecting",
    names.TIMEOUT_FIRST_TOKEN: "timeout before first token",
    names.TIMEOUT_TOTAL: "timeout, whole answer",
    names.KV_OOM: "no KV memory",
    names.CUT_BY_END: "cut by the end of the run",
    hard_checks.PROMPT_TOKENS: "another prompt was read",
    hard_checks.FINISH_REASON: "unknown finish reason",
    hard_checks.EMPTY: "empty answer",
    hard_checks.REPLACEMENT_CHAR: "broken characters",
    hard_checks.SPECIAL_TOKEN: "leaked special token",
    hard_checks.LOOP: "loop",
    hard_checks.MODEL: "another model answered",
    hard_checks.TRUNCATED: "cut short by the server",
    hard_checks.OVER_LIMIT: "longer than allowed",
    hard_checks.DOMINANCE: "one token over and over",
    hard_checks.FOREIGN_SCRIPT: "another script",
    hard_checks.COMPLETION_TOKENS: "tokens miscounted",
    hard_checks.ANSWER: "not the known answer",
    "golden": "golden answer changed",
    "ttft": "first token",
    "e2e": "whole answer",
    "gap": "gap between tokens",
}


def reason_words(reason: str | None) -> str:
    return "" if not reason else _REASON_WORDS.get(reason, reason.replace("_", " "))
