"""Broken input by the million: the SSE reader and every trace reader must neither crash, hang nor lose in silence.

Usage: python -m benchmarks.fuzz [--sse-minutes 10] [--trace-minutes 2] [--seed 0]

Inputs are good ones, mutated: bytes flipped, cut, doubled, swapped with tokens that matter to the format.  An input
that makes a reader do something new (by its outcome: events, drop reasons, errors) is kept and mutated further, which
is coverage guidance by behaviour.  Held against:
  * the SSE reader gives the same events for the whole input and for any cut of it, and raises only LineTooLongError;
  * an answer is the same when its stream is read whole events at a time (they are not taken apart), at once or cut;
  * a trace reader raises only UserError, keeps rows_read == rows_kept + rows_dropped, arrivals in order, and is done in
    a second of CPU.
Prints a line for each; the first input that breaks a rule is written to build/fuzz/ and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np

from loadgen.sse import LineTooLongError, SseReader
from loadgen.stream import Answer
from loadgen.traces import own, registry, servegen
from loadgen.traces.trace import Choices
from models.errors import UserError

FOUND = Path(__file__).resolve().parents[1] / "build" / "fuzz"
KEPT = 400  # inputs that did something new
SLOW_S = 1.0
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"
BURST = b"Timestamp,Model,Request tokens,Response tokens,Total tokens,Log Type\n"
SEEDS: dict[str, list[bytes]] = {
    "azure-2023": [AZURE + b"2031-02-03 04:05:06.1000001,40,7\r\n2031-02-03 04:05:07.3500001,9,1"],
    "azure-2024": [AZURE + b"2031-02-03 04:05:06+00:00,40,7\n2031-02-03 09:35:07.5+05:30,9,1\n"],
    "burstgpt-1/2": [BURST + b"5,ChatGPT,10,20,30,API log\n907,GPT-4,0,0,0,API log\n"],
    "burstgpt-3": [
        BURST.replace(b",Model", b",Session ID,Elapsed time,Model") + b"1950.0,,3,ChatGPT,12,5,17,API log\n"
    ],
    "mooncake": [b'{"timestamp": 3000, "input_length": 700, "output_length": 5, "hash_ids": [0, 1]}\n' * 3],
    "bailian": [
        b'{"chat_id": 1, "parent_chat_id": -1, "timestamp": 6.5, "input_length": 20, "output_length": 5, '
        b'"type": "text", "turn": 1, "hash_ids": [1, 2]}\n' * 3
    ],
    "ragpulse": [
        b'{"timestamp": "27", "input_length": 30, "output_length": 3, "hash_ids": {"sys_prompt": [1], '
        b'"user_input": [2]}, "session_id": "a"}\n' * 3
    ],
    "servegen": [b"0,0,0,,0,0\n600,0.2,3.0,Gamma,0.111,5.0\n1200,0.1,1.5,Weibull,0.7,0.001\n"],
    "vidur": [b"arrived_at,num_prefill_tokens,num_decode_tokens\n0.0,374.0,44\n1.314,396,109\n"],
    own.CSV: [b"t,i,o\n1.5,10,3\n2.5,11,4\n"],
    own.JSONL: [b'{"t": 1.5, "i": 10, "o": 3, "h": [1, 2]}\n' * 3],
}
ANSWER = b"".join(
    b'data: {"id": "c", "choices": [{"index": 0, "delta": {"content": "%b"}, "finish_reason": null}]}\n\n' % text
    for text in (b"a", b" b", b"c\\n", b"\xc3\xa9", b"d")
)
ANSWER += b'data: {"id": "c", "choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
OWN = Choices(columns={"time": "t", "input": "i", "output": "o"}, time_unit="s")
TOKENS = (
    b"\r\n", b"\n", b"\r", b",", b'"', b"-1", b"0", b"NaN", b"null", b"1e400", b"99999999999999999999", b"\xff",
    b"\xef\xbb\xbf", b"{", b"}", b"[", b"]", b":", b"+00:00", b"2031-13-41 99:99:99", b"1,024", b"\x00", b"data: ",
    b"data",     b"event: x\n", b"id: \x00\n", b"retry: 5\n", b": c\n", b"\n\n", b"\xf0\x9f\x90", b"true",
)  # fmt: skip


def mutated(draw: random.Random, data: bytes) -> bytes:
    """A few changes at random places."""
    for _ in range(draw.choice((1, 1, 2, 4))):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.randrange(12))
        kind = draw.randrange(6)
        if kind == 0:
            data = data[:at] + draw.choice(TOKENS) + data[at:]
        elif kind == 1:
            data = data[:at] + draw.choice(TOKENS) + data[end:]
        elif kind == 2:
            data = data[:at] + data[end:]
        elif kind == 3:
            data = data[:at] + bytes((draw.randrange(256),)) + data[at + 1 :]
        elif kind == 4:
            data = data[:at] + data[at:end] * draw.randrange(1, 4) + data[at:]
        else:
            data = data[:at]
    return data[:4096]


Check = Callable[[random.Random, bytes], object]


def fuzz(name: str, seeds: list[bytes], check: Check, minutes: float, seed: int) -> bool:
    """Mutate until the time is over.  check: raises anything for a fault; returns what it saw."""
    draw = random.Random(f"{name}:{seed}")
    kept = list(seeds)
    seen: set[object] = set()
    end = time.monotonic() + minutes * 60
    count = 0
    while time.monotonic() < end:
        data = mutated(draw, draw.choice(kept))
        count += 1
        try:
            behaviour = check(draw, data)
        except Exception as fault:
            FOUND.mkdir(parents=True, exist_ok=True)
            path = FOUND / f"{name.replace('/', '-')}.bin"
            path.write_bytes(data)
            print(f"{name}: {type(fault).__name__}: {fault}; the input is {path}")
            return False
        if behaviour not in seen and len(kept) < KEPT:
            seen.add(behaviour)
            kept.append(data)
    print(f"{name}: {count:,} inputs in {minutes:g} min, {len(seen)} kinds of outcome, no fault", flush=True)
    return True


def check_sse(draw: random.Random, data: bytes) -> object:
    """The events of a whole input and of a cut one are the same."""
    outcomes = []
    for cuts in ((), sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(1, 5)))):
        reader = SseReader(line_limit=600)
        events = []
        edges = [0, *cuts, len(data)]
        try:
            for begin, stop in pairwise(edges):
                events += reader.feed(data[begin:stop])
            outcomes.append((events, reader.pending, reader.last_id, reader.retry_ms))
        except LineTooLongError:
            outcomes.append((None, None, "", None))
    if None not in (outcomes[0][0], outcomes[1][0]):  # a limit may be met a piece earlier or later
        assert outcomes[0] == outcomes[1], "the events depend on where the bytes were cut"
    events, pending, last_id, retry = outcomes[0]
    return (None if events is None else tuple(len(e.data) for e in events)[:4], pending is None, bool(last_id), retry)


def check_answer(draw: random.Random, data: bytes) -> object:
    """A stream that is read whole events at a time, and one cut anywhere, are the same answer."""
    outcomes = []
    ends = [at + 2 for at in range(len(data)) if data.startswith(b"\n\n", at)]
    for cuts in (ends, [], sorted(draw.randrange(len(data) + 1) for _ in range(draw.randrange(1, 5)))):
        answer = Answer(line_limit=600)
        answer.head(200, {b"content-type": b"text/event-stream"}, 1)
        for begin, stop in pairwise([0, *cuts, len(data)]):
            answer.feed(data[begin:stop], 2)
        answer.end(3)
        outcomes.append((answer.pieces, answer.finish_reason, answer.completion_tokens, answer.failure))
    limited = any(o[3] is not None and "unreadable" in o[3].detail for o in outcomes)  # met a piece earlier or later
    assert limited or outcomes[0] == outcomes[1] == outcomes[2], "the answer depends on where the bytes were cut"
    pieces, finish, tokens, failure = outcomes[0]
    return len(pieces), finish, tokens is None, None if failure is None else failure.detail[:20]


def trace_check(format: str, folder: Path) -> Callable[[random.Random, bytes], object]:
    """The check of one trace reader, which is told the format: recognition is not what is tried here."""
    path = folder / ("c-trace.csv" if format == "servegen" else "trace")
    if format == "servegen":
        servegen.MAX_PER_WINDOW = 20_000  # type: ignore[misc]  # a mutated rate may ask for a load that takes its time
        tables = {"0": {"input_tokens": "{10: 1.0}", "output_tokens": "{3: 0.5, 4: 0.5}"}}
        (folder / "c-dataset.json").write_text(json.dumps(tables), encoding="utf-8")

    def check(draw: random.Random, data: bytes) -> object:
        base = OWN if format in own.FORMATS else Choices()
        choices = Choices(
            format=format,
            columns=base.columns,
            time_unit=base.time_unit,
            failures=draw.choice(("keep", "drop")),
            restart=draw.choice(("fail", "append")),
        )
        path.write_bytes(data)
        began = time.process_time()  # not wall time: the machine may be busy
        try:
            trace = registry.read(path, choices=choices)
        except UserError as error:
            assert error.where and error.remedy, "an error without its place or its remedy"
            return ("error", error.message[:24])
        finally:
            assert time.process_time() - began < SLOW_S, "too slow"
        assert trace.rows_read == trace.rows_kept + sum(trace.rows_dropped.values()), "rows are lost in silence"
        assert (np.diff(trace.arrival_ns) >= 0).all(), "arrivals out of order"
        assert len(trace) == trace.rows_kept and trace.input_tokens.min() >= 0
        return tuple(sorted(trace.rows_dropped)), len(trace), len(trace.notes)

    return check


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--sse-minutes", type=float, default=10.0)
    parser.add_argument("--trace-minutes", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    stream = b'\xef\xbb\xbf: hi\r\nid: 7\r\nevent: message\r\ndata: {"a": 1}\r\n\r\n'
    stream += b"data:b\ndata: c\n\nretry: 9\n\ndata: [DONE]\n\n"
    held = [fuzz("sse", [stream], check_sse, asked.sse_minutes, asked.seed)]
    held.append(fuzz("answer", [ANSWER], check_answer, asked.trace_minutes, asked.seed))
    with tempfile.TemporaryDirectory(prefix="tailspan-fuzz-") as name:
        for format, seeds in SEEDS.items():
            held.append(fuzz(format, seeds, trace_check(format, Path(name)), asked.trace_minutes, asked.seed))
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
