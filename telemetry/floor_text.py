"""The cost account in the terminal: of a planned load, and of a run.

Owns the layout only; every number comes from ``models.load_account`` or ``telemetry.floor``.  Must always hold: each
figure stands beside the formula or the count that it comes from, and 100 columns are enough.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from models.load_account import GIB, Account
from models.roofline import OVERHEAD
from models.wording import several
from telemetry.floor import RunFloor, StepsFloor
from telemetry.summary import format_seconds


def render_account(account: Account) -> RenderableType:
    """The account of a planned load."""
    device, load = account.device, account.load
    cached = f" ({load.cached} cached)" if load.cached else ""
    head = [
        f"{account.model}: {account.parameters / 1e9:.3g} x 10^9 parameters ({_nominal(account)} by name), "
        f"weights {load.dtype}, KV {load.kv_dtype}",
        f"{device.name}: {_rate(device.flops, 'FLOP/s')}, {_gb(device.bandwidth)}/s -> balance "
        f"{device.balance:.0f} FLOP/byte, {_gb(device.memory)}; {device.source}",
        f"load: prompt {load.prompt}{cached}, output {load.output}, batch {load.batch}",
    ]
    blocks: list[RenderableType] = [*map(Text, head), Text(), _figures(account), Text(), *map(Text, _notes(account))]
    return Group(*blocks)


def _figures(account: Account) -> Table:
    load, thumb = account.load, account.thumb
    prefill, alone, decode = account.prefill, account.decode_alone, account.decode
    table = _table("", "rule of thumb", "by the shape", "wall", left=1)
    table.add_row("weights read by a step", _gb(thumb.weight_bytes), _gb(account.weight_bytes))
    table.add_row("decode alone", f"{_ms(thumb.decode_alone_s)}/token", f"{_ms(alone.floor_s)}/token", alone.wall)
    table.add_row(
        f"prefill of {load.prompt - load.cached} tokens",
        f"{_rate(thumb.prefill_flops, 'FLOP')} -> {_s(thumb.prefill_s)}",
        f"{_rate(prefill.flops, 'FLOP')} -> {_s(prefill.floor_s)}",
        prefill.wall,
    )
    table.add_row("  of it attention", "left out", _rate(prefill.attention_flops, "FLOP"))
    table.add_row("KV of a prompt", _gib(thumb.kv_bytes_per_request), _gib(account.kv_bytes_per_request))
    table.add_row(
        f"decode step, batch {load.batch}",
        f"{_gb(thumb.step_bytes)} -> {_ms(thumb.step_s)}",
        f"{_gb(decode.bytes)} -> {_ms(decode.floor_s)}",
        decode.wall,
    )
    table.add_row("  that is", f"{thumb.tokens_per_s:.0f} token/s", f"{account.tokens_per_s:.0f} token/s")
    table.add_row("iron law, prefill", "", _s(prefill.iron_law_s))
    table.add_row("iron law, decode step", "", _ms(decode.iron_law_s))
    return table


def _notes(account: Account) -> Iterable[str]:
    load, thumb, device = account.load, account.thumb, account.device
    yield (
        "Rule of thumb: 2 FLOPs per parameter and token; a step reads all parameters and, in a batch, the KV of its "
        "prompts; no attention."
    )
    yield (
        "By the shape: embedding by rows, KV at the mean context (prompt + output / 2), attention 4 x layers x heads "
        "x head size FLOPs a pair of tokens; floor = max(bytes / bandwidth, FLOPs / peak) + "
        f"{device.fixed_ns / 1000:.3g} us a step. Iron law: bytes / bandwidth + FLOPs / (peak x "
        f"{load.utilisation:g}) + the same."
    )
    if thumb.weight_bytes >= GIB and (quoted := round(thumb.misread_step_s * 1e3)):
        yield (
            f"Beware: {thumb.weight_bytes / GIB:.0f} GiB + {load.batch} x {thumb.kv_bytes_per_request / GIB:.3g} GiB = "
            f"{_gb(thumb.step_bytes)}. With GiB read as GB, as such figures are often quoted, the step seems to take "
            f"{quoted} ms and to give {int(load.batch / quoted * 1e3)} token/s."
        )
    bound = account.compute_bound_batch
    if bound is None:
        yield "A decode step is never bound by compute: a sequence's KV takes longer to read than its token to compute."
    elif bound <= 1:
        yield "A decode step is bound by compute at any batch."
    else:
        yield f"A decode step is bound by compute from batch {bound:.0f} on."
    total = load.prompt + load.output
    fit = account.batch_that_fits
    yield (
        f"Memory beside the weights holds KV for {account.kv_capacity_tokens} tokens: {fit} "
        f"request{'' if fit == 1 else 's'} of {total}{' - this batch does not fit.' if fit < load.batch else '.'}"
    )
    yield (
        f"At most {account.rate:.3g} requests/s keep the device busy with these; by Little's law each then stays "
        f"{load.batch} / {account.rate:.3g} = {format_seconds(account.residence_s)}."
    )
    if total > account.max_context:
        yield f"{total} tokens exceed the model's context of {account.max_context}: the figures are arithmetic only."


def render_run(run: RunFloor) -> RenderableType:
    """How far a run was from its floors."""
    blocks: list[RenderableType] = [Text(f"Floors of run {run.run_id}, model {run.model or 'unknown'}")]
    if run.device is not None:
        blocks.append(Text(_device_line(run.device)))
    if not run.recorded:
        blocks.append(Text("floors worked out here, from the model and device named, not noted by the server"))
    if run.phases:
        blocks += [Text(), _phase_table(run)]
    if run.kinds:
        blocks += [Text(), _steps_table("steps", run.kinds)]
    if run.batches:
        blocks += [Text(), _steps_table("batch", run.batches)]
    if run.idle_share is not None:
        blocks += [
            Text(),
            Text("steps: by kind; batch: pure decode steps by sequences; wall: where most of the time went."),
            Text(f"Between steps, with work waiting: {100 * run.idle_share:.1f} % of the time."),
        ]
    if run.faster:
        blocks.append(
            Text(
                f"{several(run.faster, 'step was faster than its', 'steps were faster than their')} floor: "
                "the device can do more than its figures say; "
                "measure it again on a quiet machine (tailspan floor --device cpu --remeasure) and restart the server."
            )
        )
    return Group(*blocks, Text(), *_premises(run))


def _device_line(device: dict[str, str]) -> str:
    flops, bandwidth = float(device["flops_per_second"]), float(device["bytes_per_second"])
    return (
        f"{device['title']}: {_rate(flops, 'FLOP/s')}, {_gb(bandwidth)}/s -> balance {flops / bandwidth:.0f} "
        f"FLOP/byte ({device['source']}); {device['weight_bytes']} bytes a weight, {device['kv_bytes']} a KV number"
    )


def _phase_table(run: RunFloor) -> Table:
    table = _table("phase", "requests", "median", "floor alone", "of floor", "wall", left=1)
    for one in run.phases:
        per = "" if one.phase == "prefill" else "/token"
        seen = "" if one.by_server else " (client's view)"
        table.add_row(
            one.phase + seen,
            str(one.requests),
            format_seconds(one.median_s) + per,
            format_seconds(one.floor_median_s) + per,
            _percent(one.efficiency),
            one.wall or "-",
        )
    return table


def _steps_table(title: str, groups: Sequence[StepsFloor]) -> Table:
    table = _table(title, "n", "time", "floor", "of floor", "GB/s", "GFLOP/s", "wall", left=1)
    for one in groups:
        table.add_row(
            one.group,
            str(one.steps),
            format_seconds(one.time_s),
            format_seconds(one.floor_s),
            _percent(one.efficiency),
            f"{one.bytes_per_s / 1e9:.3g}",
            f"{one.flops_per_s / 1e9:.3g}",
            f"{one.wall} {100 * one.walls[one.wall]:.0f} %",
        )
    return table


def _premises(run: RunFloor) -> Iterable[Text]:
    yield Text("The account's premises:")
    for one in run.premises:
        mark = "not known" if one.holds is None else "holds" if one.holds else "FAILS"
        yield Text(f"  {mark:<9}  {one.statement}: {one.found}")
    first = next((one for one in run.premises if one.name == run.fails_first), None)
    if first is None:
        yield Text("No premise fails: the floors say what this load could reach.")
    else:
        yield Text(f"Fails first: {first.name} (off by {100 * (first.strain or 0):.0f} %).")
    if any(one.wall == OVERHEAD for one in run.kinds):
        yield Text(f"Wall {OVERHEAD}: most of the time of a step is explained neither by its bytes nor by its FLOPs.")


def _table(*headers: str, left: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for place, header in enumerate(headers):
        table.add_column(header, justify="left" if place < left or header.startswith("wall") else "right", no_wrap=True)
    return table


def _nominal(account: Account) -> str:
    scale, unit = (1e9, "B") if account.nominal >= 1e9 else (1e6, "M")
    return f"{account.nominal / scale:.3g}{unit}"


def _rate(value: float, unit: str) -> str:
    for scale, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if value >= scale:
            return f"{value / scale:.4g} {prefix}{unit}"
    return f"{value:.3g} {unit}"


def _gb(value: float) -> str:
    if value < 1e9:
        return f"{value / 1e6:.3g} MB"
    return f"{value / 1e9:.1f} GB" if value < 1e12 else f"{value / 1e9:.0f} GB"


def _gib(value: float) -> str:
    return f"{value / GIB:.3g} GiB" if value >= GIB / 10 else f"{value / (1 << 20):.3g} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"


def _s(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else _ms(seconds)


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %" if share >= 0.1 else f"{100 * share:.1f} %"
