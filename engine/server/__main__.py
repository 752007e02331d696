"""``python -m engine.server``: the serve command alone, without the rest of the command line."""

from __future__ import annotations

import sys

import typer

from engine.commands import serve_command
from models.errors import UserError
from telemetry.names import EXIT_USAGE


def main() -> None:
    """Run ``serve``; an error that a user is meant to read goes to stderr without a traceback."""
    try:
        typer.run(serve_command)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
