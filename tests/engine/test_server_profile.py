"""``/debug/profile``: the next steps by kernel, each with its number in the step log."""

from __future__ import annotations

import asyncio

from tests.engine.serving import client, serving

ASKED = {"model": "tiny", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}


def test_the_next_steps_are_profiled_and_joined_to_the_log() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            await http.post("/v1/chat/completions", json=ASKED)
            waiting = asyncio.ensure_future(http.get("/debug/profile?steps=2"))
            while not waiting.done():
                await http.post("/v1/chat/completions", json=ASKED)
            answer = await waiting
            assert answer.status == 200
            found = await answer.json()
            assert found["complete"] is True
            assert found["runner"] in ("native", "cpu")
            first, second = found["steps"]
            assert second["step"] == first["step"] + 1
            assert [one["kernel"] for one in first["kernels"]] == ["forward"]
            assert 0 < first["kernels"][0]["seconds"] <= first["seconds"]

    asyncio.run(go())


def test_a_wrong_number_of_steps_is_refused_by_name() -> None:
    async def go() -> None:
        async with serving() as server, client(server) as http:
            for wrong in ("0", "-1", "many", "1001"):
                answer = await http.get(f"/debug/profile?steps={wrong}")
                assert answer.status == 400
                assert wrong in (await answer.json())["error"]["message"]

    asyncio.run(go())
