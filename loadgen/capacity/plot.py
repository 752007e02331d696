"""A scatter plot of a few labelled points in plain characters."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

WIDTH: Final = 60
HEIGHT: Final = 12


def scatter(points: Sequence[tuple[float, float, str]], x_name: str, y_name: str) -> str:
    """(x, y, label) on linear axes from zero; empty text without a point.  A label stands right of its point."""
    if not points:
        return ""
    right, top = max(x for x, _, _ in points) or 1.0, max(y for _, y, _ in points) or 1.0
    rows = [[" "] * (WIDTH + 12) for _ in range(HEIGHT + 1)]
    for x, y, label in points:
        row, column = HEIGHT - round(y / top * HEIGHT), round(x / right * WIDTH)
        rows[row][column] = "o"
        for at, letter in enumerate(label[:9], start=column + 2):
            if rows[row][at] == " ":
                rows[row][at] = letter
    gutter = max(len(f"{top:.3g}"), 1)
    lines = [y_name]
    for number, row_ in enumerate(rows):
        mark = f"{top:.3g}" if number == 0 else "0" if number == HEIGHT else ""
        lines.append(f"{mark:>{gutter}} |" + "".join(row_).rstrip())
    lines.append(" " * gutter + " +" + "-" * WIDTH)
    lines.append(" " * (gutter + 2) + f"0{f'{right:.4g}':>{WIDTH}}")
    lines.append(" " * (gutter + 2) + x_name)
    return "\n".join(lines)
