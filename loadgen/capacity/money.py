"""What a capacity means in devices, people and money.  Plain arithmetic; every assumption is an argument.

Must always hold: sizing uses the low end of what is believed of the capacity, never the middle.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

DAY_S: Final = 86_400.0
HOUR_S: Final = 3600.0
USER_REQUESTS: Final = 12.0  # an hour of a person at work: one question in five minutes; an assumption, printed as such


@dataclass(frozen=True, slots=True)
class Sizing:
    """replicas for a peak (requests/s), and one more so that one may fail; devices and their price an hour."""

    peak: float
    replicas: int
    devices: int
    with_spare: int
    price_per_hour: float | None


@dataclass(frozen=True, slots=True)
class Millisecond:
    """One millisecond of device time per request, at a volume of requests a day.

    machine_days: of devices, every day.  share: of the device time that a request takes now.
    """

    volume: float
    machine_days: float
    device_ms: float
    share: float
    price_per_day: float | None


def cost_per_million(price_per_hour: float, devices: int, tokens_per_s: float) -> float | None:
    """Price of a million tokens at this many a second; None where there are none."""
    return price_per_hour * devices / HOUR_S / tokens_per_s * 1e6 if tokens_per_s > 0 else None


def users(rate: float, requests_per_hour: float, devices: int) -> float:
    """People who may be active at once for each device."""
    return rate * HOUR_S / requests_per_hour / devices


def sizing(peak: float, rate: float, devices: int, price_per_hour: float | None) -> Sizing:
    """rate: requests/s that one replica of so many devices holds for sure."""
    replicas = max(1, math.ceil(peak / rate - 1e-9))
    every = replicas * devices
    return Sizing(peak, replicas, every, every + devices, None if price_per_hour is None else price_per_hour * every)


def millisecond(volume: float, rate: float, devices: int, price_per_hour: float | None) -> Millisecond:
    """rate: requests/s of one replica."""
    machine_days = volume * 1e-3 / DAY_S
    device_ms = 1e3 * devices / rate
    price = None if price_per_hour is None else price_per_hour * 24 * machine_days
    return Millisecond(volume, machine_days, device_ms, 1 / device_ms, price)
