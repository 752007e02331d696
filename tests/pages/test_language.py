"""Every text of the pages in both languages, with the same holes."""

from __future__ import annotations

import ast
import string
from collections.abc import Iterator
from pathlib import Path

from dashboards import language, oncall, palette
from dashboards.facts import checks, one_request, traffic, under_way
from dashboards.figures import bars, steps
from dashboards.language import CHINESE
from telemetry import canary_report, names
from tests.pages.opening import APP


def said_in_code() -> Iterator[tuple[str, str]]:
    """Every text that is given to ``tr`` as it stands, with its file."""
    for file in sorted(APP.parent.parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or not node.args:
                continue
            if node.func.id == "tr" and isinstance(node.args[0], ast.Constant):
                yield str(node.args[0].value), file.name
            translated = isinstance(node.args[0], ast.Name) and node.args[0].id == "tr"
            if node.func.id == "map" and translated and isinstance(node.args[1], ast.Tuple):
                for element in node.args[1].elts:
                    assert isinstance(element, ast.Constant)
                    yield str(element.value), file.name


def said_from_tables() -> Iterator[str]:
    """Texts that reach ``tr`` through a table of words."""
    from dashboards import words
    from dashboards.figures import timeline as figures
    from dashboards.pages import traces

    yield from names.LABELS
    yield from palette.PHASE_WORDS.values()
    yield from palette.PHASE_MEANING.values()
    yield from (palette.reason_words(reason) for reason in (*names.DROP_REASONS, *names.INVALID_REASONS))
    yield from palette._REASON_WORDS.values()
    yield from words.MEASURES.values()
    yield from (head for head in (*words.PERCENTILE_HEADER, *words.SLOW_HEADER) if head)
    yield from (word for word, _ in figures._STRIP.values())
    yield from oncall._DIMENSION_WORDS.values()
    yield from one_request.LAYERS
    yield from steps.KIND_COLOURS
    yield from bars.GAUGE_COLOURS
    yield from checks.COUNTERS.values()
    yield from under_way.GAUGES.values()
    yield from traces._FACTS.values()
    yield from traffic.LENGTHS.values()
    yield from canary_report.PLACES.values()
    yield from (canary_report.SAME, canary_report.NUMERIC, canary_report.BROKEN)
    yield from ("memory", "compute", "overhead", "half or more", "less than half", "milliseconds", "seconds")
    for node in ast.walk(ast.parse(Path(one_request.__file__).read_text())):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Seen":
            assert isinstance(node.args[1], ast.Constant)
            yield str(node.args[1].value)


def test_every_text_has_a_chinese_one_with_the_same_placeholders() -> None:
    wanted = {text for text, _ in said_in_code()} | set(said_from_tables())
    assert sorted(wanted - CHINESE.keys()) == []
    assert sorted(CHINESE.keys() - wanted) == []

    def holes(text: str) -> set[str]:
        return {name for _, name, _, _ in string.Formatter().parse(text) if name is not None}

    assert {text for text in wanted if "{" in text and holes(text) != holes(CHINESE[text])} == set()


def test_a_locale_chooses_the_language() -> None:
    assert [language.guess(locale) for locale in ("zh-CN", "zh", "en-GB", None, "de")] == ["zh", "zh", "en", "en", "en"]
