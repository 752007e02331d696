"""Faults whose size is a share of what the healthy side took."""

from __future__ import annotations

from pathlib import Path

import pyarrow.compute as pc
import pytest

from loadgen.lab.sized import PAGE_TOKENS, pool_share, sized
from models.errors import UserError
from telemetry.bundle import Bundle
from tests.bundles import make_bundle


def test_a_pool_is_a_share_of_what_the_load_held_at_its_peak(tmp_path: Path) -> None:
    healthy = make_bundle(tmp_path, n=60, overload=True)
    peak = max(healthy.table("steps").column("kv_used").to_pylist())
    asked = {"faults": [{"name": "kv_pool", "of_peak": 40.0}, {"name": "slow_step", "size": 20}], "canaries": True}
    assert sized(asked, healthy) == {
        "faults": [{"name": "kv_pool", "size": min(1.0, 40 * peak / 1024)}, asked["faults"][1]],
        "canaries": True,
    }
    assert asked["faults"][0] == {"name": "kv_pool", "of_peak": 40.0}  # each pair asks for it anew


def test_a_pool_holds_the_longest_request(tmp_path: Path) -> None:
    healthy = make_bundle(tmp_path, n=60)
    rows = healthy.table("requests")
    both = pc.add(rows.column("prompt_tokens_reported"), rows.column("completion_tokens_reported"))
    pages = pool_share(0.001, healthy) * 1024
    assert pc.max(both).as_py() / PAGE_TOKENS < pages < pc.max(both).as_py() / PAGE_TOKENS + 3


def test_pages_are_as_large_as_those_of_the_servers_that_the_lab_starts() -> None:
    from engine.config import EngineConfig

    assert EngineConfig().block_size == PAGE_TOKENS


def test_a_side_without_a_step_log_is_named(tmp_path: Path) -> None:
    bundle = Bundle.create(tmp_path, {})
    with pytest.raises(UserError, match="no step log"):
        pool_share(0.4, bundle)
