"""A document assistant: a policy that many requests share, a question on it, and an answer that can be checked.

Each of DOCUMENTS policies is a list of clauses, "the travel allowance of the Lisbon office is 347 euros", no two of
them on the same thing.  A prompt is as many clauses as its length allows, some plain sentences, and a question on one
clause that is in it.  Prompts on one policy begin alike up to the shorter one's last clause; policies are salted per
run.  Must always hold: exactly the asked number of tokens (at least `minimum`), and the answer stands in the prompt
once.
"""

from __future__ import annotations

import hashlib
from functools import cached_property
from typing import Final

from loadgen.prompts import Prompt, PromptMaker

DOCUMENTS: Final = 16
TOPICS: Final = (
    "travel allowance", "meal allowance", "training budget", "phone budget", "parking fee", "late return fee",
    "relocation grant", "clothing grant", "home office grant", "fitness grant", "visitor budget", "library budget",
)  # fmt: skip
PLACES: Final = (
    "Lisbon", "Oslo", "Turin", "Leeds", "Ghent", "Porto", "Basel", "Graz", "Lyon", "Malmo", "Bergen", "Cork",
    "Dresden", "Gdansk", "Utrecht", "Vienna", "Zagreb", "Tampere", "Riga", "Split",
)  # fmt: skip


class DocumentPrompts:
    """Prompts of the class "documents".  Not thread-safe."""

    def __init__(self, maker: PromptMaker, *, seed: int, salt: str) -> None:
        self._maker = maker
        self._seed, self._salt = seed, salt
        self._policies: dict[int, tuple[list[str], list[int], list[tuple[str, str]]]] = {}

    @cached_property
    def minimum(self) -> int:
        """Tokens of the shortest prompt: the longest head, clause and question."""
        clause = max(self._maker.count(_clause(topic, place, 999)) for topic in TOPICS for place in PLACES)
        return self._maker.count_text(self._maker.salt_words(0) + ".") + clause + self._question_room

    @cached_property
    def _question_room(self) -> int:
        """Tokens of the longest question, and some that may be lost where texts meet."""
        return max(self._maker.count(_question(topic, place)) for topic in TOPICS for place in PLACES) + 8

    def make(self, index: int, tokens: int) -> Prompt:
        """The prompt of a request, of `tokens` or `minimum`, whichever is more."""
        tokens = max(tokens, self.minimum)
        draw = int.from_bytes(
            hashlib.blake2b(f"{self._seed}:{index}:document".encode(), digest_size=12).digest(), "big"
        )
        number = draw % DOCUMENTS
        clauses, upto, facts = self._policy(number)
        head = self._maker.salt_words(-1 - number) + "."
        room = tokens - self._maker.count_text(head) - self._question_room
        fitting = max(1, sum(1 for used in upto if used <= room))
        chosen = (draw >> 16) % fitting
        topic, place = facts[chosen]
        text = head + "".join(clauses[:fitting])
        made = self._maker.closed(text, draw >> 32, _question(topic, place), tokens)
        return Prompt(made.text, made.tokens, answer=str(self._amount(number, chosen)))

    def _policy(self, number: int) -> tuple[list[str], list[int], list[tuple[str, str]]]:
        """The clauses of one policy, the tokens up to each, and what each is about."""
        found = self._policies.get(number)
        if found is None:
            facts = [(topic, place) for topic in TOPICS for place in PLACES]
            facts.sort(key=lambda fact: hashlib.blake2b(f"{self._salt}:{number}:{fact}".encode()).digest())
            clauses = [_clause(*fact, self._amount(number, n)) for n, fact in enumerate(facts)]
            upto, total = [], 0
            for clause in clauses:
                total += self._maker.count(clause)
                upto.append(total)
            found = self._policies[number] = (clauses, upto, facts)
        return found

    def _amount(self, document: int, clause: int) -> int:
        """A number of three digits that no other clause of the document has."""
        start = int.from_bytes(hashlib.blake2b(f"{self._salt}:{document}".encode(), digest_size=8).digest(), "big")
        return 100 + (start + clause * 377) % 900  # 377 and 900 have no common divisor


def _clause(topic: str, place: str, amount: int) -> str:
    return f" The {topic} of the {place} office is {amount} euros."


def _question(topic: str, place: str) -> str:
    return (
        f" According to the policy above, how many euros is the {topic} of the {place} office? Answer with the number."
    )
