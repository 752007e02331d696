"""What a container image needs of requirements.lock, and what of an installed environment nothing there runs.

Usage: python scripts/image_requirements.py cpu|gpu          prints the entries of the lock, with their hashes
       python scripts/image_requirements.py --slim FOLDER    removes from a virtual environment what nothing runs

The lock holds what tests need as well.  An entry stays when the project needs it without its extras, by itself or
through another one; pip-compile says through which ("# via").  torch is installed by itself (requirements-torch.lock).
Triton (690 MB) works on GPUs only and stays out of the CPU image; so do torch's own tests and headers.
"""

from __future__ import annotations

import re
import shutil
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==[^\n]*\n(?:[ \t]+[^\n]*\n)*", re.MULTILINE)
UNUSED = (
    "torch/test", "torch/include", "torch/bin/[!t]*", "torch/bin/test_*", "torch/share/cmake", "pyarrow/include",
    "pyarrow/src", "pyarrow/tests", "pandas/tests", "**/__pycache__",
)  # fmt: skip


def requirements(device: str, lock: str, dependencies: list[str]) -> list[str]:
    """The entries of ``lock`` that an image for ``device`` needs, as they stand there."""
    entries = {match["name"]: match.group(0) for match in ENTRY.finditer(lock)}
    needed_by = {
        name: set(re.findall(r"^    #(?: via)? +(\S+)$", text, re.MULTILINE)) for name, text in entries.items()
    }
    kept = {re.split(r"[^A-Za-z0-9._-]", one)[0] for one in dependencies}
    if device == "cpu":
        kept.discard("triton")
    while more := {name for name, parents in needed_by.items() if parents & kept} - kept:
        kept |= more - ({"triton"} if device == "cpu" else set())
        if not more - {"triton"}:
            break
    return [text for name, text in entries.items() if name in kept]


def slim(environment: Path) -> int:
    """Remove UNUSED from a virtual environment; the bytes that this freed."""
    freed = 0
    for packages in environment.glob("lib/python3*/site-packages"):
        for pattern in UNUSED:
            for path in list(packages.glob(pattern)):
                freed += sum(file.lstat().st_size for file in (path, *path.rglob("*")) if file.is_file())
                shutil.rmtree(path) if path.is_dir() else path.unlink()
    return freed


def main(words: list[str]) -> int:
    match words:
        case ["cpu" | "gpu" as device]:
            lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
            project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
            sys.stdout.writelines(requirements(device, lock, project["dependencies"]))
        case ["--slim", folder]:
            print(f"removed {slim(Path(folder)) / 1e6:.0f} MB")
        case _:
            print(__doc__, file=sys.stderr)
            return 4
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
