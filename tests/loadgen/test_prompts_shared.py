"""Prompts that begin alike where the trace says so, documents with answers, and prompts that a user brings."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path

import numpy as np
import pytest

from loadgen.bodies import COMPLETIONS, RESPONSES, Sampling
from loadgen.calls import Calls
from loadgen.classes import TrafficClass
from loadgen.documents import DocumentPrompts
from loadgen.prompts import NoTemplate, PromptMaker
from loadgen.schedule import Schedule, build
from loadgen.sharing import SESSION_BLOCK, SharedPrompts
from loadgen.textfacts import matches
from loadgen.traces.trace import Rows, Trace
from loadgen.transforms import Mix, Transforms
from loadgen.user_prompts import UserPrompts
from models.errors import UserError
from models.store import Reference, load_reference

BLOCK = 64


@pytest.fixture(scope="module")
def tiny(model: Path) -> Reference:
    return load_reference(str(model))


def maker(reference: Reference, salt: str = "run-1") -> PromptMaker:
    return PromptMaker(reference.tokenizer, reference.template, seed=0, salt=salt)


def tree(block: int = BLOCK) -> Trace:
    """Prompts of 1 to 6 blocks that branch off each other; ids are prefix-chained, as an engine's are."""
    rng = np.random.default_rng(4)
    rows = Rows(Path("made"), block_size=block)
    chains: list[list[int]] = [[0]]
    for n in range(40):
        parent = chains[int(rng.integers(len(chains)))]
        ids = [
            *parent[: int(rng.integers(1, len(parent) + 1))],
            *range(100 * n + 1, 100 * n + 1 + int(rng.integers(3))),
        ]
        chains.append(ids)
        tokens = (len(ids) - 1) * block + int(rng.integers(1, block + 1))
        rows.keep(n * 10**9, tokens, 5, ids=ids)
    return rows.trace("made", "mooncake", "0", [])


def encoded(reference: Reference, texts: Sequence[str]) -> list[list[int]]:
    chats = ([{"role": "user", "content": text}] for text in texts)
    return [reference.tokenizer.encode(reference.template.render(chat)) for chat in chats]


def common(one: Sequence[int], other: Sequence[int]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@pytest.mark.parametrize("scale", [1.0, 0.5, 0.2])
def test_prompts_share_the_blocks_that_the_trace_shares_and_no_more(tiny: Reference, scale: float) -> None:
    trace, prompts = tree(), maker(tiny)
    schedule = build(trace, Transforms(seed=0, length_scale=scale, min_input=prompts.minimum))
    shared = SharedPrompts(prompts, schedule)
    made = [shared.make(n, int(schedule.input_tokens[n])) for n in range(len(schedule))]
    assert all(one is not None for one in made)
    ids = encoded(tiny, [one.text for one in made if one is not None])
    assert [len(one) for one in ids] == schedule.input_tokens.tolist(), "exact, template included"
    assert trace.prefixes is not None
    again = 0
    for a in range(len(ids)):
        for b in range(a):
            blocks = common(trace.prefixes.of(a), trace.prefixes.of(b)) // shared.group
            edge = math.floor(BLOCK * scale * shared.group * blocks + 0.5) if blocks else prompts.before
            found = common(ids[a], ids[b])
            again += blocks > 0
            assert found >= min(edge, len(ids[a]) - 25, len(ids[b]) - 25)
            if blocks * shared.group < min(len(trace.prefixes.of(a)), len(trace.prefixes.of(b))) - shared.group:
                assert found < edge + prompts.salt_tokens, "salt words tell different blocks apart"
    assert again > 50


def test_copies_and_other_salts_share_nothing(tiny: Reference) -> None:
    trace, prompts = tree(), maker(tiny)
    schedule = build(trace, Transforms(seed=0, loop=2, min_input=prompts.minimum))
    shared = SharedPrompts(prompts, schedule)
    other = SharedPrompts(maker(tiny, "run-2"), schedule)
    tokens = int(schedule.input_tokens[5])
    made = [shared.make(5, tokens), shared.make(45, tokens), other.make(5, tokens), shared.make(5, tokens)]
    first, copy, salted, same = encoded(tiny, [one.text for one in made if one is not None])
    assert first == same
    limit = prompts.before + prompts.salt_tokens
    assert common(first, copy) < limit and common(first, salted) < limit


def test_turns_of_a_session_share_what_came_before(tiny: Reference) -> None:
    rows = Rows(Path("made"))
    for n, (tokens, session) in enumerate([(150, 1), (300, 1), (150, 2), (90, -1), (90, -1)]):
        rows.keep(n * 10**9, tokens, 5, session=session)
    prompts = maker(tiny)
    schedule = build(rows.trace("made", "burstgpt-3", "0", []), Transforms(seed=0, min_input=prompts.minimum))
    calls = Calls(schedule, prompts, Sampling("m", 0, 1.0, 1.0, True), "r", 0.0)
    ids = encoded(tiny, [calls.prompt(n).text for n in range(5)])
    assert [len(one) for one in ids] == [150, 300, 150, 90, 90]
    assert common(ids[0], ids[1]) >= 2 * SESSION_BLOCK
    assert common(ids[0], ids[2]) < prompts.before + prompts.salt_tokens
    assert common(ids[3], ids[4]) < prompts.before + prompts.salt_tokens
    apart = Calls(schedule, prompts, Sampling("m", 0, 1.0, 1.0, True), "r", 0.0, share_prefixes=False)
    ids = encoded(tiny, [apart.prompt(n).text for n in range(2)])
    assert common(ids[0], ids[1]) < prompts.before + prompts.salt_tokens


def test_a_document_holds_its_answer_once_and_many_questions_share_it(tiny: Reference) -> None:
    prompts = maker(tiny)
    documents = DocumentPrompts(prompts, seed=0, salt="run-1")
    made = [documents.make(n, 60 + 13 * n) for n in range(60)]
    ids = encoded(tiny, [one.text for one in made])
    heads = set()
    for n, (one, tokens) in enumerate(zip(made, ids, strict=True)):
        assert len(tokens) == one.tokens == max(documents.minimum, 60 + 13 * n)
        assert one.answer is not None and one.text.count(one.answer) == 1
        clause = one.text.split(f" is {one.answer} euros")[0].rsplit(" The ", 1)[1]
        assert f"how many euros is the {clause}?" in one.text, "the question is about that clause"
        heads.add(one.text.split(".")[0])
    assert 5 < len(heads) <= 16
    other = DocumentPrompts(maker(tiny, "run-2"), seed=0, salt="run-2").make(7, 400)
    assert other.text.split(".")[0] not in heads, "another run has other policies"
    assert matches("It is 347 euros.", "347") and not matches("3475", "347") and not matches("a347", "347")


def mixed(reference: Reference, file: Path) -> tuple[Schedule, Calls]:
    rows = Rows(Path("made"))
    for n in range(600):
        rows.keep(n * 10**8, 200, 5, session=n // 3)
    asked = Transforms(seed=2, min_input=30, mix=(Mix("chat", 0.5), Mix("help", 0.3), Mix("mine", 0.2)))
    schedule = build(rows.trace("made", "x", "0", []), asked)
    classes = (
        TrafficClass("chat", 0.5),
        TrafficClass("help", 0.3, "documents"),
        TrafficClass("mine", 0.2, "file", str(file)),
    )
    sampling = Sampling("m", 0, 1.0, 1.0, True)
    return schedule, Calls(schedule, maker(reference), sampling, "r", 0.0, classes=classes, salt="s")


def test_classes_are_mixed_by_session_with_prompts_of_their_kind(tiny: Reference, tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [{"prompt": "Where is the ferry?", "answer": "harbor"}, {"messages": [{"role": "user", "content": "Why?"}]}]
    file.write_text("\n".join(json.dumps(line) for line in lines), encoding="utf-8")
    schedule, calls = mixed(tiny, file)
    assert schedule.session is not None
    for session in range(200):
        assert len(set(schedule.klass[schedule.session == session].tolist())) == 1
    shares = np.bincount(schedule.klass) / len(schedule)
    assert shares == pytest.approx([0.5, 0.3, 0.2], abs=0.08)
    by_class = {name: [n for n in range(600) if schedule.klass[n] == k] for k, name in enumerate(schedule.class_names)}
    help_ = calls.at(by_class["help"][0])
    assert help_.klass == "help" and help_.expected_answer is not None and b"According to the policy" in help_.body
    mine = [calls.at(n) for n in by_class["mine"][:6]]
    assert {call.expected_answer for call in mine} <= {"harbor", None}
    for call in mine:
        text = json.loads(call.body)["messages"][0]["content"]
        assert text in ("Where is the ferry?", "Why?")
        assert call.prompt_tokens_expected == len(encoded(tiny, [text])[0])


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("{", "not JSON"),
        ("[]", "not an object"),
        ('{"text": "x"}', "unknown key 'text'"),
        ('{"prompt": "x", "messages": []}', "one of prompt and messages"),
        ('{"messages": [{"role": "user"}]}', "no message with role and content"),
        ('{"prompt": "x", "answer": 3}', "is no text"),
    ],
)
def test_a_prompt_that_cannot_be_used_names_its_line(tiny: Reference, tmp_path: Path, line: str, word: str) -> None:
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + line, encoding="utf-8")
    with pytest.raises(UserError, match=word) as caught:
        UserPrompts(maker(tiny), path)
    assert caught.value.where == f"{path}:3"


def test_each_api_has_its_own_body_and_completions_count_without_a_template(tiny: Reference) -> None:
    rows = Rows(Path("made"))
    rows.keep(0, 120, 7)
    plain = PromptMaker(tiny.tokenizer, NoTemplate(), seed=0, salt="s")
    schedule = build(rows.trace("made", "x", "0", []), Transforms(seed=0, min_input=plain.minimum))
    sampling = Sampling("m", 0, 1.0, 1.0, True)
    call = Calls(schedule, plain, replace(sampling, api=COMPLETIONS), "r", 0.0).at(0)
    body = json.loads(call.body)
    assert (call.path, body["max_tokens"], "messages" in body) == ("/v1/completions", 7, False)
    assert len(tiny.tokenizer.encode(body["prompt"])) + len(tiny.tokenizer.prefix_ids) == 120 == call.input_tokens
    call = Calls(schedule, maker(tiny), replace(sampling, api=RESPONSES), "r", 0.0).at(0)
    body = json.loads(call.body)
    assert (call.path, body["max_output_tokens"], body["stream"]) == ("/v1/responses", 7, True)
    assert body["input"][0]["role"] == "user" and "min_tokens" not in body
