"""Opens a page of the app without a browser, and gathers all that it says."""

from __future__ import annotations

import html
from pathlib import Path

from streamlit.testing.v1 import AppTest

from dashboards import view

APP = Path(view.__file__).parent / "entry" / "app.py"
PAGES = tuple(sorted(file.stem for file in (APP.parent.parent / "pages").glob("[!_]*.py")))


def open_page(name: str, **query: str) -> AppTest:
    """The page ``name`` at an address with these parameters; fails on an exception."""
    page = AppTest.from_file(str(APP), default_timeout=60)
    page.query_params["lang"] = "en"
    for key, value in query.items():
        page.query_params[key] = value
    page.switch_page(f"../pages/{name}.py").run()
    assert not page.exception, page.exception
    return page


def text_of(page: AppTest) -> str:
    """All that the page says, HTML pieces, links and labels included."""
    parts = []
    for kind in ("html", "markdown", "caption", "info", "success", "warning", "error", "code", "title", "page_link"):
        for element in page.get(kind):
            proto = element.proto
            parts.append(getattr(proto, "body", None) or getattr(proto, "label", None) or getattr(element, "value", ""))
    return html.unescape("\n".join(map(str, parts)))


def tile(page: AppTest, label: str) -> str:
    """The count on the tile of a label."""
    body = "\n".join(element.proto.body for element in page.get("html"))
    return body.split(f'data-testid="tile-{label}"')[1].split('"ts-count">')[1].split("<")[0].strip()
