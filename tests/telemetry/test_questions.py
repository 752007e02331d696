"""The shipped questions: sound, distinct, exactly checkable; and the checkers at their edges."""

from __future__ import annotations

import json

import pytest

from telemetry import paired
from telemetry.question_sets import PER_KIND, SETS
from telemetry.questions import JSON, KINDS, NUMBER, PATTERN, PHRASE, Question, digest, score

#: sha256 of each set: change ``VERSION`` when you change a question, since old scores can no longer be compared.
DIGESTS = {
    "small": "3242b12ca8007d2bb433f264cab874e8de053aebb870fe19638a33a94f3d19f6",
    "large": "e70ce2ea1c543237975cba4b10b398cfcafb413107843799e9eb809d3a613f8a",
}


@pytest.mark.parametrize("name", SETS)
def test_every_question_is_distinct_and_passes_its_own_answer(name: str) -> None:
    questions = SETS[name]()
    assert len(questions) == 3 * PER_KIND == len({q.id for q in questions}) == len({q.prompt for q in questions})
    assert {kind: sum(q.kind == kind for q in questions) for kind in KINDS} == dict.fromkeys(KINDS, PER_KIND)
    assert all(score(questions, [q.good_answer for q in questions]).values())
    assert not any(score(questions, [""] * len(questions)).values())
    assert not any(score(questions, ["I do not know."] * len(questions)).values())
    for question in questions:
        assert question.expected not in question.others and 1 <= question.max_tokens <= 96


@pytest.mark.parametrize("name", SETS)
def test_the_answer_of_another_question_is_wrong(name: str) -> None:
    questions = SETS[name]()
    by_kind = [q for q in questions if q.kind == "extraction"]
    for question in by_kind:
        for other in question.others:
            assert not question.is_right(other)
            assert not question.is_right(f"{question.expected} or {other}")
    for question in questions:
        if question.checker == NUMBER:
            assert not question.is_right(str(float(question.expected) + 1))
        if question.checker == JSON:
            assert not question.is_right("{}") and not question.is_right(question.expected + "!")


@pytest.mark.parametrize("name", SETS)
def test_the_sets_do_not_change_under_their_name(name: str) -> None:
    assert digest(SETS[name]()) == DIGESTS[name]


@pytest.mark.parametrize("name", SETS)
def test_extraction_answers_stand_in_their_document(name: str) -> None:
    for question in SETS[name]():
        if question.kind == "extraction":
            assert question.expected in question.prompt and all(other in question.prompt for other in question.others)


@pytest.mark.parametrize(
    ("checker", "expected", "text", "right"),
    [
        (NUMBER, "12", "12", True),
        (NUMBER, "12", " 7 + 5 = 12.\nSo 13", True),  # the first line with a number, its last number
        (NUMBER, "12", "The answer:\n12", True),
        (NUMBER, "1200", "1,200 lamps", True),
        (NUMBER, "12", "120", False),
        (NUMBER, "-3", "it is -3", True),
        (NUMBER, "12", "twelve", False),
        (PHRASE, "Lisbon", "lisbon.", True),
        (PHRASE, "Lisbon", "She lives in Lisbon, not Oslo", False),
        (PHRASE, "red", "a hundred", False),
        (PHRASE, "K137", "Order K137 was received.", True),
        (PATTERN, r"river, ?candle\.?", "river,candle.", True),
        (PATTERN, r"river, ?candle\.?", "Sure! river, candle", False),
        (JSON, '{"a": 1}', '```json\n{"a": 1}\n```', True),
        (JSON, '{"a": 1}', ' {"a":1} ', True),
        (JSON, '{"a": 1}', '{"a": 1} done', False),
        (JSON, '{"a": 1}', '{"a": 2}', False),
        (JSON, "null", "none", False),
    ],
)
def test_checkers(checker: str, expected: str, text: str, right: bool) -> None:
    assert Question("q", "format", "?", checker, expected, ("Oslo",)).is_right(text) is right


def test_scores_are_compared_in_pairs() -> None:
    questions = SETS["small"]()
    before = score(questions, [q.good_answer for q in questions])
    after = score(questions, [q.good_answer if i % 10 else "?" for i, q in enumerate(questions)])
    found = paired.compare(before, after)
    assert (found.lost, found.worse) == (12, True)
    assert paired.power(len(questions), lost_share=0.12) > 0.8
    with pytest.raises(ValueError, match="answers to"):
        score(questions, ["x"])
    assert json.loads(json.dumps(found.to_dict()))["lost"] == 12
