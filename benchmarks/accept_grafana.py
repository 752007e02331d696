"""Every panel, rule and alert against a real Prometheus that scraped a real run, and every alert in its fault.

Usage: python -m benchmarks.accept_grafana [--healthy 90] [--only CASE] [--folder build/accept-grafana]
For each step anew it starts the bundled engine on SmolLM2 with --enable-faults, Prometheus with the stack's rules and,
where its binary is found, Alertmanager with the stack's configuration; it loads the engine with `tailspan run`.

1. A healthy run: no alert may fire in it, but TailspanClientLimited where the run calls itself CLIENT_LIMITED.
2. Fault by fault under load: the alert that is for it must fire.
3. Every PromQL expression of every dashboard, rule and alert is asked over the time of each step: it must parse, and in
   some step return series that carry the labels that its legend names.  Exemplars must name traces of the run's bundle.
4. A generator that is too slow: its alert holds back the burn-rate alerts in Alertmanager.

Prints a Markdown table; exits with 1 when anything does not hold.  Nothing here measures time.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml

from dashboards import rules, stack
from dashboards.grafana import files
from dashboards.processes import Child, Children, answers, choose_port
from telemetry.bundle import Bundle, newest
from telemetry.names import CLIENT_LIMITED

ROOT: Final = Path(__file__).resolve().parent.parent
FIRE_S: Final = 120.0  # for an alert to fire in its fault
STEP_S: Final = 1  # some alerts are true for seconds only
LOAD: Final = ("--arrivals", "poisson:rate=1.5", "--length-scale", "0.05", "--slo", "demo")
#: Alerts that need hours of trouble, or a fault that cannot be made here: their expressions need only parse.
NEVER: Final = ("TailspanBudgetBurn", "TailspanClassBudgetBurn", "TailspanLawBroken")
GRAFANAS: Final = {"$__rate_interval": "30s", "$__range": "10m", "$model": ".*", "$engine": ".*", "$run": ".*"}


@dataclass(frozen=True, slots=True)
class Case:
    """A fault and the alerts that must fire in it.  fault: for /debug/faults; or act: what is done instead."""

    name: str
    alerts: tuple[str, ...]
    fault: dict[str, Any] | None = None


CASES: Final = (
    Case("stalled loop", ("TailspanEngineStalls",), {"name": "stalled_loop", "size": 1500, "every_s": 2}),
    Case("empty answers", ("TailspanCanaryFailures",), {"name": "empty_output"}),
    Case("logits not finite", ("TailspanNotFinite",), {"name": "nan_row", "share": 0.5}),
    Case("a row reads its neighbour", ("TailspanAnswersDiverge",), {"name": "race", "size": 2}),
    Case("streams cut", ("TailspanBudgetBurn", "TailspanClassBudgetBurn"), {"name": "cut_stream"}),
    Case("a tiny KV pool", ("TailspanBudgetBurn",), {"name": "kv_pool", "size": 0.001}),
    Case("frozen scheduler", ("TailspanEngineHangs",), {"name": "frozen_scheduler"}),
)


class Session:
    """Engine, Prometheus and Alertmanager, and what is asked of them."""

    def __init__(self, children: Children, folder: Path) -> None:
        self.children, self.folder = children, folder
        self.runs = folder / "runs"
        folder.mkdir(parents=True, exist_ok=True)
        self.metrics_port = choose_port(0, "/metrics", "")
        self.otlp_port = choose_port(0, "spans", "")
        self.engine = self._engine()
        self.alertmanager = self._alertmanager()
        self.prometheus = self._prometheus()
        self._load: Child | None = None
        self.began = time.time()

    def _engine(self) -> str:
        ready = self.folder / "ready.json"
        port = choose_port(0, "the engine", "")
        words = ["serve", "--port", str(port), "--ready-file", str(ready), "--enable-faults"]
        words += ["--replica", "engine", "--shadow", "0.2", "--otlp-endpoint", f"http://127.0.0.1:{self.otlp_port}"]
        child = self.children.start("engine", stack.tailspan(*words), env=stack.child_env())
        self.children.wait_ready(child, ready.exists, 180.0)
        return f"http://127.0.0.1:{port}"

    def _alertmanager(self) -> str | None:
        binary = shutil.which("alertmanager") or shutil.which("prometheus-alertmanager")
        if binary is None:
            return None
        port = choose_port(0, "Alertmanager", "")
        argv = [binary, f"--config.file={ROOT / 'docker' / 'alertmanager.yml'}", "--cluster.listen-address="]
        argv += [f"--storage.path={self.folder / 'alertmanager'}", f"--web.listen-address=127.0.0.1:{port}"]
        child = self.children.start("alertmanager", argv)
        self.children.wait_ready(child, lambda: answers(f"http://127.0.0.1:{port}/-/ready"), 30.0)
        return f"127.0.0.1:{port}"

    def _prometheus(self) -> str:
        binary = stack.prometheus_binary()
        if binary is None:
            raise SystemExit("accept-grafana needs Prometheus: apt-get install prometheus")
        plain = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text(encoding="utf-8"))
        plain["global"] = {"scrape_interval": "1s", "scrape_timeout": "900ms", "evaluation_interval": "1s"}
        plain["rule_files"] = [str(rules.FOLDER / "*.rules.yml")]
        plain["alerting"] = (
            {"alertmanagers": [{"static_configs": [{"targets": [self.alertmanager]}]}]} if self.alertmanager else {}
        )
        ports = {
            "tailspan-engine": urllib.parse.urlsplit(self.engine).netloc,
            "tailspan-load": f"127.0.0.1:{self.metrics_port}",
        }
        plain["scrape_configs"] = [
            {"job_name": job["job_name"], "static_configs": [{"targets": [ports[job["job_name"]]]}]}
            for job in plain["scrape_configs"]
            if job["job_name"] in ports
        ]
        config = self.folder / "prometheus.yml"
        config.write_text(yaml.safe_dump(plain), encoding="utf-8")
        port = choose_port(0, "Prometheus", "")
        argv = [binary, f"--config.file={config}", f"--storage.tsdb.path={self.folder / 'prometheus'}"]
        argv += [f"--web.listen-address=127.0.0.1:{port}", "--enable-feature=exemplar-storage"]
        child = self.children.start("prometheus", argv)
        self.children.wait_ready(child, lambda: answers(f"http://127.0.0.1:{port}/-/ready"), 30.0)
        return f"http://127.0.0.1:{port}"

    @contextmanager
    def load(self, seconds: float) -> Iterator[Child]:
        """A `tailspan run` for at most so long; ended at the end of the block."""
        words = ["run", "--target", self.engine, "--duration", f"{seconds:g}", *LOAD, "--linger", "5"]
        words += ["--metrics-port", str(self.metrics_port), "--otlp-port", str(self.otlp_port)]
        words += ["--first-token-timeout", "20", "--total-timeout", "40"]
        argv = stack.tailspan(*words)
        child = self.children.start(
            "load", argv, env={**stack.child_env(), "TAILSPAN_RUNS": str(self.runs)}, grace_s=60
        )
        try:
            yield child
        finally:
            if child.exit_status() is None:
                child.signal_group(signal.SIGINT)
                child.wait(60.0)
            child.signal_group(signal.SIGKILL)
            child.process.wait()
            self.children.running.remove(child)

    def fault(self, body: dict[str, Any] | None) -> None:
        """Put one fault in force; None: clear all."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            f"{self.engine}/debug/faults", data, method="DELETE" if data is None else "PUT"
        )
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=10) as answer:
            answer.read()

    def ask(self, path: str, **words: Any) -> Any:
        """The data of an answer of Prometheus' API.  Raises ValueError with what it said."""
        url = f"{self.prometheus}/api/v1/{path}?{urllib.parse.urlencode(words)}"
        try:
            with urllib.request.urlopen(url, timeout=30) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error))) from None

    def over(self, expr: str, since: float | None = None) -> list[dict[str, Any]]:
        """Every series that an expression returned at any step since then."""
        span = {"start": since or self.began, "end": time.time() + STEP_S, "step": STEP_S}
        return list(self.ask("query_range", query=expr, **span)["result"])

    def firing(self, since: float) -> set[str]:
        """Names of the alerts that fired at any second since then."""
        span = {"start": since, "end": time.time(), "step": 1}
        found = self.ask("query_range", query='ALERTS{alertstate="firing"}', **span)["result"]
        return {one["metric"]["alertname"] for one in found}


def until(what: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if what():
            return True
        time.sleep(1.0)
    return what()


def healthy(session: Session, seconds: float) -> tuple[bool, str, Bundle]:
    """A run without a fault."""
    since = time.time()
    with session.load(seconds) as child:
        child.wait(seconds + 120)
    time.sleep(2.0)
    fired = session.firing(since)
    bundle = Bundle.open(newest(session.runs))
    counts = Path(bundle.path / "metrics.prom").read_text(encoding="utf-8").count('outcome="good"')
    verdict = bundle.manifest["validity"]["verdict"]
    wrong = fired - ({"TailspanClientLimited"} if verdict == CLIENT_LIMITED else set())
    idle = max((float(v) for one in session.over(rules.NO_STEP, since) for _, v in one["values"]), default=0.0)
    said = f"the run is {verdict}; alerts fired: {', '.join(sorted(fired)) or 'none'}; no step for {idle:.2%} at most"
    return not wrong and counts > 0, said, bundle


def in_fault(session: Session, case: Case) -> tuple[bool, str]:
    """The load goes, the fault comes: do its alerts?"""
    with session.load(FIRE_S + 60):
        if not until(lambda: bool(session.ask("query", query="tailspan_run_info")["result"]), 60):
            return False, "the load did not begin"
        time.sleep(5.0)
        began = time.time()
        session.fault(case.fault)
        held = until(lambda: set(case.alerts) <= session.firing(began), FIRE_S)
        fired = session.firing(began)
        session.fault(None)
    missing = set(case.alerts) - fired
    others = fired - set(case.alerts)
    said = f"after {time.time() - began:.0f} s" if held else f"never: {', '.join(missing)}"
    return held, f"{said}; fired besides: {', '.join(sorted(others)) or 'none'}"


def too_slow(session: Session) -> tuple[bool, str]:
    """The sender is stopped for half a second again and again while streams are cut: who is told of what?"""
    over = threading.Event()

    def hold_up(parent: int) -> None:
        while not over.wait(0.5):
            for process in psutil.Process(parent).children(recursive=True):
                if "loadgen.sender" in " ".join(process.cmdline()):
                    process.suspend()
                    over.wait(0.5)
                    process.resume()

    with session.load(FIRE_S + 60) as child:
        if not until(lambda: bool(session.ask("query", query="tailspan_run_info")["result"]), 60):
            return False, "the load did not begin"
        began = time.time()
        session.fault({"name": "cut_stream"})
        thread = threading.Thread(target=hold_up, args=(child.pid,), daemon=True)
        thread.start()
        fired = until(lambda: {"TailspanClientLimited", "TailspanBudgetBurn"} <= session.firing(began), FIRE_S)
        inhibited = (
            until(lambda: bool(session.alertmanager) and held_back(session) == (True, True), 60) if fired else False
        )
        over.set()
        thread.join()
        session.fault(None)
    if session.alertmanager is None:
        return fired, "fired; no Alertmanager was found, so what it holds back is unchecked"
    return fired and inhibited, f"TailspanClientLimited fired: {fired}; burn-rate alerts held back: {inhibited}"


def killed(session: Session) -> tuple[bool, str]:
    began = time.time()
    engine = next(child for child in session.children.running if child.name == "engine")
    time.sleep(5.0)  # a few scrapes while it lives
    engine.signal_group(signal.SIGKILL)
    away = until(lambda: "TailspanEngineAway" in session.firing(began), FIRE_S)
    return away, f"after {time.time() - began:.0f} s"


def held_back(session: Session) -> tuple[bool, bool]:
    """(are there burn-rate alerts in Alertmanager, are all of them inhibited)."""
    with urllib.request.urlopen(f"http://{session.alertmanager}/api/v2/alerts", timeout=10) as answer:
        found = [one for one in json.load(answer) if one["labels"]["alertname"].endswith("BudgetBurn")]
    return bool(found), all(one["status"]["state"] == "suppressed" for one in found)


# --- expressions ---
def asked() -> list[tuple[str, str, set[str]]]:
    """(where, PromQL, labels that its legend or template names) of every dashboard and rule."""
    found = []
    for dashboard in files.dashboards():
        for panel in dashboard["panels"]:
            for target in panel.get("targets", ()):
                where = f"{dashboard['uid']}: {panel['title']} ({target['refId']})"
                found.append((where, target["expr"], set(re.findall(r"{{(\w+)}}", target.get("legendFormat") or ""))))
        found += [
            (f"{dashboard['uid']}: {where}", expr, set())
            for where, expr in files.expressions(dashboard)
            if "annotation" in where
        ]
        for one in dashboard["templating"]["list"]:
            if one["type"] == "query":
                metric, label = re.findall(r"^label_values\((.*), (\w+)\)$", one["query"]["query"])[0]
                found.append((f"{dashboard['uid']}: variable {one['name']}", metric, {label}))
    for text in rules.made().values():
        for group in yaml.safe_load(text)["groups"]:
            for rule in group["rules"]:
                name = rule.get("alert") or rule["record"]
                found.append((f"rule {group['name']}: {name}", rule["expr"], set()))
    return found


def plain(expr: str) -> str:
    """A dashboard's expression with Grafana's variables filled in."""
    for name, value in GRAFANAS.items():
        expr = expr.replace(name, value)
    return expr


@dataclass(slots=True)
class Seen:
    """What the expressions returned in the steps so far.  answered: where -> labels of its series."""

    answered: dict[str, set[str]] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)

    def look(self, session: Session) -> None:
        """Ask everything over the time of one step."""
        for where, expr, _ in asked():
            try:
                series = session.over(plain(expr))
            except ValueError as error:
                self.errors[where] = f"{error}\n        {plain(expr)}"
                continue
            if series:
                self.answered.setdefault(where, set()).update(*(one["metric"] for one in series))

    def wrong(self) -> list[str]:
        """Expressions that do not parse, never returned anything, or whose legend names a label that is not there."""
        found = [f"{where}: {error}" for where, error in self.errors.items()]
        for where, expr, labels in asked():
            if where in self.errors:
                continue
            if where not in self.answered:
                if where.rpartition(": ")[2] not in NEVER:
                    found.append(f"{where}: no series\n        {plain(expr)}")
            elif missing := labels - self.answered[where]:
                found.append(f"{where}: its legend names {missing}, which no series has")
        return found


def exemplars(session: Session, bundle: Bundle) -> tuple[bool, str]:
    """Trace ids of the heatmaps' exemplars, against the spans of the healthy run."""
    spans = {one.as_py() for one in bundle.table("spans").column("trace_id")}
    said, good = [], True
    for name in ("vllm:e2e_request_latency_seconds", "vllm:time_to_first_token_seconds"):
        found = session.ask("query_exemplars", query=f"{name}_bucket", start=session.began, end=time.time())
        ids = {one["labels"]["trace_id"] for series in found for one in series["exemplars"]}
        said.append(f"{name}: {len(ids)} exemplars, {len(ids & spans)} of them traces of the healthy run")
        good = good and bool(ids & spans)
    return good, "; ".join(said)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--healthy", type=float, default=90.0, help="seconds of the healthy run")
    parser.add_argument("--folder", type=Path, default=ROOT / "build" / "accept-grafana")
    parser.add_argument("--only", metavar="CASE", help="one fault alone, without the expressions")
    given = parser.parse_args()
    shutil.rmtree(given.folder, ignore_errors=True)
    given.folder.mkdir(parents=True)
    os.environ.setdefault("TAILSPAN_RUNS", str(given.folder / "runs"))
    results: list[tuple[str, bool, str]] = []

    def say(what: str, held: bool, said: str) -> None:
        results.append((what, held, said))
        print(f"| {what} | {'holds' if held else 'DOES NOT HOLD'} | {said} |", flush=True)

    print("| what | | |\n|---|---|---|", flush=True)
    seen = Seen()

    @contextmanager
    def session(name: str) -> Iterator[Session]:
        folder = given.folder / name.replace(" ", "-")
        with Children(folder / "logs") as children:
            found = Session(children, folder)
            yield found
            seen.look(found)

    if given.only:
        case = next(one for one in CASES if one.name == given.only)
        with session(case.name) as one:
            say(f"{case.name}: {', '.join(case.alerts)}", *in_fault(one, case))
        return int(not results[0][1])
    with session("healthy") as one:
        held, said, bundle = healthy(one, given.healthy)
        say("a healthy run fires no alert", held, said)
        say("exemplars open traces of the run", *exemplars(one, bundle))
    for case in CASES:
        with session(case.name) as one:
            say(f"{case.name}: {', '.join(case.alerts)}", *in_fault(one, case))
    with session("too slow") as one:
        say("a generator that is too slow", *too_slow(one))
    with session("killed") as one:
        say("a killed engine: TailspanEngineAway", *killed(one))
    wrong = seen.wrong()
    say(f"{len(asked())} expressions return what they promise", not wrong, f"{len(wrong)} do not")
    for line in wrong:
        print(f"    {line}", flush=True)
    failed = sum(not held for _, held, _ in results)
    print(f"accept-grafana: {len(results) - failed} passed, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
