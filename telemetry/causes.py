"""One cause for every late, wrong or dropped request, from the facts of its row: the table behind ``telemetry.layer``.

Owns the vocabulary of causes, the layer that each belongs to and the rule that assigns it: of single requests, where
they lost their time ("queue").  Why a run got worse than another ("arrivals") has a vocabulary of its own in
telemetry.explain.causes: there a queue is a symptom, and a name that both have (hang) is told by other evidence.  Must
always hold: a request has at most one cause; a fact that is unknown (null) points nowhere; what the rows cannot tell is
UNKNOWN, not a guess.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import hard_checks, names
from telemetry.slo import Slo

APPLICATION: Final = "application"
TOKENIZER: Final = "tokenizer or template"
MODEL: Final = "model or quantisation"
ENGINE: Final = "engine"
INFRASTRUCTURE: Final = "infrastructure"
TOOLING: Final = "tooling"
NOWHERE: Final = "not known"
LAYERS: Final = (APPLICATION, TOKENIZER, MODEL, ENGINE, INFRASTRUCTURE, TOOLING, NOWHERE)


@dataclass(frozen=True, slots=True)
class Cause:
    """words: what is so.  check: what would disprove it, or shows it closer."""

    name: str
    layer: str
    words: str
    check: str


CAUSES: Final = {
    cause.name: cause
    for cause in (
        # application: what was sent is not what was meant
        Cause("other_lengths", APPLICATION, "prompts were sent with other lengths than were planned",
              "compare plan.json with the prompts that were sent: tailspan run --dry-run"),
        Cause("other_model", APPLICATION, "another model answered than the one that was asked for",
              "look at the routing, and at the names that /v1/models gives"),
        Cause("too_long", APPLICATION, "requests are longer than the context of the model",
              "shorten prompts or answers before they are sent, or use --over-limit"),
        # tokenizer or template
        Cause("template", TOKENIZER, "the server reads every prompt as so many tokens more or less than we sent",
              "compare template_sha of tailspan_build_info with the model's files; look for a second BOS"),
        Cause("tokenizer", TOKENIZER, "the server counts the tokens of the prompts differently, each by another number",
              "compare tokenizer_sha of tailspan_build_info with the model's files"),
        Cause("other_prompts", TOKENIZER, "the server read other prompts than were sent, too few to say in which way",
              "compare the digests in tailspan_build_info with the model's files"),
        Cause("detokenizer", TOKENIZER, "texts hold broken characters or control tokens",
              "decode the same token ids with the model's own tokenizer"),
        # model or quantisation
        Cause("answers", MODEL, "answers are wrong whatever the load", "tailspan canaries check on an idle server"),
        Cause("too_slow", MODEL, "even alone on the device these answers would miss their deadline",
              "tailspan floor --run: a smaller model, fewer bits, or a later deadline"),
        # engine
        Cause("wrong_in_batches", ENGINE, "answers are wrong in large batches and right in small ones",
              "send the same requests one at a time; serve with a smaller --max-batch"),
        Cause("wrong_on_hits", ENGINE, "answers are wrong where the prefix cache was hit",
              "send them again with another salt, or without prefix cache"),
        Cause("prefill", ENGINE, "late requests spend most of their time in prefill",
              "look at chunks and token budget; tailspan floor --run for what prefill must take"),
        Cause("decode", ENGINE, "late requests spend most of their time in decode, beside others",
              "look at the batch; tailspan capacity --sweep batch=… shows what it costs"),
        Cause("kv", ENGINE, "requests lost their KV pages and were computed again",
              "a larger pool, a smaller --max-batch, or shorter contexts"),
        Cause("stall", ENGINE, "requests waited while no step ran",
              "look for what holds the engine's process up: other processes, garbage collection, compiling"),
        Cause("front", ENGINE, "time goes to reading, tokenising and sending",
              "look at the server process around the engine: its CPU, its event loop"),
        Cause("kv_oom", ENGINE, "the KV pool is too small for requests", "a larger pool, or --max-context"),
        Cause("failed", ENGINE, "the server failed on requests", "read its log at these times"),
        Cause("hang", ENGINE, "requests were running and no token came", "look for a step that never ends"),
        # infrastructure
        Cause("queue", INFRASTRUCTURE, "requests wait in the queue: more comes than is served",
              "tailspan capacity: what one replica holds; then add replicas or refuse earlier"),
        Cause("rejected", INFRASTRUCTURE, "the server refuses what its limits do not allow (429, 503)",
              "raise the limit only where the queue would still hold the deadlines"),
        Cause("unreachable", INFRASTRUCTURE, "nobody takes the connection",
              "is the server up, and is this its address and port?"),
        Cause("cut", INFRASTRUCTURE, "connections end in the middle of an answer",
              "look at proxies and their time limits between client and server"),
        Cause("network", INFRASTRUCTURE, "time goes between client and server", "ask from the server's own machine"),
        Cause("client", INFRASTRUCTURE, "requests wait on this side for a connection",
              "look at connection limits and at this machine: tailspan selfcheck"),
        Cause("replica", INFRASTRUCTURE, "one replica makes nearly all of it",
              "take it out, and compare it with the others"),
        # not known
        Cause("no_account", NOWHERE, "the server gives no account of its phases",
              "ask for one: --header, an adapter, or its own traces"),
    )
}  # fmt: skip

COLUMNS: Final = (
    "index", "class", "target", "replica", "model", "intended_s", "sent_s", "first_token_s", "end_s", "input_tokens",
    "expected_output_tokens", "prompt_tokens_expected", "prompt_tokens_reported", "completion_tokens_reported",
    "cached_tokens", "batch_size_mean", "server_duration_s", "floor_ttft_s", "floor_tpot_s",
    *(f"phase_{name}_s" for name in names.PHASES),
)  # fmt: skip

_OF_DROP: Final = {
    names.REFUSED: "unreachable",
    names.TIMEOUT_CONNECT: "unreachable",
    names.REJECTED: "rejected",
    names.RESET: "cut",
    names.STREAM_CUT: "cut",
    names.KV_OOM: "kv_oom",
    names.CONTEXT_OVERFLOW: "too_long",
    names.SERVER_ERROR: "failed",
    names.HANG: "hang",
    names.TIMEOUT_FIRST_TOKEN: "no_account",
    names.TIMEOUT_TOTAL: "no_account",
}
_OF_WRONG: Final = {
    hard_checks.REPLACEMENT_CHAR: "detokenizer",
    hard_checks.SPECIAL_TOKEN: "detokenizer",
}
#: Part of the time -> cause, for late requests.
OF_PART: Final = {
    names.CLIENT_WAIT: "client",
    names.NETWORK: "network",
    names.QUEUE: "queue",
    names.PREFILL: "prefill",
    names.DECODE: "decode",
    names.PREEMPTED: "kv",
    names.RECOMPUTE: "kv",
    names.STALL: "stall",
    names.INGRESS: "front",
    names.TOKENIZE: "front",
    names.SEND: "front",
}
#: Of the prompts that the server counts differently: so many by the same number mean the template.
SAME_DELTA: Final = 0.9
LEAST: Final = 5  # requests; fewer are no pattern

Strings = npt.NDArray[np.object_]
Floats = npt.NDArray[np.float64]


def of_requests(rows: pa.Table, verdicts: pa.Table, slo: Slo, asked_model: str | None) -> Strings:
    """The cause of each late, wrong or dropped verdict; rows: of the same requests, nulls where one left none.

    asked_model: the name that went into the requests.  Patterns over many requests are ``layer``'s.
    """
    label = np.array(verdicts.column("label").to_pylist(), dtype=object)
    reason = np.array(verdicts.column("reason").to_pylist(), dtype=object)
    kind = np.array(verdicts.column("wrong_kind").to_pylist(), dtype=object)
    found: Strings = np.full(len(label), None, dtype=object)
    dropped = label == names.DROPPED
    found[dropped] = [_OF_DROP.get(one, "failed") for one in reason[dropped]]
    wrong = label == names.WRONG
    found[wrong] = [_OF_WRONG.get(one, "answers") for one in kind[wrong]]
    prompts = wrong & (kind == hard_checks.PROMPT_TOKENS)
    found[prompts] = _prompt_causes(rows, prompts)
    if asked_model is not None:
        model = np.array(rows.column("model").to_pylist(), dtype=object)
        found[wrong & (model != asked_model) & (model != None)] = "other_model"  # noqa: E711  (elementwise)
    late = label == names.LATE
    found[late] = _late_causes(rows, late, slo)
    return found


def _prompt_causes(rows: pa.Table, chosen: npt.NDArray[np.bool_]) -> Strings:
    """Why the server counts other prompt tokens: we sent others than planned, the template, or the tokenizer."""
    expected, reported = (floats(rows, f"prompt_tokens_{what}")[chosen] for what in ("expected", "reported"))
    planned = floats(rows, "input_tokens")[chosen]
    if not len(expected):
        return np.empty(0, dtype=object)
    off = reported - expected
    values, counts = np.unique(off[~np.isnan(off)], return_counts=True)
    same = len(values) > 0 and counts.max() >= SAME_DELTA * len(off)
    pattern = "other_prompts" if len(off) < LEAST else "template" if same else "tokenizer"
    found: Strings = np.full(len(off), pattern, dtype=object)
    found[~np.isnan(planned) & (planned == reported) & (planned != expected)] = "other_lengths"
    return found


def _late_causes(rows: pa.Table, late: npt.NDArray[np.bool_], slo: Slo) -> Strings:
    """The part of its time that a late request spent most in; before that, whether the device alone is too slow."""
    chosen = rows.filter(pa.array(late))
    n = chosen.num_rows
    found: Strings = np.full(n, "no_account", dtype=object)
    if n == 0:
        return found
    known = ~np.isnan(floats(chosen, "server_duration_s"))
    sent, end = floats(chosen, "sent_s"), floats(chosen, "end_s")
    parts = {name: np.nan_to_num(floats(chosen, f"phase_{name}_s")) for name in names.PHASES}
    parts[names.CLIENT_WAIT] = sent - floats(chosen, "intended_s")
    parts[names.NETWORK] = end - sent - floats(chosen, "server_duration_s")
    grouped: dict[str, Floats] = {}
    for part, cause in OF_PART.items():
        grouped[cause] = grouped.get(cause, np.zeros(n)) + np.nan_to_num(parts[part])
    order = list(grouped)
    largest = np.argmax(np.stack([grouped[cause] for cause in order]), axis=0)
    found[known] = np.array(order, dtype=object)[largest][known]
    waits = parts[names.CLIENT_WAIT]
    found[~known & (waits > 0.5 * (end - floats(chosen, "intended_s")))] = "client"
    found[_too_slow(chosen, slo)] = "too_slow"
    return found


def _too_slow(rows: pa.Table, slo: Slo) -> npt.NDArray[np.bool_]:
    """Would the device miss the deadline with nothing else to do?"""
    ttft, gap, e2e = slo.deadline_columns(rows)
    first, each = floats(rows, "floor_ttft_s"), floats(rows, "floor_tpot_s")
    more = np.nan_to_num(floats(rows, "expected_output_tokens"), nan=1.0) - 1
    slow: npt.NDArray[np.bool_] = (first > ttft) | (each > gap) | (first + each * more > e2e)  # false for NaN
    return slow


def floats(table: pa.Table, name: str) -> Floats:
    """A column with NaN for null."""
    values: Floats = pc.cast(table.column(name), pa.float64()).to_numpy().copy()
    return values
