"""How far a run was from what its device can do: by kind of step, by batch, by phase; and which premise fails first.

Owns the arithmetic from the tables ``steps`` and ``requests`` to a RunFloor.  Floors are the engine's own, noted with
every step and request; a run on another server is accounted for with a StepCost that the caller brings.  What must
hold: time is compared with the floor of the same work; where a floor is not known nothing is said, and a step that
was faster than its floor is counted aloud, since it convicts the device's figures.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from models.errors import UserError
from models.roofline import WALLS, StepCost, wall_of
from telemetry import names
from telemetry.bundle import Bundle

#: A premise fails when what it leaves out moves the account by more than this share.
FAILS_AT: Final = 0.1
KINDS: Final = ("decode", "prefill", "mixed")

REQUEST_COLUMNS: Final = (
    "error", "prompt_tokens_reported", "completion_tokens_reported", "completion_tokens_counted", "cached_tokens",
    "sent_s", "first_token_s", "last_token_s", "phase_prefill_s", "phase_decode_s", "floor_ttft_s", "floor_tpot_s",
)  # fmt: skip
STEP_COLUMNS: Final = (
    "start_ns", "end_ns", "gap_ns", "kind", "decode_seqs", "prefill_tokens", "context_tokens", "bytes", "flops",
    "floor_ns", "wall",
)  # fmt: skip
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepsFloor:
    """A group of steps.  efficiency: floor_s / time_s.  walls: share of the time at each wall.  wall: the largest.

    bytes_per_s, flops_per_s: what was achieved, by the account's least bytes and FLOPs.
    """

    group: str
    steps: int
    time_s: float
    floor_s: float
    efficiency: float
    wall: str
    walls: dict[str, float]
    bytes_per_s: float
    flops_per_s: float


@dataclass(frozen=True, slots=True)
class PhaseFloor:
    """A phase over the complete requests: time in it, and the floor of each request alone on the device.

    median_s, floor_median_s: of the time to the first token from its first step on, or of the time per further token.
    efficiency: floor_s / time_s; what is missing is sharing the device, waiting for steps and slow steps.  by_server:
    false: the client's view, network and queue included.
    """

    phase: str
    requests: int
    time_s: float
    floor_s: float
    efficiency: float
    median_s: float
    floor_median_s: float
    wall: str | None
    by_server: bool


@dataclass(frozen=True, slots=True)
class Premise:
    """What the account takes for granted.  strain: share by which it was not so (0 = held); None: not known here."""

    name: str
    statement: str
    strain: float | None
    found: str

    @property
    def holds(self) -> bool | None:
        """None where the run cannot say."""
        return None if self.strain is None else self.strain <= FAILS_AT


@dataclass(frozen=True, slots=True)
class RunFloor:
    """The whole account.  device: labels of names.M_DEVICE_INFO or of the StepCost used; None: the run does not say.

    idle_share: of the time in which work was there, the share in which no step ran; None without a step log.
    faster: steps that took less than their floor.  fails_first: name of the premise under the largest strain above
    FAILS_AT.
    """

    run_id: str
    model: str | None
    device: dict[str, str] | None
    recorded: bool  # floors noted by the engine itself, not worked out here
    kinds: tuple[StepsFloor, ...]
    batches: tuple[StepsFloor, ...]
    phases: tuple[PhaseFloor, ...]
    premises: tuple[Premise, ...]
    fails_first: str | None
    idle_share: float | None
    faster: int

    def to_dict(self) -> dict[str, Any]:
        """Plain values for JSON."""
        found = asdict(self)
        for premise, plain in zip(self.premises, found["premises"], strict=True):
            plain["holds"] = premise.holds
        return found


def floor_of_run(bundle: Bundle, cost: StepCost | None = None) -> RunFloor:
    """The account of a run; cost: the model on its device, used instead of what the engine noted.

    Raises UserError when neither is there.
    """
    steps = _Steps.read(bundle, cost)
    rows = bundle.table("requests", REQUEST_COLUMNS)
    rows = rows.filter(pc.and_(pc.is_null(rows.column("error")), pc.is_valid(rows.column("first_token_s"))))
    phases = _phases(rows, steps, cost)
    if steps is None and not phases:
        raise UserError(
            "this run has no floors: its server did not say what it runs on",
            where=f"run {bundle.run_id}",
            remedy="name both: --model and --device (and --dtype), e.g. --model llama-3.1-8b --device H100",
        )
    premises = (_whole(rows), _constant_batch(bundle, steps), _one_device(steps))
    strained = [premise for premise in premises if premise.holds is False]
    worst = max(strained, key=lambda premise: premise.strain or 0.0, default=None)
    return RunFloor(
        run_id=bundle.run_id,
        model=cost.shape.name if cost is not None else _model(bundle),
        device=device_labels(cost) if cost is not None else recorded_device(bundle),
        recorded=cost is None,
        kinds=steps.by_kind() if steps else (),
        batches=steps.by_batch() if steps else (),
        phases=phases,
        premises=premises,
        fails_first=worst.name if worst is not None else None,
        idle_share=steps.idle_share if steps else None,
        faster=int((steps.floor > steps.time).sum()) if steps else 0,
    )


# --- steps ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Steps:
    """Columns of the step log that have a floor; times in ns."""

    kind: npt.NDArray[np.str_]
    time: Floats
    floor: Floats
    gap: Floats
    decodes: Floats
    bytes: Floats
    flops: Floats
    wall: npt.NDArray[np.str_]

    @classmethod
    def read(cls, bundle: Bundle, cost: StepCost | None) -> _Steps | None:
        """None when there is no step with a floor."""
        table = bundle.table("steps", STEP_COLUMNS)
        if cost is not None:
            table = _with_cost(table, cost)
        table = table.filter(pc.is_valid(table.column("floor_ns")))
        if not table.num_rows:
            return None
        return cls(
            kind=np.array(table.column("kind").to_pylist(), np.str_),
            time=_numbers(table, "end_ns") - _numbers(table, "start_ns"),
            floor=_numbers(table, "floor_ns"),
            gap=_numbers(table, "gap_ns"),
            decodes=_numbers(table, "decode_seqs"),
            bytes=_numbers(table, "bytes"),
            flops=_numbers(table, "flops"),
            wall=np.array(table.column("wall").to_pylist(), np.str_),
        )

    @property
    def idle_share(self) -> float:
        """Time between steps with work waiting, as a share of that and the steps."""
        busy, idle = float(self.time.sum()), float(self.gap.sum())
        return idle / (busy + idle) if busy + idle > 0 else 0.0

    def group(self, name: str, chosen: npt.NDArray[np.bool_]) -> StepsFloor:
        """The account of the steps chosen."""
        time, floor = float(self.time[chosen].sum()) / 1e9, float(self.floor[chosen].sum()) / 1e9
        each = {wall: float(self.time[chosen & (self.wall == wall)].sum()) / 1e9 for wall in WALLS}
        walls = {wall: seconds / time if time else 0.0 for wall, seconds in each.items()}
        return StepsFloor(
            group=name,
            steps=int(chosen.sum()),
            time_s=time,
            floor_s=floor,
            efficiency=floor / time if time else 0.0,
            wall=max(walls, key=lambda wall: walls[wall]),
            walls=walls,
            bytes_per_s=float(self.bytes[chosen].sum()) / time if time else 0.0,
            flops_per_s=float(self.flops[chosen].sum()) / time if time else 0.0,
        )

    def by_kind(self) -> tuple[StepsFloor, ...]:
        """decode, prefill, mixed; those that occurred."""
        chosen = {kind: self.kind == kind for kind in KINDS}
        return tuple(self.group(kind, mask) for kind, mask in chosen.items() if mask.any())

    def by_batch(self) -> tuple[StepsFloor, ...]:
        """Pure decode steps by sequences in them: 1, 2, 3-4, 5-8 and so on."""
        found, low, high = [], 1, 1
        decode = self.kind == "decode"
        most = int(self.decodes[decode].max()) if decode.any() else 0
        while low <= most:
            mask = decode & (self.decodes >= low) & (self.decodes <= high)
            if mask.any():
                found.append(self.group(str(low) if low == high else f"{low}-{high}", mask))
            low, high = high + 1, high * 2
        return tuple(found)

    def wall_where(self, chosen: npt.NDArray[np.bool_]) -> str | None:
        """The wall at which most of the time of these steps was spent."""
        return self.group("", chosen).wall if chosen.any() else None


def _with_cost(table: pa.Table, cost: StepCost) -> pa.Table:
    """The same steps with the floor of another account.

    The log tells neither how many rows of a step were sampled beside the decodes nor how its context lies over its
    prompts, so both are taken at their least; the floor stays a floor.
    """
    found: dict[str, list[Any]] = {name: [] for name in ("bytes", "flops", "floor_ns", "wall")}
    names_of = ("prefill_tokens", "decode_seqs", "context_tokens", "start_ns", "end_ns")
    for prefill, decodes, context, start, end in zip(*(table.column(n).to_pylist() for n in names_of), strict=True):
        step = cost.floor_ns(prefill or 0, decodes or 0, context or 0, decodes or 0)
        for name, value in zip(found, (step.bytes, step.flops, step.floor_ns, wall_of(step, end - start)), strict=True):
            found[name].append(value)
    for name, values in found.items():
        position = table.column_names.index(name)
        table = table.set_column(position, table.schema.field(name), pa.array(values, table.schema.field(name).type))
    return table


# --- phases -----------------------------------------------------------------------------------------------------------


def _phases(rows: pa.Table, steps: _Steps | None, cost: StepCost | None) -> tuple[PhaseFloor, ...]:
    if not rows.num_rows:
        return ()
    prompt = _numbers(rows, "prompt_tokens_reported")
    cached = np.nan_to_num(_numbers(rows, "cached_tokens"))
    output = _numbers(rows, "completion_tokens_reported")
    output = np.where(np.isnan(output), _numbers(rows, "completion_tokens_counted"), output)
    if cost is None:
        ttft, tpot = _numbers(rows, "floor_ttft_s"), _numbers(rows, "floor_tpot_s")
    else:
        known = ~np.isnan(prompt)
        ttft = np.full(len(prompt), np.nan)
        ttft[known] = [cost.ttft_ns(p, c) / 1e9 for p, c in zip(prompt[known], cached[known], strict=True)]
        known &= output >= 2
        tpot = np.full(len(prompt), np.nan)
        tpot[known] = [(cost.tpot_ns(p, n) or 0) / 1e9 for p, n in zip(prompt[known], output[known], strict=True)]
    own = bool(np.isfinite(_numbers(rows, "phase_prefill_s")).any())
    if own:
        before, after = _numbers(rows, "phase_prefill_s"), _numbers(rows, "phase_decode_s")
    else:
        first = _numbers(rows, "first_token_s")
        before, after = first - _numbers(rows, "sent_s"), _numbers(rows, "last_token_s") - first
    more = np.maximum(output - 1, 0)
    computing = steps.kind != "decode" if steps else None
    decoding = steps.decodes > 0 if steps else None
    found = (
        _phase(names.PREFILL, before, ttft, np.ones(len(ttft)), steps, computing, own),
        _phase(names.DECODE, after, tpot, more, steps, decoding, own),
    )
    return tuple(phase for phase in found if phase is not None)


def _phase(
    name: str,
    time: Floats,
    floor_each: Floats,
    times: Floats,
    steps: _Steps | None,
    chosen: npt.NDArray[np.bool_] | None,
    own: bool,
) -> PhaseFloor | None:
    """time: s in the phase, of each request; floor_each: s of one of its ``times`` tokens."""
    counted = np.isfinite(time) & np.isfinite(floor_each) & (times > 0) & (time > 0)
    if not counted.any():
        return None
    total, floor = float(time[counted].sum()), float((floor_each * times)[counted].sum())
    return PhaseFloor(
        phase=name,
        requests=int(counted.sum()),
        time_s=total,
        floor_s=floor,
        efficiency=floor / total,
        median_s=float(np.median((time / np.maximum(times, 1))[counted])),
        floor_median_s=float(np.median(floor_each[counted])),
        wall=steps.wall_where(chosen) if steps is not None and chosen is not None else None,
        by_server=own,
    )


# --- the three premises of the account --------------------------------------------------------------------------------


def _whole(rows: pa.Table) -> Premise:
    """Every prompt is computed whole, so that each pass over the weights does all of its work."""
    prompt, cached = _numbers(rows, "prompt_tokens_reported"), _numbers(rows, "cached_tokens")
    known = np.isfinite(prompt) & np.isfinite(cached)
    total = float(prompt[known].sum())
    share = float(cached[known].sum()) / total if total else None
    return Premise(
        "read whole",
        "weights and prompts are read whole: nothing is skipped",
        share,
        "no server account of cached tokens"
        if share is None
        else f"{100 * share:.1f} % of the prompt tokens came from the prefix cache",
    )


def _constant_batch(bundle: Bundle, steps: _Steps | None) -> Premise:
    name, statement = "constant batch", "the batch is the same in every step"
    if steps is not None:
        decoding = steps.decodes > 0
        weights, batch, what = steps.time[decoding], steps.decodes[decoding], "decoding sequences"
    else:
        series = bundle.table("series", ["name", "value"])
        running = series.filter(pc.equal(series.column("name"), names.M_RUNNING))
        batch = _numbers(running, "value")
        batch = batch[batch > 0]
        weights, what = np.ones(len(batch)), "running requests"
    if not len(batch) or weights.sum() <= 0:
        return Premise(name, statement, None, "no step log and no gauge of running requests")
    mean, peak = float(np.average(batch, weights=weights)), float(batch.max())
    return Premise(name, statement, 1 - mean / peak, f"mean {mean:.1f}, peak {peak:.0f} {what}")


def _one_device(steps: _Steps | None) -> Premise:
    name, statement = "one device", "nothing crosses a link between devices"
    if steps is not None:
        return Premise(name, statement, 0.0, "communication 0 %: this engine runs on one device")
    return Premise(name, statement, None, "another server's communication is not seen from outside")


# --- what the run says of itself --------------------------------------------------------------------------------------


def _model(bundle: Bundle) -> str | None:
    for server in (bundle.manifest.get("server") or {}).values():
        if isinstance(server, dict) and server.get("models"):
            return str(server["models"][0])
    return None


def served_model(bundle: Bundle) -> str | None:
    """The first model that the run's servers named."""
    return _model(bundle)


def device_labels(cost: StepCost) -> dict[str, str]:
    """What floors rest on, as the labels of names.M_DEVICE_INFO."""
    device = cost.device
    return {
        "device": device.name,
        "title": device.title,
        "source": device.source,
        "flops_per_second": f"{device.flops:.4g}",
        "bytes_per_second": f"{device.bandwidth:.4g}",
        "fixed_ns": str(device.fixed_ns),
        "weight_bytes": f"{cost.weight_bytes_per_param:g}",
        "kv_bytes": f"{cost.kv_bytes:g}",
    }


def recorded_device(bundle: Bundle) -> dict[str, str] | None:
    """The labels of names.M_DEVICE_INFO that the run's server gave; None: it gave none."""
    series = bundle.table("series", ["name", "labels"])
    found = series.filter(pc.equal(series.column("name"), names.M_DEVICE_INFO)).column("labels").to_pylist()
    return {str(key): str(value) for key, value in json.loads(found[0]).items()} if found else None


def _numbers(table: pa.Table, column: str) -> Floats:
    values: Floats = table.column(column).cast(pa.float64()).to_numpy(zero_copy_only=False)
    return values
