"""Every number and every address that any command takes: nonsense is refused at once, by the name of its option.

The commands are walked, so that a new option is tested without a word here; one whose type is a number has to refuse
-1 and what is no number, and 0 unless ZERO_MEANS_SOMETHING; one that takes an address has to refuse what is none.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import tailspan
from telemetry import names

#: What each command needs to come as far as its own checks, and no further: nobody answers at this address.
NOBODY = "http://127.0.0.1:9"
NEEDED: dict[str, list[str]] = {
    "canaries check": ["--target", NOBODY, "--canaries", "canaries.json"],
    "canaries record": ["--target", NOBODY, "-o", "canaries.json"],
    "capacity": ["--target", NOBODY, "--trace", "no-such-trace"],
    "compare": ["no-such-run", "latest"],
    "explain": ["no-such-run", "latest"],
    "floor": ["--model", "no-such-model"],
    "grafana build": ["--slo", "no-such-slo"],
    "grafana push": ["--token-env", "NO_SUCH_TOKEN"],
    "lab proxy": ["--fault", "no-such-fault", "--target", NOBODY],
    "lab run": ["no-such-scenario"],
    "run": ["--target", NOBODY, "--trace", "no-such-trace"],
    "serve": ["--model", "no-such-model"],
    "lab blind": ["no-such-run"],
    "traces show": ["no-such-trace"],
    "traces verify": ["no-such-trace"],
    "watch": ["--target", NOBODY, "--slo", "no-such-slo"],
}
#: Options of an engine's twin are refused without it.
VIRTUAL = ["--virtual", "--model", "no-such-model", "--device", "h100"]
TWINS = {"--max-batch", "--token-budget", "--kv-blocks"}
#: Of two that exclude each other, or need each other: what has to stand beside an option.
BESIDE = {"--find": ["--against", NOBODY], "--canary-share": ["--canaries", "no-such-file"]}

COMMAND: Any = typer.main.get_command(tailspan.app)  # building it anew would take most of the time

ZERO_MEANS_SOMETHING = {
    "--cached", "--check-every", "--drain-timeout", "--engine-port", "--linger", "--metrics-port",
    "--nice", "--otlp-port", "--port", "--prometheus-port", "--remote-workers", "--replica", "--seed", "--shadow",
    "--sim-seed", "--speculate", "--start", "--temperature", "--tolerance", "--trace-seed", "--ui-port", "--warm-up",
}  # fmt: skip
SHARES = {
    "--alpha", "--canary-share", "--power", "--precision", "--shadow", "--utilisation", "--warm-up",
}  # fmt: skip
ADDRESSES = {
    "--against", "--forward-spans", "--otlp-endpoint", "--prometheus", "--proxy", "--target", "--tempo", "--url",
}  # fmt: skip
NO_ADDRESS = ("foo", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://127.0.0.1:99999", "http://127.0.0.1:x")
PLACES = {"--bind": ["foo", "http://127.0.0.1:5557", "127.0.0.1:x", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:65536"]}
HOSTS = {"--host", "--listen"}
NO_HOST = ("http://127.0.0.1", "127.0.0.1:8000", "a b", "")


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words."""

    def walk(command: Any, words: list[str]) -> Iterator[tuple[str, Any]]:
        for name, one in sorted(getattr(command, "commands", {}).items()):
            yield from walk(one, [*words, name])
        if not hasattr(command, "commands"):
            yield " ".join(words), command

    yield from walk(COMMAND, [])


def nonsense() -> Iterator[tuple[str, str, str]]:
    """Command, option, value that has to be refused."""
    for name, command in commands():
        for one in command.params:
            option = one.opts[-1] if one.param_type_name == "option" else ""
            kind = str(getattr(one, "type_descriptor", None) and one.type_descriptor.annotation)
            if not option:
                continue
            if "float" in kind or ("int" in kind and "Path" not in kind):
                values = ["-1", "x", *(() if option in ZERO_MEANS_SOMETHING else ("0",))]
                values += ["nan", "inf", "-inf"] if "float" in kind else ["1.5"]
                values += ["1.01", "50"] if option in SHARES else []
                values += ["65536"] if "port" in option else []
                values += ["100000"] if "workers" in option else []
                yield from ((name, option, value) for value in values)
            for values in (
                NO_ADDRESS if option in ADDRESSES else (), PLACES.get(option, ()), NO_HOST if option in HOSTS else ()
            ):  # fmt: skip
                yield from ((name, option, value) for value in values)


@pytest.mark.parametrize(("command", "option", "value"), list(nonsense()))
def test_nonsense_is_refused_by_the_name_of_its_option(
    command: str,
    option: str,
    value: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("TAILSPAN_RUNS", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tailspan, "app", COMMAND)
    needed = NEEDED.get(command, [])
    if command == "capacity" and option in TWINS:
        needed = VIRTUAL
    words = [*command.split(), *needed, *BESIDE.get(option, []), f"{option}={value}"]
    code = tailspan.main(words)
    said = capsys.readouterr().err
    assert code == names.EXIT_USAGE, said
    assert option in said and "remedy:" in said, said
    assert not list(tmp_path.iterdir()), "nothing was begun"
