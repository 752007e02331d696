"""The plan of a run: everything a worker needs to rebuild the same schedule and the same prompts, as one JSON file.

A plan holds no secret: the API key by the name of its environment variable, header values as `$NAME`; both are looked
up in the worker.  Reading refuses unknown keys by name, so that a misspelt one is never silently ignored.
`load_worker` is what the builder of a sender calls (loadgen.building).
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from loadgen.arrivals import ArrivalModel
from loadgen.bodies import CHAT, COMPLETIONS, Sampling
from loadgen.calls import Calls
from loadgen.canaries.mixed import Mixed
from loadgen.classes import TrafficClass
from loadgen.job import KEEP_TEXT, CallSource, SendSettings
from loadgen.patience import Patience
from loadgen.prompts import NoTemplate, PromptMaker
from loadgen.schedule import Schedule, build
from loadgen.traces import registry
from loadgen.traces.trace import Choices
from loadgen.transforms import Transforms
from models.addresses import http_url
from models.errors import UserError
from models.store import Reference, load_reference

PLAN_FILE: Final = "plan.json"
VERSION: Final = 1
SECRET_NAMES: Final = re.compile(r"auth|key|token|secret|cookie|password", re.IGNORECASE)
FROM_ENVIRONMENT: Final = re.compile(r"\$\{?([A-Za-z_][A-Za-z0-9_]*)\}?")


@dataclass(frozen=True, slots=True)
class Plan:
    """One run.  Times are seconds (of trace time for the window, of run time for timeouts), lengths are tokens."""

    run_id: str
    seed: int
    salt: str  # prompts of two plans with different salts share no prefix
    trace_name: str
    trace_path: str
    trace_format: str
    trace_sha256: str
    reference: str  # model whose tokenizer and template count the prompts
    served_model: str  # the name that goes into the requests
    max_context: int
    min_input: int
    requests: int  # in the schedule; a worker that computes another number refuses to start
    targets: tuple[str, ...]
    workers: int = 1
    start_s: float = 0.0
    duration_s: float | None = None
    speed: float = 1.0
    rate_scale: float = 1.0
    length_scale: float = 1.0
    over_limit: str = "skip"
    dequantise_s: float | None = None
    loop: int = 1
    arrivals: dict[str, Any] | None = None  # see loadgen.arrivals
    trace_choices: dict[str, Any] = field(default_factory=dict)  # see loadgen.traces.trace.Choices
    classes: tuple[dict[str, Any], ...] = ()  # see loadgen.classes; empty: all plain
    share_prefixes: bool = True  # prompts begin alike where the trace says so
    patience: dict[str, Any] | None = None  # see loadgen.patience
    api: str = CHAT
    exact_output: bool = True
    temperature: float = 1.0  # the default of OpenAI's API; colder, a small model falls into loops
    top_p: float = 0.95
    headers: dict[str, str] = field(default_factory=dict)
    api_key_env: str | None = None
    proxy: str | None = None  # URL; its password as `$NAME`
    ca_file: str | None = None
    verify_tls: bool = True
    connect_timeout_s: float = 10.0
    first_token_timeout_s: float = 120.0
    total_timeout_s: float = 600.0
    max_concurrency: int | None = None
    keep_text: str = "wrong"
    canaries: dict[str, Any] | None = None  # see loadgen.canaries.mixed
    sampling_ratio: float = 1.0
    version: int = VERSION

    @property
    def transforms(self) -> Transforms:
        return Transforms(
            seed=self.seed,
            start_s=self.start_s,
            duration_s=self.duration_s,
            speed=self.speed,
            rate_scale=self.rate_scale,
            length_scale=self.length_scale,
            over_limit=self.over_limit,
            max_context=self.max_context,
            min_input=self.min_input,
            dequantise_s=self.dequantise_s,
            loop=self.loop,
            arrivals=None if self.arrivals is None else ArrivalModel.parse(self.arrivals, "plan: arrivals"),
            mix=tuple(one.mix for one in self.traffic_classes) if self.classes else (),
        )

    @property
    def sampling(self) -> Sampling:
        """What every request says about decoding."""
        return Sampling(self.served_model, self.seed, self.temperature, self.top_p, self.exact_output, self.api)

    @property
    def traffic_classes(self) -> tuple[TrafficClass, ...]:
        return tuple(TrafficClass.of(one, "plan: classes") for one in self.classes) or (TrafficClass(),)

    @property
    def mixed(self) -> Mixed | None:
        return None if self.canaries is None else Mixed.of(self.canaries)

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "targets": list(self.targets), "classes": [dict(one) for one in self.classes]}

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def read(cls, path: Path) -> Plan:
        """Raises UserError for a file that is no plan, naming unknown and missing keys."""
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise UserError(f"the plan cannot be read ({error.strerror})", where=str(path)) from None
        except ValueError as error:
            raise UserError(f"the plan is not JSON ({error})", where=str(path)) from None
        return cls.from_dict(values, str(path))

    @classmethod
    def from_dict(cls, values: Any, where: str) -> Plan:
        """Raises UserError naming the key."""
        if not isinstance(values, dict):
            raise UserError("a plan is an object with keys", where=where)
        known = {entry.name for entry in fields(cls)}
        unknown = sorted(set(values) - known)
        if unknown:
            raise UserError(f"unknown key {unknown[0]!r}", where=where, remedy=f"keys: {', '.join(sorted(known))}")
        if values.get("version", VERSION) != VERSION:
            raise UserError(
                f"plan version {values['version']} is not {VERSION}", where=where, remedy="make the plan again"
            )
        try:
            lists = {name: tuple(values.get(name, ())) for name in ("targets", "classes")}
            return cls(**{**values, **lists})
        except TypeError as error:
            missing = str(error).partition(": ")[2] or str(error)
            raise UserError(f"keys are missing: {missing}", where=where, remedy="make the plan again") from None

    def settings(self) -> SendSettings:
        """What the sender needs, with the secrets looked up in the environment.  Raises UserError for one not set."""
        headers = {name: expanded(name, value) for name, value in self.headers.items()}
        if self.api_key_env:
            headers["Authorization"] = f"Bearer {from_environment(self.api_key_env, '--api-key-env')}"
        return SendSettings(
            targets=self.targets,
            model=self.served_model,
            headers=headers,
            connect_timeout_s=self.connect_timeout_s,
            first_token_timeout_s=self.first_token_timeout_s,
            total_timeout_s=self.total_timeout_s,
            max_concurrency=share(self.max_concurrency, self.workers),
            keep_text=self.keep_text,
            tokenizer_ref=self.reference,
            patience=None if self.patience is None else Patience.of(self.patience, "plan: patience"),
            retry_seed=self.seed,
            proxy=None if self.proxy is None else expanded("proxy", self.proxy),
            ca_file=self.ca_file,
            verify_tls=self.verify_tls,
        )


def share(limit: int | None, workers: int) -> int | None:
    """What one worker gets of a limit on the whole run, at least 1."""
    return None if limit is None else max(1, limit // workers)


def expanded(name: str, value: str) -> str:
    """A header's value with `$NAME` and `${NAME}` replaced from the environment.  Raises UserError for one not set."""
    return FROM_ENVIRONMENT.sub(lambda match: from_environment(match.group(1), f"--header {name}"), value)


def from_environment(variable: str, where: str) -> str:
    """Raises UserError where the variable is not set or holds line breaks."""
    value = os.environ.get(variable, "")
    if not value or "\n" in value or "\r" in value:
        raise UserError(
            f"the environment variable {variable} is {'not one line' if value else 'not set'}",
            where=where,
            remedy=f"export {variable}=… before the run",
        )
    return value


def checked_headers(lines: list[str]) -> dict[str, str]:
    """`Name: value` lines as a plan keeps them.  Raises UserError; a literal secret is refused."""
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = (part.strip() for part in line.partition(":"))
        if not colon or not re.fullmatch(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+", name) or "\n" in value or "\r" in value:
            raise UserError(f"{line!r} is not a header", where="--header", remedy='write --header "Name: value"')
        if SECRET_NAMES.search(name) and not FROM_ENVIRONMENT.search(value):
            raise UserError(
                f"the value of {name} looks like a secret and plans are kept in the run bundle",
                where="--header",
                remedy=f"put it into an environment variable: --header '{name}: $NAME', or use --api-key-env NAME",
            )
        headers[name] = value
    return headers


def checked_targets(text: str, where: str = "--target") -> tuple[str, ...]:
    """Base URLs, split at commas, without a trailing slash.  where: the option that gave them.  Raises UserError."""
    targets = []
    for part in (piece.strip() for piece in text.split(",")):
        remedy = f"write {where} http://127.0.0.1:8000 (several: separate by commas)"
        url = http_url(part, where, remedy=remedy)
        if url.username or url.password or url.query or url.fragment:
            raise UserError(
                "the address holds a user, a query or a fragment",
                where=where,
                remedy="give keys by --api-key-env or --header; " + remedy,
            )
        targets.append(part.rstrip("/").removesuffix("/v1"))
    return tuple(targets)


def checked_limits(
    workers: int, max_concurrency: int | None, timeouts: dict[str, float], keep_text: str, temperature: float
) -> None:
    """Raises UserError naming the option.  workers: here and elsewhere; timeouts: option -> seconds."""
    if not 1 <= workers <= 256:
        remedy = "give 1 to 256, those of --remote-workers included"
        raise UserError(f"{workers} workers", where="--workers", remedy=remedy)
    if max_concurrency is not None and max_concurrency < workers:
        raise UserError(
            f"{max_concurrency} in flight for {workers} workers",
            where="--max-concurrency",
            remedy="give at least one for each worker, or leave it out for an open loop",
        )
    for option, seconds in timeouts.items():
        if not 0 < seconds <= 86_400:
            raise UserError(
                f"{seconds:g} is not a time limit", where=option, remedy="give seconds above 0, up to a day"
            )
    if keep_text not in KEEP_TEXT:
        raise UserError(f"{keep_text!r} is not a choice", where="--keep-text", remedy=f"choose {', '.join(KEEP_TEXT)}")
    if not 0 <= temperature <= 5:
        raise UserError(f"{temperature:g} is no temperature", where="--temperature", remedy="give 0 to 5")


def load_schedule(plan: Plan) -> Schedule:
    """Rebuild the schedule from the trace file.  Raises UserError where the file is no longer the one of the plan."""
    trace = registry.read(
        Path(plan.trace_path),
        plan.trace_name,
        Choices(**plan.trace_choices),
        start_s=plan.start_s,
        duration_s=None if plan.arrivals is not None else plan.duration_s,
    )
    if trace.sha256 != plan.trace_sha256:
        raise UserError(
            f"the file has changed since the plan was made: sha256 {trace.sha256[:12]}…, not {plan.trace_sha256[:12]}…",
            where=plan.trace_path,
            remedy="start the run again",
        )
    schedule = with_canaries(build(trace, plan.transforms), plan)
    if len(schedule) != plan.requests:
        raise UserError(
            f"the schedule has {len(schedule)} requests, the plan says {plan.requests}",
            where=plan.trace_path,
            remedy="use the same version of tailspan and numpy on all machines",
        )
    return schedule


def with_canaries(schedule: Schedule, plan: Plan) -> Schedule:
    """The schedule with the canaries that the plan asks for."""
    mixed = plan.mixed
    return schedule if mixed is None else mixed.into(schedule, len(plan.targets))


def load_worker(plan_path: Path, worker: int, workers: int) -> tuple[SendSettings, CallSource]:
    """The settings and the calls of one worker of several (0-based).  Raises UserError."""
    plan = Plan.read(plan_path)
    if not 0 <= worker < workers:
        raise UserError(f"worker {worker} of {workers}", where=str(plan_path), remedy="workers count from 0")
    schedule = load_schedule(plan)
    return plan.settings(), calls_of(plan, schedule, load_reference(plan.reference), worker, workers)


def calls_of(plan: Plan, schedule: Schedule, reference: Reference, worker: int = 0, workers: int = 1) -> Calls:
    """The calls of one worker of several.  Raises UserError for prompts that cannot be used."""
    return Calls(
        schedule,
        prompt_maker(reference, plan.api, seed=plan.seed, salt=plan.salt),
        plan.sampling,
        plan.run_id,
        plan.sampling_ratio,
        worker,
        workers,
        classes=plan.traffic_classes,
        share_prefixes=plan.share_prefixes,
        salt=plan.salt,
        mixed=plan.mixed,
        replicas=len(plan.targets),
    )


def prompt_maker(reference: Reference, api: str, *, seed: int, salt: str) -> PromptMaker:
    """Prompts as the API takes them: through the chat template, or plain for text completions."""
    template = NoTemplate() if api == COMPLETIONS else reference.template
    return PromptMaker(reference.tokenizer, template, seed=seed, salt=salt)
