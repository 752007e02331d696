"""CUDA graphs of steps of decodes: one a layout (``device_batch``), captured before the server is ready.

A small model's step is some hundred launches of a few microseconds each: without graphs the host decides.  A graph
replays over memory of its own: a step's numbers are copied there, and its logits stay there until the next replay.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from engine.device_batch import Layout

Compute = Callable[[Layout, torch.Tensor], torch.Tensor]


class Graphs:
    """``compute(layout, ints) -> logits``, captured.  All graphs share one pool: only one runs at a time."""

    def __init__(self, compute: Compute, device: torch.device) -> None:
        self._compute, self._device = compute, device
        self._captured: dict[Layout, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __len__(self) -> int:
        return len(self._captured)

    def capture(self, layout: Layout) -> None:
        """Capture one layout.  Its first run, outside, compiles what it needs.  Raises torch.OutOfMemoryError."""
        if layout in self._captured:
            return
        ints = torch.zeros(layout.size, dtype=torch.int32, device=self._device)
        layout.views(ints)["slots"].fill_(-1)  # padding rows only: nothing is written to the KV pool
        self._compute(layout, ints)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self._compute(layout, ints)
        self._captured[layout] = (graph, ints, logits)

    def replay(self, layout: Layout, ints: torch.Tensor) -> torch.Tensor | None:
        """Logits of the step, valid until the next replay; None where the layout was not captured."""
        found = self._captured.get(layout)
        if found is None:
            return None
        graph, memory, logits = found
        memory.copy_(ints, non_blocking=True)
        graph.replay()
        return logits
