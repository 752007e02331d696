"""A command that takes no number that is none: NaN passes every comparison with a bound, infinity most of them."""

from __future__ import annotations

import math
from typing import Any

import typer
from typer.core import TyperCommand

from models.errors import UserError


class StrictCommand(TyperCommand):
    """Refuses NaN and infinity as the value of any option.  Raises UserError that names it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """As usual, then a look at what was parsed."""
        rest = super().parse_args(ctx, args)
        for one in self.params:
            found = ctx.params.get(one.name)
            for number in found if isinstance(found, list | tuple) else (found,):
                if isinstance(number, float) and not math.isfinite(number):
                    raise UserError(f"{number} cannot be used", where=one.opts[-1], remedy="give a finite number")
        return rest


def made_strict(app: typer.Typer) -> None:
    """Make every command of an app, and of the apps in it, a StrictCommand."""
    for command in app.registered_commands:
        command.cls = StrictCommand
    for group in app.registered_groups:
        if group.typer_instance is not None:
            made_strict(group.typer_instance)
