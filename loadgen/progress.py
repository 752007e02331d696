"""The progress of a run on the terminal: one line that a person can read at a glance, nothing that costs the run.

On a terminal the line is redrawn each second; otherwise (a log, CI) a line is printed every PLAIN_S.
The numbers are the senders' own, summed over workers; lag is the worst worker's.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

from rich.console import Console
from rich.live import Live
from rich.text import Text

from telemetry.names import GOOD, LABELS

PLAIN_S: Final = 10.0


@dataclass(slots=True)
class Totals:
    """The run so far, over all workers."""

    t_s: float = 0.0
    due: int = 0
    sent: int = 0
    done: int = 0
    inflight: int = 0
    retries: int = 0
    answered: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    lag_p99_s: float = 0.0
    loop_lag_p99_s: float = 0.0
    cpu_ratio: float = 0.0

    @classmethod
    def of(cls, reports: list[dict[str, Any]]) -> Totals:
        """Sum the latest progress event of each worker."""
        total = cls()
        for report in reports:
            total.t_s = max(total.t_s, report.get("t_s") or 0.0)
            total.due += report["due"]
            total.sent += report["sent"]
            total.done += report["done"]
            total.inflight += report["inflight"]
            total.retries += report.get("retries", 0)
            total.answered += report["answered"]
            total.errors.update(report["errors"])
            total.lag_p99_s = max(total.lag_p99_s, report.get("lag_p99_s") or 0.0)
            total.loop_lag_p99_s = max(total.loop_lag_p99_s, report.get("loop_lag_p99_s") or 0.0)
            total.cpu_ratio = max(total.cpu_ratio, report.get("cpu_ratio") or 0.0)
        return total

    def when_ended(self, ended: int) -> Totals:
        """The totals of the moment at which ``ended`` requests had ended.

        The rows of the parts are read after the reports were made, so that more may have ended than a report knows:
        those were in flight at that time, or were sent since.  Beside counts of rows, these are of the same moment.
        """
        newer = max(0, ended - self.done)
        sent = self.sent + max(0, newer - self.inflight)
        return replace(
            self,
            due=max(self.due, sent),
            sent=sent,
            done=self.done + newer,
            inflight=max(0, self.inflight - newer),
        )


class Progress:
    """Draws until close().  scheduled: requests in all; length_s: of the schedule."""

    def __init__(self, console: Console, scheduled: int, length_s: float) -> None:
        self._console = console
        self._scheduled = scheduled
        self._length_s = length_s
        self._printed = time.monotonic()
        self._live = Live(Text("starting"), console=console, auto_refresh=False, transient=True)
        self._drawing = console.is_terminal
        if self._drawing:
            self._live.start()

    def show(self, totals: Totals, labels: Mapping[str, int], note: str = "") -> None:
        """Draw these totals; labels: requests by verdict so far, which may have been counted later."""
        line = self.line(totals.when_ended(sum(labels.values())), labels, note)
        if self._drawing:
            self._live.update(Text(line, no_wrap=True, overflow="ellipsis"), refresh=True)
        elif time.monotonic() - self._printed >= PLAIN_S:
            self._printed = time.monotonic()
            self.say(line)

    def say(self, line: str) -> None:
        """Print a line that stays."""
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)

    def line(self, totals: Totals, labels: Mapping[str, int], note: str = "") -> str:
        """Sent / due, in flight, lag, outcomes, rate, time left."""
        rate = totals.sent / totals.t_s if totals.t_s > 0 else 0.0
        left = max(0.0, self._length_s - totals.t_s)
        errors = " ".join(f"{reason} {count}" for reason, count in totals.errors.most_common(3))
        shown = [label for label in LABELS if labels.get(label) or label == GOOD]
        counts = "  ".join(f"{label} {labels.get(label, 0):,}" for label in shown)
        parts = [
            f"{max(0.0, totals.t_s):5.0f} s",
            f"sent {totals.sent:,}/{totals.due:,} of {self._scheduled:,}",
            f"in flight {totals.inflight:,}",
            f"lag p99 {totals.lag_p99_s * 1e3:.1f} ms",
            counts + (f" ({errors})" if errors else ""),
            f"retries {totals.retries:,}" if totals.retries else "",
            f"{rate:.2f}/s",
            f"{left:.0f} s left" if left > 0 else "waiting for the last answers",
            note,
        ]
        return "  ".join(filter(None, parts))

    def close(self) -> None:
        """Take the live line away."""
        if self._drawing:
            self._live.stop()
            self._drawing = False


def say(console: Console, label: str, text: str) -> None:
    """One labelled line."""
    console.print(f"{label:<8}{text}", highlight=False, markup=False, soft_wrap=True)
