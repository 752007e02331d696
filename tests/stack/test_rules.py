"""The stack's Prometheus rules: what is checked in is what the code makes, and promtool takes it and its tests."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from dashboards import rules
from telemetry import slo

PROMTOOL = shutil.which("promtool")
TESTS = [str(Path(__file__).with_name(name)) for name in ("alerts.test.yml", "burn.test.yml")]


def test_the_files_are_what_the_code_makes() -> None:
    assert rules.main(["--check"]) == 0
    assert {path.name for path in rules.FOLDER.iterdir()} == set(rules.made())


def test_every_alert_says_what_to_look_at() -> None:
    alerts = [
        rule
        for text in rules.made().values()
        for group in yaml.safe_load(text)["groups"]
        for rule in group["rules"]
        if "alert" in rule
    ]
    assert len(alerts) > 15
    for alert in alerts:
        assert alert["labels"]["severity"] in ("page", "ticket", "info"), alert
        assert alert["annotations"]["summary"] and alert["annotations"]["description"], alert


@pytest.mark.prometheus
@pytest.mark.skipif(PROMTOOL is None, reason="apt-get install prometheus brings promtool")
def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    done = subprocess.run(["promtool", "test", "rules", *TESTS], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.prometheus
@pytest.mark.skipif(PROMTOOL is None, reason="apt-get install prometheus brings promtool")
@pytest.mark.parametrize("preset", slo.presets())
def test_promtool_takes_the_rules_of_every_preset(preset: str, tmp_path: Path) -> None:
    for name, text in rules.made(slo.load(preset)).items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    files = sorted(map(str, tmp_path.iterdir()))
    done = subprocess.run(["promtool", "check", "rules", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
