"""Canaries beside production: one golden question at a time, at a set trickle, judged by a sequential test.

A question that is answered wrongly counts once, however often it is asked.  Must always hold: no more is asked than the
trickle allows, and what is asked is known by its trace id, so that it is never taken for a customer's request.
"""

from __future__ import annotations

import secrets
import time
from collections import deque
from dataclasses import replace
from typing import Any, Final

from loadgen.canaries import goldens
from loadgen.canaries.client import Client, Refused
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.verdict import tolerance
from models.errors import UserError
from telemetry import names
from telemetry.sequential import Watch as Sequential

REMEMBERED: Final = 4096  # trace ids of canaries: their spans come within seconds
SILENT: Final = 3  # canaries in a row without an answer are a breach
HORIZON: Final = 100_000


class Canaries:
    """``ask`` sends the next one and gives its row; results are kept in the counters."""

    def __init__(self, client: Client, recorded: CanaryFile) -> None:
        if not recorded.goldens:
            raise UserError("the canary file holds no golden", remedy="record it again: tailspan canaries record")
        self._client, self._recorded = client, recorded
        self._tolerated = tolerance(recorded)
        self._at = 0
        self._traces: deque[str] = deque(maxlen=REMEMBERED)
        self.counts = {goldens.SAME: 0, goldens.NUMERIC: 0, goldens.BROKEN: 0, "failed": 0}
        self._broken, self._changed = Sequential(horizon=HORIZON), Sequential(horizon=HORIZON)
        self._known: dict[str, set[str]] = {goldens.NUMERIC: set(), goldens.BROKEN: set()}
        self.silent = 0
        self.last_note = ""

    @property
    def traces(self) -> frozenset[str]:
        """Trace ids of what was asked lately."""
        return frozenset(self._traces)

    @property
    def alarm(self) -> str | None:
        """Why on call should look; None: all is well."""
        if self.silent >= SILENT:
            return f"{self.silent} canaries in a row had no answer: {self.last_note}"
        if self._broken.alarm_at is not None:
            return f"canaries are answered wrongly: {self._broken.sentence()}; last: {self.last_note}"
        if self._changed.alarm_at is not None:
            return f"canaries have moved: {self._changed.sentence()}; last: {self.last_note}"
        return None

    def ask(self, target: str, zero_unix_ns: int) -> dict[str, Any]:
        """Send one; its row (schema REQUESTS, without an index)."""
        golden = self._recorded.goldens[self._at % len(self._recorded.goldens)]
        self._at += 1
        trace, span = secrets.token_hex(16), secrets.token_hex(8)
        self._traces.append(trace)
        client = replace(self._client, headers={**self._client.headers, "traceparent": f"00-{trace}-{span}-01"})
        began_unix, began = time.time_ns(), time.monotonic_ns()
        row: dict[str, Any] = {
            "class": "canary",
            "target": target,
            "intended_s": (began_unix - zero_unix_ns) / 1e9,
            "canary_kind": "golden",
            "expected_answer": "".join(golden.tokens),
            "attempts": 1,
            "trace_id": trace,
            "span_id": span,
            "sampled": False,
            "lag_s": 0.0,
        }
        row["sent_s"] = row["intended_s"]
        try:
            answer = client.chat(golden.prompt, len(golden.tokens), logprobs=True)
        except (Refused, UserError) as error:
            self.counts["failed"] += 1
            self.silent += 1
            status = getattr(error, "status", None)
            self.last_note = str(getattr(error, "said", "") or error)[:200]
            reason = names.REFUSED if status is None else names.REJECTED if status in (429, 503) else names.SERVER_ERROR
            ended = row["sent_s"] + (time.monotonic_ns() - began) / 1e9
            return row | {"error": reason, "error_detail": self.last_note, "status": status, "end_s": ended}
        self.silent = 0
        found = goldens.compare(golden, answer, self._tolerated)
        self.counts[found.kind] += 1
        self._judge(found)
        return row | {
            "status": 200,
            "end_s": row["sent_s"] + (time.monotonic_ns() - began) / 1e9,
            "finish_reason": answer.finish_reason,
            "done_marker": True,
            "prompt_tokens_reported": answer.prompt_tokens,
            "prompt_tokens_expected": golden.prompt_tokens,
            "completion_tokens_reported": answer.completion_tokens,
            "output_chars": len(answer.text),
            "text": answer.text,
            "answer_matches": found.kind == goldens.SAME,
        }

    def _judge(self, found: goldens.Compared) -> None:
        """The same golden failing again is the same piece of evidence."""
        if found.kind != goldens.SAME:
            self.last_note = f"{found.id}: {found.note}"
        if found.id not in self._known[goldens.BROKEN]:
            self._broken.see(found.kind == goldens.BROKEN)
        if found.id not in self._known[goldens.NUMERIC]:
            self._changed.see(found.kind != goldens.SAME)
        if found.kind == goldens.BROKEN:
            self._known[goldens.BROKEN].add(found.id)
        if found.kind != goldens.SAME:
            self._known[goldens.NUMERIC].add(found.id)
