"""The few pieces of HTML that Streamlit has no widget for: verdict, tiles, legend.  All they show is escaped.

Bundles are mailed around, so every text from one is a stranger's.  Colours work on light and dark ground: the pieces
take the theme's own text colour and lay translucent grey behind it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Final

STYLE: Final = """
<style>
.ts-verdict { border-left: 6px solid var(--ts-colour); padding: .35rem .9rem; background: rgba(128,128,128,.09);
  border-radius: 4px; }
.ts-verdict .ts-say { font-size: 1.35rem; font-weight: 600; line-height: 1.35; }
.ts-verdict .ts-also { opacity: .8; margin-top: .15rem; font-size: .95rem; }
.ts-tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.2rem, 1fr)); gap: .6rem; }
.ts-tile { border-top: 4px solid var(--ts-colour); background: rgba(128,128,128,.09); border-radius: 4px;
  padding: .4rem .75rem .55rem; min-width: 0; }
.ts-tile .ts-name { font-size: .9rem; opacity: .85; }
.ts-tile .ts-count { font-size: 1.7rem; font-weight: 600; line-height: 1.2; font-variant-numeric: tabular-nums; }
.ts-tile .ts-share { font-size: .9rem; font-weight: 400; opacity: .75; margin-left: .35rem; }
.ts-tile .ts-why { font-size: .82rem; opacity: .85; line-height: 1.3; overflow-wrap: anywhere; }
.ts-legend { display: flex; flex-wrap: wrap; gap: .15rem .9rem; font-size: .85rem; }
.ts-legend span { white-space: nowrap; }
.ts-legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -1px; }
</style>
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """One count: its name, share of the whole (None: has none), colour and, in words, what it consists of."""

    name: str
    count: int
    share: float | None
    colour: str
    why: str


def verdict(sentence: str, also: str, colour: str) -> str:
    """The sentence that answers the question, and beneath it whether the run itself can be trusted."""
    return (
        f'<div class="ts-verdict" style="--ts-colour:{escape(colour)}" data-testid="verdict">'
        f'<div class="ts-say">{escape(sentence)}</div><div class="ts-also">{escape(also)}</div></div>'
    )


def tiles(items: Iterable[Tile]) -> str:
    cells = []
    for item in items:
        share = "" if item.share is None else f'<span class="ts-share">{item.share:.1%}</span>'
        cells.append(
            f'<div class="ts-tile" style="--ts-colour:{escape(item.colour)}" data-testid="tile-{escape(item.name)}">'
            f'<div class="ts-name">{escape(item.name)}</div>'
            f'<div class="ts-count">{item.count:,}{share}</div><div class="ts-why">{escape(item.why)}</div></div>'
        )
    return f'<div class="ts-tiles">{"".join(cells)}</div>'


def legend(colours: Mapping[str, str], meaning: Mapping[str, str] | None = None) -> str:
    """Names with their colours, in the order given; what each means on hover."""
    spans = [
        f'<span title="{escape((meaning or {}).get(name, name))}"><i style="background:{escape(colour)}"></i>'
        f"{escape(name)}</span>"
        for name, colour in colours.items()
    ]
    return f'<div class="ts-legend">{"".join(spans)}</div>'
