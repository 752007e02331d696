"""``tailspan floor``: what a load must cost at least on a device, or how far a run was from that.

Owns the options and what they mean; figures come from ``models`` and ``telemetry.floor``.  Heavy imports stay inside
the function, so that ``tailspan --help`` is quick.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from models.errors import UserError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from models.roofline import StepCost
    from telemetry.bundle import Bundle

_PLAN_DEFAULTS = {"prompt": 512, "output": 128, "batch": 1, "cached": 0, "utilisation": 1.0}


def floor_command(
    model: Annotated[
        str | None, typer.Option(help="A known shape (llama-2-7b, llama-3.1-8b, ...), a model folder or a GGUF file.")
    ] = None,
    device: Annotated[str | None, typer.Option(help="A100, H100, H200, L4, or cpu: this machine, measured.")] = None,
    prompt: Annotated[int | None, typer.Option(help="Prompt tokens of each request [512].")] = None,
    cached: Annotated[int | None, typer.Option(help="Of them, tokens in the prefix cache [0].")] = None,
    output: Annotated[int | None, typer.Option(help="Output tokens of each request [128].")] = None,
    batch: Annotated[int | None, typer.Option(help="Requests that decode together [1].")] = None,
    dtype: Annotated[str | None, typer.Option(help="Precision of the weights, as stored [fp16].")] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Precision of the KV cache [fp16].")] = None,
    utilisation: Annotated[
        float | None, typer.Option(help="Share of the peak FLOP/s in the iron law's sum, 0..1 [1.0].")
    ] = None,
    run: Annotated[
        str | None, typer.Option(help="How far this run was from its floor: a bundle's path, id or latest.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Folder of run bundles [$TAILSPAN_RUNS, else ./runs].")] = None,
    remeasure: Annotated[bool, typer.Option("--remeasure", help="Measure this CPU again.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The least time that a load can take on a device, and which wall it hits; or a run beside it (--run)."""
    plan = {"prompt": prompt, "output": output, "batch": batch, "cached": cached, "utilisation": utilisation}
    given = {name: value for name, value in plan.items() if value is not None}
    if run is not None:
        if given:
            raise UserError(
                f"--{next(iter(given))} describes a planned load; a run brings its own",
                where="--run",
                remedy="leave it out, or leave --run out",
            )
        _of_run(run, root, model, device, (dtype, kv_dtype), remeasure=remeasure, as_json=as_json)
        return
    if root is not None:
        raise UserError("it says where runs are, but no run is named", where="--root", remedy="add --run latest")
    if model is None:
        if remeasure and device in (None, "cpu"):
            _only_measure(as_json)
            return
        raise UserError(
            "name a model, or a run", where="floor", remedy="e.g. --model llama-2-7b --device A100, or --run latest"
        )
    from models.devices import CPU, find_device
    from models.known_shapes import find_shape
    from models.load_account import Load, account_of
    from telemetry.floor_text import render_account

    precision = {"dtype": dtype or "fp16", "kv_dtype": kv_dtype or "fp16"}
    load = Load(**{**_PLAN_DEFAULTS, **given}, **precision)  # type: ignore[arg-type]
    load.check()  # before a measurement takes its time
    account = account_of(find_shape(model), find_device(device or CPU, remeasure=remeasure), load)
    _show(account.to_dict() if as_json else render_account(account))


def _of_run(
    run: str,
    root: Path | None,
    model: str | None,
    device: str | None,
    precision: tuple[str | None, str | None],
    *,
    remeasure: bool,
    as_json: bool,
) -> None:
    from telemetry.bundle import Bundle
    from telemetry.floor import floor_of_run
    from telemetry.floor_text import render_run

    bundle = Bundle.open(run, root)
    cost = _cost(bundle, model, device, precision, remeasure=remeasure)
    found = floor_of_run(bundle, cost)
    _show(found.to_dict() if as_json else render_run(found))


def _cost(
    bundle: Bundle,
    model: str | None,
    device: str | None,
    precision: tuple[str | None, str | None],
    *,
    remeasure: bool,
) -> StepCost | None:
    """The account to use instead of the run's own, when a device was named."""
    if device is None:
        idle = [
            name
            for name, value in zip(("--model", "--dtype", "--kv-dtype"), (model, *precision), strict=True)
            if value is not None
        ]
        if remeasure:
            idle.append("--remeasure")
        if idle:
            raise UserError(f"{idle[0]} needs the device that the run was on", where="--run", remedy="add --device")
        return None
    from models.devices import find_device
    from models.known_shapes import find_shape
    from models.load_account import Load
    from models.roofline import DTYPE_BYTES, StepCost
    from telemetry.floor import served_model

    name = model or served_model(bundle)
    if name is None:
        raise UserError("the run does not say which model it asked", where="--run", remedy="add --model")
    dtype, kv_dtype = (chosen or "fp16" for chosen in precision)
    Load(1, 1, 1, dtype=dtype, kv_dtype=kv_dtype).check()
    return StepCost(
        find_shape(name).shape, find_device(device, remeasure=remeasure), DTYPE_BYTES[dtype], DTYPE_BYTES[kv_dtype]
    )


def _only_measure(as_json: bool) -> None:
    from dataclasses import asdict

    from models.devices import CPU, find_device

    found = find_device(CPU, remeasure=True)
    if as_json:
        _show({**asdict(found), "balance": found.balance})
    else:
        typer.echo(
            f"{found.title}: {found.flops / 1e9:.0f} GFLOP/s, {found.bandwidth / 1e9:.1f} GB/s -> balance "
            f"{found.balance:.1f} FLOP/byte; {found.source}"
        )


def _show(value: dict[str, object] | RenderableType) -> None:
    if isinstance(value, dict):
        typer.echo(json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False))
        return
    from telemetry.terminal import show

    show(value)
