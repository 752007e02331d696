"""Children never outlive the command: normal end, error, signal, SIGKILL of the parent; and errors that help."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from dashboards.processes import Children, Terminated, answers, choose_port, describe
from models.errors import UserError

SLEEPER = (sys.executable, "-S", "-c", "import time; print('up', flush=True); time.sleep(600)")
STUBBORN = (
    sys.executable,
    "-S",
    "-c",
    "import signal, time\nfor s in (15, 2): signal.signal(s, signal.SIG_IGN)\nprint('up', flush=True)\ntime.sleep(600)",
)


def alive(pid: int) -> bool:
    """Whether the process runs (a zombie that nobody reaped yet does not)."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return stat.rsplit(")", 1)[1].split()[0] != "Z"


def wait_until(condition, timeout_s: float = 20.0) -> bool:  # type: ignore[no-untyped-def]
    until = time.monotonic() + timeout_s
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.02)
    return False


def said(child, text: str = "up"):  # type: ignore[no-untyped-def]
    return lambda: text in child.tail()


def test_leaving_the_block_ends_every_child_and_keeps_its_log(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        started = [children.start(f"sleeper{k}", SLEEPER) for k in range(2)]
        for child in started:
            children.wait_ready(child, said(child), 20)
            assert child.exit_status() is None
    assert [alive(child.pid) for child in started] == [False, False]
    assert (tmp_path / "sleeper0.log").read_text() == "up\n"
    assert started[0].exit_status() == -signal.SIGTERM


def test_an_error_inside_the_block_ends_them_too(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), Children(tmp_path) as children:
        child = children.start("sleeper", SLEEPER)
        _ = 1 / 0
    assert not alive(child.pid)


def test_a_child_that_ignores_signals_is_killed_after_its_grace(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        child = children.start("stubborn", STUBBORN, grace_s=0.3)
        children.wait_ready(child, said(child), 20)
        started = time.monotonic()
    assert child.exit_status() == -signal.SIGKILL
    assert not alive(child.pid)
    assert time.monotonic() - started < 10


def test_the_last_started_has_ended_before_the_one_before_is_asked_to(tmp_path: Path) -> None:
    code = (
        "import signal, sys, time\n"
        "def end(*_):\n    time.sleep(0.2)\n    print('ended', time.monotonic_ns(), flush=True)\n    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, end)\nprint('up', flush=True)\ntime.sleep(600)"
    )
    with Children(tmp_path) as children:
        for name in ("server", "load"):
            child = children.start(name, (sys.executable, "-S", "-c", code))
            children.wait_ready(child, said(child), 20)
    ended = {name: int((tmp_path / f"{name}.log").read_text().split("ended ")[1]) for name in ("server", "load")}
    assert ended["server"] - ended["load"] > 0.2e9


def test_a_grandchild_goes_with_the_group_even_when_its_parent_ended_first(tmp_path: Path) -> None:
    code = f"import subprocess; p = subprocess.Popen({STUBBORN!r}); print('pid', p.pid, flush=True)"
    with Children(tmp_path) as children:
        child = children.start("parent", (sys.executable, "-S", "-c", code), grace_s=0.3)
        assert child.wait(20) == 0
        assert wait_until(lambda: "up" in child.tail())
        grandchild = int(child.tail().split("pid ")[1].split()[0])
        assert alive(grandchild)
    assert wait_until(lambda: not alive(grandchild))


def test_sigterm_to_the_command_ends_the_children(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Terminated) as ended, Children(tmp_path) as children:
        child = children.start("sleeper", SLEEPER)
        os.kill(os.getpid(), signal.SIGTERM)
        child.wait(20)
    assert ended.value.exit_code == 128 + signal.SIGTERM
    assert not alive(child.pid)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux")
def test_sigkill_of_the_command_leaves_no_child(tmp_path: Path) -> None:
    code = textwrap.dedent(
        f"""
        import time
        from pathlib import Path
        from dashboards.processes import Children
        with Children(Path({str(tmp_path)!r})) as children:
            pids = [children.start(f"c{{k}}", {STUBBORN!r}).pid for k in range(3)]
            print(*pids, flush=True)
            time.sleep(600)
        """
    )
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 3
    assert wait_until(lambda: all("up" in (tmp_path / f"c{k}.log").read_text() for k in range(3)))
    parent.kill()
    parent.wait()
    parent.stdout.close()
    assert wait_until(lambda: not any(alive(pid) for pid in pids))


def test_a_child_that_ends_before_it_is_ready_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error, Children(tmp_path) as children:
        child = children.start("engine", (sys.executable, "-S", "-c", "print('no such model'); raise SystemExit(4)"))
        children.wait_ready(child, lambda: False, 20)
    assert "engine ended before it was ready (exit code 4)" in str(error.value)
    assert "no such model" in str(error.value)


def test_a_child_that_is_never_ready_is_bounded(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="engine was not ready after 0 s"), Children(tmp_path) as children:
        child = children.start("engine", SLEEPER)
        children.wait_ready(child, lambda: False, 0.1)
    assert not alive(child.pid)


def test_a_program_that_does_not_exist(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot start prometheus"), Children(tmp_path) as children:
        children.start("prometheus", (str(tmp_path / "nowhere"),))


def test_wait_any_names_the_one_that_ended(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        children.start("sleeper", SLEEPER)
        short = children.start("short", (sys.executable, "-S", "-c", "raise SystemExit(3)"))
        assert children.wait_any() is short
        assert short.exit_status() == 3


def test_a_taken_port_is_named_with_the_remedy() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(UserError) as error:
            choose_port(port, "the page", "--ui-port")
        assert f"--ui-port: port {port} for the page is taken" in str(error.value)
        assert "--ui-port 0" in str(error.value)
        assert not answers(f"http://127.0.0.1:{port}/never")
    free = choose_port(0, "the page", "--ui-port")
    assert choose_port(free, "the page", "--ui-port") == free


def test_statuses_in_words() -> None:
    assert describe(3) == "exit code 3"
    assert describe(-9) == "killed by SIGKILL"


def test_run_to_end_gives_the_exit_code_and_forgets_the_child(tmp_path: Path) -> None:
    with Children(tmp_path) as children:
        assert children.run_to_end(children.start("run", (sys.executable, "-S", "-c", "raise SystemExit(3)"))) == 3
        sleeper = children.start("sleeper", SLEEPER)
        assert children.running == [sleeper]
