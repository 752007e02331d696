"""Users who give up and try again: how long they wait, how often they come back, and what that does to the load.

A user model, not a flag: a request is abandoned after a time and retried after a pause that grows, with jitter, at the
server's wish where it says Retry-After, and within a budget over all requests, so that a storm has a measure.
Must always hold: retries never exceed budget x requests begun; the pauses depend on the seed, the request and the
number of the attempt alone; a request's time runs from its first intended send.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final

from models.errors import UserError
from telemetry import names

#: What a client retries: the server was not there, had no room, broke off, or took too long.
RETRIED: Final = (
    names.REFUSED, names.REJECTED, names.TIMEOUT_CONNECT, names.TIMEOUT_FIRST_TOKEN, names.TIMEOUT_TOTAL, names.RESET,
    names.STREAM_CUT, names.SERVER_ERROR,
)  # fmt: skip
_REMEDY: Final = "write patience: {first_token_s: 5, retries: 2, backoff_s: 0.5, budget: 0.1}"


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds, counts and shares.  first_token_s, total_s: of each attempt, from its start; None: the timeouts alone.

    The pause before retry k (1, 2, ...) is backoff_s x factor^(k-1), at most longest_s, of which the last `jitter` part
    is drawn; a Retry-After that is longer is kept to, if it is at most longest_s (else there is no retry).
    """

    first_token_s: float | None = None
    total_s: float | None = None
    retries: int = 0
    backoff_s: float = 0.5
    factor: float = 2.0
    longest_s: float = 60.0
    jitter: float = 0.5
    budget: float = 0.1
    retry_after: bool = True
    retry_on: tuple[str, ...] = RETRIED

    @classmethod
    def of(cls, values: Mapping[str, Any], where: str) -> Patience:
        """From a mapping of a plan.  Raises UserError naming the key."""
        known = {one.name for one in fields(cls)}
        unknown = [key for key in values if key not in known]
        if unknown:
            raise UserError(f"unknown key {unknown[0]!r}", where=where, remedy=f"keys: {', '.join(sorted(known))}")
        given = dict(values)
        if "retry_on" in given:
            reasons = given["retry_on"]
            wrong = (
                [one for one in reasons if one not in names.DROP_REASONS]
                if isinstance(reasons, list | tuple)
                else [reasons]
            )
            if wrong:
                raise UserError(
                    f"{wrong[0]!r} is no reason", where=where, remedy=f"choose from {', '.join(names.DROP_REASONS)}"
                )
            given["retry_on"] = tuple(reasons)
        made = cls(**given)
        limits = {
            "first_token_s": (0.001, 86_400), "total_s": (0.001, 86_400), "retries": (0, 100), "backoff_s": (0, 3600),
            "factor": (1, 100), "longest_s": (0, 86_400), "jitter": (0, 1), "budget": (0, 100),
        }  # fmt: skip
        for name, (least, most) in limits.items():
            value = getattr(made, name)
            if value is None and name in ("first_token_s", "total_s"):
                continue
            if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
                raise UserError(f"{name}: {value!r} is not between {least} and {most}", where=where, remedy=_REMEDY)
        if not isinstance(made.retries, int) or not isinstance(made.retry_after, bool):
            raise UserError("retries is a whole number, retry_after is true or false", where=where, remedy=_REMEDY)
        return made

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "retry_on": list(self.retry_on)}

    def pause_s(self, seed: int, index: int, retry: int, retry_after_s: float | None) -> float | None:
        """Seconds before this retry (1, 2, ...) of a request; None: the server asks for more than we wait."""
        pause = min(self.longest_s, self.backoff_s * self.factor ** (retry - 1))
        draw = hashlib.blake2b(f"{seed}:{index}:{retry}:pause".encode(), digest_size=8).digest()
        pause *= 1 - self.jitter * int.from_bytes(draw, "big") / 2**64
        if self.retry_after and retry_after_s is not None:
            if retry_after_s > self.longest_s:
                return None
            pause = max(pause, retry_after_s)
        return pause


class Budget:
    """Retries over all requests of a worker: never more than `ratio` x requests begun."""

    def __init__(self, ratio: float) -> None:
        self._ratio = ratio
        self.begun = 0
        self.spent = 0
        self.refused = 0  # retries that it did not allow

    def take(self) -> bool:
        """May one more retry be made?"""
        if self.spent + 1 > self._ratio * self.begun:
            self.refused += 1
            return False
        self.spent += 1
        return True
