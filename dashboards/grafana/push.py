"""Bring a running Grafana to what is checked in: folder, data sources, dashboards, annotations.  Through grafana-api.

Must always hold: pushing twice changes nothing the second time, since each thing is read first and written only where
it differs; a dashboard is written with the version that was read, so that somebody's change in between is refused by
Grafana and not lost; the token never reaches a message; every HTTP error becomes a sentence that says what to do.

What Grafana adds to a thing (ids, versions, defaults) is not ours and is left alone: a thing is as it should be when
everything that we say of it is so there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from urllib.parse import SplitResult

from dashboards.grafana.files import FOLDER_TITLE, FOLDER_UID
from models.addresses import http_url
from models.errors import UserError

TIMEOUT_S: Final = 10.0
CREATED, UPDATED, SAME = "created", "updated", "unchanged"
_TOKEN: Final = "make one under Administration > Service accounts, with the role Editor (Admin for data sources)"


@dataclass(frozen=True, slots=True)
class Mark:
    """An annotation.  key: a tag that no other has; kind: run, deploy or fault; times in ms, end may be the start."""

    key: str
    kind: str
    text: str
    start_ms: int
    end_ms: int

    @property
    def tags(self) -> list[str]:
        return ["tailspan", f"tailspan-{self.kind}", self.key]


@dataclass(slots=True)
class Pushed:
    """What was done: (thing, created, updated or unchanged), and what Grafana is."""

    version: str = ""
    done: list[tuple[str, str]] = field(default_factory=list)

    @property
    def changed(self) -> int:
        return sum(what != SAME for _, what in self.done)


def contains(theirs: Any, ours: Any) -> bool:
    """Whether everything in ``ours`` is so in ``theirs``; lists must have the same length."""
    if isinstance(ours, dict):
        return isinstance(theirs, dict) and all(key in theirs and contains(theirs[key], ours[key]) for key in ours)
    if isinstance(ours, list):
        return isinstance(theirs, list) and len(theirs) == len(ours) and all(map(contains, theirs, ours))
    return bool(theirs == ours)


def checked_grafana(url: str) -> SplitResult:
    """The parts of a Grafana's base URL.  Raises UserError."""
    remedy = "write its base URL, such as http://127.0.0.1:3000; the token comes from the environment"
    parts = http_url(url, "--url", "the address of a Grafana", remedy)
    if parts.username or parts.password:
        raise UserError("it holds a user: that is not the address of a Grafana", where="--url", remedy=remedy)
    return parts


class Grafana:
    """A Grafana at a base URL, asked with a service account's token.  Raises UserError for a URL that is none."""

    def __init__(self, url: str, token: str) -> None:
        from grafana_api.grafana_face import GrafanaFace

        parts = checked_grafana(url)
        prefix = parts.path.strip("/")
        name = parts.hostname or ""
        host = f"[{name}]" if ":" in name else name
        self.url = url.rstrip("/")
        self._face = GrafanaFace(
            token,
            host=host,
            port=parts.port,
            url_path_prefix=f"{prefix}/" if prefix else "",
            protocol=parts.scheme,
            timeout=TIMEOUT_S,
        )

    def version(self) -> str:
        """Of the server, which also shows whether it is one and takes the token.  Raises UserError."""
        with self._explained("asking who is there"):
            health = self._face.api.GET("/health")
            if not isinstance(health, dict) or "database" not in health:
                raise UserError(f"what answers is no Grafana: {str(health)[:80]}", where=self.url, remedy="check --url")
            self._face.api.GET("/org")
            return str(health.get("version", "?"))

    def folder(self) -> str:
        """Make the folder, or give it its title back."""
        with self._explained(f"the folder {FOLDER_TITLE!r}", gone=True) as asked:
            found = self._face.folder.get_folder(FOLDER_UID)
        if asked.gone:
            with self._explained(f"the folder {FOLDER_TITLE!r}"):
                self._face.folder.create_folder(FOLDER_TITLE, FOLDER_UID)
            return CREATED
        if found["title"] == FOLDER_TITLE:
            return SAME
        with self._explained(f"the folder {FOLDER_TITLE!r}"):
            self._face.folder.update_folder(FOLDER_UID, FOLDER_TITLE, version=found.get("version"))
        return UPDATED

    def datasource(self, wanted: dict[str, Any]) -> str:
        """Create or change a data source; one that comes from a provisioning file is left, where it is as wanted."""
        what, path = f"the data source {wanted['name']!r}", f"/datasources/uid/{wanted['uid']}"
        with self._explained(what, gone=True) as asked:
            found = self._face.api.GET(path)
        if asked.gone:
            with self._explained(what):
                self._face.datasource.create_datasource(wanted)
            return CREATED
        ours = {key: value for key, value in wanted.items() if key != "isDefault"}  # whose turn that is, users decide
        if contains(found, ours):
            return SAME
        if found.get("readOnly"):
            raise UserError(
                f"{what} comes from a provisioning file and differs from what is asked for",
                where=self.url,
                remedy=f"change that file (uid {wanted['uid']}, url {found.get('url')}), or leave data sources out: "
                "--no-datasources",
            )
        with self._explained(what):
            body = {**wanted, "isDefault": found.get("isDefault", False), "version": found.get("version")}
            self._face.api.PUT(path, json=body)
        return UPDATED

    def dashboard(self, wanted: dict[str, Any]) -> str:
        """Create or change a dashboard in our folder, unless somebody changes it at the same time."""
        what, uid = f"the dashboard {wanted['title']!r}", wanted["uid"]
        with self._explained(what, gone=True) as asked:
            found = self._face.dashboard.get_dashboard(uid)
        if not asked.gone:
            there, meta = found["dashboard"], found.get("meta", {})
            if contains(there, wanted) and meta.get("folderUid", FOLDER_UID) == FOLDER_UID:
                return SAME
            if meta.get("provisioned"):
                raise UserError(
                    f"{what} comes from a provisioning file and differs from ours",
                    where=self.url,
                    remedy="update that file (tailspan grafana build writes it), or take it out of the provisioning",
                )
        version = (
            {} if asked.gone else {"version": found["dashboard"].get("version"), "id": found["dashboard"].get("id")}
        )
        body = {
            "dashboard": {**wanted, **version},
            "folderUid": FOLDER_UID,
            "message": "tailspan grafana push",
            "overwrite": False,
        }
        with self._explained(what):
            self._face.dashboard.update_dashboard(body)
        return CREATED if asked.gone else UPDATED

    def mark(self, wanted: Mark) -> str:
        """Add an annotation that is not there yet; it is found by its key."""
        what = f"the annotation {wanted.key!r}"
        with self._explained(what):
            if self._face.annotations.get_annotation(tags=["tailspan", wanted.key], limit=1):
                return SAME
            words = {"time": wanted.start_ms, "timeEnd": wanted.end_ms, "tags": wanted.tags, "text": wanted.text}
            self._face.api.POST("/annotations", json=words)
        return CREATED

    @contextmanager
    def _explained(self, what: str, *, gone: bool = False) -> Iterator[_Asked]:
        """Turn what goes wrong into a UserError.  gone: a 404 is an answer, noted in what is yielded."""
        import requests
        from grafana_api.grafana_api import GrafanaClientError, GrafanaException

        asked = _Asked()
        try:
            yield asked
        except GrafanaException as error:
            if gone and isinstance(error, GrafanaClientError) and error.status_code == 404 and _speaks_grafana(error):
                asked.gone = True
                return
            raise UserError(f"{what}: {_said(error)}", where=self.url, remedy=_remedy(error)) from None
        except requests.exceptions.JSONDecodeError:
            remedy = "is --url the base URL, with the path under which Grafana is served, and no login page before it?"
            raise UserError(f"{what}: the answer is no JSON", where=self.url, remedy=remedy) from None
        except requests.exceptions.SSLError as error:
            remedy = "name your certificates in REQUESTS_CA_BUNDLE"
            raise UserError(f"{what}: its certificate is not trusted: {error}", where=self.url, remedy=remedy) from None
        except requests.exceptions.Timeout:
            remedy = "try again; is it starting, or behind a proxy that swallows it?"
            raise UserError(f"{what}: no answer within {TIMEOUT_S:g} s", where=self.url, remedy=remedy) from None
        except requests.exceptions.RequestException as error:
            raise UserError(f"{what}: {_short(error)}", where=self.url, remedy="is it running there?") from None


@dataclass(slots=True)
class _Asked:
    gone: bool = False


def _speaks_grafana(error: Any) -> bool:
    """A 404 of Grafana has a JSON body with a message; one of a proxy or of another server does not."""
    return isinstance(error.response, dict) and "message" in error.response


def _said(error: Any) -> str:
    body = error.response
    message = body.get("message", "") if isinstance(body, dict) else str(body)
    return f"status {error.status_code}" + (f": {' '.join(message.split())[:200]}" if message else "")


def _short(error: Exception) -> str:
    text = str(error)
    return "connection refused" if "refused" in text else "its name is not known" if "resolve" in text else text[:200]


def _remedy(error: Any) -> str:
    """What to do about a status of Grafana's API."""
    status = error.status_code
    kind = error.response.get("status", "") if isinstance(error.response, dict) else ""
    if status == 412 or kind == "version-mismatch":
        if kind == "name-exists":
            return "a dashboard of this title is in the folder with another uid: rename or delete it there"
        return "somebody changed it in this moment: look at it, then push again"
    remedies = {
        400: "this Grafana takes it otherwise: tailspan is written for Grafana 11 and 12",
        401: f"the token is not taken (wrong, expired or of another server): {_TOKEN}",
        403: f"the token may not do this: {_TOKEN}",
        404: "is --url the base URL of a Grafana, with the path under which it is served?",
        409: "something of this name is there with another uid: rename or delete it there",
        413: "a proxy before Grafana refuses bodies of this size: raise its limit",
        422: "this Grafana takes it otherwise: tailspan is written for Grafana 11 and 12",
        429: "Grafana or a proxy limits the rate: try again later",
    }
    return remedies.get(status, "look at Grafana's log, then push again" if status >= 500 else "see Grafana's HTTP API")


def push(
    grafana: Grafana,
    dashboards: list[dict[str, Any]],
    datasources: list[dict[str, Any]],
    marks: list[Mark],
    say: Callable[[str], None],
) -> Pushed:
    """Bring all of it there; says each thing as it is done.  Raises UserError at the first that fails."""
    pushed = Pushed(version=grafana.version())
    say(f"Grafana {pushed.version} at {grafana.url}")

    def note(thing: str, what: str) -> None:
        pushed.done.append((thing, what))
        say(f"  {what:<10}{thing}")

    if dashboards:
        note(f"folder {FOLDER_TITLE}", grafana.folder())
    for source in datasources:
        note(f"data source {source['name']}", grafana.datasource(source))
    for dashboard in dashboards:
        note(f"dashboard {dashboard['title']}", grafana.dashboard(dashboard))
    for mark in marks:
        note(f"annotation {mark.key}", grafana.mark(mark))
    return pushed
