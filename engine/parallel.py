"""Tensor parallelism: one process a GPU, each with its heads and its part of the MLP (``device_weights.Shard``).

Rank 0 owns the engine; the others follow.  Before each step rank 0 tells them its layout and its int32 memory over
gloo; then all compute the same step, and their results of o and of down are added up (one all-reduce each), over NCCL
on GPUs and gloo on CPUs.  The vocabulary is cut as well: one more all-reduce finds the embeddings, one all-gather puts
the logits together.  Every rank then holds the same rows; rank 0 samples.

What must hold: followers do nothing but what they are told, in that order, so every collective meets its peers; they
end when they are told so or when rank 0 is gone.
"""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import subprocess
import sys
from datetime import timedelta
from typing import TYPE_CHECKING, Final

import numpy as np
import torch
import torch.distributed as dist

from engine.config import EngineConfig
from engine.device_batch import Layout
from engine.device_weights import Shard

if TYPE_CHECKING:
    from collections.abc import Sequence

STOP: Final = 0
STEP: Final = 1
CAPTURE: Final = 2
_FIELDS: Final = len(dataclasses.fields(Layout))
# an idle server may say nothing for months; a rank that is gone closes its sockets, which is noticed at once
_PATIENCE: Final = timedelta(days=365)


class Parallel:
    """This process's place among the ranks."""

    def __init__(self, rank: int, world: int, port: int, device: torch.device) -> None:
        self.shard = Shard(rank, world)
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(
            backend, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world, timeout=_PATIENCE
        )

    def add_up(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks, in place."""
        dist.all_reduce(x)
        return x

    def put_together(self, x: torch.Tensor) -> torch.Tensor:
        """[rows, n] of every rank, in their order, as [rows, n world]."""
        parts = [torch.empty_like(x) for _ in range(self.shard.world)]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=1)

    def least(self, n: int) -> int:
        """The least of what the ranks have."""
        all_of_them = torch.tensor([n])
        dist.all_reduce(all_of_them, dist.ReduceOp.MIN)
        return int(all_of_them)

    def tell(self, what: int, layout: Layout | None = None, ints: np.ndarray | None = None) -> None:
        """Rank 0: what comes next."""
        numbers = layout.numbers() if layout is not None else (0,) * _FIELDS
        dist.broadcast(torch.tensor([what, *numbers]), 0)
        if ints is not None:
            dist.broadcast(torch.from_numpy(ints), 0)

    def hear(self) -> tuple[int, Layout, np.ndarray | None]:
        """The others: wait for what comes next."""
        head = torch.zeros(1 + _FIELDS, dtype=torch.long)
        dist.broadcast(head, 0)
        what, *numbers = head.tolist()
        layout = Layout(*numbers)
        if what != STEP:
            return what, layout, None
        ints = torch.zeros(layout.size, dtype=torch.int32)
        dist.broadcast(ints, 0)
        return what, layout, ints.numpy()

    def close(self) -> None:
        """Leave the group."""
        dist.destroy_process_group()


class Followers:
    """The processes of ranks 1 .., started by rank 0."""

    def __init__(self, config: EngineConfig, model: str, environment: dict[str, str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        told = {"config": dataclasses.asdict(config), "model": model, "port": self.port}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "engine.parallel", json.dumps({**told, "rank": rank})],
                env={**os.environ, **environment},
            )
            for rank in range(1, config.tensor_parallel)
        ]

    def join(self, timeout: float) -> list[int]:
        """Wait for their end, by force after ``timeout`` seconds; their exit codes."""
        codes = []
        for process in self._processes:
            try:
                codes.append(process.wait(timeout))
            except subprocess.TimeoutExpired:
                process.kill()
                codes.append(process.wait())
        return codes


def main(arguments: Sequence[str]) -> None:
    """A follower's whole life."""
    told = json.loads(arguments[0])
    config = EngineConfig(**told["config"])
    from engine.runner_triton import TritonRunner, device_of
    from models.store import load

    rank = int(told["rank"])
    parallel = Parallel(rank, config.tensor_parallel, int(told["port"]), device_of(rank))
    runner = TritonRunner(load(told["model"]), config, parallel)
    runner.follow()
    parallel.close()


if __name__ == "__main__":
    main(sys.argv[1:])
