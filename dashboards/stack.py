"""How each part of a local stack is started and known to be ready: engine, page, Prometheus.

What must always hold: parts are started as processes and never imported, so that a page cannot bend what it measures;
each waits a bounded time; every one listens on loopback only.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dashboards.processes import Child, Children, answers
from telemetry.bundle import runs_root

HOST: Final = "127.0.0.1"
_PROJECT: Final = Path(__file__).resolve().parent.parent
_ENGINE_READY_S: Final = 180.0  # the first start converts the model
_PAGE_READY_S: Final = 60.0
_PROMETHEUS_READY_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class Part:
    """A running part of the stack: its process, its address and the seconds it took to be ready."""

    child: Child
    url: str
    seconds: float


def tailspan(*words: str) -> list[str]:
    """The command line of another ``tailspan`` with this interpreter."""
    return [sys.executable, "-m", "tailspan", *words]


def child_env() -> dict[str, str]:
    """What our children need: our packages first, whatever folder they are started in.

    PYTHONSAFEPATH keeps a user's own folder named ``engine`` or ``models`` from shadowing ours.
    """
    path = os.pathsep.join(filter(None, (str(_PROJECT), os.environ.get("PYTHONPATH"))))
    return {"PYTHONSAFEPATH": "1", "PYTHONPATH": path, "TAILSPAN_RUNS": str(runs_root().resolve())}


def start_engine(children: Children, *, model: str, port: int, nice: int) -> Part:
    """Start ``tailspan serve`` and wait until it answers.  Port 0: the system chooses."""
    ready_file = children.logs / "engine-ready.json"
    words = ["serve", "--model", model, "--host", HOST, "--port", str(port)]
    words += ["--ready-file", str(ready_file), "--nice", str(nice)]
    child = children.start("engine", tailspan(*words), env=child_env())
    seconds = children.wait_ready(child, ready_file.exists, _ENGINE_READY_S)
    return Part(child, str(json.loads(ready_file.read_text())["url"]), seconds)


def page_argv(port: int, host: str = HOST) -> list[str]:
    """Streamlit on our page: quiet, offline, and no watching of files; on loopback unless told otherwise."""
    options = {
        "server.port": str(port),
        "server.address": host,
        "server.headless": "true",
        "server.fileWatcherType": "none",
        "browser.gatherUsageStats": "false",
        "global.developmentMode": "false",
    }
    flags = [word for name, value in options.items() for word in (f"--{name}", value)]
    return [sys.executable, "-m", "streamlit", "run", str(_PROJECT / "dashboards" / "entry" / "app.py"), *flags]


def start_page(children: Children, *, port: int) -> Part:
    """Start Streamlit on our page and wait until it serves."""
    child = children.start("page", page_argv(port), env=child_env(), grace_s=5.0)
    url = f"http://{HOST}:{port}"
    seconds = children.wait_ready(child, lambda: answers(f"{url}/_stcore/health"), _PAGE_READY_S)
    return Part(child, url, seconds)


def prometheus_binary() -> str | None:
    return shutil.which("prometheus")


def start_prometheus(children: Children, *, binary: str, port: int, engine_url: str) -> Part:
    """Start Prometheus with a config of its own that scrapes the engine.  Its data goes with the log folder."""
    config = children.logs / "prometheus.yml"
    config.write_text(prometheus_config(engine_url))
    argv = [
        binary,
        f"--config.file={config}",
        f"--storage.tsdb.path={children.logs / 'prometheus'}",
        f"--web.listen-address={HOST}:{port}",
    ]
    child = children.start("prometheus", argv, end_signal=signal.SIGTERM)
    url = f"http://{HOST}:{port}"
    seconds = children.wait_ready(child, lambda: answers(f"{url}/-/ready"), _PROMETHEUS_READY_S)
    return Part(child, url, seconds)


def prometheus_config(engine_url: str) -> str:
    """Scrape the engine every five seconds.  JSON is YAML, and needs no quoting rules."""
    target = engine_url.removeprefix("http://").rstrip("/")
    job = {"job_name": "tailspan-engine", "static_configs": [{"targets": [target]}]}
    config = {"global": {"scrape_interval": "5s", "scrape_timeout": "4s"}, "scrape_configs": [job]}
    return json.dumps(config, indent=2) + "\n"
