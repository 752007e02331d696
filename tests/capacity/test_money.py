"""Devices, people and money, held against sums by hand."""

from __future__ import annotations

import pytest

from loadgen.capacity import money
from loadgen.capacity.answer import Terms
from models.errors import UserError


def test_cost_per_million_tokens() -> None:
    # 1,000 token/s are 3.6 million an hour; two devices at 1.80 an hour cost 3.60
    assert money.cost_per_million(1.80, 2, 1000.0) == pytest.approx(1.0)
    assert money.cost_per_million(1.80, 2, 0.0) is None


def test_users() -> None:
    assert money.users(10.0, 12.0, 1) == pytest.approx(3000.0)  # 36,000 requests an hour, 12 each
    assert money.users(10.0, 12.0, 4) == pytest.approx(750.0)


def test_sizing_rounds_up_and_adds_one_replica_to_spare() -> None:
    size = money.sizing(100.0, 18.0, 2, 3.0)
    assert (size.replicas, size.devices, size.with_spare, size.price_per_hour) == (6, 12, 14, 36.0)
    assert money.sizing(36.0, 18.0, 1, None).replicas == 2, "exactly two are two"
    assert money.sizing(1.0, 18.0, 1, None).replicas == 1


def test_a_millisecond_of_a_billion_requests_is_eleven_and_a_half_machine_days() -> None:
    one = money.millisecond(1e9, 20.0, 1, 3.0)
    assert one.machine_days == pytest.approx(1e6 / 86_400)  # 1e9 ms are 1e6 s
    assert one.device_ms == pytest.approx(50.0) and one.share == pytest.approx(0.02)
    assert one.price_per_day == pytest.approx(72.0 * 1e6 / 86_400)


@pytest.mark.parametrize(
    ("values", "option"),
    [({"price": 0.0}, "--device-hour"), ({"peak": -1.0}, "--peak"), ({"volume": float("nan")}, "--volume"),
     ({"user_requests": 0.0}, "--user-requests"), ({"devices": 0}, "--devices")],
)  # fmt: skip
def test_terms_that_make_no_sense(values: dict[str, float], option: str) -> None:
    with pytest.raises(UserError, match=option):
        Terms(**values)  # type: ignore[arg-type]
