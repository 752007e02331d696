"""Finding and fetching known traces, against a local server: pinned, resumed, refused, and the stand-in named."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from loadgen.traces import catalogue, fetch, find
from loadgen.traces.catalogue import KNOWN, SHIPPED_FOLDER
from models.errors import UserError

CONTENT = b"TIMESTAMP,ContextTokens,GeneratedTokens\n" + b"2031-02-03 04:05:06.1000001,40,7\n" * 5000


class Origin(ThreadingHTTPServer):
    """Serves CONTENT.  mode: whole, ranges, cut (half, then the connection closes), html, lfs, missing."""

    mode = "ranges"
    asked: list[str | None]

    def known(self, **changes: object) -> catalogue.Known:
        port = self.server_address[1]
        entry = replace(
            KNOWN["azure-2023-conv"],
            url=f"http://127.0.0.1:{port}/trace.csv",
            sha256=hashlib.sha256(CONTENT).hexdigest(),
            bytes=len(CONTENT),
        )
        return replace(entry, **changes)  # type: ignore[arg-type]


class Handler(BaseHTTPRequestHandler):
    server: Origin

    def do_GET(self) -> None:
        asked = self.headers.get("Range")
        self.server.asked.append(asked)
        mode = self.server.mode
        if mode == "missing":
            self.send_error(404)
            return
        body = {"html": b"<html>log in</html>", "lfs": b"version https://git-lfs.github.com/spec/v1\n"}.get(
            mode, CONTENT
        )
        start = int(asked.removeprefix("bytes=").rstrip("-")) if asked and mode == "ranges" else 0
        if start >= len(body):
            self.send_error(416)
            return
        self.send_response(206 if start else 200)
        self.send_header("Content-Type", "text/html" if mode == "html" else "text/csv")
        self.send_header("Content-Length", str(len(body) - start))
        self.end_headers()
        part = body[start:]
        if mode == "cut":
            part = part[: len(part) // 2]
            self.server.mode = "ranges"
        self.wfile.write(part)

    def log_message(self, format: str, *args: object) -> None:
        return


@pytest.fixture
def origin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("TAILSPAN_TRACES", raising=False)
    for variable in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    server = Origin(("127.0.0.1", 0), Handler)
    server.asked = []
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


def test_it_fetches_and_takes_the_name_only_when_whole(origin: Origin, tmp_path: Path) -> None:
    seen: list[int] = []
    path = fetch.fetch(origin.known(), tmp_path, lambda done, total: seen.append(done))
    assert path.read_bytes() == CONTENT
    assert seen[-1] == len(CONTENT)
    assert [file.name for file in tmp_path.glob("*.part")] == []


def test_a_broken_download_is_resumed_with_a_range(origin: Origin, tmp_path: Path) -> None:
    origin.mode = "cut"
    path = fetch.fetch(origin.known(), tmp_path)
    assert path.read_bytes() == CONTENT
    assert origin.asked == [None, f"bytes={len(CONTENT) // 2}-"]


def test_a_server_without_ranges_sends_it_again_from_the_start(origin: Origin, tmp_path: Path) -> None:
    (tmp_path / f"{origin.known().file}.part").write_bytes(CONTENT[:1000])
    origin.mode = "whole"
    assert fetch.fetch(origin.known(), tmp_path).read_bytes() == CONTENT


def test_a_part_with_other_bytes_is_found_out_by_its_sha256(origin: Origin, tmp_path: Path) -> None:
    part = tmp_path / f"{origin.known().file}.part"
    part.write_bytes(b"x" * 1000)
    with pytest.raises(fetch.FetchError, match="sha256"):
        fetch.fetch(origin.known(), tmp_path)
    assert not part.exists()
    assert fetch.fetch(origin.known(), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(("mode", "word"), [("html", "web page"), ("lfs", "Git-LFS pointer"), ("missing", "404")])
def test_what_is_not_the_trace_is_refused_by_name(origin: Origin, tmp_path: Path, mode: str, word: str) -> None:
    origin.mode = mode
    with pytest.raises(fetch.FetchError, match=word):
        fetch.fetch(origin.known(), tmp_path)
    assert not (tmp_path / origin.known().file).exists()


def test_more_bytes_than_the_trace_has_are_refused(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match="more than"):
        fetch.fetch(origin.known(bytes=1000), tmp_path)


def test_a_trace_of_unknown_size_is_fetched_resumed_and_recognised_when_it_was_whole(
    origin: Origin, tmp_path: Path
) -> None:
    known = origin.known(bytes=None)
    origin.mode = "cut"
    seen: list[int | None] = []
    assert fetch.fetch(known, tmp_path, lambda done, total: seen.append(total)).read_bytes() == CONTENT
    assert set(seen) == {len(CONTENT)}
    assert origin.asked == [None, f"bytes={len(CONTENT) // 2}-"]
    (tmp_path / known.file).rename(tmp_path / f"{known.file}.part")  # killed between the last byte and the name
    assert fetch.fetch(known, tmp_path).read_bytes() == CONTENT
    assert origin.asked[-1] == f"bytes={len(CONTENT)}-"


def test_the_command_shows_licence_and_citation_and_fetches(
    origin: Origin, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import tailspan

    monkeypatch.setitem(KNOWN, "azure-2023-conv", origin.known())
    assert tailspan.main(["traces", "fetch", "azure-2023-conv"]) == 0
    out = capsys.readouterr().out
    assert "CC-BY-4.0" in out and "Splitwise" in out and origin.known().sha256 in out
    assert (find.cache_folder() / origin.known().file).read_bytes() == CONTENT
    for name in ("synthetic-conv", "azure-2032"):
        assert tailspan.main(["traces", "fetch", name]) == 4
        assert "is not a trace that can be fetched" in capsys.readouterr().err


def test_every_known_trace_says_where_it_is_from_and_what_it_may_be_used_for() -> None:
    for known in KNOWN.values():
        assert len(known.sha256) == 64 and known.licence and known.citation
        assert known.synthetic or (known.url or "").startswith("https://")


def test_a_folder_of_the_variable_comes_before_the_cache_and_a_file_with_other_bytes_is_passed_over(
    origin: Origin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = origin.known()
    monkeypatch.setitem(KNOWN, known.name, known)
    other, real = tmp_path / "other", tmp_path / "real"
    for folder, content in ((other, b"something else"), (real, CONTENT)):
        folder.mkdir()
        (folder / known.file).write_bytes(content)
    monkeypatch.setenv("TAILSPAN_TRACES", f"{other}:{real}")
    found = find.locate(known.name)
    assert (found.path, found.source) == (real / known.file, "folder")
    assert "TAILSPAN_TRACES" in found.sentence
    monkeypatch.setenv("TAILSPAN_TRACES", str(other))
    found = find.locate(known.name)
    assert found.source == "fetched"
    assert str(other / known.file) in found.sentence
    assert find.locate(known.name).source == "cache"


def test_without_the_network_the_stand_in_is_used_and_called_synthetic(
    origin: Origin, monkeypatch: pytest.MonkeyPatch
) -> None:
    origin.mode = "missing"
    monkeypatch.setitem(KNOWN, "azure-2023-conv", origin.known())
    found = find.locate("azure-2023-conv")
    assert (found.path, found.name) == (SHIPPED_FOLDER / "synthetic-conv.csv", "synthetic-conv")
    assert "SYNTHETIC" in found.sentence
    assert "404" in found.sentence
    monkeypatch.setitem(KNOWN, "azure-2023-code", replace(origin.known(), name="azure-2023-code", stand_in=None))
    with pytest.raises(UserError, match="could not be fetched") as caught:
        find.locate("azure-2023-code")
    assert "TAILSPAN_TRACES" in (caught.value.remedy or "")


def test_a_host_that_cannot_be_resolved_is_given_up_at_once(origin: Origin, tmp_path: Path) -> None:
    with pytest.raises(fetch.FetchError, match="no network"):
        fetch.fetch(origin.known(url="https://nowhere.invalid/trace.csv"), tmp_path)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        find.locate("azure-2032")
    assert "azure-2023-conv" in (caught.value.remedy or "")


def test_what_exists_and_is_no_file_is_called_so(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="a folder") as told:
        find.locate(str(tmp_path))
    assert told.value.where == str(tmp_path)
    with pytest.raises(UserError, match="no regular file"):
        find.locate("/dev/null")
