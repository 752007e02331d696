"""Which budget binds an engine: what was full while requests waited, from its step log.

Time is weighed, not steps.  A step binds by its batch, its token budget or its KV pool when requests wait behind it and
that limit is reached; where nobody waits, the device binds: steps take as long as they take.  Must always hold: a limit
that is not known is named only where the log itself shows it (a largest batch that is reached again and again); shares
are of the time in steps.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

BATCH: Final = "batch"
TOKEN_BUDGET: Final = "token budget"
KV_POOL: Final = "KV pool"
DEVICE: Final = "device"
COLUMNS: Final = (
    "start_ns", "end_ns", "running", "waiting", "decode_tokens", "prefill_tokens", "kv_used", "kv_free", "wall",
)  # fmt: skip
#: A limit binds when it was reached, with requests waiting, in more than this share of the time in steps.
BINDS_AT: Final = 0.1
FULL: Final = 0.98  # of a budget: the last tokens of a step find no chunk that fits
KV_FULL: Final = 0.95  # of the pool: a prompt waits for as many pages as it needs, not for one
AGAIN: Final = 0.02  # of the time: so often a largest batch that is a limit is reached

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Binding:
    """binds: BATCH, TOKEN_BUDGET, KV_POOL or DEVICE.  shares: of the time in steps, of each limit that was reached with
    requests waiting.  walls: of the time, by what bounds the steps.  waiting: share of the time with requests waiting.
    """

    binds: str
    shares: dict[str, float]
    walls: dict[str, float]
    waiting: float
    batch_mean: float
    batch_peak: int
    kv_mean: float | None
    busy: float  # share of the time between the first step and the last in which a step ran

    @property
    def words(self) -> str:
        """One sentence."""
        if self.binds == DEVICE:
            wall = max(self.walls, key=lambda name: self.walls[name], default=None)
            told = f", mostly {wall} ({100 * self.walls[wall]:.0f} % of the time)" if wall is not None else ""
            return f"no budget binds: the device does{told}"
        share = f"full, with requests waiting, in {100 * self.shares[self.binds]:.0f} % of the time"
        return f"the {self.binds} binds: {share}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def binding(steps: pa.Table, limits: Mapping[str, int | None]) -> Binding | None:
    """limits: max_batch, token_budget of the engine, where they are known.  None: the run has no step log."""
    if not steps.num_rows:
        return None
    start, end = _numbers(steps, "start_ns"), _numbers(steps, "end_ns")
    time = np.maximum(end - start, 1.0)
    weight = time / time.sum()
    running, waiting = _numbers(steps, "running"), _numbers(steps, "waiting")
    tokens = _numbers(steps, "decode_tokens") + _numbers(steps, "prefill_tokens")
    used = _numbers(steps, "kv_used")
    pool = used + _numbers(steps, "kv_free")
    behind = waiting > 0
    most = limits.get("max_batch") or _reached_again(running, weight)
    reached: dict[str, Bools] = {}
    if most is not None:
        reached[BATCH] = running >= most
    if budget := limits.get("token_budget"):
        reached[TOKEN_BUDGET] = tokens >= FULL * budget
    reached[KV_POOL] = used >= KV_FULL * np.maximum(pool, 1)
    shares = {name: float(weight[full & behind].sum()) for name, full in reached.items()}
    fullest = max(shares, key=lambda name: shares[name])
    walls: dict[str, float] = {}
    for wall in pc.unique(steps.column("wall")).drop_null().to_pylist():
        of_wall = pc.fill_null(pc.equal(steps.column("wall"), wall), False).to_numpy()
        walls[wall] = float(weight[of_wall].sum())
    return Binding(
        binds=fullest if shares[fullest] > BINDS_AT else DEVICE,
        shares=shares,
        walls=walls,
        waiting=float(weight[behind].sum()),
        batch_mean=float((running * weight).sum()),
        batch_peak=int(running.max()),
        kv_mean=float((used / np.maximum(pool, 1) * weight).sum()) if pool.max() > 0 else None,
        busy=float(min(1.0, time.sum() / max(1.0, end.max() - start.min()))),
    )


def _reached_again(running: npt.NDArray[np.float64], weight: npt.NDArray[np.float64]) -> int | None:
    peak = running.max()
    return int(peak) if float(weight[running == peak].sum()) > AGAIN and peak > 1 else None


def _numbers(table: pa.Table, name: str) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = pc.fill_null(table.column(name).cast(pa.float64()), 0.0).to_numpy()
    return values
