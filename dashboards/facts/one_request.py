"""One request through application, engine, model and device: what each of them saw, and where that is written.

Owns which columns are the evidence of which layer.  Must always hold: a layer that saw nothing says so; no stamp of the
server is put on the client's clock here, the engine's steps are found by their numbers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dashboards.language import tr
from dashboards.source import Rows, Source
from dashboards.words import outcome
from telemetry import names, slo
from telemetry.summary import format_seconds

APPLICATION: Final = "application"
ENGINE: Final = "engine"
MODEL: Final = "model"
DEVICE: Final = "device"
LAYERS: Final = (APPLICATION, ENGINE, MODEL, DEVICE)
_STEPS_SHOWN: Final = 600


@dataclass(frozen=True, slots=True)
class Seen:
    """One observation: which layer, what, its value as text, and the column or table that it comes from."""

    layer: str
    what: str
    value: str
    evidence: str


def find(run: Source, index: int) -> dict[str, Any] | None:
    """All facts of a request and its verdict; None: there is no such row."""
    found = run.ask('SELECT * FROM rows WHERE "index" = $index LIMIT 1', index=index)
    return found[0] if found else None


def extent(run: Source) -> tuple[int, int]:
    """The least and the greatest index that has a row; (0, 0) without rows."""
    row = run.ask('SELECT min("index") AS low, max("index") AS high FROM rows')[0]
    return (row["low"] or 0, row["high"] or 0)


def steps_of(run: Source, row: Mapping[str, Any]) -> Rows:
    """The engine's steps from this request's first to its last, at most 600, evenly chosen: after_s, took_s and load.

    after_s: start of the step, seconds after the start of the first.  None of its own tokens need be in every step.
    """
    if row["step_first"] is None or row["step_last"] is None:
        return []
    every = max(1, -(-(row["step_last"] - row["step_first"] + 1) // _STEPS_SHOWN))
    return run.ask(
        """
        SELECT step, (start_ns - min(start_ns) OVER ()) / 1e9 AS start_s,
            (end_ns - min(start_ns) OVER ()) / 1e9 AS end_s,
            (end_ns - start_ns) / 1e9 AS took_s, running, waiting, prefill_tokens, decode_seqs, context_tokens,
            kv_used / nullif(kv_used + kv_free, 0) AS kv_share, floor_ns / 1e9 AS floor_s, wall, gap_ns / 1e9 AS gap_s,
            1 AS steps
        FROM steps WHERE replica = $replica AND step BETWEEN $first AND $last AND (step - $first) % $every = 0
        ORDER BY step
        """,
        replica=row["replica"],
        first=row["step_first"],
        last=row["step_last"],
        every=every,
    )


def device_of(run: Source, row: Mapping[str, Any]) -> dict[str, Any]:
    """All steps from its first to its last in figures: steps, first, last, took_s, running (most), prefill_tokens.

    floor_s and known_s: the floor and the time of the steps that have one; wall: that of most of that time.
    """
    return run.ask(
        """
        WITH own AS (
            SELECT step, (end_ns - start_ns) / 1e9 AS took_s, running, prefill_tokens, floor_ns / 1e9 AS floor_s, wall
            FROM steps WHERE replica = $replica AND step BETWEEN $first AND $last
        )
        SELECT count(*) AS steps, min(step) AS first, max(step) AS last, sum(took_s) AS took_s,
            max(running) AS running, sum(prefill_tokens)::BIGINT AS prefill_tokens, sum(floor_s) AS floor_s,
            sum(took_s) FILTER (floor_s IS NOT NULL) AS known_s,
            (SELECT wall FROM own WHERE wall IS NOT NULL GROUP BY wall ORDER BY sum(took_s) DESC, wall LIMIT 1) AS wall
        FROM own
        """,
        replica=row["replica"],
        first=row["step_first"],
        last=row["step_last"],
    )[0]


def spans_of(run: Source, row: Mapping[str, Any]) -> Rows:
    """Its spans: service, name, from_s after the first of that service, seconds, attributes; in that order."""
    if row["trace_id"] is None:
        return []
    found = run.ask(
        """
        SELECT service, name, (start_unix_ns - min(start_unix_ns) OVER (PARTITION BY service)) / 1e9 AS from_s,
            (end_unix_ns - start_unix_ns) / 1e9 AS seconds, status, attributes
        FROM spans WHERE trace_id = $trace ORDER BY service, start_unix_ns, end_unix_ns DESC
        """,
        trace=row["trace_id"],
    )
    for span in found:
        span["attributes"] = json.loads(span["attributes"] or "{}")
    return found


def layers(row: Mapping[str, Any], device: Mapping[str, Any], policy: slo.Slo) -> list[Seen]:
    """What each layer saw (device: ``device_of``), in the order of LAYERS; only what is there."""
    found = [*_application(row, policy), *_engine(row), *_model(row), *_device(device)]
    return [seen for seen in found if seen.value]


def _application(row: Mapping[str, Any], policy: slo.Slo) -> list[Seen]:
    intended = row["intended_s"]
    deadlines = policy.deadlines(row["class"], row["input_tokens"] or 0, row["expected_output_tokens"])
    verdict = outcome(row["label"], row["reason"])
    sent = None if row["sent_s"] is None else row["sent_s"] - intended
    first, whole = row["ttft_s"], row["e2e_s"]
    return [
        Seen(APPLICATION, "verdict", verdict, "verdicts"),
        Seen(APPLICATION, "meant to be sent", tr("{t} s into the run", t=f"{intended:.3f}"), "intended_s"),
        Seen(APPLICATION, "sent after", _time(sent), "sent_s - intended_s"),
        Seen(APPLICATION, "first token after", _against(first, deadlines.ttft), "first_token_s - intended_s"),
        Seen(APPLICATION, "longest silence", _against(row["max_gap_s"], deadlines.gap), "max_gap_s"),
        Seen(APPLICATION, "ended after", _against(whole, deadlines.e2e), "end_s - intended_s"),
        Seen(APPLICATION, "HTTP status", _text(row["status"]), "status"),
        Seen(APPLICATION, "attempts", _text(row["attempts"]), "attempts"),
        Seen(APPLICATION, "error", _text(row["error_detail"] or row["error"]), "error, error_detail"),
        Seen(APPLICATION, "asked of", _text(row["target"]), "target"),
    ]


def _engine(row: Mapping[str, Any]) -> list[Seen]:
    if row["server_duration_s"] is None:
        return []
    chunks = row["prefill_chunks"]
    return [
        Seen(ENGINE, "replica", _text(row["replica"]), "replica"),
        Seen(ENGINE, "had it for", _time(row["server_duration_s"]), "server_duration_s"),
        Seen(ENGINE, "waited in the queue", _time(row[f"phase_{names.QUEUE}_s"]), f"phase_{names.QUEUE}_s"),
        Seen(ENGINE, "requests before it", _text(row["queue_depth_at_arrival"]), "queue_depth_at_arrival"),
        Seen(ENGINE, "tokens before it", _text(row["queue_tokens_ahead"]), "queue_tokens_ahead"),
        Seen(
            ENGINE,
            "read the prompt in",
            _time(row[f"phase_{names.PREFILL}_s"]) + (tr(", {n} chunks", n=chunks) if chunks else ""),
            f"phase_{names.PREFILL}_s, prefill_chunks",
        ),
        Seen(ENGINE, "wrote the answer in", _time(row[f"phase_{names.DECODE}_s"]), f"phase_{names.DECODE}_s"),
        Seen(ENGINE, "preempted", _text(row["preemptions"]), "preemptions"),
        Seen(ENGINE, "stalled for", _time(row[f"phase_{names.STALL}_s"]), f"phase_{names.STALL}_s"),
        Seen(ENGINE, "mean batch", _number(row["batch_size_mean"]), "batch_size_mean"),
    ]


def _model(row: Mapping[str, Any]) -> list[Seen]:
    expected, reported = row["prompt_tokens_expected"], row["prompt_tokens_reported"]
    prompt = _text(reported if reported is not None else row["input_tokens"])
    if reported is not None and expected is not None and reported != expected:
        prompt += tr(", {n} expected", n=expected)
    answer = row["completion_tokens_reported"]
    counted = row["completion_tokens_counted"]
    return [
        Seen(MODEL, "model", _text(row["model"]), "model"),
        Seen(MODEL, "prompt tokens", prompt, "prompt_tokens_reported, prompt_tokens_expected"),
        Seen(MODEL, "of them from the cache", _text(row["cached_tokens"]), "cached_tokens"),
        Seen(MODEL, "answer tokens", _text(answer if answer is not None else counted), "completion_tokens_reported"),
        Seen(MODEL, "ended by", _text(row["finish_reason"]), "finish_reason"),
        Seen(MODEL, "failed check", _text(row["wrong_kind"]), "verdicts"),
        Seen(MODEL, "time per token", _time(row["tpot_s"]), "tpot_s"),
    ]


def _device(device: Mapping[str, Any]) -> list[Seen]:
    if not device["steps"]:
        return []
    floor, measured = device["floor_s"], device["known_s"]
    share = tr("{n} % of the time", n=f"{100 * floor / measured:.0f}") if measured else ""
    return [
        Seen(DEVICE, "steps", f"{device['steps']:,}: {device['first']} – {device['last']}", "steps"),
        Seen(DEVICE, "time in them", _time(device["took_s"]), "end_ns - start_ns"),
        Seen(DEVICE, "largest batch", _text(device["running"]), "running"),
        Seen(DEVICE, "prefill beside it", f"{device['prefill_tokens'] or 0:,} {tr('tokens')}", "prefill_tokens"),
        Seen(DEVICE, "floor", share, "floor_ns"),
        Seen(DEVICE, "mostly bound by", tr(device["wall"]) if device["wall"] else "", "wall"),
    ]


def _against(value: float | None, deadline: float | None) -> str:
    if value is None or deadline is None:
        return _time(value)
    return tr("{t}, {bound} allowed", t=format_seconds(value), bound=format_seconds(deadline))


def _time(value: float | None) -> str:
    return "" if value is None else format_seconds(value)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _text(value: object) -> str:
    return "" if value is None else f"{value:,}" if isinstance(value, int) else str(value)
