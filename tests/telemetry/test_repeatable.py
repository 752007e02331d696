"""How surely a run held or broke its SLO, and which budget bound the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from telemetry import slo
from telemetry.binding import BATCH, DEVICE, KV_POOL, TOKEN_BUDGET, binding
from telemetry.repeatable import FARTHEST, chance, margin
from telemetry.schema import STEPS
from tests.bundles import answered_row
from tests.telemetry.test_summary import bundle_of

TEXT = """
classes: {default: {ttft: {base_s: 1.0}}}
objectives: [%s]
"""
LATE = {"first_token_s": 9.0, "last_token_s": 9.5, "end_s": 9.6}


def distance(tmp_path: Path, late: list[int], n: int = 200, objectives: str = "goodput >= 90 %") -> float:
    def row(index: int) -> dict[str, Any]:
        changes = {key: value + 0.1 * index for key, value in LATE.items()} if index in late else {}
        return answered_row(index, 1.0 + 0.1 * index, **changes)

    policy = slo.parse(TEXT % objectives, "x")
    bundle = bundle_of(tmp_path / f"{len(late)}-{n}-{len(objectives)}", [row(i) for i in range(n)])
    found, worst = margin(policy, bundle.table("requests"), bundle.verdicts(policy))
    assert worst in objectives
    return found


def test_the_distance_has_the_sign_of_the_verdict_and_grows_with_the_room(tmp_path: Path) -> None:
    spread = [list(range(0, 200, 200 // k))[:k] for k in (1, 10, 20, 22, 40)]
    found = [distance(tmp_path, late) for late in spread]
    assert found == sorted(found, reverse=True)
    assert found[0] > 5 and found[1] > 2
    assert 0 < found[2] < 1, "exactly what is allowed still holds"
    assert found[3] < 0 and found[4] < -3
    assert distance(tmp_path, []) == FARTHEST and chance(FARTHEST) > 0.999
    assert chance(0.0) == pytest.approx(0.5)


def test_requests_that_fail_together_say_less_than_as_many_that_fail_alone(tmp_path: Path) -> None:
    alone = distance(tmp_path, list(range(0, 200, 20)))
    together = distance(tmp_path, list(range(100, 110)))
    assert 0 < together < 0.5 * alone


def test_and_takes_the_least_and_or_the_largest(tmp_path: Path) -> None:
    late = list(range(0, 200, 10))  # 10 %
    strict, loose = (distance(tmp_path, late, objectives=f"goodput >= {bound} %") for bound in (95, 80))
    assert strict < 0 < loose
    assert distance(tmp_path, late, objectives="goodput >= 95 %, goodput >= 80 %") == strict
    assert distance(tmp_path, late, objectives="any: [goodput >= 95 %, goodput >= 80 % ]") == loose


def steps(count: int, **columns: Any) -> list[dict[str, Any]]:
    plain = {
        "running": 4, "waiting": 0, "decode_tokens": 4, "prefill_tokens": 0, "kv_used": 10, "kv_free": 90,
        "wall": "memory",
    }  # fmt: skip
    return [{"start_ns": k * 100, "end_ns": k * 100 + 90, **plain, **columns} for k in range(count)]


LIMITS = {"max_batch": 8, "token_budget": 100}


@pytest.mark.parametrize(
    ("full", "binds"),
    [
        ({"running": 8, "waiting": 3}, BATCH),
        ({"prefill_tokens": 96, "waiting": 3}, TOKEN_BUDGET),
        ({"kv_used": 97, "kv_free": 3, "waiting": 1}, KV_POOL),
        ({"running": 8}, DEVICE),  # full, but nobody waits
        ({"waiting": 3}, DEVICE),  # somebody waits, but nothing is full
    ],
)
def test_what_was_full_while_requests_waited_binds(full: dict[str, Any], binds: str) -> None:
    table = pa.Table.from_pylist(steps(80) + steps(20, **full), schema=STEPS)
    found = binding(table, LIMITS)
    assert found is not None and found.binds == binds
    assert found.walls == {"memory": pytest.approx(1.0)}
    if binds != DEVICE:
        assert found.shares[binds] == pytest.approx(0.2) and binds in found.words
    rare = binding(pa.Table.from_pylist(steps(98) + steps(2, **full), schema=STEPS), LIMITS)
    assert rare is not None and rare.binds == DEVICE, "a moment binds nothing"


def test_an_unknown_batch_limit_is_the_largest_that_is_reached_again() -> None:
    table = pa.Table.from_pylist(steps(50) + steps(50, running=6, waiting=2), schema=STEPS)
    found = binding(table, {"max_batch": None, "token_budget": None})
    assert found is not None and found.binds == BATCH and found.batch_peak == 6
    assert binding(STEPS.empty_table(), LIMITS) is None
