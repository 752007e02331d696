"""What is asked once the load is over, and the finding of a run's canaries as its bundle keeps it.

Owns ``canaries.json`` and ``checks-canaries.parquet``.  Alone, without load: the reference text (W2, the drift of
probabilities) and those goldens that changed under load, so that a fault of concurrency is told from one of the model.
Must always hold: a broken answer is a failed check of its request, unless the run's verdict is numeric drift: then the
changed answers are other, not wrong; a server that is gone by then costs the findings of this phase alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from loadgen.canaries import goldens
from loadgen.canaries.check import drift_of
from loadgen.canaries.client import Client, Refused
from loadgen.canaries.mixed import BEYOND_END
from loadgen.canaries.verdict import BROKEN, NUMERIC, SAME, Finding, joined, tolerance
from loadgen.canaries.watch import COLUMNS, CanaryWatch
from models.errors import UserError
from telemetry import names, outcomes
from telemetry.bundle import Bundle
from telemetry.canary_report import FILE
from telemetry.parts import write_atomically

CHECKS_NAME: Final = "canaries"
MOST_ALONE: Final = 8  # goldens asked again
LEAST_LOST: Final = 3  # canaries without an answer, half of all: more than bad luck


def close(bundle: Bundle, watch: CanaryWatch, clients: Sequence[Client], *, salted: bool) -> str:
    """Take what the watch has not seen, ask what is asked alone, and write it down.  Returns the verdict."""
    rows = bundle.table("requests", COLUMNS)
    chosen = rows.filter(pc.is_valid(rows.column("canary_kind")))
    final = CanaryWatch(watch.recorded)
    final.take(chosen.to_pylist())
    findings = final.findings()
    findings += _lost(final, bundle)
    for client in clients:
        try:
            _, found = drift_of(client, watch.recorded)
            findings += [found] if found is not None else []
            findings += _alone(client, final, f"{bundle.run_id}/alone" if salted else None)
        except UserError as problem:
            findings.append(Finding(SAME, "alone", f"asked alone: {problem.message} ({client.target})"))
    verdict = joined(findings)
    content = {
        "verdict": verdict,
        "findings": [one.to_dict() for one in findings],
        "pairs": final.pairs(),
        "asked": final.asked,
        "unanswered": dict(final.unanswered),
        "alarm_at": final.broken.alarm_at or final.changed.alarm_at,
        "goldens": [
            {"index": one.index, "place": one.place, "target": one.target, **one.compared.to_dict()}
            for one in final.seen
        ],
    }
    write_atomically(bundle.path / FILE, json.dumps(content, ensure_ascii=False, indent=1).encode() + b"\n")
    bundle.add_checks(CHECKS_NAME, checks(final, verdict))
    return verdict


def checks(watch: CanaryWatch, verdict: str) -> pa.Table:
    """Each compared golden as a check of its request (schema outcomes.CHECKS)."""
    found: list[dict[str, Any]] = []
    for one in watch.seen:
        if one.compared.kind == goldens.SAME:
            found.append({"index": one.index, "check": "golden", "passed": True})
        elif one.compared.kind == goldens.BROKEN and verdict != NUMERIC:
            found.append({"index": one.index, "check": "golden", "passed": False})
    return pa.Table.from_pylist(found, schema=outcomes.CHECKS)


def _lost(watch: CanaryWatch, bundle: Bundle) -> list[Finding]:
    """Canaries that failed on the server's side, with what its own counter says of values that are not finite."""
    found = []
    series = bundle.table("series", ["source", "t_s", "name", "value"])
    base = pc.replace_substring_regex(series.column("name"), "_total$", "")
    counted = series.filter(pc.equal(base, names.M_NONFINITE))
    for source in pc.unique(counted.column("source")).to_pylist():
        values = counted.filter(pc.equal(counted.column("source"), source)).sort_by("t_s").column("value").to_pylist()
        if values[-1] > values[0]:
            said = f"not finite: {values[-1] - values[0]:.0f} rows of logits during the run ({source})"
            found.append(Finding(BROKEN, "non-finite", said))
    errors = watch.unanswered[names.SERVER_ERROR]
    if errors >= max(LEAST_LOST, watch.asked / 2) and not found:
        said = f"{errors} of {watch.asked} canaries ended in an error of the server"
        found.append(Finding(BROKEN, "server-error", said))
    return found


def _alone(client: Client, watch: CanaryWatch, salt: str | None) -> list[Finding]:
    """Ask the goldens that changed on this replica again, one at a time and twice: the second is a hit of the cache."""
    own = CanaryWatch(watch.recorded, seen=[one for one in watch.seen if one.target == client.target])
    odd = own.odd()[:MOST_ALONE]
    if not odd:
        return []
    known = {one.id: one for one in watch.recorded.goldens}
    changed = [0, 0]
    for name in odd:
        golden = known[name]
        # A salt of its own: goldens begin alike (the template), and would find each other's pages.
        salted = {} if salt is None else {"cache_salt": f"{salt}/{name}"}
        for again in (0, 1):
            try:
                answer = client.chat(
                    golden.prompt, len(golden.tokens) + BEYOND_END * golden.ended, logprobs=True, **salted
                )
            except Refused as refused:
                return [Finding(SAME, "alone", f"asked alone: refused ({refused.status}: {refused.said[:80]})")]
            compared = goldens.compare(golden, answer, tolerance(watch.recorded))
            changed[again] += compared.kind != goldens.SAME
    verdict = BROKEN if watch.alarm == BROKEN else SAME
    of = f"of {len(odd)} changed goldens"
    if changed == [0, 0]:
        said = f"asked alone, none {of} changes: only under load, concurrency ({client.target})"
        return [Finding(verdict, "concurrency", said)]
    if changed[0] == 0 and salt is not None:
        said = f"asked alone, none {of} changes at first and {changed[1]} when asked again: the prefix cache"
        return [Finding(verdict, "cache", f"{said} ({client.target})")]
    return [Finding(SAME, "alone", f"asked alone, {changed[0]} {of} change too ({client.target})")]
