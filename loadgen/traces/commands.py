"""`tailspan traces`: list, fetch, show and verify.

Results go to stdout (a table, or JSON with --json).  Heavy modules are imported in the commands, so that
`tailspan --help` stays fast.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from models.errors import UserError, did_you_mean
from models.wording import several

if TYPE_CHECKING:
    from loadgen.traces.find import Found
    from loadgen.traces.registry import Stream
    from loadgen.traces.statistics import Statistics
    from loadgen.traces.trace import Choices

traces = typer.Typer(no_args_is_help=True, help="Arrival traces: which are known, where they lie, what they are like.")

BARS = " ▁▂▃▄▅▆▇█"
PLOT_ROWS = 6

Format = Annotated[str | None, typer.Option("--trace-format", help="Format, where two fit or for a file of your own.")]
Columns = Annotated[
    str | None, typer.Option(metavar="OURS=THEIRS,…", help="Column map of a file of your own: time, input, output, …")
]
TimeUnit = Annotated[str | None, typer.Option(help="Unit of the time column: s, ms, us, ns, iso.")]
BlockSize = Annotated[int | None, typer.Option(help="Tokens of a prefix block, where the file leaves a doubt.")]
Failures = Annotated[str, typer.Option("--trace-failures", help="Requests that failed when recorded: drop or keep.")]
Restart = Annotated[str, typer.Option("--trace-restart", help="A clock that starts again in the file: fail or append.")]
Seed = Annotated[int, typer.Option("--trace-seed", min=0, help="Of a trace that is generated from parameters.")]


def choices_of(
    format: str | None,
    columns: str | None,
    time_unit: str | None,
    block_size: int | None,
    failures: str,
    restart: str,
    seed: int,
) -> Choices:
    """The options of reading a trace.  Raises UserError."""
    from loadgen.traces.registry import checked
    from loadgen.traces.trace import Choices

    return checked(Choices(format, column_map(columns), time_unit, block_size, failures, restart, seed))


def column_map(text: str | None) -> dict[str, str]:
    """`time=arrived,input=in` as a dict.  Raises UserError."""
    from loadgen.traces.own import MAP_REMEDY

    found: dict[str, str] = {}
    for part in filter(None, (text or "").split(",")):
        ours, equals, theirs = (piece.strip() for piece in part.partition("="))
        if not equals or not ours or not theirs or ours in found:
            raise UserError(f"{part!r} maps no column", where="--columns", remedy=MAP_REMEDY)
        found[ours] = theirs
    return found


@traces.command("list")
def list_traces(as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False) -> None:
    """The traces known by name, and whether they are on this machine."""
    from loadgen.traces.catalogue import KNOWN
    from loadgen.traces.find import on_disk

    rows: list[dict[str, Any]] = []
    for known in KNOWN.values():
        found, _ = on_disk(known)
        row = {"name": known.name, "rows": known.rows, "synthetic": known.synthetic, "licence": known.licence}
        rows.append({**row, "about": known.about, "path": str(found.path) if found else None})
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    for row in rows:
        count = "?" if row["rows"] is None else f"{row['rows']:,}"
        print(f"{row['name']:<22}{count:>11} rows  {row['licence']}\n    {row['about']}")
        print(f"    {row['path'] or 'not on this machine yet: tailspan traces fetch ' + str(row['name'])}")


@traces.command("fetch")
def fetch_trace(name: Annotated[str, typer.Argument(help="A known trace.")]) -> None:
    """Download a known trace into the cache: pinned sha256, resumed where it broke off."""
    from rich.console import Console
    from rich.progress import Progress

    from loadgen.traces.catalogue import KNOWN
    from loadgen.traces.fetch import FetchError, fetch
    from loadgen.traces.find import cache_folder

    known = KNOWN.get(name)
    if known is None or known.url is None:
        remote = ", ".join(entry.name for entry in KNOWN.values() if entry.url)
        raise UserError(
            f"{name!r} is not a trace that can be fetched",
            where="traces fetch",
            remedy=did_you_mean(name, KNOWN) + f"one of: {remote}",
        )
    print(f"{known.name}: {known.about}\nlicence {known.licence}; {known.citation}\nfrom {known.url}")
    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(known.file, total=known.bytes)
        try:
            path = fetch(known, cache_folder(), lambda done, total: bar.update(task, completed=done, total=total))
        except FetchError as error:
            raise UserError(
                f"{name} could not be fetched: {error}",
                where="traces fetch",
                remedy=f"try again, or put {known.file} into a folder named by TAILSPAN_TRACES",
            ) from None
    print(f"{path} (sha256 {known.sha256})")


@traces.command("show")
def show_trace(
    name: Annotated[str, typer.Argument(help="A known trace or a file.")],
    trace_format: Format = None,
    columns: Columns = None,
    time_unit: TimeUnit = None,
    block_size: BlockSize = None,
    failures: Failures = "drop",
    restart: Restart = "fail",
    seed: Seed = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Counts, rate, burstiness and lengths of a trace."""
    choices = choices_of(trace_format, columns, time_unit, block_size, failures, restart, seed)
    found, source, figures = examined(name, choices, None, "traces show")
    if as_json:
        print(json.dumps({**facts(found, source), **figures.to_dict()}, indent=2))
    else:
        print_trace(found, source, figures)


@traces.command("verify")
def verify_trace(
    name: Annotated[str, typer.Argument(help="A known trace or a file.")],
    trace_format: Format = None,
    columns: Columns = None,
    time_unit: TimeUnit = None,
    block_size: BlockSize = None,
    failures: Failures = "drop",
    restart: Restart = "fail",
    seed: Seed = 0,
    max_context: Annotated[int | None, typer.Option(min=1, help="Count the rows that exceed this context.")] = None,
    tokenizer: Annotated[
        list[str] | None, typer.Option(metavar="MODEL", help="Count the texts with this model's tokenizer; give two.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> int:
    """Read every row and say what a replay of this trace can and cannot show.  Exit code 4: it is unusable."""
    from loadgen.traces.texts import count_texts

    choices = choices_of(trace_format, columns, time_unit, block_size, failures, restart, seed)
    if tokenizer and "text" not in choices.columns:
        raise UserError(
            "no text column is named", where="--tokenizer", remedy="map it: --columns time=…,input=…,output=…,text=…"
        )
    found, source, figures = examined(name, choices, max_context, "traces verify")
    counted = count_texts(found.path, choices, tokenizer) if tokenizer else []
    if as_json:
        texts = [one.to_dict() for one in counted]
        print(json.dumps({**facts(found, source), **figures.to_dict(), "tokenizers": texts}, indent=2))
        return 0
    print_trace(found, source, figures)
    for line in findings(source, figures, max_context):
        print(line)
    for one in counted:
        print(one.sentence())
    print()
    print("\n".join(plot(figures.curve, figures.span_s)))
    return 0


def examined(name: str, choices: Choices, max_context: int | None, where: str) -> tuple[Found, Stream, Statistics]:
    """Read a trace through once.  where: the command, for errors.  Raises UserError."""
    from loadgen.traces import registry
    from loadgen.traces.find import locate
    from loadgen.traces.statistics import Tally

    found = locate(name, where=where)
    source = registry.stream(found.path, choices)
    tally = Tally(max_context)
    for batch in source.batches:
        tally.add(batch)
    return found, source, tally.result()


def facts(found: Found, source: Stream) -> dict[str, Any]:
    """What was read, for JSON."""
    from loadgen.traces.catalogue import KNOWN
    from loadgen.traces.registry import sha256_of

    rows, known = source.rows, KNOWN.get(found.name)
    return {
        "name": found.name,
        "format": source.reader.format,
        "path": str(found.path),
        "sha256": sha256_of(found.path),
        "source": found.source,
        "synthetic": bool(known and known.synthetic),
        "notes": rows.notes,
        "rows_read": rows.read,
        "rows_kept": rows.kept,
        "rows_dropped": rows.dropped,
        "first_drop": rows.first_drop,
        "inversions": source.order.inversions,
        "block_size": rows.block_size or None,
    }


def findings(source: Stream, figures: Statistics, max_context: int | None) -> list[str]:
    """What to know before replaying it, each with its number."""
    found = []
    if figures.tick_s is not None:
        share = figures.equal_stamps / figures.arrivals
        found.append(
            f"quantised clock: {share:.1%} of the arrivals share their stamp with the one before, the clock ticks "
            f"every {figures.tick_s:g} s; replay it with --dequantise {figures.tick_s:g}"
        )
    if figures.duplicates:
        found.append(f"{several(figures.duplicates, 'row has', 'rows have')} the stamp and the lengths of another")
    if max_context is not None:
        found.append(f"{figures.over_limit:,} of {figures.arrivals:,} rows exceed a context of {max_context:,} tokens")
    if source.order.inversions:
        found.append(f"{several(source.order.inversions, 'row')} stood before an earlier one; sorted")
    if figures.failures:
        found.append(
            f"{several(figures.failures, 'row is of a request', 'rows are of requests')} that failed when recorded"
        )
    return found or ["nothing unusual was found"]


def print_trace(found: Found, source: Stream, figures: Statistics) -> None:
    """The figures as a table."""
    from rich.console import Console
    from rich.table import Table

    def number(value: float | None, unit: str = "") -> str:
        return "not defined" if value is None else f"{value:,.4g}{unit}"

    console = Console()
    if not console.is_terminal:
        console = Console(width=max(console.width, 110))  # rich would cut tables at 80 in a pipe
    console.print(found.sentence, highlight=False, markup=False, soft_wrap=True)
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_row("format", source.reader.format)
    table.add_row("rows", account(source))
    for note in source.rows.notes:
        table.add_row("note", note)
    table.add_row("span", number(figures.span_s, " s"))
    peaks = f", at most {figures.peak_1s} in one second and {figures.peak_60s} in a minute"
    table.add_row("mean rate", number(figures.rate_per_s, " /s") + peaks)
    table.add_row("CV of gaps", number(figures.gap_cv) + "  (Poisson 1)")
    dispersion = "   ".join(f"{width} s: {number(value)}" for width, value in figures.iod.items())
    table.add_row("IoD", dispersion + "  (Poisson 1)")
    table.add_row("longest gap", number(figures.longest_gap_s, " s"))
    table.add_row("equal stamps", f"{figures.equal_stamps:,} ({figures.equal_stamps / figures.arrivals:.1%})")
    for label, mean, quantiles in (
        ("input tokens", figures.input_mean, figures.input_tokens),
        ("output tokens", figures.output_mean, figures.output_tokens),
    ):
        levels = "   ".join(f"{level} {value:,}" for level, value in quantiles.items())
        table.add_row(label, f"mean {mean:,.1f}   {levels}")
    if figures.sessions:
        table.add_row("sessions", f"{figures.sessions:,}")
    if figures.prefix_seen is not None:
        size = f"blocks of {source.rows.block_size} tokens" if source.rows.block_size else "components"
        bound = f"{figures.prefix_seen:.1%} seen before, {figures.prefix_hit_bound:.1%} in prefixes of two and more"
        table.add_row("prefixes", f"{size}: {bound}")
    console.print(table)


def account(source: Stream) -> str:
    """Rows read, kept, dropped by reason with the first place of each."""
    rows = source.rows
    text = f"{rows.read:,} read, {rows.kept:,} kept"
    for reason, count in sorted(rows.dropped.items()):
        text += f", {count:,} dropped ({reason}; first: {rows.first_drop[reason]})"
    return text


def plot(curve: tuple[float, ...], span_s: float) -> list[str]:
    """Arrivals per second over the span, as bars of text."""
    top = max(curve, default=0.0)
    if top <= 0:
        return []
    lines = []
    for row in range(PLOT_ROWS, 0, -1):
        heights = (rate / top * PLOT_ROWS - (row - 1) for rate in curve)
        bars = "".join(BARS[max(0, min(8, round(8 * height)))] for height in heights)
        label = f"{top * row / PLOT_ROWS:8.3g}/s " if row in (PLOT_ROWS, 1) else " " * 11
        lines.append(label + bars)
    return [*lines, f"{'0 s':>14}{f'{span_s:,.0f} s':>{max(4, len(curve) - 3)}}"]
