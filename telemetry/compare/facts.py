"""One replay as arrays: what every figure of a comparison is computed from.

Must always hold: a request without an answer is there as +inf, an undefined time is NaN, an invalid request has no part
in any figure, a canary none in the times.

Only the columns that a figure needs are read, and they are joined in numpy: a million requests a side take about a
second.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from telemetry import latency, names, outcomes, validity
from telemetry.bundle import COMPLETE, Bundle
from telemetry.slo import Slo, of_manifest

MEASURES: Final = latency.MEASURES
_COLUMNS: Final = (
    "index", "intended_s", "first_token_s", "end_s", "tpot_s", "canary_kind", "input_tokens", "expected_output_tokens",
)  # fmt: skip

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Facts:
    """A run.  Arrays have an entry per request that is judged and not invalid, in order of index.

    label: position in ``names.LABELS``.  times: seconds of each of MEASURES.  length_s: of the schedule.  valid: may
    the run be believed; reasons: why not.  load: what identifies it besides its rows (trace, seeds, salt).
    """

    run: str
    index: Ints
    intended_s: Floats
    input_tokens: Ints
    output_tokens: Ints
    label: npt.NDArray[np.int8]
    times: Mapping[str, Floats]
    length_s: float
    valid: bool = True
    reasons: tuple[str, ...] = ()
    load: Mapping[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.index)

    @classmethod
    def of(cls, bundle: Bundle, slo: Slo | None = None) -> Facts:
        """The facts of a bundle, judged by an SLO (default: its own)."""
        policy = slo or of_manifest(bundle.manifest)
        rows = bundle.table("requests", _COLUMNS)
        verdicts = bundle.verdicts(policy, ("index", "label"))
        known, place = latency.joined(rows, verdicts)
        label = outcomes.label_places(verdicts)[place] if verdicts.num_rows else place.astype(np.int8)
        counts = known & (label != names.LABELS.index(names.INVALID))
        label = label[counts]
        canary = rows.column("canary_kind").is_valid().to_numpy()[counts]
        dropped = label == names.LABELS.index(names.DROPPED)
        times = {}
        for measure in MEASURES:
            values = latency.times(rows, measure)[counts]
            values[dropped] = np.inf
            values[canary] = np.nan
            times[measure] = values
        valid, reasons = _validity(bundle, policy)
        manifest = bundle.manifest
        intended = rows.column("intended_s").to_numpy()[counts]
        length = manifest.get("length_s")
        return cls(
            bundle.run_id,
            rows.column("index").to_numpy()[counts],
            intended,
            _ints(rows, "input_tokens")[counts],
            _ints(rows, "expected_output_tokens")[counts],
            label,
            times,
            float(length) if isinstance(length, int | float) else float(intended.max(initial=0.0)),
            valid,
            reasons,
            {
                "trace": (manifest.get("hashes") or {}).get("trace"),
                "seed": (manifest.get("seeds") or {}).get("schedule"),
                "salt": (manifest.get("seeds") or {}).get("salt"),
                "targets": manifest.get("targets"),
            },
        )

    def between(self, start_s: float, end_s: float) -> Facts:
        """The requests meant to be sent in [start, end)."""
        return self.only((self.intended_s >= start_s) & (self.intended_s < end_s))

    def only(self, mask: npt.NDArray[np.bool_]) -> Facts:
        """The requests of a mask."""
        return replace(
            self,
            index=self.index[mask],
            intended_s=self.intended_s[mask],
            input_tokens=self.input_tokens[mask],
            output_tokens=self.output_tokens[mask],
            label=self.label[mask],
            times={name: values[mask] for name, values in self.times.items()},
        )


def _validity(bundle: Bundle, slo: Slo) -> tuple[bool, tuple[str, ...]]:
    stored = bundle.manifest.get("validity")
    if bundle.status == COMPLETE and isinstance(stored, Mapping) and stored.get("verdict"):
        return stored["verdict"] == names.VALID, tuple(str(one) for one in stored.get("reasons") or ())
    rows = bundle.table("requests", [*outcomes.columns(slo), "sent_s"])
    judged = validity.assess(rows, bundle.manifest, slo)
    return judged.verdict == names.VALID, judged.reasons


def _ints(table: pa.Table, name: str) -> Ints:
    column = table.column(name)
    known = column if not column.null_count else column.cast(pa.float64())  # null is NaN there; exact up to 2^53
    values: Ints = np.nan_to_num(known.to_numpy(), nan=-1).astype(np.int64)
    return values
