"""How large the engine is: lines of code by group, without blank lines, comments and docstrings.

Usage: python scripts/count_lines.py [FOLDER]

A line counts when it holds a token of code.  Lines in brackets stand as the formatter breaks them (120 columns), so a
table or a signature written one entry a line counts as many.  C sources: without blank lines and comments.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path
from typing import Final

#: What a file belongs to: the first group whose pattern its path (below the folder) matches.
GROUPS: Final = (
    ("server", r"server/"),
    ("kernels (Triton)", r"kernels/"),
    ("native (C) forward", r"native/"),
    ("GPU path", r"(device_\w+|triton_\w+|runner_triton|graphs|parallel|kernel_table|lookahead|step_profile)\.py"),
    ("simulation and virtual time", r"(simulated|step_fit|step_model|virtual|tally|replay|cohort|leaping|deferred"
                                    r"|counting_pool)\.py"),
    ("faults for testing the tester", r"faults\.py"),
    ("engine proper", r""),
)  # fmt: skip
_NO_CODE: Final = frozenset(
    {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
)


def python_lines(source: str) -> int:
    """Lines with code in them."""
    docs: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                docs.update(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _NO_CODE:
            found.update(range(token.start[0], token.end[0] + 1))
    return len(found - docs)


def c_lines(source: str) -> int:
    """Lines with code in them."""
    bare = re.sub(r"/\*.*?\*/", lambda found: "\n" * found.group().count("\n"), source, flags=re.DOTALL)
    return sum(1 for line in re.sub(r"//[^\n]*", "", bare).splitlines() if line.strip())


def main(folder: Path) -> int:
    groups: dict[str, list[int]] = {}
    for path in sorted([*folder.rglob("*.py"), *folder.rglob("*.c"), *folder.rglob("*.h")]):
        name = path.relative_to(folder).as_posix()
        group = next(title for title, pattern in GROUPS if re.match(pattern, name))
        source = path.read_text(encoding="utf-8")
        lines = python_lines(source) if path.suffix == ".py" else c_lines(source)
        row = groups.setdefault(group, [0, 0, 0])
        row[0] += 1
        row[1] += lines
        row[2] += source.count("\n")
    print("| group | files | lines of code | lines in all |\n|---|---|---|---|")
    for title, _pattern in reversed(GROUPS):
        if title in groups:
            print(f"| {title} | " + " | ".join(f"{value:,}" for value in groups[title]) + " |")
    print("| together | " + " | ".join(f"{sum(column):,}" for column in zip(*groups.values(), strict=True)) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "engine")))
