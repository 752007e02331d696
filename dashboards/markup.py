"""The few pieces of HTML that Streamlit has no widget for: verdict, tiles, legend.  All they show is escaped.

Bundles are mailed around, so every text from one is a stranger's.  Colours work on light and dark ground: the pieces
take the theme's own text colour and lay translucent grey behind it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from telemetry.summary import format_share

_MARKDOWN: Final = re.compile(r"([\\`*_{}\[\]()#+!|<>~$:])")

STYLE: Final = """
<style>
.stMainBlockContainer { padding-top: 2.6rem; padding-bottom: 1.5rem; max-width: 1240px; }
.stMainBlockContainer h4 { padding-top: .9rem; }
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
@media (max-width: 640px) {
  .stMainBlockContainer { padding-top: 4rem; }
  .ts-verdict .ts-say { font-size: 1.1rem; }
  .ts-tiles { grid-template-columns: 1fr 1fr; }
  .ts-tile:last-child:nth-child(odd) { grid-column: span 2; }
}
.ts-legend { display: flex; flex-wrap: wrap; gap: .15rem .9rem; font-size: .85rem; }
.ts-head { font-size: .95rem; opacity: .8; overflow-wrap: anywhere; }
.ts-head b { font-size: 1.05rem; }
.ts-asks { display: flex; flex-wrap: wrap; gap: .3rem .5rem; font-size: .9rem; }
.ts-ask { border: 1px solid rgba(128,128,128,.35); border-radius: 4px; padding: .1rem .55rem; }
.ts-ask.ts-broken { border-color: #D55E00; border-width: 2px; }
.ts-ask b { font-weight: 600; }
.ts-cards { display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: .6rem; }
.ts-card { background: rgba(128,128,128,.09); border-radius: 4px; padding: .4rem .75rem .5rem; font-size: .88rem;
  line-height: 1.4; min-width: 0; overflow-wrap: anywhere; }
.ts-card-name { font-weight: 600; font-size: .92rem; }
.ts-layers { grid-template-columns: repeat(auto-fit, minmax(21rem, 1fr)); align-items: start; }
.ts-card table { border-collapse: collapse; width: 100%; }
.ts-card td { padding: .05rem .5rem .05rem 0; vertical-align: top; font-variant-numeric: tabular-nums; }
.ts-card td:first-child { width: 32%; opacity: .85; }
.ts-card td:nth-child(2) { min-width: 7rem; }
.ts-evidence { text-align: right; opacity: .6; font-size: .78rem; overflow-wrap: anywhere; }
.ts-title { font-size: 1.55rem; font-weight: 600; line-height: 1.3; padding: 0; margin: 0; }
.ts-title span { font-size: .92rem; font-weight: 400; opacity: .7; margin-left: .5rem; }
.ts-scroll { overflow-x: auto; }
.ts-table { border-collapse: collapse; font-size: .9rem; width: 100%; font-variant-numeric: tabular-nums; }
.ts-table th { text-align: right; font-weight: 600; opacity: .8; padding: .25rem .7rem; white-space: nowrap; }
.ts-table td { text-align: right; padding: .2rem .7rem; border-top: 1px solid rgba(128,128,128,.22);
  white-space: nowrap; }
.ts-table th:first-child, .ts-table td:first-child { text-align: left; padding-left: 0; }
.ts-words th, .ts-words td { text-align: left; }
.ts-words td { white-space: normal; overflow-wrap: anywhere; }
.ts-legend span { white-space: nowrap; }
.ts-legend i { display: inline-block; width: .75rem; height: .75rem; border-radius: 2px; margin-right: .35rem;
  vertical-align: -1px; }
</style>
"""


@dataclass(frozen=True, slots=True)
class Tile:
    """One count: which label, its name, share of the whole (None: has none), colour and what it consists of."""

    label: str
    name: str
    count: int
    share: float | None
    colour: str
    why: str


def plain(text: object) -> str:
    """A stranger's text for a piece of Markdown: shown as it is, never a link, never an image that asks its server."""
    return _MARKDOWN.sub(r"\\\1", str(text))


def verdict(sentence: str, also: str, colour: str) -> str:
    """The sentence that answers the question, and beneath it whether the run itself can be trusted."""
    return (
        f'<div class="ts-verdict" style="--ts-colour:{escape(colour)}" data-testid="verdict">'
        f'<div class="ts-say">{escape(sentence)}</div><div class="ts-also">{escape(also)}</div></div>'
    )


def tiles(items: Iterable[Tile]) -> str:
    cells = []
    for item in items:
        share = "" if item.share is None else f' <span class="ts-share">{format_share(item.share)}</span>'
        cells.append(
            f'<div class="ts-tile" style="--ts-colour:{escape(item.colour)}" data-testid="tile-{escape(item.label)}">'
            f'<div class="ts-name">{escape(item.name)}</div>'
            f'<div class="ts-count">{item.count:,}{share}</div><div class="ts-why">{escape(item.why)}</div></div>'
        )
    return f'<div class="ts-tiles">{"".join(cells)}</div>'


def cards(items: Iterable[tuple[str, Sequence[str]]]) -> str:
    """Titled boxes of a few lines each, beside each other where there is room."""
    boxes = [
        f'<div class="ts-card"><div class="ts-card-name">{escape(name)}</div>'
        + "".join(f"<div>{escape(line)}</div>" for line in lines)
        + "</div>"
        for name, lines in items
    ]
    return f'<div class="ts-cards">{"".join(boxes)}</div>'


def title(name: str, what: str) -> str:
    """The name of a page, and what it answers, in one line where there is room."""
    return f'<h1 class="ts-title">{escape(name)} <span>{escape(what)}</span></h1>'


def layer(name: str, rows: Iterable[tuple[str, str, str]]) -> str:
    """One layer's account: what, value, and in small letters where it is written."""
    body = "".join(
        f'<tr><td>{escape(what)}</td><td>{escape(value)}</td><td class="ts-evidence">{escape(evidence)}</td></tr>'
        for what, value, evidence in rows
    )
    return f'<div class="ts-card"><div class="ts-card-name">{escape(name)}</div><table>{body}</table></div>'


def side_by_side(pieces: Iterable[str]) -> str:
    """Pieces of markup beside each other where there is room."""
    return f'<div class="ts-cards ts-layers">{"".join(pieces)}</div>'


def head(run: str, *notes: str) -> str:
    """Which run this is, in one quiet line."""
    rest = "".join(f" · {escape(note)}" for note in notes if note)
    return f'<div class="ts-head"><b>{escape(run)}</b>{rest}</div>'


def asks(items: Iterable[tuple[bool, str, str]]) -> str:
    """The objectives of the SLO: whether it holds, what was asked, what was found."""
    chips = [
        f'<div class="ts-ask{"" if holds else " ts-broken"}">{"✓" if holds else "✗"} {escape(asked)} · '
        f"<b>{escape(found)}</b></div>"
        for holds, asked, found in items
    ]
    return f'<div class="ts-asks">{"".join(chips)}</div>'


def table(header: Iterable[str], rows: Iterable[Sequence[str]], *, words: bool = False) -> str:
    """A plain table of ready-made texts, numbers to the right (``words``: texts to the left).

    It scrolls sideways where it does not fit, by keyboard too.
    """
    top = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    kind = "ts-table ts-words" if words else "ts-table"
    return f'<div class="ts-scroll" tabindex="0"><table class="{kind}"><tr>{top}</tr>{body}</table></div>'


def legend(colours: Mapping[str, str], meaning: Mapping[str, str] | None = None) -> str:
    """Names with their colours, in the order given; what each means on hover."""
    spans = [
        f'<span title="{escape((meaning or {}).get(name, name))}"><i style="background:{escape(colour)}"></i>'
        f"{escape(name)}</span>"
        for name, colour in colours.items()
    ]
    return f'<div class="ts-legend">{"".join(spans)}</div>'
