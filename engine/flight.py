"""A step on its way: planned and started, its tokens not read yet.

With overlap the engine plans and starts step n + 1 while the device computes step n:

    host      plan 1, start 1 | plan 2, start 2 | read 1, commit 1 | plan 3, start 3 | read 2, commit 2 | ...
    device                   [ 1 ...............][ 2 .......................][ 3 ...

The tokens that step n samples stay on the device, where step n + 1 takes its input from them; the host reads them when
step n + 1 has been started.  What must hold:

* a step is started ahead only when every row that the one before it samples is drawn on the device (``feeds``), and
  when nobody would have to be preempted for it (``Plan.short``);
* steps are read in the order in which they were started, so marks, log and pages are written in the order of time;
* who turns out to be over when step n is read (a stop, an abort, a failure) may have a row in step n + 1.  That row is
  void: no token, no count, no page in the prefix cache comes of it; the log has it as padding.  Its pages may be given
  away at once, since the device writes what step n + 1 writes before what any later step does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from engine.scheduler import Plan, Slice

Drawn = tuple[list[int], list[bool]]  # the token of every slice that samples, and whether its logits were finite
Read = Callable[[], Drawn]  # waits for the step; raises what went wrong with it


class DeviceFull(Exception):
    """The device has no memory for a step, not even in parts; its requests fail with 503 and ``kv_oom``."""


@dataclass(slots=True)
class Flight:
    """columns: what the runner adds to the step log.  start_ns, gap_ns: once the step is the first in line."""

    plan: Plan
    read: Read = lambda: ([], [])
    feeds: bool = False
    columns: dict[str, int] = field(default_factory=dict)
    start_ns: int = 0
    gap_ns: int = 0

    @property
    def live(self) -> list[Slice]:
        """Slices whose requests are not over."""
        return [piece for piece in self.plan.slices if piece.request.state != "finished"]
