"""The result of a search: the capacity, and what it means in tokens, people, floors, devices and money.

Owns the arithmetic from the points and the bundle of the best run to an Answer.  Must always hold: every figure of
speed comes from a run that held the SLO; what cannot be known of this target is None, never a guess.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import pyarrow.compute as pc

from loadgen.capacity import money, search
from loadgen.capacity.point import DESCENT, SEARCH, Point
from loadgen.capacity.search import Bounds
from models.devices import Device
from models.errors import UserError
from models.roofline import StepCost
from models.shape import ModelShape
from models.steady_load import Bound, Limits, SteadyLoad
from telemetry import names
from telemetry.binding import COLUMNS as STEP_COLUMNS
from telemetry.binding import Binding, binding
from telemetry.bundle import Bundle
from telemetry.floor import floor_of_run, recorded_device
from telemetry.objective import BROKEN
from telemetry.slo import Slo

EXIT_OF: Final = {
    search.FOUND: names.EXIT_OK,
    search.ROUGH: names.EXIT_OK,
    search.NONE_HOLDS: names.EXIT_SLO_BROKEN,
    search.UNBOUNDED: names.EXIT_OK,
    search.CLIENT_LIMITED: names.EXIT_RUN_NOT_VALID,
    search.TOO_FEW: names.EXIT_RUN_NOT_VALID,
    search.INCOMPLETE: names.EXIT_RUN_NOT_VALID,
}


@dataclass(frozen=True, slots=True)
class Terms:
    """What the user states: assumptions and prices.  price: of a device-hour.  devices: of one replica.

    user_requests: an hour, of one active person.  peak: requests/s.  volume: requests a day.
    """

    price: float | None = None
    devices: int = 1
    user_requests: float = money.USER_REQUESTS
    peak: float | None = None
    volume: float | None = None

    def __post_init__(self) -> None:
        for option, value in (
            ("--device-hour", self.price),
            ("--user-requests", self.user_requests),
            ("--peak", self.peak),
            ("--volume", self.volume),
        ):
            if value is not None and not 0 < value < 1e15:
                raise UserError(f"{value:g} is no figure for this", where=option, remedy="give a number above 0")
        if not 1 <= self.devices <= 100_000:
            raise UserError(f"{self.devices} devices", where="--devices", remedy="give how many one replica has")


@dataclass(frozen=True, slots=True)
class Theory:
    """What the device allows for these lengths: by the iron law with a utilisation, and with all of the peak.

    reached: capacity / iron law's rate.
    """

    iron_law: Bound
    utilisation: float
    peak: Bound
    reached: float


@dataclass(frozen=True, slots=True)
class Descent:
    """The way down: after an overload, does the rate below what is believed hold?  rate: of the last try."""

    held: bool
    rate: float
    tries: int


@dataclass(frozen=True, slots=True)
class Answer:
    """rate, low, high: requests/s over all replicas, and its 90 %; None where the search found none.

    at_least: the highest rate that held.  best: its run.  goodput: good requests/s at the capacity; tokens: output
    tokens/s of them; both per replica.  latency_s: p50 and p95 of the best run.
    """

    ended: str
    slo: str
    load: str | None  # the trace whose lengths, and perhaps times, were sent
    simulated: str | None
    runs: int
    rate: float | None
    low: float | None
    high: float | None
    at_least: float | None
    client_ceiling: float | None
    best: str | None
    breaks: str | None
    replicas: int
    goodput: float | None
    tokens: float | None
    all_tokens: float | None
    good_share: float | None
    latency_s: dict[str, list[float | None]]
    descent: Descent | None
    users: float | None
    terms: Terms
    cost_output: float | None
    cost_all: float | None
    sizing: money.Sizing | None
    millisecond: money.Millisecond | None
    theory: Theory | None
    efficiency: dict[str, float]
    binding: Binding | None
    window_s: float
    points: tuple[Point, ...]

    @property
    def exit_code(self) -> int:
        return EXIT_OF[self.ended]

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        return {**asdict(self), "exit_code": self.exit_code}


def answer(
    points: Sequence[Point],
    bounds: Bounds,
    terms: Terms,
    slo: Slo,
    group: Path,
    limits: Limits,
    cost: StepCost | None,
    utilisation: float,
    shape: ModelShape | None,
    replicas: int,
) -> Answer:
    """cost: of the engine, where it is known beforehand; else it is made of what the best run recorded, and shape."""
    belief = search.believe(points)
    held = [point for point in points if point.held]
    best = max(held, key=lambda point: point.rate, default=None)
    rate = belief.rate if belief is not None else best.rate if best is not None else None
    top = search.ceiling(points)
    per_request = best.tokens_per_s / max(best.good_per_s, 1e-9) if best is not None else 0.0
    prompts = best.prompt_tokens_per_s / max(best.good_per_s, 1e-9) if best is not None else 0.0
    goodput = rate * (best.good_share or 0.0) / replicas if best is not None and rate is not None else None
    tokens = goodput * per_request if goodput is not None else None
    every = goodput * (per_request + prompts) if goodput is not None else None
    low = (belief.low if belief is not None else rate or 0.0) / replicas
    down = [point for point in points if point.kind == DESCENT]
    bundle = Bundle.open(group / best.run) if best is not None else None
    theory = efficiency = found = None
    if bundle is not None and rate is not None:
        cost = cost or recorded_cost(bundle, shape)
        theory = theory_of(bundle, cost, limits, utilisation, slo, rate / replicas)
        efficiency = _efficiency(bundle)
        lost = _first_broken(points)
        found = binding(
            (Bundle.open(group / lost.run) if lost is not None else bundle).table("steps", list(STEP_COLUMNS)),
            {"max_batch": limits.max_batch, "token_budget": limits.token_budget},
        )
    return Answer(
        ended=search.ended(points, bounds),
        slo=slo.name,
        load=None if bundle is None else _load(bundle),
        simulated=None if bundle is None else bundle.manifest.get(names.SIMULATED_KEY),
        runs=len(points),
        rate=rate,
        low=belief.low if belief is not None else None,
        high=belief.high if belief is not None else None,
        at_least=best.rate if best is not None else None,
        client_ceiling=top if top < float("inf") else None,
        best=best.run if best is not None else None,
        breaks=next((p.breaks for p in sorted(points, key=lambda p: p.rate) if p.verdict == BROKEN), None),
        replicas=replicas,
        goodput=goodput,
        tokens=tokens,
        all_tokens=every,
        good_share=best.good_share if best is not None else None,
        latency_s=best.latency_s if best is not None else {},
        descent=Descent(down[-1].held, down[-1].rate, len(down)) if down else None,
        users=None if rate is None else money.users(rate / replicas, terms.user_requests, terms.devices),
        terms=terms,
        cost_output=_price(terms, tokens),
        cost_all=_price(terms, every),
        sizing=money.sizing(terms.peak, low, terms.devices, terms.price) if terms.peak and low else None,
        millisecond=money.millisecond(terms.volume, rate / replicas, terms.devices, terms.price)
        if terms.volume and rate
        else None,
        theory=theory,
        efficiency=efficiency or {},
        binding=found,
        window_s=points[0].length_s if points else 0.0,
        points=tuple(points),
    )


def _load(bundle: Bundle) -> str:
    trace = bundle.manifest.get("trace") or {}
    model = (bundle.manifest.get("plan") or {}).get("arrivals")
    times = f", {model['model']} arrivals" if model else ""
    return f"{trace.get('name', 'unknown')}{' (SYNTHETIC)' if trace.get('synthetic') else ''}{times}"


def _price(terms: Terms, tokens_per_s: float | None) -> float | None:
    if terms.price is None or tokens_per_s is None:
        return None
    return money.cost_per_million(terms.price, terms.devices, tokens_per_s)


def _first_broken(points: Sequence[Point]) -> Point | None:
    """The lowest rate that broke the SLO: what fills up there first is what binds."""
    broken = [p for p in points if p.verdict == BROKEN and p.kind == SEARCH]
    return min(broken, key=lambda point: point.rate, default=None)


def theory_of(
    bundle: Bundle, cost: StepCost | None, limits: Limits, utilisation: float, slo: Slo, rate: float
) -> Theory | None:
    """The device's bounds for the lengths of a run; None where the device is not known."""
    rows = bundle.table("requests", ["input_tokens", "completion_tokens_reported", "expected_output_tokens", "error"])
    rows = rows.filter(pc.is_null(rows.column("error")))
    if cost is None or not rows.num_rows:
        return None
    inputs = pc.fill_null(rows.column("input_tokens"), 1).to_numpy()
    told = pc.coalesce(rows.column("completion_tokens_reported"), rows.column("expected_output_tokens"))
    outputs = pc.fill_null(told, 1).to_numpy()
    token_s = pace_of(slo)
    law = SteadyLoad(cost, inputs, outputs, utilisation).bound(limits, token_s)
    peak = SteadyLoad(cost, inputs, outputs, 1.0).bound(limits, token_s)
    return Theory(law, utilisation, peak, rate / law.rate)


def pace_of(slo: Slo) -> float | None:
    """The seconds that the SLO gives a token after the first: of its objectives, else of its slowest class."""
    asked = [one.bound for one in slo.objectives if one.measure == "tpot"]
    paces = [rule.e2e_per_output_token for rule in slo.classes.values() if rule.e2e_per_output_token is not None]
    return min(asked) if asked else max(paces) if paces else None


def recorded_cost(bundle: Bundle, shape: ModelShape | None) -> StepCost | None:
    """The account of a model on the device that its server named; None where it named none."""
    labels = recorded_device(bundle)
    if labels is None or shape is None:
        return None
    try:
        device = Device(
            labels["device"], labels.get("title", labels["device"]), float(labels["flops_per_second"]),
            float(labels["bytes_per_second"]), 0.0, int(float(labels["fixed_ns"])), labels.get("source", ""),
        )  # fmt: skip
        return StepCost(shape, device, float(labels["weight_bytes"]), float(labels["kv_bytes"]))
    except (KeyError, ValueError):
        return None


def _efficiency(bundle: Bundle) -> dict[str, float]:
    """Floor over time of each phase of the run; empty where nothing is known of its floors."""
    try:
        found = floor_of_run(bundle)
    except UserError:
        return {}
    return {phase.phase: phase.efficiency for phase in found.phases} | {
        f"{kind.group} steps": kind.efficiency for kind in found.kinds
    }
