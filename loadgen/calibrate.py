"""`--fit U`: how fast is the target, and which scales make the trace use the share U of it?

Measured before the run by a short probe with prompts of its own (another salt, so nothing of the run is cached):
single requests that are nearly all prefill, then a burst of BURST that are nearly all decode.  The model is that of a
server which does one thing at a time: utilisation = sum over requests of (input / prefill rate + output / decode rate
at that batch) / window, where input leaves out what every prompt has cached (the template's beginning), if the server
says so.  It decides the load, it is no result; the manifest keeps it with the measured rates.
The length scale is chosen first, at the lowest rate that still gives ENOUGH requests; only where full lengths do not
fill the machine is the rate raised, up to the trace's own.
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

import numpy as np

from loadgen.bodies import Sampling
from loadgen.calls import CHAT_PATH
from loadgen.prompts import PromptMaker
from loadgen.schedule import Schedule, build
from loadgen.traces.trace import Trace
from loadgen.transforms import Transforms
from loadgen.way import DIRECT, Way
from models.errors import UserError
from models.wording import several

BUDGET_S: Final = 15.0  # what the probe aims at
LIMIT_S: Final = 60.0  # after which it gives up: a machine may be busy, and a slow target is measured all the same
FIRST_TOKENS: Final = 48  # of the first, rough prefill probe, above the template
PREFILL_S: Final = 0.8  # what one of the following should take
LONGEST: Final = 1024
BURST: Final = 8
BURST_OUTPUT: Final = 20
ENOUGH: Final = 110
LEAST_INPUT: Final = 16  # mean input tokens above the shortest prompt
LEAST_OUTPUT: Final = 4  # mean output tokens
_REMEDY: Final = "start the target first, or leave --fit out and choose --rate-scale and --length-scale yourself"


@dataclass(frozen=True, slots=True)
class Answer:
    """One probe: how long it took, and its tokens by the server's usage.  cached: prompt tokens not computed again."""

    seconds: float
    prompt_tokens: int
    cached: int
    completion_tokens: int

    @property
    def computed(self) -> int:
        return max(1, self.prompt_tokens - self.cached)


Ask = Callable[[int, int], Answer]  # input and output tokens -> answer


@dataclass(frozen=True, slots=True)
class Speed:
    """What the probe measured: tokens per second of prefill alone, and of decode with `batch` requests at once.

    cached: prompt tokens that a new prompt finds in the server's prefix cache.
    """

    prefill_per_s: float
    decode_per_s: float
    cached: int
    batch: int
    requests: int
    probe_s: float

    def times(self, targets: int) -> Speed:
        """Of several targets as fast as this one."""
        return replace(self, prefill_per_s=self.prefill_per_s * targets, decode_per_s=self.decode_per_s * targets)


@dataclass(frozen=True, slots=True)
class Fit:
    """The scales chosen.  predicted: utilisation that the model expects of them; asked: what was wanted."""

    rate_scale: float
    length_scale: float
    requests: int
    predicted: float
    asked: float
    speed: Speed

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def sentence(self) -> str:
        """One line for the user."""
        text = (
            f"measured {self.speed.prefill_per_s:,.0f} token/s prefill, {self.speed.decode_per_s:,.0f} token/s decode "
            f"at batch {self.speed.batch} in {self.speed.probe_s:.1f} s; for {self.asked:.0%} of that: rate x "
            f"{self.rate_scale:.3g}, lengths x {self.length_scale:.3g} ({several(self.requests, 'request')})"
        )
        if self.predicted > self.asked * 1.1:
            text += f"; the least load that makes {ENOUGH} requests is more, about {self.predicted:.0%}"
        elif self.predicted < self.asked * 0.9:
            text += f"; this trace and the context of the model ask for no more than about {self.predicted:.0%}"
        return text


def measure(
    target: str,
    headers: Mapping[str, str],
    maker: PromptMaker,
    model: str,
    max_context: int,
    way: Way = DIRECT,
    sampling: Sampling | None = None,
) -> Speed:
    """Probe a target for about BUDGET_S.  Raises UserError where it does not answer as it should.

    sampling: of the load to come; the probe asks for tokens drawn in the same way, which on a small model costs as much
    as a part of its forward.  None: greedy.
    """
    drawn = {} if sampling is None else {"temperature": sampling.temperature, "top_p": sampling.top_p}
    began = time.monotonic()
    counter = iter(range(1_000_000))

    def ask(input_tokens: int, output_tokens: int) -> Answer:
        prompt = maker.make(next(counter), max(maker.minimum, input_tokens))
        left = max(1.0, LIMIT_S - (time.monotonic() - began))
        return _ask(target, headers, model, prompt.text, output_tokens, left, way, drawn)

    ask(maker.minimum, 1)  # opens what is opened once
    prefill, asked = _prefill_rate(ask, maker.minimum, min(LONGEST, max_context // 2), began)
    with ThreadPoolExecutor(BURST) as pool:
        start = time.monotonic()
        answers = list(pool.map(lambda _: ask(maker.minimum + LEAST_INPUT, BURST_OUTPUT), range(BURST)))
        took = time.monotonic() - start
    decode_s = max(took - sum(answer.computed for answer in answers) / prefill, took * 0.2)  # they may overlap
    decode = sum(answer.completion_tokens for answer in answers) / decode_s
    cached = min(answer.cached for answer in answers)
    return Speed(prefill, decode, cached, BURST, 1 + asked + BURST, time.monotonic() - began)


def _prefill_rate(ask: Ask, minimum: int, longest: int, began: float) -> tuple[float, int]:
    """Tokens per second of prompts long enough to outweigh the fixed cost of a request, and the requests it took."""
    first = ask(minimum + FIRST_TOKENS, 1)
    length = int(np.clip(first.computed / first.seconds * PREFILL_S, minimum + FIRST_TOKENS, longest))
    rates = []
    for _ in range(3):
        answer = ask(length, 1)
        rates.append(answer.computed / answer.seconds)
        if time.monotonic() - began > BUDGET_S * 0.4:
            break
    return float(np.median(rates)), 1 + len(rates)


def _ask(
    target: str,
    headers: Mapping[str, str],
    model: str,
    text: str,
    output_tokens: int,
    timeout_s: float,
    way: Way,
    drawn: Mapping[str, float],
) -> Answer:
    """One plain request; drawn: how its tokens are sampled, greedy where it says nothing."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": output_tokens,
        "min_tokens": output_tokens,
        "ignore_eos": True,
        "temperature": 0.0,
        **drawn,
    }
    request = urllib.request.Request(
        target + CHAT_PATH,
        data=json.dumps(body).encode(),
        headers={**headers, "Content-Type": "application/json"},
    )
    began = time.monotonic()
    try:
        with way.opener.open(request, timeout=timeout_s) as answer:
            usage = json.loads(answer.read())["usage"]
        seconds = max(1e-6, time.monotonic() - began)
        cached = int((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0)
        return Answer(seconds, int(usage["prompt_tokens"]), cached, int(usage["completion_tokens"]))
    except urllib.error.HTTPError as error:
        with error:
            said = error.read(300).decode("utf-8", "replace")
        raise UserError(f"the target answers {error.code} to a probe: {said}", where="--fit", remedy=_REMEDY) from None
    except OSError as error:
        reason = getattr(error, "reason", None) or error
        raise UserError(f"the probe of {target} failed ({reason})", where="--fit", remedy=_REMEDY) from None
    except (ValueError, KeyError, TypeError, AttributeError):
        raise UserError("the target's answer to a probe has no usage", where="--fit", remedy=_REMEDY) from None


def utilisation(schedule: Schedule, speed: Speed) -> float:
    """Share of the target's time that this schedule asks for, by the model of this module."""
    computed = np.maximum(schedule.input_tokens - speed.cached, 1).sum()
    seconds = computed / speed.prefill_per_s + schedule.output_tokens.sum() / speed.decode_per_s
    return float(seconds) / schedule.length_s


def checked_share(share: float) -> None:
    """Raises UserError for what is no utilisation to fit a load to."""
    if not 0 < share <= 20:
        raise UserError(
            f"{share:g} is not a utilisation", where="--fit", remedy="give a share such as 0.5 (above 1: overload)"
        )


def fit(
    trace: Trace,
    asked: Transforms,
    speed: Speed,
    share: float,
    *,
    rate: float | None = None,
    length: float | None = None,
) -> Fit:
    """Choose the scales for this share of the target.  rate, length: a scale that the user has fixed already.

    An arrival model has the rate that it was given, so only the lengths are chosen then.
    """
    checked_share(share)
    if asked.arrivals is not None:
        rate = 1.0

    def at(rate_scale: float, length_scale: float) -> Schedule:
        return build(trace, replace(asked, rate_scale=rate_scale, length_scale=length_scale))

    def load(rate_scale: float, length_scale: float) -> float:
        return utilisation(at(rate_scale, length_scale), speed)

    rate_scale = _least_rate(at) if rate is None else rate
    if length is None:
        longest = _longest_scale(trace, asked)
        shortest = _bisect(lambda scale: _long_enough(at(rate_scale, scale), asked.min_input), 1e-4, longest)
        length_scale = _bisect(lambda scale: load(rate_scale, scale) >= share, shortest, longest)
    else:
        length_scale = length
    if rate is None and load(rate_scale, length_scale) < share:
        rate_scale = _bisect(lambda scale: load(scale, length_scale) >= share, rate_scale, 1.0)
    schedule = at(rate_scale, length_scale)
    return Fit(rate_scale, length_scale, len(schedule), utilisation(schedule, speed), share, speed)


def _least_rate(at: Callable[[float, float], Schedule]) -> float:
    """The smallest rate scale up to 1 that leaves ENOUGH requests; 1 where the window has fewer."""
    whole = len(at(1.0, 1e-3))
    if whole <= ENOUGH:
        return 1.0
    return _bisect(lambda scale: len(at(scale, 1e-3)) >= ENOUGH, 0.5 * ENOUGH / whole, 1.0)


def _longest_scale(trace: Trace, asked: Transforms) -> float:
    """The largest length scale up to 1 under which 99 % of the trace's requests fit the context."""
    total = trace.input_tokens.astype(np.int64) + trace.output_tokens
    return float(min(1.0, asked.max_context / max(1.0, np.quantile(total, 0.99))))


def _long_enough(schedule: Schedule, min_input: int) -> bool:
    return bool(
        schedule.input_tokens.mean() >= min_input + LEAST_INPUT and schedule.output_tokens.mean() >= LEAST_OUTPUT
    )


def _bisect(holds: Callable[[float], bool], low: float, high: float) -> float:
    """The smallest value between low and high (to 0.1 %) from which `holds` holds; high where it never does."""
    if holds(low):
        return low
    while high - low > 1e-3 * high:
        middle = (low + high) / 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return round(high, 6)
