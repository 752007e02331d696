"""Kernels run in Triton's interpreter here, on CPU tensors.

The interpreter is chosen by a variable that triton reads when it is imported and when a kernel is decorated, so both
happen here, before any test of this folder; then the variable is as it was, and nothing else of the suite sees it.
"""

from __future__ import annotations

import importlib
import os
import sys

import numpy as np
import pytest

if "triton" in sys.modules and "engine.kernels.launch" not in sys.modules:
    raise pytest.UsageError("triton was imported before tests/kernels: its interpreter cannot be chosen any more")
_before = os.environ.get("TRITON_INTERPRET")
os.environ["TRITON_INTERPRET"] = "1"
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
try:
    importlib.import_module("triton.experimental.gluon")  # looks at it too; the first launch would import it

    import engine.kernels.feed
    import engine.kernels.gemm_quant
    import engine.kernels.gemm_small_m
    import engine.kernels.norm
    import engine.kernels.paged_decode
    import engine.kernels.paged_prefill
    import engine.kernels.rope
    import engine.kernels.sample
    import engine.kernels.silu_mul
finally:
    if _before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = _before

if not engine.kernels.launch.INTERPRETED:
    raise pytest.UsageError("engine.kernels was imported without the interpreter before tests/kernels")


@pytest.fixture
def ordered_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """Products whose elements are summed one k after the other.

    The interpreter multiplies through BLAS, where a row's last bits depend on its place in the matrix; on tensor cores
    every row of a tile is made alike.  With this, what still differs between two launches is the kernels' own doing.
    """
    from triton.runtime import interpreter

    def create_dot(
        self: object, a: interpreter.TensorHandle, b: interpreter.TensorHandle, d: interpreter.TensorHandle, *_: object
    ) -> interpreter.TensorHandle:
        total = np.zeros(d.data.shape, d.data.dtype)
        for k in range(a.data.shape[-1]):
            total += a.data[:, k : k + 1].astype(total.dtype) * b.data[k : k + 1].astype(total.dtype)
        return interpreter.TensorHandle(total + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
