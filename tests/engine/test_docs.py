"""Every name that docs/engine.md and docs/virtual-time.md give exists where they say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = re.compile(r"`([\w/]+\.py)::([\w.]+)`")


def names_in(path: Path) -> set[str]:
    """Functions, classes, their methods, and constants of a module."""
    found: set[str] = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            inner = (one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef))
            found.update(f"{node.name}.{one.name}" for one in inner)
        if isinstance(node, ast.Assign | ast.AnnAssign):
            for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
                parts = target.elts if isinstance(target, ast.Tuple) else [target]
                found.update(part.id for part in parts if isinstance(part, ast.Name))
    return found


@pytest.mark.parametrize(("page", "least"), [("engine.md", 60), ("virtual-time.md", 8)])
def test_every_name_in_the_page_exists(page: str, least: int) -> None:
    named = NAME.findall((ROOT / "docs" / page).read_text(encoding="utf-8"))
    assert len(named) >= least
    missing = [f"{file}::{name}" for file, name in named if name not in names_in(ROOT / file)]
    assert missing == []
