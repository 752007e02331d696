"""What is asked once the load is over, and what a bundle keeps of the canaries."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from loadgen.canaries.after import close
from loadgen.canaries.client import Client
from loadgen.canaries.file import CanaryFile
from loadgen.canaries.record import record
from loadgen.canaries.watch import CanaryWatch
from loadgen.live import Live
from telemetry import canary_report, names, slo
from telemetry.bundle import Bundle
from tests.bundles import answered_row, dropped_row
from tests.canaries.fake_model import FakeModel
from tests.loadgen.stub import StubThread, unused_port

POLICY = slo.load("demo")


@pytest.fixture(scope="module")
def trusted() -> Iterator[tuple[Client, CanaryFile]]:
    """A healthy server, and what was recorded on it."""
    model = FakeModel()
    with StubThread(model.play) as stub:
        client = Client(stub.url, "stub", {})
        yield client, record(client, runs=2, tokens=8)


def row(index: int, recorded: CanaryFile, target: str, *, broken: bool = False) -> dict[str, Any]:
    """The row of a golden: as recorded, or with another token, far ahead, at its start."""
    golden = recorded.goldens[index]
    told = []
    for step, (token, logprob) in enumerate(zip(golden.tokens, golden.logprobs, strict=True)):
        said = "zz" if broken and step == 0 else token
        top = [{"token": said, "logprob": logprob}, {"token": "other", "logprob": logprob - 9}]
        told.append({"token": said, "logprob": logprob, "top_logprobs": top})
    return answered_row(
        index, index * 0.1, canary_kind="golden", canary_id=golden.id, canary_place="miss", target=target,
        prompt_tokens_reported=golden.prompt_tokens, prompt_tokens_expected=golden.prompt_tokens,
        logprobs=json.dumps(told), cached_tokens=0,
    )  # fmt: skip


def closed(folder: Path, recorded: CanaryFile, client: Client, rows: list[dict[str, Any]], **more: Any) -> Bundle:
    bundle = Bundle.create(folder, {}, scheduled=len(rows))
    with bundle.writer("requests", "w") as writer:
        writer.append(rows)
    if "series" in more:
        with bundle.writer("series", "s") as writer:
            writer.append(more["series"])
    bundle.update(status="complete")
    close(bundle, CanaryWatch(recorded), [client], salted=True)
    return bundle


def found(bundle: Bundle) -> dict[str, tuple[str, str]]:
    """Kind -> (verdict, sentence)."""
    report = canary_report.read(bundle.path)
    assert report is not None
    return {kind: (verdict, said) for verdict, kind, said in report.findings}


def test_right_alone_and_wrong_under_load_is_concurrency(tmp_path: Path, trusted: tuple[Client, CanaryFile]) -> None:
    client, recorded = trusted
    rows = [row(n, recorded, client.target, broken=n < 4) for n in range(12)]
    bundle = closed(tmp_path, recorded, client, rows)
    verdict, said = found(bundle)["concurrency"]
    assert verdict == "broken" and "none of 4 changed goldens changes: only under load" in said
    assert found(bundle)["drift"][0] == "same"
    labels = [one["wrong_kind"] for one in bundle.verdicts(POLICY).to_pylist()]
    assert labels == ["golden"] * 4 + [None] * 8
    assert sum(one["verified"] for one in bundle.verdicts(POLICY).to_pylist()) == 8


def test_right_alone_at_first_and_wrong_again_is_the_cache(tmp_path: Path, trusted: tuple[Client, CanaryFile]) -> None:
    _, recorded = trusted
    spoilt = FakeModel(wrong_on_hit=True)
    with StubThread(spoilt.play) as stub:
        client = Client(stub.url, "stub", {})
        rows = [row(n, recorded, client.target, broken=n < 4) for n in range(12)]
        verdict, said = found(closed(tmp_path, recorded, client, rows))["cache"]
    assert verdict == "broken" and "none of 4 changed goldens changes at first and 4 when asked again" in said


def test_a_server_that_is_gone_costs_what_is_asked_alone(tmp_path: Path, trusted: tuple[Client, CanaryFile]) -> None:
    client, recorded = trusted
    gone = Client(f"http://127.0.0.1:{unused_port()}", "stub", {})
    rows = [row(n, recorded, client.target, broken=n < 4) for n in range(12)]
    bundle = closed(tmp_path, recorded, gone, rows)
    assert found(bundle)["golden"][0] == "broken"
    assert "no answer to a canary" in found(bundle)["alone"][1]


def test_values_that_are_not_finite_and_errors_of_the_server_are_found(
    tmp_path: Path, trusted: tuple[Client, CanaryFile]
) -> None:
    client, recorded = trusted
    lost = [
        dropped_row(n, n * 0.1, names.SERVER_ERROR, canary_kind="golden", canary_id=recorded.goldens[n].id,
                    canary_place="miss", target=client.target)
        for n in range(6)
    ]  # fmt: skip
    told = found(closed(tmp_path / "a", recorded, client, lost))
    assert told["server-error"] == ("broken", "6 of 6 canaries ended in an error of the server")
    counted = [
        {"t_s": float(t), "source": client.target, "name": f"{names.M_NONFINITE}_total", "labels": "{}", "value": v}
        for t, v in ((0, 2.0), (1, 2.0), (2, 9.0))
    ]
    told = found(closed(tmp_path / "b", recorded, client, lost, series=counted))
    assert told["non-finite"][1].startswith("not finite: 7 rows of logits") and "server-error" not in told
    calm = [{**one, "value": 2.0} for one in counted]
    rows = [row(n, recorded, client.target) for n in range(6)]
    assert "non-finite" not in found(closed(tmp_path / "c", recorded, client, rows, series=calm))


def test_the_alarm_comes_while_the_rows_do(tmp_path: Path, trusted: tuple[Client, CanaryFile]) -> None:
    client, recorded = trusted
    bundle = Bundle.create(tmp_path, {}, scheduled=40)
    watch = CanaryWatch(recorded)
    live = Live(bundle, POLICY, 40, watch)
    alarms = []
    with bundle.writer("requests", "w") as writer:
        for n in range(12):
            writer.append([row(n, recorded, client.target, broken=n >= 6), answered_row(20 + n, n * 0.1)])
            writer.flush()
            live.update()
            alarms.append(watch.alarm)
    assert alarms[:7] == [None] * 7 and alarms[7:] == ["broken"] * 5  # at the second of those that broke in mid-run
    assert watch.asked == 12 and watch.broken.alarm_at == 8
    assert sum(live.counts.values()) == 24
