"""Write the JSON of the dashboards: ``python -m dashboards.grafana.make [--check]``.

Needs grafana-foundation-sdk (an extra for development); what it writes is checked in, so that nothing else needs it.
--check writes nothing and exits with 1 where a file is not what the code makes.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from dashboards.grafana.boards import BOARDS
from dashboards.grafana.files import FOLDER


def made() -> dict[str, str]:
    """File name -> JSON text, of every dashboard."""
    found = {}
    for build in BOARDS:
        plain: dict[str, Any] = json.loads(json.dumps(build().build(), cls=JSONEncoder))
        number_panels(plain["panels"])
        found[f"{plain['uid']}.json"] = json.dumps(plain, indent=2, sort_keys=True, ensure_ascii=False) + "\n"
    return found


def number_panels(panels: list[dict[str, Any]]) -> None:
    """Ids 1, 2, … so that a link to a panel stays good as long as the code does not change before it."""
    for place, panel in enumerate(panels, 1):
        panel["id"] = place


def main(words: list[str]) -> int:
    texts = made()
    if words == ["--check"]:
        wrong = [name for name, text in texts.items() if not _is(name, text)]
        wrong += [path.name for path in FOLDER.glob("*.json") if path.name not in texts]
        for name in wrong:
            print(f"{FOLDER / name} is not what the code makes; run: python -m dashboards.grafana.make")
        return int(bool(wrong))
    FOLDER.mkdir(exist_ok=True)
    for path in FOLDER.glob("*.json"):
        path.unlink()
    for name, text in texts.items():
        (FOLDER / name).write_text(text, encoding="utf-8")
        print(FOLDER / name)
    return 0


def _is(name: str, text: str) -> bool:
    path = FOLDER / name
    return path.exists() and path.read_text(encoding="utf-8") == text


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
