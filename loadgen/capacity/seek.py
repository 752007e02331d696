"""One search from its first rate to its answer: steps, runs, and the state after each."""

from __future__ import annotations

from rich.console import Console

from loadgen.capacity import search
from loadgen.capacity.group import Group
from loadgen.capacity.point import Point
from loadgen.capacity.probe import Probe
from loadgen.capacity.search import Bounds
from loadgen.progress import say
from models.wording import several
from telemetry.objective import BROKEN, HELD


def seek(probe: Probe, group: Group, bounds: Bounds, console: Console) -> None:
    """Run until there is no step left; points go into the group and onto the disk as they come."""
    if group.points:
        say(console, "search", f"going on after {several(len(group.points), 'run')} in {group.path}")
    while (step := search.next_step(group.points, bounds)) is not None:
        number = len(group.points)
        what = f"run {number + 1} of at most {bounds.most_runs}: {step.rate:.4g} requests/s"
        if step.after is not None:
            what += f", straight after an overload at {step.after:.4g}"
        say(console, "search", what)
        for point in probe.run(step, number):
            group.points.append(point)
            group.save()
            say(console, "", sentence(point))
        belief = search.believe(group.points)
        if belief is not None:
            say(
                console,
                "",
                f"so far {belief.rate:.4g}/s, 90 % in {belief.low:.4g} to {belief.high:.4g} (± {belief.width:.1%})",
            )


def sentence(point: Point) -> str:
    """One line on a point."""
    text = f"{point.rate:.4g}/s {point.verdict}"
    if point.verdict in (HELD, BROKEN):
        good = "" if point.good_share is None else f", {point.good_share:.1%} good of {point.requests}"
        text += f" (another run would hold it with {point.chance:.0%}{good})"
    if point.verdict == BROKEN and point.breaks:
        text += f": {point.breaks}"
    return text + (f"; {point.why}" if point.why else "")
