"""``tailspan grafana build | push``: dashboards, data sources and rules as files, or into a running Grafana.

Owns the options and the output; the work is in ``files`` and ``push``.  Heavy imports stay inside the functions.
"""

from __future__ import annotations

import json
import os
import time
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from models.addresses import http_url
from models.errors import UserError

if TYPE_CHECKING:
    from dashboards.grafana.push import Mark

app = typer.Typer(help="Dashboards and rules for a Prometheus and a Grafana of your own.", no_args_is_help=True)

Prometheus = Annotated[str, typer.Option(metavar="URL", help="Prometheus, as Grafana reaches it.")]
Tempo = Annotated[str, typer.Option(metavar="URL", help="Tempo, as Grafana reaches it; empty: traces are not linked.")]
SLO_HELP: Final = "SLO file or preset whose rules are written."


@app.command("build")
def build_command(
    out: Annotated[Path, typer.Option("-o", "--out", help="Folder to write to")] = Path("grafana"),
    prometheus: Prometheus = "http://127.0.0.1:9090",
    tempo: Tempo = "http://127.0.0.1:3200",
    slo: Annotated[str, typer.Option(help=SLO_HELP)] = "demo",
) -> None:
    """Write dashboards, their provisioning and Prometheus rules as files; talks to nobody."""
    import yaml

    from dashboards import rules
    from dashboards.grafana import files

    checked_sources(prometheus, tempo)
    from telemetry.slo import load

    provider = {"name": "tailspan", "folder": files.FOLDER_TITLE, "folderUid": files.FOLDER_UID, "type": "file"}
    provider_file = {
        "apiVersion": 1,
        "providers": [{**provider, "options": {"path": str((out / "dashboards").resolve())}}],
    }
    sources = {"apiVersion": 1, "datasources": files.datasources(prometheus, tempo or None)}
    texts = {f"dashboards/{one['uid']}.json": _pretty(one) for one in files.dashboards()}
    texts["provisioning/dashboards/tailspan.yaml"] = yaml.safe_dump(provider_file, sort_keys=False)
    texts["provisioning/datasources/tailspan.yaml"] = yaml.safe_dump(sources, sort_keys=False)
    texts |= {f"rules/{name}": text for name, text in rules.made(load(slo)).items()}
    try:
        for name, text in texts.items():
            path = out / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            typer.echo(str(path))
    except OSError as error:
        remedy = "give a folder you may write to: -o FOLDER"
        raise UserError(f"cannot be written: {error.strerror}", where=str(out), remedy=remedy) from error


@app.command("push")
def push_command(
    url: Annotated[str, typer.Option(help="Base URL of Grafana, with its path.")] = "http://127.0.0.1:3000",
    token_env: Annotated[
        str, typer.Option(metavar="VARIABLE", help="Environment variable with a service account's token.")
    ] = "GRAFANA_TOKEN",
    prometheus: Prometheus = "http://127.0.0.1:9090",
    tempo: Tempo = "",
    no_datasources: Annotated[
        bool, typer.Option("--no-datasources", help="Leave data sources as they are (needs no Admin).")
    ] = False,
    run: Annotated[
        list[str] | None, typer.Option(help="Mark this run as a region: path, id, start of an id, or latest.")
    ] = None,
    root: Annotated[Path | None, typer.Option("--root", help="Folder of run bundles.")] = None,
    deploy: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Mark a deploy.")] = None,
    fault: Annotated[list[str] | None, typer.Option(metavar="TEXT", help="Mark a fault.")] = None,
    at: Annotated[
        str | None, typer.Option(metavar="TIME", help="When that was, e.g. 2026-01-31T12:00:00+00:00. [default: now]")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON")] = False,
) -> None:
    """Bring a running Grafana to what is checked in; a second push changes nothing."""
    from dashboards.grafana import files
    from dashboards.grafana.push import Grafana, checked_grafana, push

    checked_grafana(url)
    checked_sources(prometheus, tempo)
    token = os.environ.get(token_env, "").strip()
    if not token:
        remedy = f"export {token_env}=… with a service account's token (Administration > Service accounts)"
        raise UserError("holds no token", where=f"${token_env}", remedy=remedy)
    marks = [run_mark(name, root) for name in run or ()]
    moment = moment_ms(at)
    marks += [event_mark("deploy", text, moment) for text in deploy or ()]
    marks += [event_mark("fault", text, moment) for text in fault or ()]
    sources = [] if no_datasources else files.datasources(prometheus, tempo or None)
    say = (lambda _: None) if as_json else typer.echo
    pushed = push(Grafana(url, token), files.dashboards(), sources, marks, say)
    if as_json:
        typer.echo(json.dumps({"version": pushed.version, "changed": pushed.changed, "done": pushed.done}, indent=2))
    else:
        typer.echo(f"{pushed.changed} of {len(pushed.done)} changed")


def checked_sources(prometheus: str, tempo: str) -> None:
    """Raises UserError for the address of a data source that is none; Tempo may be left out."""
    http_url(prometheus, "--prometheus", remedy="write it as Grafana reaches it, such as http://127.0.0.1:9090")
    if tempo:
        http_url(tempo, "--tempo", remedy="write it as Grafana reaches it, such as http://127.0.0.1:3200; '': none")


def run_mark(reference: str, root: Path | None) -> Mark:
    """The region of a run on the time axis.  Raises UserError."""
    from dashboards.grafana.push import Mark
    from telemetry.bundle import Bundle, resolve

    bundle = Bundle.open(resolve(reference, root))
    zero = (bundle.manifest.get("clock") or {}).get("zero_unix_ns")
    if zero is None:
        remedy = "mark one that sent something"
        raise UserError(f"run {bundle.run_id} never started", where=str(bundle.path), remedy=remedy)
    start = int(zero) // 1_000_000
    ends = bundle.table("requests", ["end_s"]).column("end_s").to_pylist()
    last = max((end for end in ends if end is not None), default=float(bundle.manifest.get("length_s") or 0.0))
    verdict = (bundle.manifest.get("validity") or {}).get("verdict", bundle.status)
    slo = (bundle.manifest.get("slo") or {}).get("name", "")
    text = f"run {bundle.run_id}: {verdict}, SLO {slo}"
    return Mark(f"run:{bundle.run_id}", "run", text, start, start + round(last * 1000))


def event_mark(kind: str, text: str, moment: int | None) -> Mark:
    """A deploy or a fault.  Its key is its text, and its time where one was given: without one it is marked once."""
    from dashboards.grafana.push import Mark
    from telemetry.prometheus_rules import slug

    key = f"{kind}:{slug(text)[:60]}" + ("" if moment is None else f":{moment}")
    now = time.time_ns() // 1_000_000 if moment is None else moment
    return Mark(key, kind, text, now, now)


def moment_ms(text: str | None) -> int | None:
    """Milliseconds of a time in ISO 8601; without a zone it is local.  Raises UserError."""
    if text is None:
        return None
    try:
        return round(datetime.fromisoformat(text).timestamp() * 1000)
    except ValueError as error:
        remedy = "write for example 2026-01-31T12:00:00+00:00"
        raise UserError(f"{text!r} is not a time", where="--at", remedy=remedy) from error


def _pretty(plain: dict[str, Any]) -> str:
    return json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
