"""All the figures that the page shows of one run, read from its bundle; no Streamlit in here.

What must always hold: the verdict, counts, percentiles and phases are those of ``telemetry.summary`` and
``telemetry.phases``, the functions behind ``tailspan run`` and ``tailspan runs show``; only bins over time and the list
of the slowest are computed here (``queries``).  The SLO is the one the run was judged by, kept in its manifest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from dashboards import queries
from dashboards.palette import UNACCOUNTED
from models.errors import UserError
from telemetry import names, phases, slo
from telemetry.bundle import MANIFEST, RUNNING, Bundle, list_runs
from telemetry.schema import TABLES
from telemetry.summary import PERCENTILES, Summary, summarize

WORST_SHOWN: Final = 12
_WORST_COLUMNS: Final = (
    *phases.COLUMNS, "class", "replica", "error_detail", "input_tokens", "completion_tokens_counted",
    "completion_tokens_reported",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class View:
    """One run.  splits: phases at each percentile, by measure (``e2e``, ``ttft``).  facts: name and value, as text."""

    summary: Summary
    running: bool
    writer_alive: bool
    rows_so_far: int
    bin_s: float
    outcomes: queries.Rows
    load: queries.Rows
    splits: dict[str, tuple[phases.Split, ...]]
    facts: tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Slow:
    """One of the slowest requests.  parts: seconds by phase, from the intended send to the end; they sum to total_s."""

    index: int
    label: str
    reason: str | None
    total_s: float
    first_token_s: float | None
    parts: dict[str, float]
    input_tokens: int | None
    output_tokens: int | None
    replica: str | None
    detail: str | None


def list_choices(root: Path) -> dict[str, Path]:
    """Run id to folder, newest first.  What the address may name: nothing outside the root."""
    return {path.name: path for path in list_runs(root)}


def stamp(path: Path) -> tuple[int, int]:
    """Changes whenever the facts of a bundle do: newest change and total size of its manifest and parts."""
    files = [path / MANIFEST]
    for table in TABLES:
        files += [file for file in (path / table).glob("*") if file.is_file()]
    newest = size = 0
    for file in files:
        try:
            found = file.stat()
        except FileNotFoundError:  # compacted away since it was listed; the next look sees what took its place
            continue
        newest, size = max(newest, found.st_mtime_ns), size + found.st_size
    return newest, size


def is_running(path: Path) -> bool:
    """Whether rows may still come: the bundle says so and its writer lives.  False when it cannot be read."""
    try:
        bundle = Bundle.open(path)
    except UserError:
        return False
    return bundle.status == RUNNING and bundle.writer_alive()


def load(path: Path, policy: slo.Slo | None = None, *, known: Summary | None = None) -> View:
    """Everything but the list of the slowest, under the run's own SLO or another.

    known: the summary under that SLO, where it is at hand.  UserError when the bundle cannot be read.
    """
    bundle = Bundle.open(path)
    policy = policy or slo_of(bundle)
    summary = summarize(bundle, policy) if known is None else known
    verdicts = bundle.verdicts(policy)
    requests = bundle.table("requests", list(dict.fromkeys((*phases.COLUMNS, "canary_kind"))))
    answered = phases.answered_rows(requests, verdicts)
    bin_s = queries.bin_width(queries.span_s(requests), requests.num_rows)
    return View(
        summary=summary,
        running=bundle.status == RUNNING,
        writer_alive=bundle.writer_alive(),
        rows_so_far=requests.num_rows,
        bin_s=bin_s,
        outcomes=queries.outcomes_over_time(requests, verdicts, bin_s),
        load=queries.load_over_time(requests, bin_s),
        splits={m: tuple(phases.splits(answered, PERCENTILES, m)) for m in (phases.TTFT, phases.E2E)},
        facts=_facts(bundle.manifest),
    )


def slowest(path: Path, *, by: str, label: str | None, policy: slo.Slo | None = None) -> list[Slow]:
    """The slowest requests by ``e2e`` or ``ttft``, of one label or of all but the invalid; answered ones first."""
    bundle = Bundle.open(path)
    verdicts = bundle.verdicts(policy or slo_of(bundle))
    requests = bundle.table("requests", list(_WORST_COLUMNS))
    rows = queries.worst(requests, verdicts, by=by, label=label, limit=WORST_SHOWN)
    chosen = requests.filter(pc.is_in(requests["index"], pa.array([row["index"] for row in rows], pa.int64())))
    accounts = {entry["index"]: entry for entry in phases.row_parts(chosen).to_pylist()}
    return [_slow(row, accounts.get(row["index"])) for row in rows]


def slo_of(bundle: Bundle) -> slo.Slo:
    """The SLO that the run was judged by; the default one for a bundle that keeps none."""
    kept = bundle.manifest.get("slo") or {}
    text = kept.get("text")
    if not text:
        return slo.load()
    return slo.parse(str(text), str(kept.get("file") or bundle.path / MANIFEST))


def _slow(row: Mapping[str, Any], account: Mapping[str, float] | None) -> Slow:
    if account is not None:
        parts = {name: account[f"{name}_s"] for name in phases.E2E_PARTS}
    else:
        parts = client_view(row)
    reported, counted = row["completion_tokens_reported"], row["completion_tokens_counted"]
    return Slow(
        index=row["index"],
        label=row["label"],
        reason=row["reason"],
        total_s=row["e2e_s"],
        first_token_s=row["ttft_s"],
        parts=parts,
        input_tokens=row["input_tokens"],
        output_tokens=counted if reported is None else reported,
        replica=row["replica"],
        detail=row["error_detail"],
    )


def client_view(row: Mapping[str, Any]) -> dict[str, float]:
    """What the client alone can say of a request: wait, first token, stream; or that nothing came."""
    intended, sent, first, end = row["intended_s"], row["sent_s"], row["first_token_s"], row["end_s"]
    if sent is None:  # never sent: no connection, or no time left
        return {UNACCOUNTED: end - intended}
    if first is None:
        return {names.CLIENT_WAIT: sent - intended, UNACCOUNTED: end - sent}
    wait, first_token, stream = phases.CLIENT_PARTS
    return {wait: sent - intended, first_token: first - sent, stream: end - first}


def _facts(manifest: Mapping[str, Any]) -> tuple[tuple[str, str], ...]:
    """What was run, in the order in which a reader asks for it; only what the manifest says."""
    trace = manifest.get("trace") or {}
    dropped = trace.get("rows_dropped") or {}
    left_out = ", ".join(f"{reason}: {count}" for reason, count in dropped.items() if count)
    generator = manifest.get("generator") or {}
    rows = [
        ("trace", " · ".join(str(trace[key]) for key in ("name", "source") if trace.get(key))),
        ("trace rows", f"{trace['rows_kept']} of {trace.get('rows_read')} kept" if "rows_kept" in trace else ""),
        ("left out", left_out),
        ("transforms", "; ".join(map(str, manifest.get("transforms") or ()))),
        ("target", ", ".join(map(str, manifest.get("targets") or ()))),
        ("SIMULATED", str(manifest.get(names.SIMULATED_KEY) or "")),
        ("seeds", ", ".join(f"{key} {value}" for key, value in (manifest.get("seeds") or {}).items())),
        ("sender's CPU", f"{generator['cpu_ratio']:.0%} of a core" if _is_number(generator.get("cpu_ratio")) else ""),
        ("command", str(manifest.get("command") or "")),
    ]
    return tuple((name, text) for name, text in rows if text)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
