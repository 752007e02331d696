"""Which runner computes the steps: the one place where a backend is chosen and an engine built on it.

    auto        triton where a GPU is visible, else cpu
    cpu         the forward in C (``engine.native``) where it can be had, else in torch (``engine.runner_cpu``)
    triton      the kernels (``engine.kernels``) on a GPU (``engine.runner_triton``)
    simulated   nothing is computed: step times of a model of a device (``engine.simulated``)

Nothing heavy is imported before the model was found.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from engine.config import AUTO, CPU, SIMULATED, TRITON, EngineConfig
from models.errors import UserError
from models.store import LoadedModel, Reference, load

if TYPE_CHECKING:
    from engine.core import Engine
    from engine.native.runner import NativeRunner
    from engine.runner_cpu import CpuRunner
    from engine.scheduler import Slice

log = logging.getLogger("tailspan.engine")


def resolved(backend: str) -> str:
    """What ``auto`` means on this machine."""
    if backend != AUTO:
        return backend
    import torch

    return TRITON if torch.cuda.is_available() else CPU


def open_model(config: EngineConfig) -> Reference:
    """The model that a configuration names, with its weights where the backend computes.  Raises UserError."""
    if resolved(config.backend) == SIMULATED:
        from engine.simulated import open_reference

        return open_reference(config.model)
    return load(config.model)


def build(config: EngineConfig, model: Reference) -> Engine:
    """An engine, warm: the first request meets no cold code.  Raises UserError."""
    engine = _BUILDERS[resolved(config.backend)](config, model)
    gc.collect()
    gc.freeze()  # the model and its tables live for ever: the collector need not walk them in a step
    return engine


def _cpu(config: EngineConfig, model: Reference) -> Engine:
    from engine.core import Engine
    from models.cpu_device import this_cpu
    from models.roofline import StepCost

    if not isinstance(model, LoadedModel):
        raise TypeError("the cpu backend needs a model with its weights")
    config.refuse_kernel_options()
    runner = _cpu_runner(config, model)
    cost = StepCost(model.shape, this_cpu(), runner.weight_bytes, runner.kv_bytes)
    engine = Engine(config, model, runner, cost)
    seconds = runner.warm_up(lambda n: _warm_slices(engine, n))
    log.info("forward: %s, %s, %d threads; warm-up took %.2f s", runner.name, runner.dtype, runner.threads, seconds)
    return engine


def _triton(config: EngineConfig, model: Reference) -> Engine:
    from engine.core import Engine
    from engine.runner_triton import make_triton_runner
    from models.roofline import StepCost

    if not isinstance(model, LoadedModel):
        raise TypeError("the triton backend needs a model with its weights")
    runner = make_triton_runner(model, config)
    device = runner.account
    cost = StepCost(model.shape, device, runner.weight_bytes, runner.kv_bytes) if device is not None else None
    engine = Engine(config, model, runner, cost)
    seconds = runner.warm_up(lambda n: _warm_slices(engine, n))
    log.info("forward: %s, %s weights on %s; warm-up took %.2f s", runner.name, runner.dtype, runner.device, seconds)
    return engine


def _cpu_runner(config: EngineConfig, model: LoadedModel) -> NativeRunner | CpuRunner:
    """The forward in C where it can be had, else in torch, which says why."""
    from engine.native.build import NoCompiler
    from engine.native.runner import NativeRunner, fits
    from engine.runner_cpu import CpuRunner

    reason = fits(model, config)
    if reason is None:
        try:
            return NativeRunner(model, config)
        except NoCompiler as error:
            reason = str(error)
    if config.dtype.startswith("int"):
        raise UserError(
            f"{config.dtype} weights need the forward in C, which cannot be had: {reason}",
            where="engine configuration",
            remedy="use fp32, bf16 or auto",
        )
    log.warning("the forward runs in torch, which is slower: %s", reason)
    return CpuRunner(model, config)


def _warm_slices(engine: Engine, n: int) -> list[Slice]:
    from engine.phase_clock import PhaseClock
    from engine.request import Request, SamplingParams
    from engine.scheduler import Slice

    n = min(n, engine.max_context, engine.pool.total * engine.pool.size)
    request = Request("warm-up", [0] * n, SamplingParams(max_tokens=1), PhaseClock(0), lambda _output: None)
    request.tokens = list(request.prompt_ids)
    request.blocks = list(range(engine.pool.pages(n)))
    return [Slice(request, 0, n, True)]


def _simulated(config: EngineConfig, model: Reference) -> Engine:
    from engine.core import Engine
    from engine.simulated import SimulatedRunner, simulation

    what = simulation(config, model)
    engine = Engine(config, model, SimulatedRunner(config, what), what.cost)
    log.warning("SIMULATED: nothing is computed, answers mean nothing; %s", what.label)
    return engine


_BUILDERS: Final[dict[str, Callable[[EngineConfig, Reference], Engine]]] = {
    CPU: _cpu,
    TRITON: _triton,
    SIMULATED: _simulated,
}
