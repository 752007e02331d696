"""Canaries inside the load: which golden is asked when, of which replica, and how; a part of the plan.

Owns the order.  They come in groups of PLACES asks, one group on one golden and one replica, each ask at the moment of
a request of the load, spread evenly over it:

    miss    streamed, with a cache salt of its own (``cache_salt``, vLLM's), so that nothing of it is in a prefix cache
    hit     streamed, with the same salt
    plain   not streamed, with the same salt
    hot     one fixed prompt at temperature 1.2 with a seed of its own: such answers must differ

Goldens come in an order without order, so that even a few are of several kinds.  Group n asks golden n // replicas of
replica n % replicas, so that neighbours compare two replicas.  Must always hold: a canary depends on the plan and its
number alone; the requests of the trace keep their moments and lengths.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from loadgen.bodies import CHAT, PATHS
from loadgen.canaries.client import TOP
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.probes import HOT, STORY
from loadgen.schedule import Schedule
from models.errors import UserError

MISS: Final = "miss"
HIT: Final = "hit"
PLAIN: Final = "plain"
DRAW: Final = "hot"
PLACES: Final = (MISS, HIT, PLAIN, DRAW)
GOLDEN: Final = "golden"  # canary_kind of the first three
SAMPLING: Final = "sampling"  # and of the last
DRAW_TOKENS: Final = 16
MOST: Final = 2_000  # 0.3 % wrong show with 95 %; more of them say little more
HIGHEST_SHARE: Final = 0.2
BEYOND_END: Final = 4  # tokens more than a golden that ended by itself: a server that never ends shows


def checked_share(share: float) -> None:
    """Raises UserError for what is no share of a load that canaries may be."""
    if not 0 < share <= HIGHEST_SHARE:
        raise UserError(
            f"{share:g} is no share for canaries",
            where="--canary-share",
            remedy=f"give a share above 0, up to {HIGHEST_SHARE:g}; 0.02 is usual",
        )


@dataclass(frozen=True, slots=True)
class Ask:
    """A golden as it is sent.  tokens: max_tokens; prompt_tokens: of the recording, None: it did not say."""

    id: str
    prompt: str
    tokens: int
    prompt_tokens: int | None


@dataclass(frozen=True, slots=True)
class Mixed:
    """What a plan says of its canaries.  share: of all requests; salted: the targets take a cache salt."""

    file: str
    share: float
    salted: bool
    asks: tuple[Ask, ...]

    @classmethod
    def of_file(cls, recorded: CanaryFile, file: str, share: float, *, salted: bool) -> Mixed:
        """Raises UserError: a share out of range."""
        checked_share(share)
        asks = tuple(
            Ask(one.id, one.prompt, len(one.tokens) + BEYOND_END * one.ended, one.prompt_tokens)
            for one in sorted(recorded.goldens, key=lambda one: hashlib.blake2b(one.id.encode()).digest())
        )
        return cls(file, share, salted, asks)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> Mixed:
        """From a plan's JSON."""
        return cls(values["file"], values["share"], values["salted"], tuple(Ask(**one) for one in values["asks"]))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "asks": [asdict(one) for one in self.asks]}

    def count(self, requests: int) -> int:
        """Canaries beside so many requests: whole groups as far as they go, at least one."""
        wanted = self.share * requests / (1 - self.share)
        return min(MOST, max(len(PLACES), round(wanted / len(PLACES)) * len(PLACES)))

    def into(self, schedule: Schedule, replicas: int) -> Schedule:
        """The schedule with canaries among its requests."""
        count, size = self.count(len(schedule)), len(schedule)
        behind = np.minimum(((np.arange(count) + 0.5) * size / count).astype(np.int64), size - 1)
        asks = [self.asked(number, replicas) for number in range(count)]
        inputs = [ask.prompt_tokens or 0 for _, ask in asks]
        outputs = [ask.tokens for _, ask in asks]

        def among(values: Any, own: Any) -> Any:
            return np.insert(values, behind + 1, own)

        record = {"name": "canaries", "count": count, "share": round(count / (count + size), 4), "salted": self.salted}
        tokens = int(schedule.input_tokens.sum()) + int(schedule.output_tokens.sum())
        record["tokens_share"] = round((sum(inputs) + sum(outputs)) / max(1, tokens + sum(inputs) + sum(outputs)), 4)
        return replace(
            schedule,
            intended_s=among(schedule.intended_s, schedule.intended_s[behind]),
            trace_row=among(schedule.trace_row, -1),
            input_tokens=among(schedule.input_tokens, inputs),
            output_tokens=among(schedule.output_tokens, outputs),
            records=(*schedule.records, record),
            source=among(schedule.source, -1),
            copy=among(schedule.copy, 0),
            klass=among(schedule.klass, 0),
            session=None if schedule.session is None else among(schedule.session, -1),
            canary=among(np.full(size, -1, dtype=np.int64), np.arange(count)),
        )

    def asked(self, number: int, replicas: int) -> tuple[str, Ask]:
        """The place in its group, and what is asked, of a canary by its number."""
        group, place = divmod(number, len(PLACES))
        if PLACES[place] == DRAW:
            return DRAW, Ask(DRAW, STORY, DRAW_TOKENS, None)
        return PLACES[place], self.asks[group // replicas % len(self.asks)]

    def replica(self, number: int, replicas: int) -> int:
        """Which target it goes to."""
        return number // len(PLACES) % replicas

    def body(self, number: int, replicas: int, model: str, salt: str) -> bytes:
        """The JSON of a canary."""
        place, ask = self.asked(number, replicas)
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": ask.prompt}],
            "max_tokens": ask.tokens,
        }
        if place == DRAW:
            body |= {"temperature": HOT, "seed": number}
        else:
            body |= {"temperature": 0.0, "logprobs": True, "top_logprobs": TOP}
        if place != PLAIN:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        if self.salted:
            body["cache_salt"] = f"{salt}/{number // len(PLACES)}"
        return json.dumps(body, separators=(",", ":"), ensure_ascii=False).encode()

    @property
    def path(self) -> str:
        return PATHS[CHAT]
