"""schemathesis against the server's own description, for a short while with a fixed seed: no 500, no hang, no lie."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import pytest

from tests.engine.serving import serving

ROOT = Path(__file__).parents[2]
EXAMPLES = 12  # an operation; `make accept-conformance` tries many more


@pytest.mark.timeout(400)
def test_the_server_does_what_its_description_says() -> None:
    async def go() -> None:
        # a short context: a request that names no limit fills it
        async with serving(max_context=64, queue_limit=4096) as server:
            line = ("-m", "benchmarks.conformance", "--url", server.url, "--examples", str(EXAMPLES), "--seed", "7")
            run = await asyncio.create_subprocess_exec(
                sys.executable,
                *line,
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": str(ROOT)},
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
            )
            said = (await run.communicate())[0].decode(errors="replace")
            assert run.returncode == 0, said[-8000:]
            books, engine = server.service.books, server.service.engine
            assert set(books.outcomes) <= {"200", "400", "404", "abort"} and books.outcomes["200"] > 20
            assert books.violations() == [] and not server.service.live
            assert engine.integrity() == [] and engine.stats().kv_used == 0

    asyncio.run(go())
