"""What the engine's twin in virtual time is asked, and what it shows: the contract of a function that is handed around.

The load generator may not import the engine, so whoever joins them (``tailspan.py``) hands it a ``MakeTwin``.  Must
always hold: what the twin shows has the columns of a real run, on the clock of the run (zero: its first moment), and
its label says that nothing was computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from models.roofline import StepCost
from models.steady_load import Limits
from models.store import Reference

#: (seconds, requests due, requests over) -> why to stop, or None to go on.
Watch = Callable[[float, int, int], str | None]


@dataclass(frozen=True, slots=True)
class TwinSetting:
    """An engine to simulate.  None: the engine's own choice."""

    model: str
    device: str
    weights: str = "auto"
    max_batch: int = 1024
    token_budget: int = 8192
    kv_blocks: int | None = None
    queue_limit: int = 1 << 20
    sim_fit: str | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Offered:
    """A load.  Arrays have one entry a request, sorted by time; no two prompts have a page in common.

    intended_s: seconds.  klass: place in class_names.
    """

    intended_s: npt.NDArray[np.float64]
    input_tokens: npt.NDArray[np.int32]
    output_tokens: npt.NDArray[np.int32]
    trace_row: npt.NDArray[np.int64]
    klass: npt.NDArray[np.int8]
    class_names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Shown:
    """requests, steps: tables of ``telemetry.schema``.  stopped: why the watch ended it.  end_s, cpu_s: what it took.

    A request that was in flight when the watch ended the run has no row.
    """

    requests: pa.Table
    steps: pa.Table
    stopped: str | None
    end_s: float
    cpu_s: float


class Twin(Protocol):
    """One simulated engine; each run starts with an empty one."""

    label: str
    reference: Reference
    max_context: int
    cost: StepCost
    utilisation: float  # share of the peak that its steps reach
    limits: Limits

    def run(self, load: Offered, watch: Watch | None = None, before: Offered | None = None) -> Shown:
        """Let the load come.  before: one that comes first, to the same engine, and is then aborted.

        The clock of the run begins when all of ``before`` is gone.
        """


MakeTwin = Callable[[TwinSetting], Twin]
