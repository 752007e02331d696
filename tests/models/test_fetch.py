"""Fetching: goes on where it stopped, over real sockets, and never leaves a wrong file."""

from __future__ import annotations

import hashlib
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from models.errors import UserError
from models.fetch import RefusedError, fetch

CONTENT = random.Random(1).randbytes(300_000)
SHA = hashlib.sha256(CONTENT).hexdigest()
Serve = Callable[[dict[str, bytes]], Any]


def get(url: str, target: Path, **changes: Any) -> list[int]:
    seen: list[int] = []
    arguments: dict[str, Any] = {
        "size": len(CONTENT),
        "sha256": SHA,
        "on_bytes": seen.append,
        "proxies": {},
        "backoff": (0.0, 0.0),
    }
    fetch(url, target, **{**arguments, **changes})
    return seen


def test_a_plain_fetch(serve: Serve, tmp_path: Path) -> None:
    server, target = serve({"/f": CONTENT}), tmp_path / "f"
    seen = get(f"{server.url}/f", target)
    assert target.read_bytes() == CONTENT
    assert seen[0] == 0 and seen[-1] == len(CONTENT) and seen == sorted(seen)
    assert list(tmp_path.glob("*.part")) == []


def test_it_goes_on_after_the_connection_breaks(serve: Serve, tmp_path: Path) -> None:
    server, target = serve({"/f": CONTENT}), tmp_path / "f"
    server.cut_after = [100_000, 50_000]
    get(f"{server.url}/f", target)
    assert target.read_bytes() == CONTENT
    assert [asked for _, asked in server.requests] == ["bytes=0-", "bytes=100000-", "bytes=150000-"]


def test_another_process_goes_on_where_one_stopped(serve: Serve, tmp_path: Path) -> None:
    server, target = serve({"/f": CONTENT}), tmp_path / "f"
    (tmp_path / "f.part").write_bytes(CONTENT[:200_000])
    assert get(f"{server.url}/f", target)[0] == 200_000
    assert server.requests == [("/f", "bytes=200000-")]
    assert target.read_bytes() == CONTENT


def test_a_part_that_is_whole_needs_no_request(serve: Serve, tmp_path: Path) -> None:
    server = serve({"/f": CONTENT})
    (tmp_path / "f.part").write_bytes(CONTENT)
    get(f"{server.url}/f", tmp_path / "f")
    assert server.requests == []


def test_a_server_without_ranges_starts_over(serve: Serve, tmp_path: Path) -> None:
    server = serve({"/f": CONTENT})
    server.ranges = False
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    get(f"{server.url}/f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_part_of_another_file_is_found_out_and_dropped(serve: Serve, tmp_path: Path) -> None:
    server = serve({"/f": CONTENT})
    (tmp_path / "f.part").write_bytes(b"x" * 1000)
    with pytest.raises(UserError, match="SHA-256"):
        get(f"{server.url}/f", tmp_path / "f")
    assert list(tmp_path.iterdir()) == []
    get(f"{server.url}/f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_a_longer_or_shorter_file_is_not_taken(serve: Serve, tmp_path: Path) -> None:
    server = serve({"/long": CONTENT + b"x" * 600_000, "/short": CONTENT[:-1]})
    for path in ("/long", "/short"):
        with pytest.raises(UserError):
            get(f"{server.url}{path}", tmp_path / "f")
        assert not (tmp_path / "f").exists()
    (tmp_path / "f.part").write_bytes(CONTENT + b"left by another version")
    get(f"{serve({'/f': CONTENT}).url}/f", tmp_path / "f")
    assert (tmp_path / "f").read_bytes() == CONTENT


def test_passing_errors_are_tried_again(serve: Serve, tmp_path: Path) -> None:
    server = serve({"/f": CONTENT})
    server.status = [503, 429]
    get(f"{server.url}/f", tmp_path / "f")
    assert len(server.requests) == 3


def test_lasting_errors_say_where_they_stopped(serve: Serve, tmp_path: Path) -> None:
    server = serve({"/f": CONTENT})
    server.cut_after = [100_000, 0, 0, 0]
    with pytest.raises(UserError, match=r"stopped at 0\.1 of 0\.3 MB") as caught:
        get(f"{server.url}/f", tmp_path / "f")
    assert "goes on from there" in str(caught.value.remedy)
    assert (tmp_path / "f.part").stat().st_size == 100_000
    with pytest.raises(UserError, match="404"):
        get(f"{server.url}/none", tmp_path / "g")
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        with pytest.raises(UserError, match="stopped at"):
            get(f"http://127.0.0.1:{port}/f", tmp_path / "h")


@pytest.mark.parametrize("status", [401, 403])
def test_credentials_are_left_to_pip(status: int, serve: Serve, tmp_path: Path) -> None:
    server = serve({"/f": CONTENT})
    server.status = [status]
    with pytest.raises(RefusedError):
        get(f"{server.url}/f", tmp_path / "f")
