"""Facts of a text: counts, and a loop score that leaves honest texts alone."""

from __future__ import annotations

import hashlib
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadgen.clean import clean
from loadgen.textfacts import MIN_COPIES, dominance, leak_counter, repeat_share, sketch, text_facts
from telemetry.scripts import foreign_letters, main_script, scripts_in

PROSE = (
    "The harbour lay quiet under a low sky when the first boats came in. Nobody spoke of the storm, although "
    "everyone had seen it pass along the horizon during the night, and the nets were heavy with what it had "
    "driven towards the coast. By noon the stalls were full and the gulls had settled on the roofs, waiting for "
    "the men to look away. A child counted the crates aloud and lost the thread at forty; her brother began anew."
)


class Letters:
    """A tokenizer of one token a character."""

    def encode_plain(self, text: str, /) -> list[int]:
        return [ord(letter) for letter in text]


def test_the_plain_counts() -> None:
    facts = text_facts("né <|im_end|>\ufffd <|im_end|><s>", leak_counter(["<|im_end|>", "<|im", "<s>"]), Letters())
    assert (facts.chars, facts.replacement_chars, facts.special_leaks, facts.tokens) == (28, 1, 3, 28)
    assert facts.sha == hashlib.sha256("né <|im_end|>\ufffd <|im_end|><s>".encode()).hexdigest()


def test_an_empty_text_and_no_tokenizer() -> None:
    facts = text_facts("", leak_counter([]), None)
    assert (facts.chars, facts.special_leaks, facts.repeat_share, facts.tokens) == (0, 0, 0.0, None)


def test_a_lone_surrogate_is_counted_and_hashed_and_cleaned() -> None:
    facts = text_facts("a\ud800b", leak_counter([]), Letters())
    assert facts.chars == 3 and len(facts.sha) == 64
    assert clean("a\ud800b") == "a\ufffd\ufffd\ufffdb"


@pytest.mark.parametrize(
    "text",
    [
        "the " * 100,
        "I am sorry, but I cannot help with that. " * 8,
        PROSE + " And then it came back again." * 40,
        PROSE[:150] + "\n- item" * 60,
        "好的" * 150,
        "\n" * 400,
        "1 " * 9,
        "ha" * 20,
    ],
)
def test_loops_score_high(text: str) -> None:
    assert repeat_share(text) > 0.8
    assert repeat_share(text[:-1]) > 0.8  # max_tokens cuts anywhere


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "No, no, no!",
        "ha ha ha ha",
        "The capital of France is Paris.",
        "yes yes yes",
        PROSE,
        PROSE + " Row, row, row your boat.",
        "1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20",
        "| a | b |\n|---|---|\n| 1 | 2 |\n| 3 | 4 |\n",
        PROSE + "\n" + "-" * 40,
        PROSE + " so it goes, so it goes, so it goes.",
    ],
)
def test_honest_texts_score_low(text: str) -> None:
    assert repeat_share(text) < 0.3


def test_a_short_text_scores_high_only_if_it_is_nothing_else() -> None:
    assert repeat_share("the the the the the the the the") == 1.0
    assert repeat_share("I said the the the the the the the the") < 0.3


def brute(tail: str) -> int:
    """The definition, letter by letter."""
    best = 0
    for period in range(1, len(tail) // MIN_COPIES + 1):
        match = 0
        while match < len(tail) - period and tail[-1 - match] == tail[-1 - match - period]:
            match += 1
        if period + match >= MIN_COPIES * period:
            best = max(best, period + match)
    return best


@given(st.text("ab", max_size=40), st.text("abc", min_size=1, max_size=30), st.integers(0, 40), st.integers(0, 30))
def test_the_longest_run_is_the_one_of_the_definition(start: str, unit: str, copies: int, cut: int) -> None:
    text = start + unit * copies + unit[: cut % len(unit)]
    tail = text[-max(200, len(text) // 2) :]
    expected = brute(tail)
    found = repeat_share(text) * max(len(tail), 200)
    if expected >= 48:  # shorter ones cannot matter, and may be overlooked
        assert found == pytest.approx(expected) or (len(text) < 200 and repeat_share(text) == 1.0)
    else:
        assert found <= expected + 1e-9 or repeat_share(text) == 1.0


def test_random_text_of_few_letters_scores_low() -> None:
    chosen = random.Random(7)
    for _ in range(50):
        assert repeat_share("".join(chosen.choice("ab ") for _ in range(600))) < 0.2


def test_dominance_needs_sixteen_parts_and_reads_chunks_before_tokens() -> None:
    assert dominance(["!"] * 15, []) is None
    assert dominance(["!"] * 16, []) == 1.0
    assert dominance([" the", " a"] * 8, [1] * 12 + [2] * 4) == 0.5
    assert dominance([" the the"], [1] * 12 + [2] * 4) == 0.75
    assert text_facts("1, 2, 3, 4, 5, 6, 7, 8, 9", leak_counter([]), Letters()).dominance == pytest.approx(8 / 25)


def test_letters_of_a_script_that_the_prompt_does_not_have() -> None:
    english = scripts_in("Why is the sea salty?")
    assert foreign_letters("The sea is salty.", english) == 0
    assert foreign_letters("Море, das Meer", english) == 4
    assert foreign_letters("Море, das Meer", scripts_in("Was heißt „море“?")) == 0
    assert text_facts("海", leak_counter([]), None, known_scripts=None).foreign_letters is None
    assert main_script("海 a 水") == "CJK" and main_script("12 + 3") is None


@given(st.text(max_size=60))
def test_sketches_count_every_byte_and_token(text: str) -> None:
    assert sum(sketch(text)) == len(text.encode()) and len(sketch(text)) == 16
    assert 512 <= sum(sketch("a" + text * 1000 + "b" * 2000)) <= 1024 + 1
    facts = text_facts(text, leak_counter([]), Letters())
    assert facts.sketch is not None and sum(facts.sketch) == facts.tokens
