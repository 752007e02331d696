"""SLO files: per-request deadlines by traffic class, and objectives over a whole run.

Owns: the YAML format (its presets in ``telemetry/slos`` explain it), its errors, the deadline formulas and the hash
that names a set of verdicts.  Must always hold: an unknown or repeated key is refused with its line; the hash covers
what changes a verdict and nothing else, so comments, key order and the name leave it alone.

Deadlines, in seconds from the intended send: ``ttft = base + per_input_token * input_tokens``, ``gap`` is a constant,
and ``e2e = ttft + per_output_token * (expected_output - 1)``, where the expected output comes from the trace or the
reference answer, never from the actual output: a server that truncates would get an easier deadline.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import yaml

from models.errors import UserError
from telemetry.names import DROPPED, LATE, PHASES, ROW_PHASES, WRONG

PRESETS: Final = Path(__file__).parent / "slos"
DEFAULT: Final = "chat"
DEFAULT_CLASS: Final = "default"
GOODPUT: Final = "goodput"
LATENCIES: Final = ("ttft", "tpot", "e2e", "gap")
SHARES: Final = (GOODPUT, LATE, WRONG, DROPPED)
GRAMMAR: Final = "'ttft p95 <= 2 s', 'queue p90 <= 500 ms' or 'goodput >= 95 %'"

_OBJECTIVE = re.compile(
    r"(?P<measure>[a-z0-9_]+)(?:\s+p(?P<percentile>\d+(?:\.\d+)?))?\s*(?P<op><=|>=)\s*(?P<bound>\d+(?:\.\d+)?)\s*(?P<unit>s|ms|%)?"
)
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from the intended send (gap: a duration); None where the SLO sets none."""

    ttft: float | None
    gap: float | None
    e2e: float | None


@dataclass(frozen=True, slots=True)
class ClassRule:
    """The deadline figures of one traffic class, in seconds; None where it sets none."""

    ttft_base: float | None = None
    ttft_per_input_token: float = 0.0
    gap: float | None = None
    e2e_per_output_token: float | None = None


@dataclass(frozen=True, slots=True)
class Objective:
    """One sentence about the run.  bound: seconds for latencies and phases, a share (0..1) otherwise."""

    text: str
    measure: str
    percentile: float | None
    op: str
    bound: float
    traffic_class: str | None = None

    def holds(self, value: float | None, *, unbounded: bool = False) -> bool:
        """Whether a measured value keeps it; a value that is missing or unbounded keeps none."""
        if unbounded or value is None:
            return False
        return value <= self.bound if self.op == "<=" else value >= self.bound


@dataclass(frozen=True, slots=True)
class Slo:
    """A parsed SLO file.  ``hash``: sha256 over its canonical content."""

    name: str
    description: str
    classes: Mapping[str, ClassRule]
    objectives: tuple[Objective, ...]
    text: str
    where: str
    hash: str

    def deadlines(self, traffic_class: str | None, input_tokens: int, expected_output: int | None) -> Deadlines:
        """The deadlines of one request."""
        rule = self.classes.get(traffic_class or DEFAULT_CLASS, self.classes[DEFAULT_CLASS])
        ttft = None if rule.ttft_base is None else rule.ttft_base + rule.ttft_per_input_token * input_tokens
        e2e = None
        if ttft is not None and rule.e2e_per_output_token is not None and expected_output is not None:
            e2e = ttft + rule.e2e_per_output_token * max(0, expected_output - 1)
        return Deadlines(ttft, rule.gap, e2e)

    def deadline_columns(self, requests: pa.Table) -> tuple[Floats, Floats, Floats]:
        """ttft, gap and e2e deadlines of every row in seconds; +inf where there is none."""
        codes = pc.index_in(requests.column("class"), pa.array(list(self.classes), pa.string()))
        rules = [*self.classes.values(), self.classes[DEFAULT_CLASS]]
        index = pc.fill_null(codes, len(rules) - 1).to_numpy()

        def figure(values: list[float | None]) -> Floats:
            table: Floats = np.array([np.inf if value is None else value for value in values], dtype=np.float64)
            found: Floats = table[index]
            return found

        inputs = pc.fill_null(requests.column("input_tokens"), 0).to_numpy().astype(np.float64)
        expected = pc.cast(requests.column("expected_output_tokens"), pa.float64()).to_numpy()
        ttft = figure([r.ttft_base for r in rules]) + figure([r.ttft_per_input_token for r in rules]) * inputs
        per_output = figure([r.e2e_per_output_token for r in rules])
        rest = np.full(len(ttft), np.inf)
        known = np.isfinite(per_output) & ~np.isnan(expected)
        rest[known] = per_output[known] * np.maximum(expected[known] - 1, 0)
        return ttft, figure([r.gap for r in rules]), ttft + rest

    def manifest_entry(self) -> dict[str, str]:
        """What a bundle's manifest keeps of it: enough to judge again without the file."""
        return {"name": self.name, "hash": self.hash, "text": self.text, "file": self.where}


def load(reference: str | Path | None = None) -> Slo:
    """Read an SLO file, or a preset by its name (chat, demo); None: chat.  UserError naming file and line."""
    name = str(reference or DEFAULT)
    path = Path(name)
    if (
        not path.is_file()
        and path.name == name
        and (PRESETS / f"{path.stem}.yaml").is_file()
        and path.suffix in ("", ".yaml")
    ):
        path = PRESETS / f"{path.stem}.yaml"
    try:
        if path.stat().st_size > 1 << 20:
            raise UserError("larger than 1 MiB: not an SLO file", where=name, remedy="give an SLO file in YAML")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as problem:
        presets = ", ".join(sorted(file.stem for file in PRESETS.glob("*.yaml")))
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise UserError(
            f"SLO file cannot be read: {reason}", where=name, remedy=f"give a YAML file or a preset: {presets}"
        ) from problem
    return parse(text, str(path))


def of_manifest(manifest: Mapping[str, Any]) -> Slo:
    """The SLO that a run was made with, from its manifest; the default where it names none."""
    entry = manifest.get("slo") or {}
    if entry.get("text"):
        return parse(entry["text"], str(entry.get("file", "manifest.json")))
    return load()


def parse(text: str, where: str) -> Slo:
    """Parse the YAML of an SLO file.  UserError with ``where``:line for anything it does not understand."""
    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.MarkedYAMLError as problem:
        line = problem.problem_mark.line + 1 if problem.problem_mark else 1
        raise UserError(
            f"not YAML: {problem.problem}", where=f"{where}:{line}", remedy="check the indentation there"
        ) from problem
    except (yaml.YAMLError, RecursionError) as problem:
        raise UserError(f"not YAML: {problem}", where=where, remedy="save it as plain UTF-8 text") from problem
    return _Reader(where).slo(root, text)


class _Reader:
    """Turns YAML nodes into an Slo; holds the file's name for its errors."""

    def __init__(self, where: str) -> None:
        self._where = where

    def slo(self, root: yaml.Node | None, text: str) -> Slo:
        if root is None:
            raise UserError("empty", where=self._where, remedy="begin with a preset: telemetry/slos/chat.yaml")
        top = self._mapping(root, ("name", "description", "classes", "objectives"))
        for key in ("classes", "objectives"):
            if key not in top:
                raise self._error(root, f"no {key!r}", f"add a block {key}: (see telemetry/slos/chat.yaml)")
        classes = {
            str(key.value): self._rule(node) for key, node in self._pairs(top["classes"]) if self._text(key) is not None
        }
        if DEFAULT_CLASS not in classes:
            raise self._error(top["classes"], "no class 'default'", "add one: it judges requests of no other class")
        objectives = tuple(self._objective(node, classes) for node in self._items(top["objectives"]))
        if not objectives:
            raise self._error(
                top["objectives"], "no objective, so nothing could break it", f"add one, such as {GRAMMAR}"
            )
        canonical = {
            "classes": {
                name: [rule.ttft_base, rule.ttft_per_input_token, rule.gap, rule.e2e_per_output_token]
                for name, rule in sorted(classes.items())
            },
            "objectives": sorted([o.measure, o.percentile, o.op, o.bound, o.traffic_class or ""] for o in objectives),
        }
        digest = hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()
        return Slo(
            name=self._text(top["name"]) if "name" in top else Path(self._where).stem,
            description=self._text(top["description"]) if "description" in top else "",
            classes=classes,
            objectives=objectives,
            text=text,
            where=self._where,
            hash=digest,
        )

    def _rule(self, node: yaml.Node) -> ClassRule:
        fields = self._mapping(node, ("ttft", "gap_s", "e2e"))
        base, per_input, per_output = None, 0.0, None
        if "ttft" in fields:
            ttft = self._mapping(fields["ttft"], ("base_s", "per_input_token_s"))
            if "base_s" not in ttft:
                raise self._error(fields["ttft"], "ttft has no 'base_s'", "write ttft: {base_s: 1.0}")
            base = self._seconds(ttft["base_s"])
            per_input = self._seconds(ttft["per_input_token_s"], zero=True) if "per_input_token_s" in ttft else 0.0
        if "e2e" in fields:
            e2e = self._mapping(fields["e2e"], ("per_output_token_s",))
            if base is None:
                raise self._error(fields["e2e"], "e2e builds on ttft, which is missing", "add ttft: {base_s: …}")
            if "per_output_token_s" not in e2e:
                raise self._error(
                    fields["e2e"], "e2e has no 'per_output_token_s'", "write e2e: {per_output_token_s: 0.1}"
                )
            per_output = self._seconds(e2e["per_output_token_s"])
        return ClassRule(base, per_input, self._seconds(fields["gap_s"]) if "gap_s" in fields else None, per_output)

    def _objective(self, node: yaml.Node, classes: Mapping[str, ClassRule]) -> Objective:
        traffic_class = None
        sentence_node = node
        if isinstance(node, yaml.MappingNode):
            fields = self._mapping(node, ("class", "objective"))
            if "objective" not in fields:
                raise self._error(node, "no 'objective'", "write {class: default, objective: 'ttft p95 <= 2 s'}")
            sentence_node = fields["objective"]
            if "class" in fields:
                traffic_class = self._text(fields["class"])
                if traffic_class not in classes:
                    raise self._error(
                        fields["class"], f"no class {traffic_class!r} in this file", f"one of: {', '.join(classes)}"
                    )
        sentence = " ".join(self._text(sentence_node).split())
        match = _OBJECTIVE.fullmatch(sentence)
        if match is None:
            raise self._error(sentence_node, f"cannot understand objective {sentence!r}", f"write it like {GRAMMAR}")
        measure, percentile, unit = match["measure"], match["percentile"], match["unit"]
        if measure in SHARES:
            if percentile is not None or unit not in ("%", None):
                raise self._error(
                    sentence_node, f"{measure} is a share of the requests", f"write {measure} {match['op']} 5 %"
                )
            bound = float(match["bound"]) / (100 if unit == "%" else 1)
            if not 0 <= bound <= 1:
                raise self._error(
                    sentence_node, f"{bound:g} is not a share", "give 0 to 100 %, or 0 to 1 without a unit"
                )
        elif measure in (*LATENCIES, *ROW_PHASES):
            if percentile is None or not 0 < float(percentile) < 100:
                raise self._error(sentence_node, f"{measure} needs a percentile between p0 and p100", f"like {GRAMMAR}")
            if unit not in ("s", "ms"):
                raise self._error(sentence_node, f"{measure} is a time and needs a unit", "end it with s or ms")
            bound = float(match["bound"]) / (1000 if unit == "ms" else 1)
        else:
            known = ", ".join((*LATENCIES, *SHARES, *PHASES))
            raise self._error(sentence_node, f"no measure {measure!r}", f"one of: {known}")
        if (match["op"] == ">=") != (measure == GOODPUT):
            wanted = ">=" if measure == GOODPUT else "<="
            raise self._error(sentence_node, f"{measure} {match['op']} would reward the worse", f"use {wanted}")
        return Objective(
            sentence, measure, float(percentile) if percentile else None, match["op"], bound, traffic_class
        )

    # -- nodes --

    def _pairs(self, node: yaml.Node) -> list[tuple[yaml.Node, yaml.Node]]:
        if not isinstance(node, yaml.MappingNode):
            raise self._error(node, "a block of 'key: value' lines is needed here", "see telemetry/slos/chat.yaml")
        seen: set[str] = set()
        for key, _ in node.value:
            if (name := self._text(key)) in seen:
                raise self._error(key, f"{name!r} stands here twice", "keep one of them")
            seen.add(name)
        return list(node.value)

    def _mapping(self, node: yaml.Node, known: tuple[str, ...]) -> dict[str, yaml.Node]:
        pairs = self._pairs(node)
        for key, _ in pairs:
            if key.value not in known:
                raise self._error(key, f"unknown key {key.value!r}", f"known here: {', '.join(known)}")
        return {key.value: value for key, value in pairs}

    def _items(self, node: yaml.Node) -> list[yaml.Node]:
        if not isinstance(node, yaml.SequenceNode):
            raise self._error(node, "a list is needed here", "begin each line with '- '")
        return list(node.value)

    def _text(self, node: yaml.Node) -> str:
        if not isinstance(node, yaml.ScalarNode):
            raise self._error(node, "plain text is needed here", "see telemetry/slos/chat.yaml")
        return str(node.value)

    def _seconds(self, node: yaml.Node, *, zero: bool = False) -> float:
        text = self._text(node)
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not (0 <= value < 1e6) or (value == 0 and not zero):
            raise self._error(node, f"{text!r} is not a number of seconds above 0", "write for example 0.5")
        return value

    def _error(self, node: yaml.Node, message: str, remedy: str) -> UserError:
        return UserError(message, where=f"{self._where}:{node.start_mark.line + 1}", remedy=remedy)
