"""What a user does to the command line that is no question about a run: closed pipes, broken parts, lost options."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import tailspan
from telemetry import names
from tests.bundles import make_bundle

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("more", [[], ["--json"]])
@pytest.mark.parametrize(("overload", "code"), [(False, names.EXIT_OK), (True, names.EXIT_SLO_BROKEN)])
def test_a_reader_that_has_had_enough_does_not_change_the_exit_code(
    tmp_path: Path, overload: bool, code: int, more: list[str]
) -> None:
    bundle = make_bundle(tmp_path, n=200, seed=2, overload=overload)
    argv = [sys.executable, "-m", "tailspan", "gate", str(bundle.path), *more]
    reader, writer = os.pipe()
    os.close(reader)
    environment = {key: value for key, value in os.environ.items() if key != "GITHUB_STEP_SUMMARY"}
    try:
        done = subprocess.run(argv, stdout=writer, stderr=subprocess.PIPE, cwd=ROOT, env=environment)
    finally:
        os.close(writer)
    assert (done.returncode, b"Traceback" in done.stderr) == (code, False), done.stderr


FULL = 'exec "$@" > /dev/full'
CLOSED = 'exec "$@" >&-'


def in_shell(line: str, *words: str) -> subprocess.CompletedProcess[str]:
    """A command of ours whose streams a shell has set up."""
    argv = ["sh", "-c", line, "sh", sys.executable, "-m", "tailspan", *words]
    environment = {key: value for key, value in os.environ.items() if key != "GITHUB_STEP_SUMMARY"}
    return subprocess.run(argv, capture_output=True, text=True, cwd=ROOT, env=environment)


@pytest.mark.parametrize("words", [["gate"], ["slo", "list"]])
def test_a_full_output_is_an_error_that_says_so_and_a_closed_one_is_none(tmp_path: Path, words: list[str]) -> None:
    code = names.EXIT_OK
    if words[0] == "gate":
        words = [*words, str(make_bundle(tmp_path, n=200, seed=2, overload=True).path)]
        code = names.EXIT_SLO_BROKEN
    done = in_shell(FULL, *words)
    assert done.returncode == names.EXIT_USAGE
    said = done.stderr.splitlines()
    assert said[-2] == "error: standard output: cannot be written: No space left on device", done.stderr
    assert said[-1].endswith(f"exit code {code}") and "Traceback" not in done.stderr
    for line in (CLOSED, 'exec "$@" 2>&-', 'exec "$@" 2>/dev/full')[: 1 if code else 3]:
        done = in_shell(line, *words)
        assert (done.returncode, "Traceback" in done.stdout + done.stderr) == (code, False), (line, done.stderr)


@pytest.mark.parametrize("table", ["requests", "series"])
def test_a_part_that_is_cut_is_named_and_hides_no_other_run(
    tmp_path: Path, table: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, cut = make_bundle(tmp_path, n=40, seed=1), make_bundle(tmp_path, n=40, seed=2)
    part = next((cut.path / table).glob("*.parquet"))
    part.write_bytes(part.read_bytes()[:100])
    for verdicts in cut.path.glob("verdicts-*.parquet"):
        verdicts.unlink()
    assert tailspan.main(["runs", "list", "--root", str(tmp_path)]) == names.EXIT_OK
    out = capsys.readouterr().out
    assert whole.run_id in out and "no whole Parquet file" in " ".join(out.split())
    for command in (["runs", "show", str(cut.path)], ["gate", str(cut.path)]):
        assert tailspan.main(command) == names.EXIT_USAGE
        err = capsys.readouterr().err
        assert str(part) in err and "remedy" in err and "Traceback" not in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--against", "foo", "--repeats", "2"], "--against: 'foo' is not an http(s) address"),
        (["--canary-share", "0.1"], "--canary-share: no canaries are named"),
    ],
)
def test_what_a_run_cannot_heed_is_refused_before_anything_is_sent(
    tmp_path: Path, options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2031-02-03 04:05:00.0000000,40,2\n", encoding="utf-8")
    command = ["run", "--target", "http://127.0.0.1:9", "--trace", str(trace), "--runs", str(tmp_path / "runs")]
    assert tailspan.main([*command, *options]) == names.EXIT_USAGE
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()
