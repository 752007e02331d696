"""Grafana dashboards as code: the JSON is what the code makes, keeps to Grafana's model, and Prometheus parses it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models import dashboard as models

from dashboards.grafana import files, make
from dashboards.processes import answers, choose_port
from telemetry import names

BOARDS = files.dashboards()
VARIABLES = {"$__rate_interval": "1m", "$__range": "15m", "$model": ".*", "$engine": ".*", "$run": ".*"}
NAME = re.compile(r"\b(?:vllm:|tailspan_)[a-z_]+\b")


def all_panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def test_the_json_is_what_the_code_makes() -> None:
    assert make.main(["--check"]) == 0
    assert len(BOARDS) == 5


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_it_keeps_to_grafanas_model(board: dict[str, Any]) -> None:
    register_default_plugins()
    known = models.Dashboard.from_json(board)
    back = json.loads(json.dumps(known, cls=JSONEncoder))
    for note in board["annotations"]["list"]:  # fields of Prometheus' annotations, which the model does not know
        for key in ("titleFormat", "textFormat", "step"):
            note.pop(key, None)
    assert back == board
    ids = [panel["id"] for panel in board["panels"]]
    assert len(ids) == len(set(ids))
    places = [panel["gridPos"] for panel in board["panels"]]
    for one in places:
        assert one["x"] + one["w"] <= 24
        for other in places:
            apart = one is other or one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
            assert apart or one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]


@pytest.mark.parametrize("board", BOARDS, ids=lambda board: board["uid"])
def test_every_panel_says_what_it_is(board: dict[str, Any]) -> None:
    used = " ".join(expr for _, expr in files.expressions(board))
    known = {one["name"] for one in board["templating"]["list"]}
    assert set(re.findall(r"\$(model|engine|run)\b", used)) == known - {"datasource"}, "no variable that nothing reads"
    for panel in all_panels(board):
        assert panel["description"], panel["title"]
        for target in panel["targets"]:
            assert target["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
            expr, legend = target["expr"], target.get("legendFormat") or ""
            if "histogram_quantile" in expr:
                q = float(re.search(r"histogram_quantile\(([0-9.]+)", expr)[1])  # type: ignore[index]
                assert f"p{q * 100:g}" in legend, f"{panel['title']}: a quantile that does not say so"
            elif "_sum" in expr and "_count" in expr:
                assert "mean" in legend, f"{panel['title']}: a mean that does not say so"
            else:
                assert not re.search(r"\bp\d\d\b|mean", legend) or "lag" in legend, panel["title"]


def test_names_are_those_of_the_table() -> None:
    suffixes = ("_total", "_sum", "_count", "_bucket")
    table = {value for name, value in vars(names).items() if name.startswith("M_")}
    for board in BOARDS:
        for where, expr in files.expressions(board):
            for name in NAME.findall(expr):
                base = next((name.removesuffix(s) for s in suffixes if name.removesuffix(s) in table), name)
                assert base in table, f"{board['uid']}, {where}: {name}"


def test_a_plain_vllm_is_asked_for_nothing_of_ours() -> None:
    board = next(board for board in BOARDS if board["uid"] == "tailspan-vllm")
    for panel in all_panels(board):
        for target in panel["targets"]:
            assert "tailspan" not in target["expr"], panel["title"]


def test_an_exemplar_opens_its_trace() -> None:
    heatmaps = [panel for board in BOARDS for panel in all_panels(board) if panel["type"] == "heatmap"]
    assert heatmaps and all(target["exemplar"] for panel in heatmaps for target in panel["targets"])
    prometheus = next(one for one in files.datasources("http://p", "http://t") if one["type"] == "prometheus")
    assert prometheus["jsonData"]["exemplarTraceIdDestinations"] == [
        {"name": "trace_id", "datasourceUid": files.TEMPO_UID}
    ]
    assert files.datasources("http://p", None)[0]["jsonData"]["exemplarTraceIdDestinations"] == []


def test_provisioning_and_push_mean_the_same() -> None:
    folder = Path(files.__file__).parent / "provisioning"
    sources = yaml.safe_load((folder / "datasources" / "tailspan.yaml").read_text())["datasources"]
    made = files.datasources("http://prometheus:9090", "http://tempo:3200")
    plain = [{key: value for key, value in one.items() if key != "isDefault"} for one in (*sources, *made)]
    assert plain[: len(sources)] == plain[len(sources) :]
    [provider] = yaml.safe_load((folder / "dashboards" / "tailspan.yaml").read_text())["providers"]
    assert (provider["folder"], provider["folderUid"]) == (files.FOLDER_TITLE, files.FOLDER_UID)


@pytest.fixture(scope="module")
def prometheus(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A real Prometheus with nothing in it: it still parses."""
    if shutil.which("prometheus") is None:
        pytest.skip("apt-get install prometheus brings it")
    folder = tmp_path_factory.mktemp("prometheus")
    (folder / "p.yml").write_text("{}")
    port = choose_port(0, "", "")
    argv = ["prometheus", f"--config.file={folder / 'p.yml'}", f"--storage.tsdb.path={folder / 'data'}"]
    process = subprocess.Popen([*argv, f"--web.listen-address=127.0.0.1:{port}"], stderr=subprocess.DEVNULL)
    url = f"http://127.0.0.1:{port}"
    until = time.monotonic() + 60
    while not answers(f"{url}/-/ready"):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    yield url
    process.terminate()
    process.wait(30)


@pytest.mark.prometheus
def test_prometheus_parses_every_expression(prometheus: str) -> None:
    n = 0
    for board in BOARDS:
        for where, expr in files.expressions(board):
            for name, value in VARIABLES.items():
                expr = expr.replace(name, value)
            url = f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
            try:
                with urllib.request.urlopen(url, timeout=20) as answer:
                    assert json.load(answer)["status"] == "success"
            except urllib.error.HTTPError as error:
                pytest.fail(f"{board['uid']}, {where}: {json.load(error)['error']}\n{expr}")
            n += 1
    assert n > 80
