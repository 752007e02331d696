"""Split what pip-compile resolved into the two lock files: all with hashes, and torch without.

Usage: python scripts/split_lock.py RESOLVED
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

HEAD = """\
# Exact versions and hashes of everything that tailspan and its tests install, except torch (requirements-torch.lock).
# Made by `make lock` (pip-compile with hashes); do not edit by hand.
"""
TORCH_HEAD = """\
# torch stands apart and has no hash: its CPU and CUDA builds differ under one version.
# A machine without a GPU saves some gigabytes by PIP_EXTRA_INDEX_URL pointing to an index of CPU builds.
"""
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;\\]+)[^\n]*\n(?:[ \t]+[^\n]*\n)*", re.MULTILINE)


def main(resolved: Path) -> None:
    """Write requirements.lock and requirements-torch.lock beside pyproject.toml."""
    root = Path(__file__).parent.parent
    kept, torch = [], None
    for entry in ENTRY.finditer(resolved.read_text()):
        if entry["name"] == "torch":
            torch = entry["version"].split("+")[0]
        else:
            kept.append(entry.group(0))
    if torch is None:
        sys.exit(f"{resolved}: no torch in it")
    (root / "requirements.lock").write_text(HEAD + "".join(kept))
    (root / "requirements-torch.lock").write_text(TORCH_HEAD + f"torch=={torch}\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
