"""The compose stack as files: what may reach what, what is limited, what is checked, and the small programs inside.

What only a running stack shows is in benchmarks/accept_compose.py.
"""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import socket
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
COMPOSE = yaml.safe_load(TEXT)
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name for name, one in SERVICES.items() if one["image"].startswith("tailspan:")}
NO_SHELL = {"otelcol", "tempo"}  # their images cannot run a check
UNCHECKED = NO_SHELL | {"alertmanager"}


def module(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def test_the_services_are_those_of_the_stack() -> None:
    assert set(SERVICES) == {
        "engine", "engine-gpu", "target", "load", "worker", "page", "grafana", "prometheus", "alertmanager", "otelcol",
        "tempo",
    }  # fmt: skip
    assert {"engine", "engine-gpu", "target", "load", "worker", "page"} == OURS
    assert {name: one["profiles"] for name, one in SERVICES.items() if "profiles" in one} == {
        "engine-gpu": ["gpu"], "target": ["target"],
    }  # fmt: skip


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_confined(name: str) -> None:
    one = SERVICES[name]
    assert one["read_only"] is True and one["cap_drop"] == ["ALL"]
    assert one["security_opt"] == ["no-new-privileges:true"]
    limits = one["deploy"]["resources"]["limits"]
    assert limits["memory"] and limits["pids"]
    assert "privileged" not in one and "network_mode" not in one and "pid" not in one
    for port in one.get("ports", ()):
        assert port.startswith("127.0.0.1:"), port
    for volume in one.get("volumes", ()):
        source, _, rest = volume.partition(":")
        assert source in COMPOSE["volumes"] or rest.endswith(":ro"), f"{volume}: a file of this machine, and writable"
    assert one["logging"]["options"]["max-size"], "a log that grows without end"
    assert one["restart"] in ("unless-stopped", "always", "on-failure:5")


@pytest.mark.parametrize("name", sorted(set(SERVICES) - OURS))
def test_an_image_of_others_has_its_version(name: str) -> None:
    assert re.fullmatch(r"[a-z/-]+:v?\d+\.\d+\.\d+", SERVICES[name]["image"])


@pytest.mark.parametrize("name", sorted(set(SERVICES) - UNCHECKED))
def test_a_service_is_checked(name: str) -> None:
    if name in ("engine", "engine-gpu"):
        assert re.search(r"HEALTHCHECK .*\n\s+CMD \[.*8000/health", (ROOT / "Dockerfile").read_text())
        return
    check = SERVICES[name]["healthcheck"]
    assert check["test"][0] == "CMD" and check["start_period"] and check["retries"]


def test_what_waits_for_what_exists() -> None:
    for name, one in SERVICES.items():
        for other, how in one.get("depends_on", {}).items():
            assert other in SERVICES, f"{name} waits for {other}"
            if how["condition"] == "service_healthy":
                assert other not in UNCHECKED, f"{name} waits for the health of {other}, which has no check"


def test_every_setting_is_in_the_example_with_its_default() -> None:
    used = dict(re.findall(r"\$\{(\w+):?-([^}]*)\}", TEXT))
    assert not re.findall(r"\$\{\w+\}", TEXT), "a setting without a default"
    given = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / ".env.example").read_text(encoding="utf-8"), re.MULTILINE))
    assert given == used
    for name in ("gpu", "target"):
        own = dict(re.findall(r"^(\w+)=(.*)$", (ROOT / "docker" / f"{name}.env").read_text(), re.MULTILINE))
        assert own.pop("COMPOSE_PROFILES") == name and own.pop("ENGINE_REPLICAS") == "0"
        assert set(own) <= set(used)


def test_prometheus_scrapes_the_ports_that_are_served() -> None:
    plain = yaml.safe_load((ROOT / "docker" / "prometheus.yml").read_text())
    ports = {job["job_name"]: one["port"] for job in plain["scrape_configs"] for one in job.get("dns_sd_configs", ())}
    assert f"--port {ports['tailspan-engine']} " in SERVICES["engine"]["command"]
    assert f"--metrics-port {ports['tailspan-load']} " in SERVICES["load"]["command"]


def test_the_options_of_our_commands_exist() -> None:
    from typer.main import get_command

    from tailspan import app

    root = get_command(app)
    for name in OURS - {"target"}:
        words = SERVICES[name]["command"]
        words = words.split() if isinstance(words, str) else words
        command = root.commands[words[0]]  # type: ignore[attr-defined]
        known = {option for parameter in command.params for option in parameter.opts}
        for word in words[1:]:
            option = str(word).partition("=")[0]
            assert not option.startswith("--") or option in known, f"{name}: {option}"


# --- the programs inside ---
def test_health_of_a_server() -> None:
    healthy = module(ROOT / "docker" / "healthy.py")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/health" else 503)
            self.end_headers()

        def log_message(self, format: str, *args: Any) -> None:
            """Quiet."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_address[1]}"
        assert healthy.answers(f"{url}/health") is None
        assert "503" in healthy.answers(f"{url}/loading")
        server.shutdown()
    assert healthy.answers(f"{url}/health") is not None


def test_health_of_a_worker() -> None:
    healthy = module(ROOT / "docker" / "healthy.py")
    with socket.create_server(("127.0.0.1", 0)) as master:
        port = master.getsockname()[1]
        assert healthy.connected(port) == f"no connection to port {port}"
        with socket.create_connection(("127.0.0.1", port)):
            assert healthy.connected(port) is None
    done = subprocess.run([sys.executable, str(ROOT / "docker" / "healthy.py"), "connected", "1"], check=False)
    assert done.returncode == 1


def test_the_target_of_prometheus(tmp_path: Path) -> None:
    program = ROOT / "docker" / "scrape_target.py"
    groups = module(program).groups
    assert groups("http://h:8000/")[0]["targets"] == ["h:8000"]
    assert groups("https://h/llm")[0] == {
        "targets": ["h:443"], "labels": {"__scheme__": "https", "__metrics_path__": "/llm/metrics"},
    }  # fmt: skip
    assert groups("http://[::1]:9")[0]["targets"] == ["[::1]:9"]
    file = tmp_path / "t.json"
    asked = [sys.executable, str(program), "http://a:1,http://b", str(file)]
    with subprocess.Popen(asked, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert "a:1" in process.stdout.readline()
        process.terminate()
        assert process.wait(20) == 0
    assert [one["targets"] for one in json.loads(file.read_text())] == [["a:1"], ["b:80"]]
    done = subprocess.run([sys.executable, str(program), "a:1", str(file)], check=False, stderr=subprocess.DEVNULL)
    assert done.returncode == 4


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (1, 0), (3, 0), (130, 0), (4, 4), (5, 5)])
def test_a_verdict_is_no_failure_of_the_load(tmp_path: Path, code: int, ends: int) -> None:
    fake = tmp_path / "tailspan"
    fake.write_text(f'#!/bin/sh\necho "$@"\nexit {code}\n')
    fake.chmod(0o755)
    asked = [sys.executable, str(ROOT / "docker" / "load.py"), "run", "--x"]
    done = subprocess.run(asked, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (ends, "run --x\n")


def test_the_load_hears_that_it_should_end(tmp_path: Path) -> None:
    fake = tmp_path / "tailspan"
    fake.write_text("#!/bin/sh\ntrap 'exit 130' INT\necho here\nwhile :; do sleep 0.05; done\n")
    fake.chmod(0o755)
    asked = [sys.executable, str(ROOT / "docker" / "load.py"), "run"]
    with subprocess.Popen(asked, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"here\n"
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 0


def test_the_image_gets_what_the_project_needs_and_no_more() -> None:
    needs = module(ROOT / "scripts" / "image_requirements.py").requirements
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    project = __import__("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    def named(device: str) -> set[str]:
        return {entry.partition("==")[0] for entry in needs(device, lock, project["dependencies"])}

    cpu, gpu = named("cpu"), named("gpu")
    assert gpu - cpu == {"triton"}
    wanted = {re.split(r"[^a-z0-9-]", one)[0] for one in project["dependencies"]} - {"torch", "triton"}
    assert wanted <= cpu
    assert {"sympy", "networkx", "setuptools"} <= cpu, "what torch needs"
    assert {"gevent", "pandas"} <= cpu, "what Locust and Streamlit need"
    assert not cpu & {"playwright", "mypy", "transformers", "grafana-foundation-sdk", "ruff", "hypothesis"}
    assert all("--hash=sha256:" in entry for entry in needs("cpu", lock, project["dependencies"]))
