"""The cost account: the worked figures of the field, shapes against published sizes, and the laws of a lower bound."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models import cpu_device
from models.devices import DEVICES, Device, find_device
from models.errors import UserError
from models.known_shapes import SHAPES, find_shape
from models.load_account import GIB, Account, Load, account_of
from models.roofline import (
    COMPUTE,
    MEMORY,
    OVERHEAD,
    KvCapacity,
    StepCost,
    efficiency,
    mean_context,
    pairs,
    residents,
    wall_of,
)
from models.store import load_reference
from models.tiny import write_tiny

A100 = DEVICES["A100"]
LLAMA7 = SHAPES["llama-2-7b"]


@pytest.fixture(scope="module")
def worked() -> Account:
    """7B in FP16 on an A100, 14 requests of 8192 tokens."""
    return account_of(LLAMA7, A100, Load(prompt=8192, output=256, batch=14))


# --- the worked figures; rule of thumb: 2 x parameters FLOPs a token, 2 bytes a parameter, no attention ---


def test_a100_balance() -> None:
    assert (A100.flops, A100.bandwidth) == (312e12, 2039e9)
    assert round(A100.balance) == 153


def test_7b_decode_reads_14_gb_in_6_9_ms(worked: Account) -> None:
    assert worked.thumb.weight_bytes == 2 * 7e9
    assert round(worked.thumb.decode_alone_s * 1e3, 1) == 6.9


def test_8192_tokens_of_prefill_are_114_tflop_in_0_37_s(worked: Account) -> None:
    assert worked.thumb.prefill_flops == 2 * 7e9 * 8192
    assert int(worked.thumb.prefill_flops / 1e12) == 114
    assert round(worked.thumb.prefill_s, 2) == 0.37


def test_8k_of_kv_of_a_7b_is_4_gib(worked: Account) -> None:
    # 2 (keys, values) x 32 layers x 32 heads x 128 x 2 bytes x 8192 tokens
    assert worked.thumb.kv_bytes_per_request == worked.kv_bytes_per_request == 4 * GIB


def test_batch_14_at_8k_moves_74_1_gb_in_36_4_ms_for_385_tokens_a_second(worked: Account) -> None:
    assert round(worked.thumb.step_bytes / 1e9, 1) == 74.1
    assert round(worked.thumb.weight_bytes / GIB) == 13
    assert round(worked.thumb.step_s * 1e3, 1) == 36.4
    assert round(worked.thumb.tokens_per_s) == 385


def test_gib_read_as_gb_gives_the_34_ms_and_411_tokens_a_second_often_quoted(worked: Account) -> None:
    quoted = round(worked.thumb.misread_step_s * 1e3)
    assert quoted == 34
    assert int(14 / quoted * 1e3) == 411


# --- the same load by the shape ---


def test_the_shape_counts_attention_apart_and_the_embedding_by_rows(worked: Account) -> None:
    prefill = worked.prefill
    # 4 x layers x heads x head size a pair, 8192 x 8193 / 2 pairs
    assert prefill.attention_flops == 4 * 32 * 32 * 128 * (8192 * 8193 / 2)
    table = 32_000 * 4096
    norms = (2 * 32 + 1) * 4096
    products = LLAMA7.shape.parameters() - 2 * table - norms
    assert prefill.linear_flops == 2 * products * 8192 + 2 * table  # the head for the last row only
    assert prefill.flops == int(prefill.linear_flops + prefill.attention_flops)
    assert worked.weight_bytes == 2 * (LLAMA7.shape.parameters() - table + 4096)
    assert (prefill.wall, worked.decode.wall) == (COMPUTE, MEMORY)


def test_the_iron_law_adds_up_what_the_floor_overlaps(worked: Account) -> None:
    for phase in (worked.prefill, worked.decode):
        memory, compute = phase.bytes / A100.bandwidth, phase.flops / A100.flops
        assert phase.floor_s == pytest.approx(max(memory, compute) + 5e-6, rel=1e-6)
        assert phase.iron_law_s == pytest.approx(memory + compute + 5e-6, rel=1e-6)
    half = account_of(LLAMA7, A100, Load(8192, 256, 14, utilisation=0.5))
    assert half.prefill.floor_s == worked.prefill.floor_s
    gain = half.prefill.iron_law_s - worked.prefill.iron_law_s
    assert gain == pytest.approx(worked.prefill.flops / A100.flops, rel=1e-6)


def test_littles_law_turns_memory_into_a_batch_and_a_rate(worked: Account) -> None:
    assert worked.batch_that_fits == 15
    left = 80e9 - 2 * LLAMA7.shape.parameters()
    assert worked.kv_capacity_tokens == int(left / (4 * GIB / 8192))
    assert residents(worked.rate, worked.residence_s) == pytest.approx(14)
    capacity = KvCapacity(100_000)
    rate = capacity.rate(1000, 5.0, used=0.9)
    assert residents(rate, 5.0) * 1000 == pytest.approx(90_000)
    assert KvCapacity.beside_weights(SHAPES["llama-2-70b"].shape, A100, 2, 2).tokens == 0


def test_cached_prompt_tokens_need_no_prefill_but_stay_in_the_context() -> None:
    cost = StepCost(LLAMA7.shape, A100, 2, 2)
    whole, rest, none = cost.prefill(4000), cost.prefill(4000, 3000), cost.prefill(4000, 4000)
    assert rest.flops < whole.flops / 3
    # one token is always computed; whatever is cached is still read, so it beats the cold prompt by FLOPs alone
    assert none == cost.prefill(4000, 3999)
    assert none.bytes > cost.prefill(1).bytes


def test_the_prompt_in_chunks_is_never_faster_than_its_floor() -> None:
    cost = StepCost(LLAMA7.shape, A100, 2, 2)
    chunks = [
        cost.floor_ns(256, 0, start + 256, 1 if start + 256 == 2048 else 0, pairs(start, 256)).floor_ns
        for start in range(0, 2048, 256)
    ]
    assert sum(chunks) > cost.ttft_ns(2048)


def test_time_per_token_is_the_mean_over_its_steps() -> None:
    cost = StepCost(LLAMA7.shape, A100, 2, 2)
    steps = [cost.decode(100 + k).floor_ns for k in range(1, 50)]
    assert cost.tpot_ns(100, 50) == pytest.approx(sum(steps) / len(steps), abs=2)
    assert mean_context(100, 50) == sum(100 + k for k in range(1, 50)) / 49
    assert cost.tpot_ns(100, 1) is None


def test_an_idle_step_costs_only_the_fixed_part() -> None:
    cost = StepCost(LLAMA7.shape, A100, 2, 2)
    assert cost.floor_ns(0, 0, 0, 0) == (5000, 0, 0, OVERHEAD)


# --- laws of a lower bound ---

SIZES = st.integers(0, 5000)
COSTS = st.builds(
    StepCost,
    st.sampled_from([known.shape for known in SHAPES.values()]),
    st.sampled_from(list(DEVICES.values())),
    st.sampled_from([0.5, 0.625, 1, 2, 4]),
    st.sampled_from([1, 2, 4]),
)


@settings(max_examples=200, deadline=None)
@given(COSTS, SIZES, SIZES, SIZES, SIZES, SIZES, st.integers(0, 4), st.integers(1, 1000))
def test_the_floor_is_monotone_in_every_argument(
    cost: StepCost, prefill: int, decodes: int, context: int, sampled: int, attended: int, which: int, more: int
) -> None:
    arguments = [prefill, decodes, context, sampled, attended]
    before = cost.floor_ns(*arguments)
    arguments[which] += more
    after = cost.floor_ns(*arguments)
    assert after.floor_ns >= before.floor_ns and after.bytes >= before.bytes and after.flops >= before.flops
    heavier = StepCost(cost.shape, cost.device, 2 * cost.weight_bytes_per_param, 2 * cost.kv_bytes)
    assert heavier.floor_ns(*arguments).floor_ns >= after.floor_ns
    for change in ("bandwidth", "flops"):
        faster = dataclasses.replace(cost.device, **{change: 2 * getattr(cost.device, change)})
        better = StepCost(cost.shape, faster, cost.weight_bytes_per_param, cost.kv_bytes)
        assert better.floor_ns(*arguments).floor_ns <= after.floor_ns


@settings(max_examples=200, deadline=None)
@given(COSTS, SIZES, SIZES, SIZES, st.floats(1.0, 1000.0), st.floats(0.01, 1.0))
def test_efficiency_is_at_most_one_and_the_iron_law_never_below_the_floor(
    cost: StepCost, prefill: int, decodes: int, context: int, slower: float, utilisation: float
) -> None:
    step = cost.floor_ns(prefill, decodes, context, decodes)
    duration = step.floor_ns * slower
    assert 0 < efficiency(step.floor_ns, duration) <= 1
    assert cost.iron_law_ns(step, utilisation) >= step.floor_ns - 1  # a floor is in whole ns
    assert wall_of(step, duration) == (OVERHEAD if slower > 2 else step.wall)


# --- shapes ---


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-2-7b", 6_738_415_616),
        ("llama-2-13b", 13_015_864_320),
        ("llama-2-70b", 68_976_648_192),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.1-70b", 70_553_706_496),
        ("llama-3.2-1b", 1_235_814_400),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_248_023_552),
        ("tinyllama-1.1b", 1_100_048_384),
        ("smollm2", 134_515_008),
        ("smollm2-360m", 361_821_120),
        ("smollm2-1.7b", 1_711_376_384),
        ("qwen2.5-0.5b", 494_032_768),
        ("qwen3-8b", 8_190_735_360),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    known = find_shape(name.upper())
    assert known.shape.parameters() == parameters
    assert abs(known.nominal / parameters - 1) < 0.25  # Llama 3.2 1B has 1.24


def test_the_known_smollm2_is_the_real_one(smollm2: Path) -> None:
    real = load_reference(str(smollm2)).shape
    assert dataclasses.replace(SHAPES["smollm2"].shape, name=real.name) == real


def test_a_model_folder_gives_its_shape(tmp_path: Path) -> None:
    known = find_shape(str(write_tiny(tmp_path / "tiny-model")))
    assert known.shape.name == "tiny-model"
    assert known.nominal == known.shape.parameters()


# --- what is refused ---


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"prompt": 0}, "--prompt"),
        ({"output": 0}, "--output"),
        ({"batch": -1}, "--batch"),
        ({"cached": 100}, "--cached"),
        ({"utilisation": 1.5}, "--utilisation"),
        ({"utilisation": 0.0}, "--utilisation"),
        ({"dtype": "fp12"}, "--dtype"),
        ({"kv_dtype": "int4"}, "--kv-dtype"),
    ],
)
def test_an_impossible_load_is_refused_by_name(change: dict[str, object], where: str) -> None:
    load = Load(**{"prompt": 100, "output": 10, "batch": 1, **change})  # type: ignore[arg-type]
    with pytest.raises(UserError) as caught:
        account_of(LLAMA7, A100, load)
    assert caught.value.where == where


def test_unknown_names_are_refused_with_those_known() -> None:
    with pytest.raises(UserError, match=r"llama-3\.1-8b"):
        find_shape("llama-3.1-8")
    with pytest.raises(UserError, match="H100"):
        find_device("h10")


# --- this CPU ---


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path))
    monkeypatch.setattr(cpu_device, "BUDGET_S", 0.05)
    return tmp_path


def note(cache: Path) -> Path:
    return next((cache / "devices").glob("*.json"))


def test_the_cpu_is_measured_once_and_remembered(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    first = find_device("cpu")
    assert 1e8 < first.bandwidth < 1e13 and 1e8 < first.flops < 1e16
    assert 0 < first.fixed_ns < 1_000_000 and first.memory > 1e8
    written = note(cache).stat().st_mtime_ns
    assert find_device("CPU") == first
    assert note(cache).stat().st_mtime_ns == written
    facts = json.loads(note(cache).read_text())
    assert facts["cpu"] == cpu_device.cpu_model() and facts["unix_s"] > 1.6e9
    note(cache).write_text(json.dumps({**facts, "bandwidth": 1.0}))
    assert find_device("cpu").bandwidth == 1.0
    assert find_device("cpu", remeasure=True).bandwidth > 1e8


def test_what_was_measured_on_a_busy_machine_is_only_ever_improved(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    assert "while busy" in find_device("cpu").source
    facts = json.loads(note(cache).read_text())
    note(cache).write_text(json.dumps({**facts, "bandwidth": 1.0, "flops": 1e20}))
    again = find_device("cpu")
    assert again.bandwidth > 1e8 and again.flops == 1e20


@pytest.mark.parametrize("text", ["", "{", "[]", '{"version": 1}', '{"bandwidth": "fast"}'])
def test_a_damaged_note_is_measured_again(cache: Path, text: str) -> None:
    find_device("cpu")
    note(cache).write_text(text)
    assert isinstance(find_device("cpu"), Device)
    assert json.loads(note(cache).read_text())["bandwidth"] > 1e8


def test_a_cache_that_cannot_be_written_costs_only_the_next_measurement(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(cpu_device, "BUDGET_S", 0.05)
    assert find_device("cpu").flops > 1e8
