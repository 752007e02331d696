"""Calls built in another process: the same calls, never on the sender's loop, and no silent end."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from loadgen import dispatch, plan, prompts
from loadgen.building import Builder, Frames, frame, packed
from loadgen.job import Call
from loadgen.plan import Plan, load_worker, prompt_maker
from loadgen.schedule import build
from loadgen.sender import load_from_plan
from loadgen.traces import registry
from models.errors import UserError
from models.store import load_reference
from tests.loadgen.sending import Run, Source, run, settings
from tests.loadgen.stub import Stub, answer

LENGTHS = (300, 12_000, 64, 90_000, 700, 20_000)  # the long ones cost milliseconds each
COUNT = 30


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Path:
    """The plan of COUNT requests, 10 ms apart, with long prompts among them."""
    folder = tmp_path_factory.mktemp("built")
    trace = folder / "t.csv"
    rows = [f"{n / 100},{LENGTHS[n % len(LENGTHS)]},4" for n in range(COUNT)]
    trace.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "\n".join(rows) + "\n", encoding="utf-8")
    read = registry.read(trace)
    made = Plan(
        run_id="built",
        seed=3,
        salt="s",
        trace_name="t",
        trace_path=str(trace),
        trace_format=read.format,
        trace_sha256=read.sha256,
        reference=str(model),
        served_model="m",
        max_context=1 << 20,
        min_input=prompt_maker(load_reference(str(model)), "chat", seed=3, salt="s").minimum,
        requests=COUNT,
        targets=("http://127.0.0.1:1",),
    )
    assert len(build(read, made.transforms)) == COUNT
    made.write(folder / "plan.json")
    return folder / "plan.json"


def taken(source: Frames) -> list[Call]:
    """Every call of a source, waiting for those that are not there yet."""

    async def work() -> list[Call]:
        calls: list[Call] = []
        for call in source:
            if call is None:
                more = asyncio.Event()
                source.when_ready(more.set)
                await more.wait()
            else:
                calls.append(call)
        return calls

    return run(work())


@contextmanager
def piped(count: int) -> Iterator[tuple[Frames, int]]:
    """A source of `count` calls and the end of its pipe to write to."""
    reading, writing = os.pipe()
    source = Frames(reading, count)
    try:
        yield source, writing
    finally:
        source.close()
        source.close()  # twice does no harm


def test_the_builder_makes_the_calls_of_the_plan(planned: Path) -> None:
    for worker, workers in ((0, 1), (1, 2)):
        here = list(load_worker(planned, worker, workers)[1])
        builder = Builder(planned, worker, workers, len(here))
        try:
            assert len(builder) == len(here)
            assert taken(builder) == here
        finally:
            builder.close()
        assert not Path(f"/proc/{builder.pid}").exists()


def test_the_sender_builds_no_prompt_itself(planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = [call.body for call in load_worker(planned, 0, 1)[1]]

    def never(*_: object, **__: object) -> None:
        raise AssertionError("a prompt is built in the sender")

    monkeypatch.setattr(prompts.PromptMaker, "__init__", never)
    monkeypatch.setattr(plan, "load_schedule", never)
    monkeypatch.setattr(dispatch, "LOOK_AHEAD", 4)  # most are taken over while it sends

    async def work() -> None:
        async with Stub(lambda request: answer("Aaaa")) as stub:
            _, source = load_from_plan(planned, 0, 1)
            try:
                run_ = Run(tmp_path, source, settings(stub.url))
                await run_.start(ahead_s=0.1)
                await run_.drained.wait()
                rows = await run_.stop()
            finally:
                source.close()
            assert [row["index"] for row in rows] == list(range(COUNT))
            assert sorted(request.body for request in stub.requests) == sorted(expected)

    run(work())


def calls(count: int) -> list[bytes]:
    """Frames of calls that are due at once."""
    return [packed(call) for call in Source(*[0.0] * count)]


def test_a_call_that_is_built_late_is_sent_late_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LOOK_AHEAD", 2)

    async def work() -> None:
        async with Stub(lambda request: answer("Aaaa")) as stub:
            frames = calls(5)
            with piped(5) as (source, end):
                os.write(end, b"".join(frames[:2]) + frames[2][:9])  # a frame cut in its middle
                run_ = Run(tmp_path, source, settings(stub.url))
                await run_.start()
                while run_.dispatcher.done < 2:
                    await asyncio.sleep(0.001)
                assert run_.dispatcher.built_late == 0 and not run_.dispatcher.finished
                built_ns = time.monotonic_ns()
                os.write(end, frames[2][9:] + frames[3] + frames[4])
                await run_.drained.wait()
                rows = await run_.stop()
                os.close(end)
            assert run_.dispatcher.built_late == 1  # once without a call, whatever comes with it then
            assert [row["index"] for row in rows] == list(range(5))
            assert all(row["lag_s"] * 1e9 >= built_ns - run_.zero_ns for row in rows[2:])

    run(work())


def test_a_stop_waits_for_no_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "LOOK_AHEAD", 1)
    monkeypatch.setattr(dispatch, "_LAST_BUILD_S", 0.01)

    async def work() -> list[int]:
        async with Stub(lambda request: answer("Aaaa")) as stub:
            with piped(4) as (source, end):
                os.write(end, b"".join(calls(4)[:1]))
                run_ = Run(tmp_path, source, settings(stub.url))
                await run_.start()
                while run_.dispatcher.done < 1:
                    await asyncio.sleep(0.001)
                rows = await run_.stop()
                os.close(end)
            return [row["index"] for row in rows]

    assert run(work()) == [0]


def test_a_builder_that_ends_early_is_an_error_and_its_own_errors_arrive(planned: Path, tmp_path: Path) -> None:
    with piped(2) as (source, end):
        os.write(end, calls(1)[0])
        os.close(end)
        with pytest.raises(UserError, match="ended before the last"):
            taken(source)
    with piped(2) as (source, end):
        os.write(end, frame({"message": "no such file", "where": "t.csv:3", "remedy": "look"}))
        with pytest.raises(UserError, match="no such file") as caught:
            taken(source)
        os.close(end)
    assert (caught.value.where, caught.value.remedy) == ("t.csv:3", "look")
    changed = tmp_path / "plan.json"
    changed.write_text(planned.read_text(encoding="utf-8").replace(f'"requests": {COUNT}', '"requests": 7'))
    _, builder = load_from_plan(changed, 0, 1)
    try:
        with pytest.raises(UserError, match=f"the schedule has {COUNT} requests, the plan says 7"):
            taken(builder)
    finally:
        builder.close()


def test_a_builder_whose_sender_is_gone_ends(planned: Path) -> None:
    builder = Builder(planned, 0, 1, COUNT)
    Frames.close(builder)  # as the kernel does it for a sender that was killed
    assert builder._process.wait(30) == 0
