"""Before a run with canaries among its load: the file is read, the targets are asked for a salt, the plan is told.

Must always hold: what the plan holds is all that a worker needs, on this machine or another; a target that does not
answer, or takes no cache salt, is asked without one.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from loadgen.canaries.client import Client, Refused
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.mixed import Mixed
from loadgen.canaries.record import Say
from loadgen.plan import Plan
from models.errors import UserError


def planned(file: str, share: float, plan: Plan, say: Say) -> tuple[CanaryFile, Plan]:
    """The recorded canaries, and the plan that asks them.  Raises UserError: the file, the share."""
    recorded = CanaryFile.read(Path(file))
    mixed = Mixed.of_file(
        recorded, file, share, salted=False
    )  # a share out of range is refused before anything is sent
    if all(takes_salt(client) for client in clients_of(plan)):
        mixed = replace(mixed, salted=True)
    else:
        say("note: a target takes no cache_salt: what is a cache hit is known by its own account alone")
    return recorded, replace(plan, canaries=mixed.to_dict())


def clients_of(plan: Plan) -> list[Client]:
    """One for each target."""
    settings = plan.settings()
    return [Client(target, plan.served_model, settings.headers, way=settings.way) for target in plan.targets]


def takes_salt(client: Client) -> bool:
    """Does the target answer a request with a cache salt?"""
    try:
        client.chat("Hello", 1, cache_salt="tailspan")
    except (Refused, UserError):
        return False
    return True
