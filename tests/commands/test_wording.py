"""Counts in messages: one of a thing is not called several."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tailspan
from loadgen.capacity.search import Bounds
from models.errors import UserError
from models.wording import several
from telemetry import check, slo
from telemetry.bundle import COMPLETE, Bundle
from telemetry.compare import compare, history
from telemetry.retries import Retries
from telemetry.summary import summarize
from telemetry.terminal import render
from tests.bundles import answered_row

PLURALS = {
    "answers", "attempts", "classes", "files", "objectives", "pairs", "parts", "questions", "requests", "rows", "runs",
    "samples", "spans", "steps", "targets", "workers",
}  # fmt: skip


def test_a_count_has_its_noun() -> None:
    assert [several(n, "class", "classes") for n in (0, 1, 2)] == ["0 classes", "1 class", "2 classes"]
    assert several(1, "row is", "rows are") == "1 row is" and several(12_345, "row") == "12,345 rows"


def _one_row(root: Path) -> Bundle:
    bundle = Bundle.create(root, {}, slo=slo.load("chat").manifest_entry(), scheduled=1, length_s=1.0)
    with bundle.writer("requests", "worker-0") as writer:
        writer.append(answered_row(usage_estimated=True, tpot_s=None))
    bundle.update(status=COMPLETE)
    bundle.compact()
    return bundle


def _said_of_one(root: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Everything that is said of one run with one request, of one class, and of one pair."""
    bundle = _one_row(root)
    texts = [str(one.message) for one in check.check(bundle, slo.load("chat"))]
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as caught:
        console.print(render(summarize(bundle, slo.load("chat"))))
    texts.append(caught.get())
    texts.append(Retries(*(1,) * len(Retries.__slots__)).sentence())
    texts += [one.message for one in compare([bundle], []).refusals]
    for ask in (lambda: history([bundle]), lambda: Bounds(1.0, most_runs=1)):
        with pytest.raises(UserError) as refused:
            ask()
        texts.append(str(refused.value))
    tailspan.main(["slo", "check", "chat", "batch", "code", "voice"])
    texts.append(capsys.readouterr().out)
    return "\n".join(texts)


def test_nothing_says_one_and_then_a_plural(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = _said_of_one(tmp_path, capsys)
    assert "1 class, " in said and "1 row in 1 file" in said and "Outcomes of 1 request " in said
    found = set(re.findall(r"(?<!of )(?<![\d.,/])1 ([a-z]+)", said))  # "0 of 1 answers" counts the kind
    assert {"row", "file", "class", "request", "attempt", "run"} <= found
    assert not found & PLURALS, said
