"""C sources compiled once into the cache."""

from __future__ import annotations

import ctypes
import shutil
from pathlib import Path

import pytest

from models.compiled import compiled, spent_s
from models.errors import UserError

FLAGS = ("-shared", "-fPIC")
pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler: apt-get install gcc brings one")


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path / "cache"))
    (tmp_path / "value.h").write_text("#define VALUE 7\n")
    path = tmp_path / "for_a_test.c"
    path.write_text('#include "value.h"\nint value(void) { return VALUE; }\n')
    return path


def made(source: Path, **more: str) -> Path:
    return compiled(source, FLAGS, ".so", headers=(source.with_name("value.h"),), **more)


def value(path: Path) -> int:
    return int(ctypes.CDLL(str(path)).value())


def test_it_is_compiled_once(source: Path) -> None:
    path = made(source)
    assert value(path) == 7 and path.name.startswith("for-a-test-")
    once, when = spent_s["for-a-test"], path.stat().st_mtime_ns
    assert once > 0
    assert made(source) == path
    assert (spent_s["for-a-test"], path.stat().st_mtime_ns) == (once, when)
    assert [one.name for one in path.parent.iterdir()] == [path.name]  # nothing half made beside it


def test_a_changed_header_or_flag_makes_another(source: Path) -> None:
    first = made(source)
    source.with_name("value.h").write_text("#define VALUE 8\n")
    second = made(source)
    third = compiled(source, (*FLAGS, "-O1"), ".so", headers=(source.with_name("value.h"),))
    assert (value(first), value(second), value(third)) == (7, 8, 8)
    assert len({first, second, third}) == 3


def test_a_source_that_is_wrong_is_told_by_its_first_error(source: Path) -> None:
    source.write_text("int value(void) { return nothing_of_that_name; }\n")
    with pytest.raises(UserError, match=r"failed: .*error: .*nothing_of_that_name"):
        made(source)


def test_a_compiler_that_is_none_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    with pytest.raises(UserError, match="no-such-compiler"):
        made(source)
    monkeypatch.delenv("CC")
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="no cc, gcc or clang"):
        made(source)


def test_a_cache_that_cannot_be_written_is_named(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TAILSPAN_CACHE", str(tmp_path / "file"))
    with pytest.raises(UserError, match="cannot be made"):
        made(source)
