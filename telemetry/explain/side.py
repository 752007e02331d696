"""One replay as explain reads it: a row per judged request, the engine's steps, and what else lies in the bundle.

Must always hold: arrays of ``rows`` have an entry per request that has a row, in order of index; NaN is unknown.  The
engine's clock is another one than the generator's; ``clock_s`` says how far apart they are, from the requests' own
accounts, good to the jitter of the network: for finding what happened meanwhile, not for any latency.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from telemetry import names
from telemetry.bundle import Bundle
from telemetry.compare.facts import Facts
from telemetry.slo import Slo, of_manifest

FLOATS: Final = (
    "intended_s", "sent_s", "first_token_s", "last_token_s", "end_s", "tpot_s", "max_gap_s", "input_tokens",
    "expected_output_tokens", "prompt_tokens_expected", "prompt_tokens_reported", "completion_tokens_reported",
    "completion_tokens_counted", "cached_tokens", "server_duration_s", "preemptions", "queue_depth_at_arrival",
    "step_first", "step_last", "attempts", "batch_size_mean", *(f"phase_{name}_s" for name in names.PHASES),
)  # fmt: skip
TEXTS: Final = ("class", "replica", "error", "finish_reason", "error_detail", "canary_kind", "output_sha")
STEP_COLUMNS: Final = (
    "step", "start_ns", "end_ns", "gap_ns", "running", "waiting", "decode_seqs", "prefill_tokens", "recomputed_tokens",
    "context_tokens", "attended", "kv_used", "kv_free", "preempted",
)  # fmt: skip
CANARIES: Final = "canaries.json"  # what `tailspan canaries check --json` printed, laid beside the run

Floats = npt.NDArray[np.float64]
Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Steps:
    """The step log of one replica: arrays by column of STEP_COLUMNS; NaN where an older version wrote none."""

    replica: str
    columns: dict[str, Floats]

    def __len__(self) -> int:
        return len(self.columns["step"])

    def __getitem__(self, name: str) -> Floats:
        return self.columns[name]

    @cached_property
    def seconds(self) -> Floats:
        """Duration of each step."""
        return (self["end_ns"] - self["start_ns"]) / 1e9

    def only(self, mask: Bools) -> Steps:
        return Steps(self.replica, {name: values[mask] for name, values in self.columns.items()})


@dataclass(frozen=True)
class Run:
    """A replay.  facts: as compare sees it.  floats, texts: columns of its rows; label, reason: verdicts of the rows,
    positions in ``names.LABELS`` and words."""

    bundle: Bundle
    facts: Facts
    index: npt.NDArray[np.int64]
    floats: dict[str, Floats]
    texts: dict[str, pa.Array]
    label: npt.NDArray[np.int8]
    reason: pa.Array
    steps: tuple[Steps, ...]
    window: tuple[float, float] | None = None
    notes: list[str] = field(default_factory=list)

    def __getitem__(self, name: str) -> Floats:
        return self.floats[name]

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, bundle: Bundle, slo: Slo | None = None) -> Run:
        """Read a bundle."""
        policy = slo or of_manifest(bundle.manifest)
        facts = Facts.of(bundle, policy)
        verdicts = bundle.verdicts(policy)
        rows = bundle.table("requests", ["index", *FLOATS, *TEXTS])
        place = pc.index_in(rows.column("index"), verdicts.column("index").combine_chunks())
        rows = rows.filter(pc.is_valid(place))
        place = place.filter(pc.is_valid(place))
        label = pc.index_in(verdicts.column("label"), pa.array(names.LABELS)).take(place)
        return cls(
            bundle,
            facts,
            rows.column("index").to_numpy(),
            {name: _floats(rows, name) for name in FLOATS},
            {name: rows.column(name).combine_chunks() for name in TEXTS},
            label.to_numpy().astype(np.int8),
            verdicts.column("reason").take(place).combine_chunks(),
            _steps(bundle),
        )

    def between(self, start_s: float, end_s: float) -> Run:
        """The requests meant to be sent in [start, end), and the steps that served them."""
        inside = (self["intended_s"] >= start_s) & (self["intended_s"] < end_s)
        found = self.only(inside)
        steps = []
        for one in self.steps:
            at = one["start_ns"] / 1e9 + self.clock_s(one)
            steps.append(one.only((at >= start_s) & (at < end_s)))
        return replace(found, steps=tuple(steps), window=(start_s, end_s))

    def only(self, mask: Bools) -> Run:
        """The requests of a mask; the steps stay."""
        kept = pa.array(mask)
        index = self.index[mask]
        return replace(
            self,
            facts=self.facts.only(np.isin(self.facts.index, index)),
            index=index,
            floats={name: values[mask] for name, values in self.floats.items()},
            texts={name: values.filter(kept) for name, values in self.texts.items()},
            label=self.label[mask],
            reason=self.reason.filter(kept),
        )

    def is_label(self, label: str) -> Bools:
        """Which rows have a label."""
        found: Bools = self.label == names.LABELS.index(label)
        return found

    @cached_property
    def counted(self) -> Bools:
        """Which rows count: not invalid, no canary."""
        canary = pc.is_valid(self.texts["canary_kind"]).to_numpy(zero_copy_only=False)
        found: Bools = ~self.is_label(names.INVALID) & ~canary
        return found

    @cached_property
    def answered(self) -> Bools:
        """Which rows count and have a complete answer."""
        found: Bools = self.counted & ~self.is_label(names.DROPPED) & ~np.isnan(self["end_s"])
        return found

    @cached_property
    def arrived_s(self) -> Floats:
        """When each request came to the server's queue, on the generator's clock; by the send where no account is."""
        network = np.nan_to_num(self["end_s"] - self["sent_s"] - self["server_duration_s"], nan=0.0)
        before = np.nan_to_num(self[f"phase_{names.INGRESS}_s"]) + np.nan_to_num(self[f"phase_{names.TOKENIZE}_s"])
        found: Floats = self["sent_s"] + np.maximum(network, 0.0) / 2 + before
        return found

    def clock_s(self, steps: Steps) -> float:
        """Generator's clock minus the engine's (s); 0 where no request names a step of this replica."""
        mine = self.of_replica(steps.replica) & (self["step_first"] >= 0)
        if not mine.any() or not len(steps):
            return 0.0
        began = self.arrived_s[mine] + self[f"phase_{names.QUEUE}_s"][mine]
        order = np.argsort(steps["step"])
        ids = steps["step"][order]
        place = np.searchsorted(ids, self["step_first"][mine])
        known = (place < len(ids)) & (ids[np.minimum(place, len(ids) - 1)] == self["step_first"][mine])
        if not known.any():
            return 0.0
        return float(np.median(began[known] - steps["start_ns"][order][place[known]] / 1e9))

    def of_replica(self, replica: str) -> Bools:
        """Rows that a replica answered; all where only one has a step log, whatever it calls itself."""
        if len(self.steps) <= 1:
            return np.ones(len(self), dtype=np.bool_)
        return np.asarray(pc.fill_null(pc.equal(self.texts["replica"], replica), False)).astype(np.bool_)

    def counter(self, name: str) -> float | None:
        """By how much a scraped counter grew, summed over labels and sources; None: it was not scraped."""
        series = self.bundle.table("series")
        chosen = series.filter(pc.is_in(series.column("name"), pa.array([name, f"{name}_total"])))
        if not chosen.num_rows:
            return None
        grown = 0.0
        last: dict[tuple[str, str], tuple[float, float]] = {}
        for row in chosen.to_pylist():
            if self.window is not None and not self.window[0] <= row["t_s"] < self.window[1]:
                continue
            key = (row["source"], row["labels"])
            first, _ = last.get(key, (row["value"], 0.0))
            last[key] = (first, row["value"])
        for first, final in last.values():
            grown += max(0.0, final - first)
        return grown

    def canaries(self) -> dict[str, Any] | None:
        """What a check of canaries found beside this run; None: none was laid there."""
        try:
            found = json.loads((self.bundle.path / CANARIES).read_bytes())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None


def values_of(texts: pa.Array, mask: Bools) -> dict[str, int]:
    """How often each value stands in the rows of a mask, most frequent first; null is left out."""
    counts = pc.value_counts(pc.drop_null(texts.filter(pa.array(mask))))
    pairs = [(one["values"].as_py(), one["counts"].as_py()) for one in counts]
    return dict(sorted(pairs, key=lambda pair: (-pair[1], pair[0])))


def _steps(bundle: Bundle) -> tuple[Steps, ...]:
    if not (bundle.path / "steps").is_dir():
        return ()
    table = bundle.table("steps", ["replica", *STEP_COLUMNS])
    found = []
    for replica in sorted(one for one in pc.unique(table.column("replica")).to_pylist() if one is not None):
        mine = table.filter(pc.equal(table.column("replica"), replica)).sort_by("step")
        found.append(Steps(replica, {name: _floats(mine, name) for name in STEP_COLUMNS}))
    return tuple(found)


def _floats(table: pa.Table, name: str) -> Floats:
    values: Floats = table.column(name).cast(pa.float64()).to_numpy().copy()
    return values


def same_requests(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Do the pairs have the same requests by index, whatever else differs?"""
    return all(
        len(one) == len(two) and bool((one.index == two.index).all()) for one, two in zip(a, b, strict=False)
    )  # fmt: skip
