"""The compose stack from nothing to nothing: does it start, load, show, heal, and leave nothing behind?

Usage: python -m benchmarks.accept_compose [--build] [--keep] [--folder build/accept-compose]
Needs Docker with compose 2.20 or newer, and chromium.  It starts docker-compose.yml as a project of its own on its own
ports, and

1. waits until every health check is green;
2. opens the page through its published port while a load of 60 s goes, and holds it against the command line;
3. kills a worker in the middle of a run: that run must be INCOMPLETE with every request labelled, the next one whole;
4. kills the engine in the middle of a run: every request must have a label, later ones must be good again;
5. takes the stack down with -v: no container, volume or network of it may be left.

Prints a line for each step; exits with 1 when one does not hold.  Where the images of Grafana, the collector and Tempo
are stand-ins, nothing is said about those three.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parent.parent
PROJECT: Final = "tailspan-accept"
PORTS: Final = {"PAGE_PORT": "18501", "ENGINE_PORT": "18000", "GRAFANA_PORT": "13000", "PROMETHEUS_PORT": "19090",
                "ALERTMANAGER_PORT": "19093"}  # fmt: skip
LOAD_S: Final = 60
UP_S: Final = 600.0
GATHER_S: Final = 30.0  # between the end of a run and its gathered bundle
RUN_S: Final = 300.0  # for a run to begin, or to end
OURS: Final = ("engine", "load", "worker", "page")
KILL: Final = """
import os, signal
for pid in filter(str.isdigit, os.listdir("/proc")):
    if open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[1] == "1":  # a child of the container's init
        os.kill(int(pid), signal.SIGKILL)
"""


#: The live page counts more good requests than before.
MORE: Final = (
    "was => Number(document.querySelector('[data-testid=tile-good] .ts-count').textContent.match(/\\d+/)[0]) > was"
)


class Broken(Exception):
    """A step that does not hold."""


def compose(*words: str, check: bool = True) -> str:
    """`docker compose` on our project; its output."""
    environment = {**os.environ, **PORTS, "LOAD_SECONDS": str(LOAD_S), "COMPOSE_PROJECT_NAME": PROJECT}
    argv = ["docker", "compose", "-f", str(ROOT / "docker-compose.yml"), *words]
    done = subprocess.run(argv, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise Broken(f"docker compose {' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def containers() -> list[dict[str, Any]]:
    """Of the project, stopped ones included."""
    return [json.loads(line) for line in compose("ps", "-a", "--format", "json").splitlines()]


def tailspan(*words: str) -> str:
    """A command of ours where the bundles lie."""
    return compose("exec", "-T", "page", "tailspan", *words, check=False)


def shown(run: str) -> dict[str, Any]:
    return dict(json.loads(tailspan("runs", "show", run, "--json")))


def runs() -> list[dict[str, Any]]:
    """Bundles, newest first."""
    return list(json.loads(tailspan("runs", "list", "--json") or "[]"))


def until(what: str, seconds: float, ask: Callable[[], Any]) -> Any:
    """The first true answer of ``ask``.  Raises Broken when none came in time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if found := ask():
            return found
        time.sleep(1.0)
    raise Broken(f"{what}: not within {seconds:.0f} s")


def under_way(after: str = "", least: int = 10) -> str:
    """A run that goes, is not ``after`` and has at least so many rows: its id."""

    def ask() -> str:
        found = runs()
        if not found or found[0]["status"] != "running" or found[0]["run_id"] <= after:
            return ""
        return str(found[0]["run_id"]) if shown(found[0]["run_id"])["attempted"] >= least else ""

    return str(until("a run under way", RUN_S, ask))


def ended(run: str) -> dict[str, Any]:
    """The account of a run once it has ended."""
    until(f"the end of run {run}", RUN_S, lambda: shown(run)["status"] != "running")
    return shown(run)


def whole(found: dict[str, Any]) -> str:
    """The verdict on a run, which must not be INCOMPLETE.  CLIENT_LIMITED is what a busy machine makes of it."""
    verdict = str(found["validity"]["verdict"])
    if verdict == "INCOMPLETE":
        raise Broken(f"run {found['run_id']} is INCOMPLETE: {found['validity']['reasons']}")
    return verdict


def nothing_lost(found: dict[str, Any]) -> str:
    """Every scheduled request has one label, and the bundle holds together.  Returns the labels in words."""
    scheduled, labels = found["validity"]["figures"]["scheduled"], found["labels"]
    if sum(labels.values()) != scheduled:
        raise Broken(f"{scheduled} requests were scheduled, {sum(labels.values())} have a label: {labels}")
    end = time.monotonic() + GATHER_S
    while (checked := tailspan("runs", "check", found["run_id"])) and "FAIL" in checked and time.monotonic() < end:
        time.sleep(1.0)
    if not (count := re.search(r"(\d+) of (\d+) checks hold", checked)) or count[1] != count[2]:
        raise Broken(f"runs check {found['run_id']}:\n{checked}")
    return ", ".join(f"{count} {label}" for label, count in labels.items() if count) + f" of {scheduled}"


def kill(service: str) -> None:
    """SIGKILL to what a container runs, so that the container ends as if it had crashed."""
    compose("exec", "-T", "--index", "1", service, "python", "-c", KILL, check=False)


def restarts(service: str) -> int:
    names = [one["Name"] for one in containers() if one["Service"] == service]
    asked = ["docker", "inspect", "-f", "{{.RestartCount}}", *names]
    return sum(int(word) for word in subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split())


def healthy() -> bool:
    found = [one for one in containers() if one["Service"] in (*OURS, "prometheus", "grafana")]
    return bool(found) and all(one["Health"] == "healthy" for one in found)


# --- the five steps ---
def starts(build: bool) -> str:
    began = time.monotonic()
    compose("up", "-d", *(["--build"] if build else ["--no-build"]), "--wait", "--wait-timeout", str(int(UP_S)))
    found = containers()
    if bad := [one["Service"] for one in found if one["State"] != "running"]:
        raise Broken(f"not running: {', '.join(bad)}")
    if not healthy():
        raise Broken(f"not healthy: {[(one['Service'], one['Health']) for one in found]}")
    return f"{len(found)} containers up, all health checks green after {time.monotonic() - began:.0f} s"


def is_seen(folder: Path) -> str:
    from playwright.sync_api import Error, sync_playwright

    try:
        with sync_playwright() as playwright:
            return look(playwright, folder)
    except Error as problem:
        raise Broken(str(problem)) from problem


def look(playwright: Any, folder: Path) -> str:
    """The load on the live page while it goes, and on the triage page at its end."""
    run = under_way(least=20)
    url = f"http://127.0.0.1:{PORTS['PAGE_PORT']}"
    browser = playwright.chromium.launch(executable_path="/usr/bin/chromium", args=["--no-sandbox"])
    page = browser.new_page(viewport={"width": 1440, "height": 900})
    page.goto(f"{url}/live?run={run}")
    page.wait_for_selector("[data-testid=tile-good]", timeout=60_000)
    first = count_on(page, "good")
    page.wait_for_function(MORE, arg=first, timeout=60_000)
    page.screenshot(path=str(folder / "live.png"))
    live = count_on(page, "good")
    found = ended(run)
    page.goto(f"{url}/run?run={run}")
    page.wait_for_selector("[data-testid=tile-late]", timeout=60_000)
    on_page = {label: count_on(page, label) for label in found["labels"]}
    page.screenshot(path=str(folder / "run.png"), full_page=True)
    browser.close()
    if on_page != {label: found["labels"][label] for label in on_page}:
        raise Broken(f"the page says {on_page}, the command line {found['labels']}")
    told = f"{first}, then {live} good on the live page; at the end {nothing_lost(found)}, as the page says"
    return f"run {run} is {whole(found)}: {told}"


def count_on(page: Any, label: str) -> int:
    """What a tile of the page counts."""
    text = page.inner_text(f"[data-testid=tile-{label}] .ts-count")
    return int(text.split()[0].replace(",", ""))


def worker_heals() -> str:
    run = under_way(after=runs()[0]["run_id"] if runs()[0]["status"] != "running" else "")
    before = restarts("worker")
    kill("worker")
    found = ended(run)
    if found["validity"]["verdict"] != "INCOMPLETE":
        raise Broken(f"run {run} lost a worker and is {found['validity']['verdict']}")
    kept = nothing_lost(found)
    following = ended(under_way(after=run))
    if restarts("worker") <= before:
        raise Broken("the worker was not restarted")
    return f"run {run} is INCOMPLETE and keeps {kept}; the next one is {whole(following)}: {nothing_lost(following)}"


def engine_heals() -> str:
    newest = runs()[0]
    run = under_way(after=newest["run_id"] if newest["status"] != "running" else "")
    before = restarts("engine")
    kill("engine")
    until("a healthy stack", RUN_S, lambda: restarts("engine") > before and healthy())
    found = ended(run)
    kept = nothing_lost(found)
    if not found["labels"]["dropped"]:
        raise Broken(f"the engine was killed in run {run}, and no request of it was dropped")
    following = ended(under_way(after=run))
    nothing_lost(following)
    if following["labels"]["dropped"]:
        raise Broken(f"the run after it still drops: {following['labels']}")
    return f"run {run} keeps {kept}; the next one: {nothing_lost(following)}"


def leaves_nothing() -> str:
    began = time.monotonic()
    compose("down", "-v", "--timeout", "30")
    left = []
    for kind in (["ps", "-a"], ["volume", "ls"], ["network", "ls"]):
        asked = ["docker", *kind, "-q", "--filter", f"label=com.docker.compose.project={PROJECT}"]
        left += subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split()
    if left:
        raise Broken(f"left behind: {left}")
    return f"down -v took {time.monotonic() - began:.0f} s; no container, volume or network is left"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", action="store_true", help="build the images first")
    parser.add_argument("--keep", action="store_true", help="leave the stack up where a step does not hold")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "accept-compose")
    given = parser.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    steps: list[tuple[str, Callable[[], str]]] = [
        ("starts", lambda: starts(given.build)),
        ("is seen", lambda: is_seen(given.folder)),
        ("a killed worker", worker_heals),
        ("a killed engine", engine_heals),
        ("goes", leaves_nothing),
    ]
    held = 0
    for name, step in steps:
        try:
            print(f"ok    {name}: {step()}", flush=True)
            held += 1
        except Broken as problem:
            print(f"FAIL  {name}: {problem}", flush=True)
            print(compose("logs", "--tail", "20", check=False)[-4000:])
            break
    if held < len(steps) and not given.keep:
        compose("down", "-v", "--timeout", "30", check=False)
    print(f"accept-compose: {held} passed, {len(steps) - held} failed")
    return int(held < len(steps))


if __name__ == "__main__":
    sys.exit(main())
