"""A look at the targets before the run: are they there, what model do they serve, how long is its context?

A target that does not answer is a line for the user, never an error: measuring a dead server is a legitimate run.
All questions are asked with short limits, on the way that the load takes.  Where a server counts tokens itself
(`/tokenize`, vLLM's), one prompt is counted by it before the run: a wrong tokenizer shows before a load is wasted.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from email.message import Message
from typing import Any, Final

from loadgen.way import DIRECT, Way
from telemetry import names
from telemetry.adapters.registry import ADAPTERS, METRICS_PATHS, metric_names, recognise

TIMEOUT_S: Final = 3.0
LIMIT: Final = 4 << 20  # bytes of an answer


@dataclass(frozen=True, slots=True)
class Target:
    """What one target said of itself.  max_context: tokens of prompt and answer; None: it did not say.

    simulated: what it simulates instead of computing; None: it computes, or does not say.
    kind: which server it is (telemetry.adapters.registry), None where nothing tells; version: as it says.
    metrics_path: where it serves Prometheus text.
    """

    url: str
    reachable: bool
    ready: bool | None
    models: tuple[str, ...]
    max_context: int | None
    detail: str
    simulated: str | None = None
    kind: str | None = None
    version: str | None = None
    metrics_path: str = METRICS_PATHS[0]

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "models": list(self.models)}


def get(
    url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S, way: Way = DIRECT, data: bytes | None = None
) -> tuple[int, bytes]:
    """Status and body (at most LIMIT bytes) of a GET, or of a POST of data.  Raises OSError without an answer."""
    status, body, _ = fetch(url, headers, timeout_s, way, data)
    return status, body


def fetch(
    url: str, headers: Mapping[str, str], timeout_s: float = TIMEOUT_S, way: Way = DIRECT, data: bytes | None = None
) -> tuple[int, bytes, Mapping[str, str]]:
    """``get`` with the answer's headers, names in lower case."""
    try:
        request = urllib.request.Request(url, headers=dict(headers), data=data)
        with way.opener.open(request, timeout=timeout_s) as answer:
            return int(answer.status), bytes(answer.read(LIMIT)), _lower(answer.headers)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read(LIMIT), _lower(error.headers)


def _lower(headers: Message) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in headers.items()}


def look(url: str, headers: Mapping[str, str], way: Way = DIRECT) -> Target:
    """Ask one target for its models and its health, and find out what server it is."""
    try:
        status, body, answer_headers = fetch(f"{url}/v1/models", headers, way=way)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        return Target(url, False, None, (), None, f"no answer ({reason})")
    models, context, simulated = _models(body) if status == 200 else ((), None, None)
    detail = f"answers {status} to /v1/models" if status != 200 else f"serves {', '.join(models) or 'no named model'}"
    try:
        ready: bool | None = {200: True, 503: False}.get(get(f"{url}/health/ready", headers, way=way)[0])
    except (OSError, ValueError):
        ready = None
    if ready is False:
        detail += ", not ready yet"
    if simulated is not None:
        detail += f" (SIMULATED: {simulated})"
    kind, path = _kind(url, headers, way, _owners(body) if status == 200 else [], answer_headers.get("server") or "")
    version = _version(url, headers, way, kind)
    if kind in ADAPTERS:
        detail += f", {ADAPTERS[kind].title}" + (f" {version}" if version else "")
    return Target(url, True, ready, models, context, detail, simulated, kind, version, path)


def _kind(url: str, headers: Mapping[str, str], way: Way, owners: list[str], server: str) -> tuple[str | None, str]:
    """What server it is, and where its Prometheus metrics are."""
    for path in METRICS_PATHS:
        try:
            status, body = get(url + path, headers, way=way)
        except (OSError, ValueError):
            break
        found = metric_names(body.decode("utf-8", "replace")) if status == 200 else set()
        if found:
            return recognise(found, owners, server), path
    return recognise((), owners, server), METRICS_PATHS[0]


def _version(url: str, headers: Mapping[str, str], way: Way, kind: str | None) -> str | None:
    """The version that a known kind of server tells at its own place."""
    where = ADAPTERS[kind].version if kind in ADAPTERS else None
    if where is None:
        return None
    try:
        status, body = get(url + where[0], headers, way=way)
        found = json.loads(body)[where[1]] if status == 200 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return found if isinstance(found, str) else None


def _owners(body: bytes) -> list[str]:
    """``owned_by`` of the models in a list."""
    try:
        return [str(entry.get("owned_by") or "") for entry in json.loads(body)["data"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return []


def _models(body: bytes) -> tuple[tuple[str, ...], int | None, str | None]:
    """Model ids of a model list, the smallest max_model_len among them (vLLM's extension), what is simulated (ours)."""
    try:
        entries = [entry for entry in json.loads(body)["data"] if isinstance(entry, dict)]
    except (ValueError, KeyError, TypeError):
        return (), None, None
    ids = tuple(entry["id"] for entry in entries if isinstance(entry.get("id"), str))
    limits = [entry["max_model_len"] for entry in entries if isinstance(entry.get("max_model_len"), int)]
    labels = [entry[names.SIMULATED_KEY] for entry in entries if isinstance(entry.get(names.SIMULATED_KEY), str)]
    return ids, min(limits, default=None), labels[0] if labels else None


def counted_by(
    url: str, headers: Mapping[str, str], model: str, asked: Mapping[str, Any], way: Way = DIRECT
) -> int | None:
    """Tokens of a prompt ({"messages": …} or {"prompt": …}) as the server counts them; None: it does not say."""
    body = json.dumps({"model": model, **asked}).encode()
    try:
        status, answer = get(f"{url}/tokenize", {**headers, "Content-Type": "application/json"}, way=way, data=body)
        count = json.loads(answer)["count"] if status == 200 else None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return count if type(count) is int else None
