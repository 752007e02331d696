"""The shipped questions: ``small`` for models below about 1B parameters, ``large`` for what is above.

Owns the content, written for this project.  Right answers are computed from the same facts as the prompts, so a prompt
and its answer cannot drift apart.  Must always hold: the sets are the same on every machine and never change under one
name (``VERSION`` and ``questions.digest`` say which they are); 120 questions each, 40 of a kind.

120 questions see a loss of 12 % of the answers that were right in all, with 80 % (``paired.power``); more of them would
cost more than they tell beside goldens and drift.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Final

from telemetry.questions import ARITHMETIC, EXTRACTION, FORMAT, JSON, NUMBER, PATTERN, PHRASE, Question

VERSION: Final = 1
PER_KIND: Final = 40


def small() -> list[Question]:
    """For a model of 100M to 1B parameters: one step each.  SmolLM2-135M has 49 of 120 right."""
    return [*_sums(), *_notes(), *_copies()]


def large() -> list[Question]:
    """For larger models: several steps, documents with distractors, exact JSON."""
    return [*_word_problems(), *_reports(), *_structures()]


SETS: Final[dict[str, Callable[[], list[Question]]]] = {"small": small, "large": large}

# --- small ---

_TOOLS: Final = ("pens", "cups", "keys", "coins", "shirts", "books", "plates", "stamps")
_PEOPLE: Final = ("Mara", "Tomas", "Ines", "Jonas", "Priya", "Oleg", "Hana", "Felix", "Nadia", "Bruno")
_TOWNS: Final = ("Lisbon", "Oslo", "Kyoto", "Quito", "Cairo", "Dublin", "Hanoi", "Perth", "Bergen", "Lima")
_JOBS: Final = ("baker", "nurse", "pilot", "farmer", "painter", "teacher", "lawyer", "singer", "plumber", "chemist")
_COLOURS: Final = ("red", "green", "yellow", "purple", "orange", "silver", "brown", "pink")
_WORDS: Final = ("river", "candle", "window", "garden", "silver", "rocket", "butter", "forest", "pencil", "monkey")


def _sums() -> Iterator[Question]:
    """Sums and differences of one step."""
    for n in range(PER_KIND):
        a, b, name = 2 + (7 * n) % 9, 1 + (5 * n + 3 + n // 36) % 9, f"s-arithmetic-{n:02d}"
        if n % 4 == 0:
            yield Question(name, ARITHMETIC, f"What is {10 * a} + {b}?", NUMBER, str(10 * a + b), max_tokens=24)
        elif n % 4 == 1:
            yield Question(name, ARITHMETIC, f"What is {a + b} - {b}?", NUMBER, str(a), max_tokens=24)
        elif n % 4 == 2:
            yield Question(name, ARITHMETIC, f"What is {a} + {b}?", NUMBER, str(a + b), max_tokens=24)
        else:
            thing = _TOOLS[n % len(_TOOLS)]
            prompt = f"Ada has {a} {thing} and gets {b} more. How many {thing} does she have now?"
            yield Question(name, ARITHMETIC, prompt, NUMBER, str(a + b), max_tokens=32)


def _notes() -> Iterator[Question]:
    """One or two sentences; the answer stands in them."""
    for n in range(PER_KIND):
        who, other = _PEOPLE[n % 10], _PEOPLE[(n + 3) % 10]
        town, elsewhere = _TOWNS[(3 * n + n // 10) % 10], _TOWNS[(3 * n + n // 10 + 4) % 10]
        job, work = _JOBS[(7 * n + n // 10) % 10], _JOBS[(7 * n + n // 10 + 5) % 10]
        one = f"{who} is a {job} and lives in {town}."
        two = f"{one} {other} is a {work} and lives in {elsewhere}."
        code, wrong = str(2311 + 173 * n), str(9187 - 131 * n)
        prompt, answer, not_this = (
            (f"{one} Where does {who} live?", town, elsewhere),
            (f"{two} Where does {other} live?", elsewhere, town),
            (f"{two} What is the job of {who}?", job, work),
            (f"The code of the door of {who} is {code}. The code of the door of {other} is {wrong}. "
             f"What is the code of the door of {who}?", code, wrong),
        )[n % 4]  # fmt: skip
        others = (not_this,) if not_this in prompt else ()
        yield Question(f"s-extraction-{n:02d}", EXTRACTION, prompt, PHRASE, answer, others, max_tokens=24)


def _copies() -> Iterator[Question]:
    """Exact copies, order, and one word only."""
    for n in range(PER_KIND):
        a, b, c = _WORDS[n % 10], _WORDS[(n + 1 + n // 10) % 10], _WORDS[(n + 4 + n // 10) % 10]
        colour = _COLOURS[(n + n // 10) % 8]
        asked, pattern, sample = (
            (f"Repeat this sentence exactly: The {a} is {colour}.", rf"['\"]?The {a} is {colour}\.?['\"]?",
             f"The {a} is {colour}."),
            (f"Write a list of these three words, in this order: {a}, {b}, {c}",
             rf"(?si).*\b{a}\b.*\b{b}\b.*\b{c}\b.*", f"1. {a}\n2. {b}\n3. {c}"),
            (f"Repeat this sentence exactly: I see a {a} and a {b}.", rf"['\"]?I see a {a} and a {b}\.?['\"]?",
             f"I see a {a} and a {b}."),
            (f"Repeat this sentence exactly: My {a} lies beside the {b}.",
             rf"['\"]?My {a} lies beside the {b}\.?['\"]?", f"My {a} lies beside the {b}."),
        )[n % 4]  # fmt: skip
        yield Question(f"s-format-{n:02d}", FORMAT, asked, PATTERN, pattern, max_tokens=24, sample=sample)


# --- large ---


def _word_problems() -> Iterator[Question]:
    end = "Write the final number and nothing else."
    for n in range(PER_KIND):
        a, b, c, d = 12 + 7 * n, 3 + n % 7, 24 + 5 * (n % 9), 2 + n % 5
        if n % 5 == 0:
            text, answer = f"Compute {a} * {c} - {b}.", a * c - b
        elif n % 5 == 1:
            text = f"A shop sells {a} boxes of {b} lamps each. {c} lamps come back. How many lamps stay sold?"
            answer = a * b - c
        elif n % 5 == 2:
            text, answer = f"What is the remainder when {a * c + d} is divided by {b + 6}?", (a * c + d) % (b + 6)
        elif n % 5 == 3:
            start = f"{8 + n % 9}:{c % 60:02d}"
            text = f"A train leaves at {start} and travels {a} minutes. How many minutes past midnight does it arrive?"
            answer = (8 + n % 9) * 60 + c % 60 + a
        else:
            text = f"The sum of two numbers is {a + c} and their difference is {abs(a - c)}. What is the larger one?"
            answer = max(a, c)
        yield Question(f"l-arithmetic-{n:02d}", ARITHMETIC, f"{text} {end}", NUMBER, str(answer), max_tokens=24)


_DEPOTS: Final = ("Alder", "Birch", "Cedar", "Dogwood", "Elm", "Fir", "Gorse", "Hazel", "Ivy", "Juniper")
_GOODS: Final = ("valves", "cables", "pumps", "filters", "sensors", "motors", "hinges", "relays")


def _reports() -> Iterator[Question]:
    for n in range(PER_KIND):
        depots = [_DEPOTS[(n + 3 * k) % 10] for k in range(4)]
        goods = [_GOODS[(n // 2 + 3 * k) % 8] for k in range(4)]
        counts = [41 + (17 * n + 53 * k) % 400 for k in range(4)]
        codes = [f"{'KQRT'[k]}{(n * 37 + k * 311) % 900 + 100}" for k in range(4)]
        people = [_PEOPLE[(n + 2 * k + n // 10) % 10] for k in range(4)]
        lines = [
            f"Depot {depots[k]} received {counts[k]} {goods[k]} under order {codes[k]}; {people[k]} signed for them."
            for k in range(4)
        ]
        note = f"Order {codes[1]} was first booked to depot {depots[3]} by mistake and corrected on the same day."
        text = " ".join([*lines, note, "No depot received goods of another."])
        pick = (n // 4) % 4
        asked, column = (
            (f"Which order did depot {depots[pick]} receive?", codes),
            (f"Who signed for order {codes[pick]}?", people),
            (f"Which goods did depot {depots[pick]} receive?", goods),
            (f"How many {goods[pick]} were received?", [str(count) for count in counts]),
        )[n % 4]
        answer = column[pick]
        others = tuple(sorted({value for value in column if value != answer}))
        prompt = f"Answer from the report alone, with the value only and no sentence.\n\n{text}\n\n{asked}"
        yield Question(f"l-extraction-{n:02d}", EXTRACTION, prompt, PHRASE, answer, others, max_tokens=16)


def _structures() -> Iterator[Question]:
    for n in range(PER_KIND):
        who, town, job = _PEOPLE[n % 10], _TOWNS[(n + n // 10) % 10], _JOBS[(3 * n + n // 10) % 10]
        age = 21 + (11 * n) % 60
        words = [_WORDS[(n // 4 + 3 * k) % 10] for k in range(4)]
        text = f"{who} is {age} years old, works as a {job} and lives in {town}."
        if n % 4 == 0:
            value: object = {"name": who, "age": age, "town": town}
            asked = f'{text} Write a JSON object with the keys "name", "age" (a number) and "town", and nothing else.'
        elif n % 4 == 1:
            value = sorted(words)
            asked = f"Sort these words from A to Z and write them as a JSON array, nothing else: {', '.join(words)}"
        elif n % 4 == 2:
            value = {"person": {"name": who, "job": job}, "adult": True, "letters": len(town)}
            asked = (
                f'{text} Write JSON and nothing else: "person" with "name" and "job", "adult" as true or false, and '
                f'"letters", the number of letters in the name of the town.'
            )
        else:
            value = [[word, len(word)] for word in words[:3]]
            asked = (
                f"For each of the words {', '.join(words[:3])}, in this order, make a pair of the word and its number "
                f"of letters. Write a JSON array of these pairs (each an array) and nothing else."
            )
        expected = json.dumps(value)
        yield Question(f"l-format-{n:02d}", FORMAT, asked, JSON, expected, max_tokens=96)
