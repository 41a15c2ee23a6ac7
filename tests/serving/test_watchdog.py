# SPDX-License-Identifier: Apache-2.0
"""The watchdog over a stand-in for the engine: silence, failure, recovery."""

import asyncio

import httpx


def watched(stand, scenario, **kwargs):
    """Run `scenario(stand, health)` beside a running watchdog; health() -> (status, message)."""
    s = stand(**kwargs)

    async def run():
        task = asyncio.create_task(s.watchdog.run())
        transport = httpx.ASGITransport(s.app)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:

            async def health():
                answer = await client.get("/health")
                text = answer.json()["error"]["message"] if answer.content else ""
                return answer.status_code, text

            await scenario(s, health)
        task.cancel()

    asyncio.run(run())


def test_silence_fails_health_and_an_answer_mends_it(stand):
    async def scenario(s, health):
        release = asyncio.Event()
        asked = []

        async def rpc(method):
            asked.append(method)
            await release.wait()

        s.engine.collective_rpc = rpc
        assert (await health())[0] == 200
        await asyncio.sleep(1)  # asked after 0.5 s, silent for 0.5: not yet
        assert (await health())[0] == 200
        await asyncio.sleep(1.2)
        status, text = await health()
        assert status == 503 and "has not answered for" in text
        assert asked == ["check_health"]  # one question at a time
        release.set()
        await asyncio.sleep(0.02)
        assert (await health())[0] == 200

    watched(stand, scenario, hang_timeout=1.0)


def test_a_worker_that_is_not_well_fails_health(stand):
    async def scenario(s, health):
        async def rpc(method):
            raise RuntimeError("CUDA error: an illegal memory access")

        good, s.engine.collective_rpc = s.engine.collective_rpc, rpc
        await asyncio.sleep(0.08)
        assert await health() == (
            503,
            "A worker is not well: RuntimeError: CUDA error: an illegal memory access",
        )
        s.engine.collective_rpc = good
        for _ in range(100):
            await asyncio.sleep(0.05)
            if (await health())[0] == 200:
                break
        assert (await health())[0] == 200

    watched(stand, scenario)


def test_without_a_limit_silence_is_no_fault(stand, monkeypatch):
    monkeypatch.setattr("mla_serving.server.watchdog._INTERVAL_SECONDS", 0.02)

    async def scenario(s, health):
        s.engine.rpc_delay = 10
        await asyncio.sleep(0.2)
        assert (await health())[0] == 200

    watched(stand, scenario, hang_timeout=0)
