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

from models.errors import UserError, did_you_mean
from models.yaml_text import compose
from telemetry.objective import ALL, ANY, FLUIDITY, GRAMMAR, Group, Objective, Problem, parse_sentence

PRESETS: Final = Path(__file__).parent / "slos"
DEFAULT: Final = "chat"
DEFAULT_CLASS: Final = "default"
DEFAULT_PERIOD_S: Final = 30 * 86_400.0  # over which an error budget is counted: that of the SRE workbook
CERTIFY: Final = "certify"
MAX_DEPTH: Final = 8  # of nested all and any

_PERIOD: Final = re.compile(r"(\d+)\s*([hdw])")
_PERIOD_UNITS: Final = {"h": 3600.0, "d": 86_400.0, "w": 604_800.0}
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds from the intended send (gap: a duration); None where the SLO sets none."""

    ttft: float | None
    gap: float | None
    e2e: float | None


@dataclass(frozen=True, slots=True)
class ClassRule:
    """The deadline figures of one traffic class, in seconds; None where it sets none.

    fluidity_per_token: pace of the token deadlines (``telemetry.fluidity``).  fluidity_at_least: an answer below it is
    late, of the kind gap.
    """

    ttft_base: float | None = None
    ttft_per_input_token: float = 0.0
    gap: float | None = None
    e2e_per_output_token: float | None = None
    fluidity_per_token: float | None = None
    fluidity_at_least: float | None = None


@dataclass(frozen=True, slots=True)
class Slo:
    """A parsed SLO file.  ``hash``: sha256 over its canonical content.

    objectives: every sentence in it; ``rule`` says how they are joined.  period_s: over which the budget is counted.
    """

    name: str
    description: str
    classes: Mapping[str, ClassRule]
    objectives: tuple[Objective, ...]
    rule: Group
    period_s: float
    text: str
    where: str
    hash: str

    @property
    def wants_fluidity(self) -> bool:
        """Whether a class or an objective speaks of fluidity, which needs the moments of all chunks."""
        asked = any(one.measure == FLUIDITY for one in self.objectives)
        return asked or any(rule.fluidity_per_token is not None for rule in self.classes.values())

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
        rules, index = self._rules_of(requests)

        def figure(values: list[float | None]) -> Floats:
            return _lookup(values, index, np.inf)

        inputs = pc.fill_null(requests.column("input_tokens"), 0).to_numpy().astype(np.float64)
        expected = pc.cast(requests.column("expected_output_tokens"), pa.float64()).to_numpy()
        ttft = figure([r.ttft_base for r in rules]) + figure([r.ttft_per_input_token for r in rules]) * inputs
        per_output = figure([r.e2e_per_output_token for r in rules])
        rest = np.full(len(ttft), np.inf)
        known = np.isfinite(per_output) & ~np.isnan(expected)
        rest[known] = per_output[known] * np.maximum(expected[known] - 1, 0)
        return ttft, figure([r.gap for r in rules]), ttft + rest

    def fluidity_columns(self, requests: pa.Table) -> tuple[Floats, Floats]:
        """Seconds per token and the least fluidity of every row; NaN where its class sets none."""
        rules, index = self._rules_of(requests)
        return (
            _lookup([rule.fluidity_per_token for rule in rules], index, np.nan),
            _lookup([rule.fluidity_at_least for rule in rules], index, np.nan),
        )

    def _rules_of(self, requests: pa.Table) -> tuple[list[ClassRule], npt.NDArray[np.int64]]:
        """The rules, and which of them each row falls under."""
        codes = pc.index_in(requests.column("class"), pa.array(list(self.classes), pa.string()))
        rules = [*self.classes.values(), self.classes[DEFAULT_CLASS]]
        index: npt.NDArray[np.int64] = pc.fill_null(codes, len(rules) - 1).to_numpy().astype(np.int64)
        return rules, index

    def manifest_entry(self) -> dict[str, str]:
        """What a bundle's manifest keeps of it: enough to judge again without the file."""
        return {"name": self.name, "hash": self.hash, "text": self.text, "file": self.where}


def _lookup(values: list[float | None], index: npt.NDArray[np.int64], missing: float) -> Floats:
    table: Floats = np.array([missing if value is None else value for value in values], dtype=np.float64)
    found: Floats = table[index]
    return found


def presets() -> list[str]:
    """Names of the SLOs that ship with tailspan."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def load(reference: str | Path | None = None) -> Slo:
    """Read an SLO file, or a preset by its name (``presets()``); None: chat.  UserError naming file and line."""
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
        known = ", ".join(presets())
        reason = problem.strerror if isinstance(problem, OSError) else "not UTF-8 text"
        raise UserError(
            f"SLO file cannot be read: {reason}",
            where=name,
            remedy=did_you_mean(name, presets()) + f"give a YAML file or a preset: {known}",
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
    return _Reader(where).slo(compose(text, where), text)


class _Reader:
    """Turns YAML nodes into an Slo; holds the file's name for its errors."""

    def __init__(self, where: str) -> None:
        self._where = where

    def slo(self, root: yaml.Node | None, text: str) -> Slo:
        if root is None:
            raise UserError("empty", where=self._where, remedy="begin with a preset: telemetry/slos/chat.yaml")
        top = self._mapping(root, ("name", "description", "period", "min_requests", "classes", "objectives"))
        for key in ("classes", "objectives"):
            if key not in top:
                raise self._error(root, f"no {key!r}", f"add a block {key}: (see telemetry/slos/chat.yaml)")
        classes = {
            str(key.value): self._rule(node) for key, node in self._pairs(top["classes"]) if self._text(key) is not None
        }
        if DEFAULT_CLASS not in classes:
            raise self._error(top["classes"], "no class 'default'", "add one: it judges requests of no other class")
        least = self._sample(top["min_requests"]) if "min_requests" in top else 0
        found: list[Objective] = []
        members = tuple(self._member(node, classes, found, least, MAX_DEPTH) for node in self._items(top["objectives"]))
        if not found:
            raise self._error(
                top["objectives"], "no objective, so nothing could break it", f"add one, such as {GRAMMAR}"
            )
        self._needs_pace(top["classes"], classes, found)
        rule = Group(ALL, members)
        return Slo(
            name=self._text(top["name"]) if "name" in top else Path(self._where).stem,
            description=self._text(top["description"]) if "description" in top else "",
            classes=classes,
            objectives=tuple(found),
            rule=rule,
            period_s=self._period(top["period"]) if "period" in top else DEFAULT_PERIOD_S,
            text=text,
            where=self._where,
            hash=_hash(classes, found, rule),
        )

    def _needs_pace(self, node: yaml.Node, classes: Mapping[str, ClassRule], objectives: list[Objective]) -> None:
        for one in objectives:
            asked = [one.traffic_class] if one.traffic_class else list(classes)
            if one.measure == FLUIDITY and all(classes[name].fluidity_per_token is None for name in asked):
                raise self._error(
                    node,
                    f"objective {one.sentence!r}, but no class of it says how fast tokens should come",
                    "add fluidity: {per_token_s: 0.1} to the class",
                )

    def _rule(self, node: yaml.Node) -> ClassRule:
        fields = self._mapping(node, ("ttft", "gap_s", "e2e", "fluidity"))
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
        pace, at_least = self._fluidity(fields["fluidity"], per_output) if "fluidity" in fields else (None, None)
        gap = self._seconds(fields["gap_s"]) if "gap_s" in fields else None
        return ClassRule(base, per_input, gap, per_output, pace, at_least)

    def _fluidity(self, node: yaml.Node, per_output: float | None) -> tuple[float, float | None]:
        fields = self._mapping(node, ("per_token_s", "at_least"))
        pace = self._seconds(fields["per_token_s"]) if "per_token_s" in fields else per_output
        if pace is None:
            raise self._error(node, "fluidity needs a pace, and e2e gives none", "write fluidity: {per_token_s: 0.1}")
        return pace, self._fraction(fields["at_least"]) if "at_least" in fields else None

    def _member(
        self, node: yaml.Node, classes: Mapping[str, ClassRule], found: list[Objective], least: int | str, depth: int
    ) -> int | Group:
        """One entry of a list of objectives: a sentence, a mapping with one, or a group."""
        if isinstance(node, yaml.MappingNode):
            kinds = [key for key, _ in self._pairs(node) if key.value in (ALL, ANY)]
            if kinds:
                self._mapping(node, (str(kinds[0].value),))  # a group has nothing beside its list
                items = self._items(node.value[0][1])
                if depth == 0:
                    raise self._error(node, f"nested more than {MAX_DEPTH} deep", "write it flatter")
                if not items:
                    raise self._error(node, f"{kinds[0].value!r} of nothing", f"add objectives, such as {GRAMMAR}")
                members = tuple(self._member(item, classes, found, least, depth - 1) for item in items)
                return Group(str(kinds[0].value), members)
        found.append(self._objective(node, classes, least))
        return len(found) - 1

    def _objective(self, node: yaml.Node, classes: Mapping[str, ClassRule], least: int | str) -> Objective:
        traffic_class = None
        sentence_node = node
        if isinstance(node, yaml.MappingNode):
            fields = self._mapping(node, ("class", "objective", "min_requests"))
            if "objective" not in fields:
                raise self._error(node, "no 'objective'", "write {class: default, objective: 'ttft p95 <= 2 s'}")
            sentence_node = fields["objective"]
            if "class" in fields:
                traffic_class = self._text(fields["class"])
                if traffic_class not in classes:
                    raise self._error(
                        fields["class"], f"no class {traffic_class!r} in this file", f"one of: {', '.join(classes)}"
                    )
            if "min_requests" in fields:
                least = self._sample(fields["min_requests"])
        try:
            return parse_sentence(self._text(sentence_node), traffic_class, least)
        except Problem as problem:
            raise self._error(sentence_node, problem.message, problem.remedy) from problem

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

    def _fraction(self, node: yaml.Node) -> float:
        text = self._text(node)
        try:
            value = float(text.rstrip("% ")) / (100 if text.endswith("%") else 1)
        except ValueError:
            value = -1.0
        if not 0 <= value <= 1:
            raise self._error(node, f"{text!r} is not a share", "write 0.9 or 90 %")
        return value

    def _sample(self, node: yaml.Node) -> int | str:
        text = self._text(node)
        if text == CERTIFY:
            return CERTIFY
        if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**9:
            raise self._error(node, f"{text!r} is not a number of requests", f"write a whole number, or {CERTIFY}")
        return int(text)

    def _period(self, node: yaml.Node) -> float:
        text = self._text(node)
        match = _PERIOD.fullmatch(text)
        seconds = float(match[1]) * _PERIOD_UNITS[match[2]] if match else 0.0
        if not 3600 <= seconds <= 366 * 86_400:
            raise self._error(node, f"{text!r} is not a period of an hour to a year", "write 30d, 4w or 24h")
        return seconds

    def _error(self, node: yaml.Node, message: str, remedy: str) -> UserError:
        return UserError(message, where=f"{self._where}:{node.start_mark.line + 1}", remedy=remedy)


def _hash(classes: Mapping[str, ClassRule], objectives: list[Objective], rule: Group) -> str:
    """sha256 over what changes a verdict.  What an older file could not say is left out where it says nothing."""
    figures: dict[str, list[float | None]] = {}
    for name, one in sorted(classes.items()):
        figures[name] = [one.ttft_base, one.ttft_per_input_token, one.gap, one.e2e_per_output_token]
        if one.fluidity_per_token is not None:
            figures[name] += [one.fluidity_per_token, one.fluidity_at_least]

    def plain(one: Objective) -> list[Any]:
        least = [one.min_requests] if one.min_requests else []
        return [one.measure, one.percentile, one.op, one.bound, one.traffic_class or "", *least]

    sentences = [plain(one) for one in objectives]
    canonical: dict[str, Any] = {"classes": figures}
    if rule.is_flat:
        canonical["objectives"] = sorted(sentences, key=lambda words: json.dumps(words))
    else:
        canonical |= {"objectives": sentences, "rule": rule.canonical()}
    return hashlib.sha256(json.dumps(canonical, sort_keys=True).encode()).hexdigest()
