"""The texts that are asked: golden prompts, and the reference text of drift.  Written for this project.

Must always hold: ids never change their prompt (a recorded file names them); the golden prompts differ in kind, length
and script, since faults do too: copying, lists, code, facts, counting, other alphabets, long context.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

_COPY: Final = (
    "Repeat this sentence exactly: The small green boat drifted past the old stone bridge at noon.",
    "Repeat this sentence exactly: Seven quiet engineers measured the pressure in every second pipe.",
    "Repeat this line exactly: alpha, bravo, charlie, delta, echo, foxtrot, golf, hotel, india, juliet",
    "Repeat this line exactly: 3, 6, 9, 12, 15, 18, 21, 24, 27, 30, 33, 36",
    "Repeat this line exactly: Monday, Tuesday, Wednesday, Thursday, Friday, Saturday, Sunday",
    "Repeat this text exactly: Die Katze schläft auf dem warmen Dach, und der Regen fällt leise.",
    "Repeat this text exactly: Le petit train bleu traverse la vallée avant la tombée de la nuit.",
    "Repeat this text exactly: Москва, Киев, Рига, Прага, Вена, Рим, Париж",
    "Repeat this text exactly: 一二三四五六七八九十",
    "Repeat this line exactly: {\"name\": \"pump\", \"count\": 12, \"ok\": true, \"tags\": [\"a\", \"b\"]}",
)  # fmt: skip
_LIST: Final = (
    "Count from 1 to 20, separated by commas.",
    "Write the letters of the English alphabet from A to Z, separated by spaces.",
    "List the months of the year in order, separated by commas.",
    "Write the even numbers from 2 to 30, separated by commas.",
    "List the days of the week, starting with Monday.",
    "Write the powers of two from 2 to 1024, separated by commas.",
    "Name the planets of the solar system in order from the sun.",
    "Count down from 15 to 1, separated by commas.",
)
_FACT: Final = (
    "What is the capital of France? Answer in one full sentence.",
    "What is the boiling point of water at sea level in degrees Celsius? Answer in one full sentence.",
    "How many days does a leap year have? Answer in one full sentence.",
    "Which planet is the largest in the solar system? Answer in one full sentence.",
    "Who wrote the play Romeo and Juliet? Answer in one full sentence.",
    "What is the chemical formula of water? Answer in one full sentence.",
    "What do bees make? Answer in one full sentence.",
    "What is the opposite of cold? Answer in one full sentence.",
)
_CODE: Final = (
    "Write a Python function add(a, b) that returns the sum of a and b. Code only.",
    "Write a Python function is_even(n). Code only.",
    "Write a line of Python that prints hello world.",
    "Write an SQL query that selects all rows of the table users.",
    "Write an HTML page with the title Test and an empty body.",
)
_STORY: Final = (
    "The lighthouse keeper wrote every evening into his book: which ships had passed, how the wind stood, and "
    "whether the lamp had burned well. On the third of March he wrote that a white schooner named Aurora had "
    "passed at dusk.",
    "The workshop repairs bicycles, clocks and radios. Bicycles are brought on Mondays, clocks on Wednesdays "
    "and radios on Fridays. The owner, Mr Lindqvist, opens at eight and closes at five, except on Wednesdays, "
    "when he closes at noon.",
    "The recipe wants three eggs, two hundred grams of flour, a pinch of salt and half a litre of milk. The "
    "eggs are beaten first; then flour and salt are stirred in, and at last the milk is added slowly.",
)
_ABOUT: Final = (
    ("Which ship passed on the third of March? Answer in one full sentence.", 0),
    ("On which day are clocks brought to the workshop? Answer in one full sentence.", 1),
    ("How many eggs does the recipe want? Answer in one full sentence.", 2),
)


def golden_prompts() -> list[tuple[str, str]]:
    """(id, prompt) of every candidate; which of them a server admits is ``goldens.admit``'s to say."""
    found = []
    for kind, texts in (("copy", _COPY), ("list", _LIST), ("fact", _FACT), ("code", _CODE)):
        found += [(f"{kind}-{number:02d}", text) for number, text in enumerate(texts)]
    for number, (question, story) in enumerate(_ABOUT):
        found.append((f"read-{number:02d}", f"{_STORY[story]}\n\n{question}"))
        # A long prompt over several pages of KV memory, most of it shared with the others: what a prefix cache serves.
        context = "\n\n".join([*_STORY, *_STORY[::-1]])
        found.append((f"long-{number:02d}", f"{context}\n\n{question}"))
    return found


#: What drift is measured on: prose in two languages, figures and code.
REFERENCE: Final = (Path(__file__).parent / "reference.txt").read_text(encoding="utf-8").strip()
