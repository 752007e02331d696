"""Ways to a server: proxies, certificates, the Responses API, and what a server is asked before the run."""

from __future__ import annotations

import asyncio
import base64
import shutil
import ssl
import subprocess
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from loadgen import preflight
from loadgen.http import Origin
from loadgen.plan import Plan
from loadgen.way import Way, checked_proxy
from models.errors import UserError
from telemetry import names
from tests.loadgen.sending import Row, Run, at_once, run, settings
from tests.loadgen.stub import Request, Step, Stub, StubThread, answer, chunk, event, plain, sse_head


class Proxy:
    """An HTTP proxy: absolute request lines are passed on, CONNECT opens a tunnel.  heads: what it was asked."""

    def __init__(self, status: str = "200 OK") -> None:
        self.status = status
        self.heads: list[str] = []
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> str:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
        self.heads.append(head)
        method, where, _ = head.split(" ", 2)
        if method == "CONNECT":
            writer.write(f"HTTP/1.1 {self.status}\r\n\r\n".encode())
            if not self.status.startswith("200"):
                writer.close()
                return
            host, _, port = where.rpartition(":")
            onward = b""
        else:
            authority, _, path = where.removeprefix("http://").partition("/")
            host, _, port = authority.rpartition(":")
            onward = head.replace(where, f"/{path}", 1).encode("latin-1")
        far_reader, far_writer = await asyncio.open_connection(host, int(port))
        far_writer.write(onward)
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer))


async def pump(source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
    try:
        while data := await source.read(65536):
            sink.write(data)
            await sink.drain()
    except ConnectionError:
        return
    finally:
        sink.close()


def certificate(folder: Path) -> tuple[Path, Path]:
    key, made = folder / "key.pem", folder / "cert.pem"
    make = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    name = ["-days", "2", "-subj", "/CN=127.0.0.1", "-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run([*make, *name, "-keyout", key, "-out", made], check=True, capture_output=True)
    return key, made


def sent(folder: Path, stub: Stub, with_: Callable[[Stub], Awaitable[Any]], count: int = 3) -> list[Row]:
    """Rows of so many requests; with_: gives the settings, once the stub runs."""

    async def work() -> list[Row]:
        async with stub:
            config = await with_(stub)
            run_ = Run(folder, at_once(count), config)
            await run_.start()
            await run_.drained.wait()
            return await run_.stop()

    return run(work())


def test_http_through_a_proxy_with_a_password(tmp_path: Path) -> None:
    proxy = Proxy()

    async def with_(stub: Stub) -> Any:
        address = await proxy.__aenter__()
        return settings(stub.url, proxy=f"http://user:p%40ss@{address}")

    stub = Stub(lambda request: answer("Hi"))
    rows = sent(tmp_path, stub, with_)
    assert [row["error"] for row in rows] == [None] * 3
    assert len(proxy.heads) >= 1
    first = proxy.heads[0].splitlines()
    assert first[0].startswith(f"POST {stub.url}/v1/chat/completions ")
    secret = base64.b64encode(b"user:p@ss").decode()
    assert f"Proxy-Authorization: Basic {secret}" in first


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificate")
def test_https_through_a_tunnel_and_with_a_certificate_of_ones_own(tmp_path: Path) -> None:
    key, made = certificate(tmp_path)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(made, key)
    proxy = Proxy()

    async def with_(stub: Stub) -> Any:
        address = await proxy.__aenter__()
        return settings(stub.url, proxy=f"http://{address}", ca_file=str(made))

    stub = Stub(lambda request: answer("Hi"), tls=server)
    rows = sent(tmp_path / "a", stub, with_)
    assert [row["error"] for row in rows] == [None] * 3
    assert proxy.heads[0].startswith(f"CONNECT {stub.url.removeprefix('https://')} HTTP/1.1")

    async def untrusting(stub: Stub) -> Any:
        return settings(stub.url)

    async def careless(stub: Stub) -> Any:
        return settings(stub.url, verify_tls=False)

    refused = sent(tmp_path / "b", Stub(lambda request: answer("Hi"), tls=server), untrusting)
    assert {row["error"] for row in refused} == {names.REFUSED} and "TLS" in refused[0]["error_detail"]
    rows = sent(tmp_path / "c", Stub(lambda request: answer("Hi"), tls=server), careless)
    assert [row["error"] for row in rows] == [None] * 3


def test_a_proxy_that_refuses_is_a_reason(tmp_path: Path) -> None:
    proxy = Proxy("407 Proxy Authentication Required")

    async def with_(stub: Stub) -> Any:
        address = await proxy.__aenter__()
        return settings("https://127.0.0.1:1", proxy=f"http://{address}")

    rows = sent(tmp_path, Stub(lambda request: answer("Hi")), with_, count=1)
    assert (rows[0]["error"], "407" in rows[0]["error_detail"]) == (names.REFUSED, True)


def test_a_proxy_as_a_plan_keeps_it() -> None:
    assert checked_proxy("http://proxy:3128/") == "http://proxy:3128"
    assert checked_proxy("http://me:$SECRET@proxy") == "http://me:$SECRET@proxy"
    for bad in ("proxy:3128", "https://proxy", "http://me:pw@proxy", "http://proxy/path", "http://proxy:x"):
        with pytest.raises(UserError) as caught:
            checked_proxy(bad)
        assert caught.value.where == "--proxy" and "pw" not in str(caught.value)
    assert Origin.of_proxy("http://proxy").port == 3128
    with pytest.raises(UserError, match="there is no file"):
        _ = Way(ca_file="/no/such.pem").tls


def test_secrets_of_proxies_are_looked_up_in_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROXY_PASSWORD", "hidden")
    base = {"run_id": "", "seed": 0, "salt": "", "trace_name": "", "trace_path": "", "trace_format": ""}
    more = {"trace_sha256": "", "reference": "", "served_model": "", "max_context": 9, "min_input": 1, "requests": 0}
    plan = Plan(**base, **more, targets=("http://a",), proxy="http://me:$PROXY_PASSWORD@p:1")  # type: ignore[arg-type]
    found = plan.settings()
    assert found.way.proxy == "http://me:hidden@p:1"
    assert "hidden" not in repr(found) + repr(plan) + repr(found.way)


# --- the Responses API ---
def said(kind: str, **fields: Any) -> bytes:
    return event({"type": f"response.{kind}", **fields}, name=f"response.{kind}")


def finished(status: str = "completed", **more: Any) -> dict[str, Any]:
    usage = {"input_tokens": 5, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
    return {"id": "resp_1", "object": "response", "model": "m", "status": status, "usage": usage, **more}


STARTED = said("created", response={"id": "resp_1", "model": "m", "status": "in_progress"})


def of(folder: Path, *events: bytes) -> Row:
    async def with_(stub: Stub) -> Any:
        return settings(stub.url)

    steps: list[Step] = [sse_head(chunked=True), *(chunk(one) for one in events), chunk(b"")]
    return sent(folder, Stub(lambda request: steps), with_, count=1)[0]


def test_a_stream_of_the_responses_api(tmp_path: Path) -> None:
    deltas = [said("output_text.delta", delta=text) for text in ("Pa", "ris")]
    row = of(tmp_path, STARTED, *deltas, said("output_text.done", text="Paris"), said("completed", response=finished()))
    assert (row["error"], row["text"], row["finish_reason"]) == (None, "Paris", "stop")
    assert (row["prompt_tokens_reported"], row["completion_tokens_reported"], row["cached_tokens"]) == (5, 2, 3)
    assert (row["model"], row["server_request_id"], row["chunk_tokens"]) == ("m", "resp_1", [1, 1])
    assert row["first_chunk_s"] <= row["first_token_s"] <= row["last_token_s"]


def test_reasoning_limits_and_failures_of_the_responses_api(tmp_path: Path) -> None:
    thought = said("reasoning_text.delta", delta="hm")
    short = said("incomplete", response=finished("incomplete", incomplete_details={"reason": "max_output_tokens"}))
    row = of(tmp_path / "a", STARTED, thought, short)
    assert (row["error"], row["finish_reason"], row["truncated_by_limit"]) == (None, "length", True)
    assert row["first_token_s"] is not None and row["first_content_s"] is None
    failed = said("failed", response=finished("failed", error={"code": "server_error", "message": "boom"}))
    row = of(tmp_path / "b", STARTED, said("output_text.delta", delta="Pa"), failed)
    assert (row["error"], row["text"]) == (names.STREAM_CUT, "Pa") and "boom" in row["error_detail"]
    row = of(tmp_path / "c", STARTED, event({"type": "error", "message": "boom"}))
    assert row["error"] == names.STREAM_CUT and "boom" in row["error_detail"]
    row = of(tmp_path / "d", STARTED, said("output_text.delta", delta="Pa"))
    assert (row["error"], row["error_detail"][:16]) == (names.STREAM_CUT, "no finish reason")


def test_a_plain_answer_of_the_responses_api(tmp_path: Path) -> None:
    output = [{"type": "message", "content": [{"type": "output_text", "text": "Paris"}]}]

    async def with_(stub: Stub) -> Any:
        return settings(stub.url)

    stub = Stub(lambda request: [plain("200 OK", finished(output=output))])
    row = sent(tmp_path, stub, with_, count=1)[0]
    assert (row["error"], row["text"], row["finish_reason"], row["cached_tokens"]) == (None, "Paris", "stop", 3)


# --- before the run ---
def test_a_server_that_counts_tokens_is_asked() -> None:
    def script(request: Request) -> list[Step]:
        if request.path == "/tokenize":
            return [plain("200 OK", {"count": len(request.json["messages"][0]["content"])})]
        return [plain("404 Not Found", {})]

    with StubThread(script) as stub:
        asked = {"messages": [{"role": "user", "content": "abcd"}]}
        assert preflight.counted_by(stub.url, {}, "m", asked) == 4
        assert preflight.counted_by(f"{stub.url}/other", {}, "m", asked) is None
    assert preflight.counted_by(stub.url, {}, "m", asked) is None
