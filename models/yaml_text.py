"""Text that should be YAML: read by a safe loader, or one line that says where it is not.

Must always hold: what is wrong is a UserError with file and line; no object is ever made but plain ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import yaml

from models.errors import UserError


@contextmanager
def yaml_errors(where: str) -> Iterator[None]:
    """What the YAML library raises inside becomes a UserError of one line at ``where``, with the line of the text."""
    try:
        yield
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise UserError(
            f"not YAML: {problem.problem}", where=f"{where}:{line}", remedy="check the indentation there"
        ) from problem
    except (yaml.YAMLError, RecursionError) as problem:
        said = " ".join(str(problem).split())
        raise UserError(f"not YAML: {said}", where=where, remedy="save it as plain UTF-8 text") from problem


def compose(text: str, where: str) -> yaml.Node | None:
    """The tree of nodes of a text, None where it is empty.  Raises UserError."""
    with yaml_errors(where):
        root: yaml.Node | None = yaml.compose(text, Loader=yaml.SafeLoader)
        return root
