"""Time by kernel, joined to the step log."""

from __future__ import annotations

import pytest

from engine.runner_triton import TritonRunner
from engine.step_profile import Profiler
from models.store import LoadedModel, load
from models.tiny import write_tiny
from tests.kernels.engines import HandDriven


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load(str(write_tiny(tmp_path_factory.mktemp("tiny"), n_layers=2, vocab=300, max_context=256)))


def test_steps_are_told_by_kernel_and_the_runner_gets_its_place_back(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny)
    driven.submit([5, 9, 13], max_tokens=1)
    driven.run()  # step 0 is not profiled
    profiler = Profiler(driven.engine, 3)
    answer = driven.submit(list(range(20, 40)), max_tokens=5)
    driven.run()
    assert isinstance(driven.engine.runner, TritonRunner)
    assert len(answer.tokens) == 5
    steps = profiler.done.result(0)
    assert [one.step for one in steps] == [1, 2, 3]
    log = {record.step: record for record in driven.engine.steps.since(-1)}
    kinds = []
    for one in steps:
        starts = {time.kernel: time.starts for time in one.kernels}
        kinds.append("prefill" if "paged_prefill" in starts else "decode")
        assert kinds[-1] == log[one.step].kind
        assert starts["rms_norm"] == 1 + 2 * 2  # one before the first layer, two in each
        assert starts["gemm_small_m"] == 4 * 2 + 1  # four in each layer and the head
        assert 0 < sum(time.seconds for time in one.kernels) <= one.seconds
    assert kinds == ["prefill", "decode", "decode"]
    assert len({record.step for record in driven.engine.steps.since(-1)}) == 6  # the others ran all the same


def test_a_profile_that_is_ended_early_has_what_there_was(tiny: LoadedModel) -> None:
    driven = HandDriven(tiny)
    profiler = Profiler(driven.engine, 100)
    driven.submit([5, 9, 13], max_tokens=2)
    driven.run()
    profiler.leave()
    assert [one.step for one in profiler.done.result(0)] == [0, 1]
    assert isinstance(driven.engine.runner, TritonRunner)
