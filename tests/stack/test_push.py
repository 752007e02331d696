"""``tailspan grafana push`` against a server that answers as Grafana 11 and 12 do, and records what it was asked."""

from __future__ import annotations

import copy
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from dashboards.grafana import files
from dashboards.grafana.commands import event_mark, moment_ms, run_mark
from dashboards.grafana.push import CREATED, SAME, UPDATED, Grafana, Mark, contains, push
from models.errors import UserError
from tailspan import main
from tests.bundles import make_bundle

TOKEN = "glsa_secret"
MARK = Mark("run:1", "run", "run 1: VALID", 1000, 61_000)


class FakeGrafana:
    """What Grafana's API does with folders, data sources, dashboards and annotations: its statuses and its bodies.

    version: 11 or 12, which answers with the schema's own defaults filled in and a resource version beside.  written:
    method and path of every request that changed something.
    """

    def __init__(self, version: int) -> None:
        self.version, self.token, self.role = version, TOKEN, "Admin"
        self.folders: dict[str, dict[str, Any]] = {}
        self.sources: dict[str, dict[str, Any]] = {}
        self.boards: dict[str, dict[str, Any]] = {}
        self.marks: list[dict[str, Any]] = []
        self.provisioned: set[str] = set()
        self.asked: list[tuple[str, str]] = []
        self.before: dict[tuple[str, str], Any] = {}  # called before this request is answered

    @property
    def written(self) -> list[tuple[str, str]]:
        return [one for one in self.asked if one[0] != "GET"]

    def answer(self, method: str, path: str, query: dict[str, list[str]], body: Any) -> tuple[int, Any]:
        self.asked.append((method, path))
        if (hook := self.before.pop((method, path), None)) is not None:
            found = hook()
            if found is not None:
                return found
        parts = path.strip("/").split("/")[1:]
        if parts == ["health"]:
            return 200, {"database": "ok", "version": f"{self.version}.0.0", "commit": "x"}
        match method, parts:
            case "GET", ["org"]:
                return 200, {"id": 1, "name": "Main Org."}
            case "GET", ["folders", uid]:
                return self._found(self.folders, uid, "folder not found")
            case "POST", ["folders"]:
                if body["uid"] in self.folders:
                    return 412, {"message": "a folder with the same uid already exists", "status": "version-mismatch"}
                self.folders[body["uid"]] = {**body, "id": 7, "version": 1}
                return 200, self.folders[body["uid"]]
            case "PUT", ["folders", uid]:
                there = self.folders[uid]
                if not body.get("overwrite") and body.get("version") != there["version"]:
                    return 412, {"message": "the folder has been changed by someone else", "status": "version-mismatch"}
                there.update(title=body["title"], version=there["version"] + 1)
                return 200, there
            case "GET", ["datasources", "uid", uid]:
                return self._found(self.sources, uid, "Data source not found")
            case "POST", ["datasources"]:
                if self.role != "Admin":
                    return 403, {"message": "You'll need additional permissions: datasources:create"}
                if any(one["name"] == body["name"] for one in self.sources.values()):
                    return 409, {"message": "data source with the same name already exists"}
                self.sources[body["uid"]] = self._source(body, 1)
                return 200, {"datasource": self.sources[body["uid"]], "message": "Datasource added"}
            case "PUT", ["datasources", "uid", uid]:
                there = self.sources[uid]
                if there["readOnly"]:
                    return 403, {"message": "Cannot update read-only data source"}
                if body.get("version") not in (None, there["version"]):
                    return 409, {"message": "Datasource has already been updated by someone else. Please reload"}
                self.sources[uid] = self._source(body, there["version"] + 1)
                return 200, {"datasource": self.sources[uid], "message": "Datasource updated"}
            case "GET", ["dashboards", "uid", uid]:
                return self._found(self.boards, uid, "Dashboard not found")
            case "POST", ["dashboards", "db"]:
                return self._save(body)
            case "GET", ["annotations"]:
                wanted = set(query.get("tags", ()))
                return 200, [one for one in self.marks if wanted <= set(one["tags"])][: int(query["limit"][0])]
            case "POST", ["annotations"]:
                self.marks.append({**body, "id": len(self.marks) + 1})
                return 200, {"message": "Annotation added", "id": len(self.marks)}
        return 404, {"message": "Not found"}

    def _save(self, body: dict[str, Any]) -> tuple[int, Any]:
        board, uid = body["dashboard"], body["dashboard"]["uid"]
        there = self.boards.get(uid)
        if body["folderUid"] not in self.folders:
            return 400, {"message": "folder not found", "status": "not-found"}
        if uid in self.provisioned:
            return 400, {"message": "Cannot save provisioned dashboard"}
        if there is None and board.get("id"):
            return 404, {"message": "Dashboard not found", "status": "not-found"}
        if any(one["dashboard"]["title"] == board["title"] for key, one in self.boards.items() if key != uid):
            return 412, {
                "message": "A dashboard with the same name in the folder already exists",
                "status": "name-exists",
            }
        version = 0 if there is None else there["dashboard"]["version"]
        if there is not None and not body["overwrite"] and board.get("version") != version:
            return 412, {"message": "The dashboard has been changed by someone else", "status": "version-mismatch"}
        saved = {**copy.deepcopy(board), "id": 11, "version": version + 1}
        if self.version >= 12:
            saved |= {"apiVersion": "v1beta1", "preload": board.get("preload", False)}
        self.boards[uid] = {"dashboard": saved, "meta": {"folderUid": body["folderUid"], "provisioned": False}}
        return 200, {"id": 11, "uid": uid, "status": "success", "version": version + 1, "slug": uid, "url": f"/d/{uid}"}

    @staticmethod
    def _found(table: dict[str, dict[str, Any]], key: str, message: str) -> tuple[int, Any]:
        return (200, table[key]) if key in table else (404, {"message": message, "status": "not-found"})

    @staticmethod
    def _source(body: dict[str, Any], version: int) -> dict[str, Any]:
        kept = {key: value for key, value in body.items() if key != "version"}
        return {"readOnly": False, "basicAuth": False, "withCredentials": False, **kept, "id": 3, "version": version}


class Served:
    def __init__(self, grafana: FakeGrafana, prefix: str = "") -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                parts = urlsplit(self.path)
                path = unquote(parts.path)
                if not path.startswith(f"{prefix}/api/"):
                    self.send(200, b"<html>the login page</html>", "text/html")
                    return
                path = path.removeprefix(prefix)
                if path != "/api/health" and self.headers.get("Authorization") != f"Bearer {grafana.token}":
                    status, found = 401, {"message": "Invalid API key", "messageId": "api-key.invalid"}
                else:
                    status, found = grafana.answer(
                        self.command, path, parse_qs(parts.query), json.loads(body) if body else None
                    )
                data, kind = (
                    (found, "text/html")
                    if isinstance(found, bytes)
                    else (json.dumps(found).encode(), "application/json")
                )
                self.send(status, data, kind)

            do_GET = do_POST = do_PUT = do_DELETE = handle_any  # noqa: N815  # names of http.server

            def send(self, status: int, data: bytes, kind: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, format: str, *args: Any) -> None:
                """Quiet."""

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}{prefix}"
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


@pytest.fixture(params=[11, 12])
def grafana(request: pytest.FixtureRequest) -> FakeGrafana:
    return FakeGrafana(request.param)


@pytest.fixture
def served(grafana: FakeGrafana) -> Iterator[Served]:
    found = Served(grafana)
    yield found
    found.close()


SOURCES = files.datasources("http://prometheus:9090", "http://tempo:3200")


def pushed(url: str, *, token: str = TOKEN, sources: list[dict[str, Any]] | None = None) -> list[str]:
    done = push(
        Grafana(url, token), files.dashboards(), SOURCES if sources is None else sources, [MARK], lambda _: None
    )
    return [what for _, what in done.done]


def test_a_second_push_changes_nothing(grafana: FakeGrafana, served: Served) -> None:
    boards = files.dashboards()
    assert pushed(served.url) == [CREATED] * (1 + len(SOURCES) + len(boards) + 1)
    assert set(grafana.boards) == {one["uid"] for one in boards}
    assert grafana.marks[0] == {"time": 1000, "timeEnd": 61_000, "tags": ["tailspan", "tailspan-run", "run:1"],
                                "text": "run 1: VALID", "id": 1}  # fmt: skip
    state = copy.deepcopy((grafana.folders, grafana.sources, grafana.boards, grafana.marks))
    grafana.asked.clear()
    assert pushed(served.url) == [SAME] * (1 + len(SOURCES) + len(boards) + 1)
    assert grafana.written == []
    assert (grafana.folders, grafana.sources, grafana.boards, grafana.marks) == state


def test_what_differs_is_brought_back_and_only_that(grafana: FakeGrafana, served: Served) -> None:
    pushed(served.url)
    uid = files.dashboards()[0]["uid"]
    grafana.boards[uid]["dashboard"]["panels"].pop()
    grafana.boards[uid]["dashboard"]["version"] = 9  # somebody saved it in the meantime
    grafana.folders[files.FOLDER_UID]["title"] = "renamed"
    grafana.sources[files.PROMETHEUS_UID]["url"] = "http://elsewhere"
    grafana.sources[files.PROMETHEUS_UID]["isDefault"] = True
    grafana.asked.clear()
    done = pushed(served.url)
    assert sorted(done) == sorted([UPDATED] * 3 + [SAME] * (len(done) - 3))
    assert grafana.written == [
        ("PUT", f"/api/folders/{files.FOLDER_UID}"),
        ("PUT", f"/api/datasources/uid/{files.PROMETHEUS_UID}"),
        ("POST", "/api/dashboards/db"),
    ]
    assert grafana.sources[files.PROMETHEUS_UID]["isDefault"] is True, "whose turn that is, users decide"
    assert set(pushed(served.url)) == {SAME}


def test_a_dashboard_in_another_folder_comes_back(grafana: FakeGrafana, served: Served) -> None:
    pushed(served.url)
    grafana.boards[files.dashboards()[0]["uid"]]["meta"]["folderUid"] = "other"
    assert pushed(served.url).count(UPDATED) == 1


def test_a_change_in_between_is_refused_and_not_lost(grafana: FakeGrafana, served: Served) -> None:
    pushed(served.url)
    there = grafana.boards[files.dashboards()[0]["uid"]]["dashboard"]
    there["panels"].pop()

    def meanwhile() -> None:
        there["version"] += 1
        there["title"] = "theirs"

    grafana.before["POST", "/api/dashboards/db"] = meanwhile
    with pytest.raises(UserError, match="status 412: The dashboard has been changed by someone else") as caught:
        pushed(served.url)
    assert "push again" in (caught.value.remedy or "")
    assert there["title"] == "theirs"


def refuse(status: int, body: Any) -> Any:
    return lambda: (status, body)


@pytest.mark.parametrize(
    ("place", "status", "body", "said", "remedy"),
    [
        (
            ("GET", "/api/org"),
            403,
            {"message": "Permission denied"},
            "status 403: Permission denied",
            "may not do this",
        ),
        (("GET", "/api/org"), 404, b"nginx", "status 404: nginx", "base URL"),
        (("POST", "/api/folders"), 409, {"message": "name exists"}, "folder 'tailspan': status 409", "another uid"),
        (
            ("POST", "/api/datasources"),
            422,
            {"message": "bad"},
            "data source 'tailspan Prometheus': status 422",
            "11 and 12",
        ),
        (("POST", "/api/dashboards/db"), 400, {"message": "bad"}, "dashboard .*: status 400: bad", "11 and 12"),
        (("POST", "/api/dashboards/db"), 413, b"too large", "status 413: too large", "proxy"),
        (("POST", "/api/dashboards/db"), 429, {"message": "slow"}, "status 429", "later"),
        (("POST", "/api/annotations"), 500, {"message": "database is locked"}, "status 500: database is locked", "log"),
        (("POST", "/api/annotations"), 503, b"<html>", "status 503: <html>", "log"),
        (("GET", "/api/dashboards/uid/tailspan-engine"), 404, b"<html>gone</html>", "status 404", "base URL"),
    ],
)
def test_every_status_is_explained(place: tuple[str, str], status: int, body: Any, said: str, remedy: str) -> None:
    grafana = FakeGrafana(12)
    grafana.before[place] = refuse(status, body)
    served = Served(grafana)
    try:
        with pytest.raises(UserError, match=said) as caught:
            pushed(served.url)
    finally:
        served.close()
    assert remedy in str(caught.value.remedy) and caught.value.where == served.url
    assert TOKEN not in str(caught.value)


def test_a_bad_token(grafana: FakeGrafana, served: Served) -> None:
    with pytest.raises(UserError, match="status 401") as caught:
        pushed(served.url, token="glsa_wrong")
    assert "token is not taken" in str(caught.value) and "glsa_wrong" not in str(caught.value)
    assert grafana.written == []


def test_an_editor_can_push_without_data_sources(grafana: FakeGrafana, served: Served) -> None:
    grafana.role = "Editor"
    with pytest.raises(UserError, match="status 403: You'll need additional permissions"):
        pushed(served.url)
    assert CREATED in pushed(served.url, sources=[])


def test_what_a_provisioning_file_holds_is_left(grafana: FakeGrafana, served: Served) -> None:
    pushed(served.url)
    grafana.sources[files.PROMETHEUS_UID]["readOnly"] = True
    uid = files.dashboards()[0]["uid"]
    grafana.boards[uid]["meta"]["provisioned"] = True
    assert set(pushed(served.url)) == {SAME}, "as it should be: nothing to say"
    grafana.sources[files.PROMETHEUS_UID]["url"] = "http://elsewhere"
    with pytest.raises(UserError, match="data source 'tailspan Prometheus' comes from a provisioning file"):
        pushed(served.url)
    grafana.boards[uid]["dashboard"]["panels"].pop()
    with pytest.raises(UserError, match=r"dashboard .* comes from a provisioning file"):
        pushed(served.url, sources=[])


def test_titles_and_names_that_others_have(grafana: FakeGrafana, served: Served) -> None:
    pushed(served.url)
    board = grafana.boards.pop(files.dashboards()[0]["uid"])
    grafana.boards["other"] = board
    with pytest.raises(UserError, match="status 412: A dashboard with the same name") as caught:
        pushed(served.url)
    assert "rename or delete" in str(caught.value)
    source = grafana.sources.pop(files.PROMETHEUS_UID)
    grafana.sources["other"] = source
    with pytest.raises(UserError, match="status 409") as caught:
        pushed(served.url)
    assert "rename or delete" in str(caught.value)


def test_where_no_grafana_answers() -> None:
    behind = Served(FakeGrafana(11), "/grafana")
    try:
        assert CREATED in pushed(behind.url)
        with pytest.raises(UserError, match="no JSON"):
            pushed(behind.url.removesuffix("/grafana"))
    finally:
        behind.close()
    with pytest.raises(UserError, match="connection refused"):
        pushed(behind.url)
    other = FakeGrafana(11)
    other.before["GET", "/api/health"] = refuse(200, {"status": "ok"})
    served = Served(other)
    try:
        with pytest.raises(UserError, match="no Grafana"):
            pushed(served.url)
    finally:
        served.close()


@pytest.mark.parametrize("url", ["127.0.0.1:3000", "ftp://h", "http://", "http://h:x", "http://admin:admin@h"])
def test_addresses_that_are_none(url: str) -> None:
    with pytest.raises(UserError, match="is not the address of a Grafana"):
        Grafana(url, TOKEN)


def test_contains() -> None:
    assert contains({"a": 1, "b": {"c": [1, {"d": 2, "e": 3}]}}, {"b": {"c": [1, {"d": 2}]}})
    for other in ({"a": 2}, {"z": None}, {"b": {"c": [1]}}, {"b": {"c": [1, {"d": 9}]}}, {"b": 1}):
        assert not contains({"a": 1, "b": {"c": [1, {"d": 2}]}}, other)


def test_marks(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, n=20)
    mark = run_mark(bundle.run_id, tmp_path)
    assert mark.key == f"run:{bundle.run_id}" and mark.tags[1] == "tailspan-run"
    ends = bundle.table("requests", ["end_s"]).column("end_s").to_pylist()
    zero = bundle.manifest["clock"]["zero_unix_ns"] // 1_000_000
    assert (mark.start_ms, mark.end_ms) == (zero, zero + round(1000 * max(end for end in ends if end is not None)))
    assert moment_ms("2026-01-31T12:00:00+00:00") == 1_769_860_800_000
    with pytest.raises(UserError, match="'noon' is not a time"):
        moment_ms("noon")
    assert event_mark("deploy", "v2 is out", 5).key == "deploy:v2-is-out:5"
    assert event_mark("deploy", "v2", None).key == event_mark("deploy", "v2", None).key


def test_the_command(
    tmp_path: Path, served: Served, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def tailspan(*words: str) -> tuple[int, str, str]:
        code = main(["grafana", *words])
        said = capsys.readouterr()
        return code, said.out, said.err

    monkeypatch.setenv("GRAFANA_TOKEN", TOKEN)
    code, out, _ = tailspan("push", "--url", served.url, "--deploy", "v2", "--json")
    assert code == 0 and json.loads(out)["changed"] == len(json.loads(out)["done"])
    code, out, _ = tailspan("push", "--url", served.url, "--deploy", "v2")
    assert code == 0 and out.splitlines()[-1].startswith("0 of ")
    monkeypatch.setenv("GRAFANA_TOKEN", "")
    code, _, err = tailspan("push", "--url", served.url)
    assert code == 4 and "$GRAFANA_TOKEN: holds no token" in err
    out_folder = tmp_path / "out"
    assert tailspan("build", "-o", str(out_folder), "--prometheus", "http://p:1", "--tempo", "")[0] == 0
    written = {str(path.relative_to(out_folder)) for path in out_folder.rglob("*") if path.is_file()}
    assert {f"dashboards/{one['uid']}.json" for one in files.dashboards()} < written
    assert "provisioning/datasources/tailspan.yaml" in written and "rules/tailspan.rules.yml" in written
    sources = (out_folder / "provisioning" / "datasources" / "tailspan.yaml").read_text()
    assert "http://p:1" in sources and "tempo" not in sources
    assert tailspan("build", "-o", "/proc/nowhere")[0] == 4
