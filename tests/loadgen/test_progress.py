"""The line of a running load: its counts are of one moment, whatever came first."""

from __future__ import annotations

import io
import re

from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from loadgen.progress import Progress, Totals


def _line(totals: Totals, labels: dict[str, int]) -> str:
    """What is drawn on a terminal."""
    out = io.StringIO()
    progress = Progress(Console(file=out, force_terminal=True, width=200), 1000, 60.0)
    progress.show(totals, labels)
    progress.close()
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue())


def test_rows_that_were_read_after_the_reports_never_exceed_what_was_sent() -> None:
    totals = Totals(t_s=2.0, due=10, sent=10, done=4, inflight=6, answered=4)
    assert "sent 12/12 of 1,000  in flight 0" in _line(totals, {"good": 11, "late": 1})
    assert "sent 10/10 of 1,000  in flight 3" in _line(totals, {"good": 7})
    assert "sent 10/10 of 1,000  in flight 6" in _line(totals, {"good": 3}), "reports may also be the newer ones"


@given(
    st.lists(st.tuples(*[st.integers(0, 50)] * 3), min_size=1, max_size=4),
    st.integers(0, 500),
)
def test_the_counts_are_those_of_one_moment(workers: list[tuple[int, int, int]], ended: int) -> None:
    reports = [
        {
            "due": done + inflight + behind, "sent": done + inflight, "done": done, "inflight": inflight,
            "answered": done, "errors": {},
        }
        for done, inflight, behind in workers
    ]  # fmt: skip
    before = Totals.of(reports)
    after = before.when_ended(ended)
    assert after.due >= after.sent == after.done + after.inflight and after.inflight >= 0
    assert after.done == max(before.done, ended) and after.sent >= before.sent and after.due >= before.due
    assert after.when_ended(ended) == after
