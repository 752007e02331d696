"""How one engine is set up: a frozen record, validated once, printed at start and kept in bundles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from engine.policy import POLICIES
from models.errors import UserError
from models.roofline import DTYPE_BYTES

AUTO: Final = "auto"
CPU: Final = "cpu"
TRITON: Final = "triton"
SIMULATED: Final = "simulated"
BACKENDS: Final = (AUTO, CPU, TRITON, SIMULATED)
DTYPES: Final = (AUTO, "fp32", "bf16", "int8", "int4", "int4-bf16")
KV_DTYPES: Final = (AUTO, "fp8")  # auto: that of the activations
SIMULATED_DTYPES: Final = (AUTO, *DTYPE_BYTES)  # auto: bf16


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Limits and choices of one engine.

    max_batch: most requests that hold KV at once.  token_budget: most tokens computed in one step (decodes first,
    then chunks of prefill).  kv_blocks: pages in the KV pool (None: from free memory).  block_size: tokens in a page.
    max_context: most tokens (prompt + output) of one request (None: the model's own limit).
    threads: CPU threads of the forward (None: one per core).  dtype: precision of the weights (auto: int4 where that
    loses nothing, as with a model from a 4-bit file, else bf16).  queue_limit: most requests that wait; one more is
    refused.  watermark: share of the pool kept free when a request is admitted, so that running ones can grow.
    policy: fcfs, priority or deadline.  queue_tokens: most prompt tokens that wait; max_predicted_ttft: seconds,
    refused above (None: no limit).  check_every: steps between two checks of the laws (0: only when idle).
    shadow: share of the finished requests that run again alone, when idle.
    backend: what computes the steps (``engine.backends``).  Of the simulated one: device, a name of
    ``models.devices``; sim_fit, a file of ``engine.step_fit`` (None: times from the account of the device); sim_seed.
    Of the triton one: invariant, whether a row's bits may depend on nothing but the row (off: faster tiles and
    splits); kv_dtype, fp8 halves the KV of 16 bits; speculate, drafts a step for greedy requests (``lookahead``);
    tensor_parallel, GPUs (``parallel``); cuda_graphs, of steps of decodes; overlap, the next step is scheduled while
    one runs (``flight``).
    """

    model: str = "smollm2"
    max_batch: int = 16
    token_budget: int = 128
    kv_blocks: int | None = None
    block_size: int = 16
    max_context: int | None = None
    threads: int | None = None
    dtype: str = "auto"
    queue_limit: int = 1024
    prefix_cache: bool = True
    watermark: float = 0.01
    step_log: int = 65_536
    policy: str = "fcfs"
    queue_tokens: int | None = None
    max_predicted_ttft: float | None = None
    check_every: int = 1000
    shadow: float = 0.0
    backend: str = AUTO
    device: str | None = None
    sim_fit: str | None = None
    sim_seed: int = 0
    invariant: bool = True
    kv_dtype: str = AUTO
    speculate: int = 0
    tensor_parallel: int = 1
    cuda_graphs: bool = True
    overlap: bool = True

    def __post_init__(self) -> None:
        for name in ("max_batch", "token_budget", "block_size", "queue_limit", "step_log"):
            if getattr(self, name) < 1:
                raise UserError(
                    f"{name} is {getattr(self, name)}, but must be at least 1",
                    where="engine configuration",
                    remedy=f"give --{name.replace('_', '-')} 1 or more",
                )
        for name in ("kv_blocks", "max_context", "threads", "queue_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(
                    f"{name} is {value}, but must be at least 1",
                    where="engine configuration",
                    remedy=f"give --{name.replace('_', '-')} 1 or more, or leave it out",
                )
        if self.token_budget < self.max_batch:
            raise UserError(
                f"token_budget {self.token_budget} is below max_batch {self.max_batch}: a full batch could not decode",
                where="engine configuration",
                remedy=f"raise the token budget to at least {self.max_batch} or lower the batch",
            )
        self._check_backend()
        if not 0 <= self.watermark < 1:
            raise UserError(f"watermark {self.watermark} is outside 0..1", where="engine configuration")
        if self.policy not in POLICIES:
            raise UserError(
                f"policy {self.policy!r} is unknown",
                where="engine configuration",
                remedy=f"one of {', '.join(POLICIES)}",
            )
        if self.max_predicted_ttft is not None and not self.max_predicted_ttft > 0:
            raise UserError(
                f"max_predicted_ttft is {self.max_predicted_ttft}, but must be above 0",
                where="engine configuration",
                remedy="give --max-predicted-ttft seconds, or leave it out",
            )
        if self.check_every < 0:
            raise UserError(
                f"check_every is {self.check_every}, but must be at least 0",
                where="engine configuration",
                remedy="give --check-every 0 (only when idle) or more",
            )
        if not 0 <= self.shadow <= 1:
            raise UserError(
                f"shadow {self.shadow} is outside 0..1", where="engine configuration", remedy="give --shadow 0 to 1"
            )

    def _check_backend(self) -> None:
        if self.backend not in BACKENDS:
            raise UserError(
                f"backend {self.backend!r} is unknown", where="--backend", remedy=f"one of {', '.join(BACKENDS)}"
            )
        simulated = self.backend == SIMULATED
        dtypes = SIMULATED_DTYPES if simulated else DTYPES
        if self.dtype not in dtypes:
            raise UserError(
                f"dtype {self.dtype!r} is unknown", where="engine configuration", remedy=f"one of {', '.join(dtypes)}"
            )
        if simulated and self.device is None:
            raise UserError("no device is named", where="--device", remedy="name one, for example --device h100")
        if simulated and self.shadow:
            raise UserError(
                "nothing is computed, so nothing can be run again alone", where="--shadow", remedy="leave it out"
            )
        self._check_triton()
        if not simulated:
            for option, given in (
                ("--device", self.device),
                ("--sim-fit", self.sim_fit),
                ("--sim-seed", self.sim_seed),
            ):
                if given:
                    raise UserError(
                        f"{given} is for a simulated model",
                        where=option,
                        remedy="add --backend simulated, or leave it out",
                    )

    def _check_triton(self) -> None:
        if self.kv_dtype not in KV_DTYPES:
            raise UserError(
                f"kv_dtype {self.kv_dtype!r} is unknown", where="--kv-dtype", remedy=f"one of {', '.join(KV_DTYPES)}"
            )
        if not 0 <= self.speculate <= 15:
            raise UserError(f"speculate is {self.speculate}", where="--speculate", remedy="use 0 (off) to 15")
        if self.tensor_parallel < 1:
            raise UserError(f"tensor_parallel is {self.tensor_parallel}", where="--tensor-parallel", remedy="1 or more")
        if self.backend in (CPU, SIMULATED):
            self.refuse_kernel_options()

    def refuse_kernel_options(self) -> None:
        """Raises UserError for an option that the backend at hand would not heed."""
        for option, changed in (
            ("--varying", not self.invariant),
            ("--kv-dtype", self.kv_dtype != AUTO),
            ("--speculate", self.speculate > 0),
            ("--tensor-parallel", self.tensor_parallel > 1),
            ("--no-cuda-graphs", not self.cuda_graphs),
            ("--no-overlap", not self.overlap),
        ):
            if changed:
                raise UserError(
                    "this is for the kernels on a GPU", where=option, remedy="add --backend triton, or leave it out"
                )
