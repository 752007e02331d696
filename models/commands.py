"""`tailspan models pull NAME` and `tailspan models list`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Fetch models and show which are there.")

Json = Annotated[bool, typer.Option("--json", help="Print JSON on stdout; progress stays on stderr.")]


@app.command("pull")
def pull_command(
    name: Annotated[str, typer.Argument(help="A known name, see `models list`.")], as_json: Json = False
) -> None:
    """Fetch a known model, check it and convert it for fast starts (resumable; does nothing if it is there)."""
    from models.pull import pull

    folder = pull(name)
    if as_json:
        typer.echo(json.dumps({"name": name, "folder": str(folder), "bytes": _bytes_in(folder)}))
    else:
        typer.echo(f"{name}: {folder} ({_bytes_in(folder) / 1e6:.0f} MB)")


@app.command("list")
def list_command(as_json: Json = False) -> None:
    """List the known models and what the cache holds, with sizes and licences."""
    rows = _rows()
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    from models.cache import cache_dir

    table = Table(title=None, box=None, pad_edge=False)
    for heading in ("NAME", "MODEL", "LICENCE", "DOWNLOAD", "IN CACHE"):
        table.add_column(heading, justify="right" if heading in ("DOWNLOAD", "IN CACHE") else "left")
    for row in rows:
        download, cached = row["download_bytes"], row["cached_bytes"]
        table.add_row(
            row["name"],
            row["title"] or "",
            row["license"] or "unknown",
            f"{download / 1e6:.0f} MB" if download else "",
            f"{cached / 1e6:.0f} MB" if cached else "no",
        )
    Console().print(table)
    typer.echo(f"cache: {cache_dir()}")


def _rows() -> list[dict[str, Any]]:
    from models.cache import cache_dir
    from models.convert import ORIGIN
    from models.file_kind import read_json
    from models.known import KNOWN

    rows: list[dict[str, Any]] = []
    for model in KNOWN.values():
        there = model.folder.is_dir()
        rows.append(
            {
                "name": model.name,
                "title": model.title,
                "license": model.license,
                "download_bytes": model.wheel_bytes,
                "cached_bytes": _bytes_in(model.folder) if there else None,
                "folder": str(model.folder) if there else None,
            }
        )
    named = {model.folder for model in KNOWN.values()}
    for folder in sorted((cache_dir() / "models").glob("[!.]*")):
        if folder in named or not (folder / ORIGIN).exists():
            continue
        origin = read_json(folder / ORIGIN)
        rows.append(
            {
                "name": origin.get("gguf"),
                "title": origin.get("name"),
                "license": origin.get("license"),
                "download_bytes": None,
                "cached_bytes": _bytes_in(folder),
                "folder": str(folder),
            }
        )
    return rows


def _bytes_in(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir() if path.is_file())
