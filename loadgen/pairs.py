"""Paired replays: `tailspan run --repeats K --against URL` sends the same load to A, B, A, B, … and keeps which belong
together.

Must always hold: both runs of a pair send the same requests at the same times, with the same words where A and B are
different servers (with other words where they are one, whose prefix cache would know them the second time); what
``--fit`` measured on A scales B as well; the group file names only runs that have ended.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from loadgen.options import Options
from loadgen.plan import checked_targets
from models.errors import UserError
from models.wording import several
from telemetry.compare.max_t import LEAST_FLIPPED

if TYPE_CHECKING:
    from loadgen.prepare import Prepared
    from telemetry.bundle import Bundle
    from telemetry.compare import Comparison

MOST: Final = 40  # pairs where the effect to find sets their number


@dataclass(frozen=True, slots=True)
class Pairing:
    """Which place a run has in its group.  salt: of the prompts; None: the run's own."""

    group: str
    side: str
    pair: int
    pairs: int
    salt: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"id": self.group, "side": self.side, "pair": self.pair, "pairs": self.pairs}


class Pairs:
    """The course of a group: whose turn it is, what has ended, and whether more pairs are needed."""

    def __init__(self, options: Options, against: str, find: float | None) -> None:
        """find: relative change that the pairs have to be enough for; None: ``repeats`` pairs.  Raises UserError."""
        checked_targets(against, "--against")
        if find is not None and not 0 < find <= 10:
            raise UserError(f"{find:g} is no change to find", where="--find", remedy="give 0.1 for 10 %")
        self.options, self.against, self.find = options, against, find
        self.group = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}-pairs"
        self.root = Path(options.runs) if options.runs else None
        self.most = options.repeats if options.repeats > 1 or find is None else MOST
        if find is not None and self.most < LEAST_FLIPPED:
            raise UserError(
                f"{several(self.most, 'pair')} at most, but {LEAST_FLIPPED} are the least that can be tested exactly",
                where="--repeats",
                remedy=f"leave it out, or give {LEAST_FLIPPED} or more",
            )
        self.sides: dict[str, list[Bundle]] = {"A": [], "B": []}

    @property
    def one_server(self) -> bool:
        return self.options.targets == self.against

    def turns(self) -> Iterator[tuple[Options, Pairing]]:
        """Options and place of each run: A, B, A, B, …; stops when the pairs are enough."""
        for pair in range(self.most):
            if self.find is not None and pair >= LEAST_FLIPPED and self._enough(pair):
                return
            for side, targets in (("A", self.options.targets), ("B", self.against)):
                salt = None if self.one_server or self.options.salt else f"{self.group} {pair}"
                yield replace(self.options, targets=targets), Pairing(self.group, side, pair, self.most, salt)

    def prepared(self, prepared: Prepared) -> None:
        """What was fitted on the first run holds for all others."""
        if self.options.fit is not None:
            plan = prepared.plan
            self.options = replace(self.options, fit=None, rate_scale=plan.rate_scale, length_scale=plan.length_scale)

    def ended(self, pairing: Pairing, bundle: Bundle) -> None:
        """A run is over: it goes into the group file."""
        from telemetry.compare.sides import write_group

        self.sides[pairing.side].append(bundle)
        a, b = ([one.run_id for one in self.sides[side]] for side in ("A", "B"))
        write_group(self.group, a, b, self.root)

    def comparison(self) -> Comparison | None:
        """Of the pairs that are complete; None: there is none."""
        from telemetry.compare import compare

        pairs = min(len(side) for side in self.sides.values())
        if pairs == 0:
            return None
        a, b = (self.sides[side][:pairs] for side in ("A", "B"))
        return compare(a, b) if self.find is None else compare(a, b, effect=self.find)

    def _enough(self, pairs: int) -> bool:
        found = self.comparison()
        return found is not None and (found.refused or found.needed is None or found.needed <= pairs)


def tell(pairs: Pairs, found: Comparison, *, as_json: bool) -> int:
    """Print the comparison; returns its exit code."""
    import json

    from telemetry.compare.text import render
    from telemetry.terminal import show

    if as_json:
        print(json.dumps({"group": pairs.group, **found.to_dict()}))
    else:
        show(render(found))
        print(f"group   {pairs.group}: tailspan compare {pairs.group}, tailspan explain {pairs.group}")
    return found.exit_code
