"""Reading prompts wrongly on purpose: another model's chat template, a tokenizer that lacks merges.

For testing the tester: the engine's faults and the lab's scenarios take them from here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Final

from models.tokenizer import Tokenizer

OTHER_TEMPLATE: Final = (
    "{% for message in messages %}{{ '### ' + message['role'] + ':\\n' + message['content'] + '\\n\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '### assistant:\\n' }}{% endif %}"
)


def fewer_merges(path: Path, share: float) -> Tokenizer:
    """The tokenizer of a file without the last ``share`` of its merges: the same ids, texts cut otherwise."""
    content = json.loads(path.read_bytes())
    merges = content["model"]["merges"]
    content["model"]["merges"] = merges[: len(merges) - max(1, int(len(merges) * share))]
    return Tokenizer(json.dumps(content).encode(), str(path))
