"""The cache: whole folders or none, with several processes at once, after a death, without room."""

from __future__ import annotations

import subprocess
import sys
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from models import cache
from models.errors import UserError
from models.store import resolve


def quiet(line: str) -> None:
    del line


def test_the_place_follows_the_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache.cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("TAILSPAN_CACHE")
    assert cache.cache_dir() == tmp_path / "xdg" / "tailspan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.cache_dir() == Path.home() / ".cache" / "tailspan"


def test_processes_at_once_convert_once(write_gguf: Callable[..., Path], own_cache: Path) -> None:
    path = write_gguf("Q8_0")
    code = "import sys; from models.store import load_reference; print(load_reference(sys.argv[1]).shape.vocab)"
    several = [
        subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(4)
    ]
    ends = [process.communicate(timeout=120) for process in several]
    assert [out for out, _ in ends] == [b"512\n"] * 4
    assert sum(b"converted" in error for _, error in ends) == 1
    assert len(list((own_cache / "models").iterdir())) == 1


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    target = tmp_path / "cache" / "models" / "m"

    def fail(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.built_once(target, fail, waiting=quiet)
    assert list(target.parent.iterdir()) == []


def test_what_a_dead_process_left_is_removed(write_gguf: Callable[..., Path], own_cache: Path) -> None:
    path = write_gguf("F32")
    folder = resolve(str(path), quiet)
    left = folder.parent / f".{folder.name}.99999.tmp"
    folder.rename(left)
    assert resolve(str(path), quiet) == folder
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_a_full_disk_is_said_before_the_work(write_gguf: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9, 1000))
    with pytest.raises(UserError, match="MB are needed") as caught:
        resolve(str(write_gguf("F32")), quiet)
    assert "TAILSPAN_CACHE" in str(caught.value.remedy)


def test_a_cache_that_cannot_be_made_is_said(
    write_gguf: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError) as caught:
        resolve(str(write_gguf("F32")), quiet)
    assert "TAILSPAN_CACHE" in str(caught.value.remedy)


def test_digests_are_remembered_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big"
    path.write_bytes(b"abc")
    first = cache.remembered_sha256(path)
    assert first == cache.sha256_of(path)
    with monkeypatch.context() as patch:
        patch.setattr(cache, "sha256_of", lambda path: pytest.fail("hashed again"))
        assert cache.remembered_sha256(path) == first
    path.write_bytes(b"abcd")
    assert cache.remembered_sha256(path) != first
    for note in (cache.cache_dir() / "digests").iterdir():
        note.write_text("damaged")
    assert cache.remembered_sha256(path) == cache.sha256_of(path)
