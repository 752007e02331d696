"""Share: a link to this run, its figures for a ticket, and how to hand the whole bundle on."""

from __future__ import annotations

from urllib.parse import urlencode, urlsplit, urlunsplit

import streamlit as st

from dashboards import frame, kept, markup
from dashboards.facts import handed_on
from dashboards.language import tr
from dashboards.source import Source


def draw(run: Source) -> None:
    frame.title(tr("Share"), tr("Every view is a link: copy the address of a page, and it opens as you see it."))
    summary = kept.summary(run)
    link = _link()
    st.markdown(f"**{tr('A link to this run')}**")
    st.code(link, language=None)
    st.markdown(f"**{tr('For a ticket')}**")
    st.code(handed_on.as_text(summary, link), language="markdown", wrap_lines=True)
    st.download_button(
        tr("Figures as JSON"),
        handed_on.as_json(summary),
        file_name=f"{summary.run_id}.json",
        mime="application/json",
    )
    st.caption(tr("The same as: {command}", command=f"`tailspan runs show {summary.run_id} --json`"))
    _bundle(run)


def _link() -> str:
    """The triage page of this run, at the address by which the visitor came."""
    came = urlsplit(st.context.url or "http://127.0.0.1:8501/share")
    folder = came.path.rsplit("/", 1)[0] + "/"
    return urlunsplit((came.scheme, came.netloc, folder, urlencode(frame.parameters()), ""))


def _bundle(run: Source) -> None:
    st.markdown("#### " + tr("The whole bundle"))
    folder = run.bundle.path.resolve()
    st.code(f"tar -C {folder.parent} -czf {folder.name}.tar.gz {folder.name}", language="bash")
    rows = [(name, f"{n:,}", f"{size / 1e6:,.1f} MB") for name, n, size in kept.ask(_holdings, run)]
    st.html(markup.table(tuple(map(tr, ("table", "rows", "size"))), rows))
    kept_texts = kept.ask(handed_on.texts_kept, run)
    rule = markup.plain((run.bundle.manifest.get("plan") or {}).get("keep_text", "wrong"))
    if kept_texts:
        st.warning(
            tr("{n} answers are in it as text (--keep-text {rule}). Look through them before you mail it.",
               n=f"{kept_texts:,}", rule=rule)
        )  # fmt: skip
    else:
        st.caption(tr("No answer's text is in it (--keep-text {rule}), and no key.", rule=rule))
    st.caption(tr("Whoever gets it unpacks it into a folder of runs and starts the page there:"))
    st.code("TAILSPAN_RUNS=FOLDER tailspan up", language="bash")


def _holdings(run: Source) -> list[tuple[str, int, int]]:
    return list(handed_on.holdings(run))


if __name__ == "__main__":
    frame.show(draw)
