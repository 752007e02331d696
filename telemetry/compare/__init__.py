"""Did it really move?  Two sides of paired replays, figure by figure, with intervals that hold for all of them at once.

    compare(a, b)             two lists of bundles: replays of the same load, a pair a repeat          (exact test)
    compare_facts(a, b)       the same on arrays in memory (``Facts``), for who has no bundle
    compare_windows(a, b)     two windows of one or two bundles, without replay                        (approximate)
    history(bundles)          where the level of a figure changed in a row of runs of one load
    resolve_sides(a, b)       command-line references to the two lists

Must always hold: what the data cannot tell is refused with what would be needed, never guessed; a request without an
answer is ranked as infinitely slow; both sides are asked in the same way, so that exchanging them changes signs alone.
"""

from telemetry.compare.change_points import ChangePoint, history
from telemetry.compare.facts import Facts
from telemetry.compare.figures import FIGURES, Figure
from telemetry.compare.refusals import Refusal
from telemetry.compare.replays import compare, compare_facts
from telemetry.compare.result import Comparison, Effect
from telemetry.compare.sides import resolve_sides
from telemetry.compare.windows import Window, compare_windows

__all__ = [
    "FIGURES", "ChangePoint", "Comparison", "Effect", "Facts", "Figure", "Refusal", "Window", "compare",
    "compare_facts", "compare_windows", "history", "resolve_sides",
]  # fmt: skip
