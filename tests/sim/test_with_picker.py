"""A real picker, on real sockets, follows simulated engines of both dialects."""

from pathlib import Path

import httpx
import pytest
from support.epp_io import running_picker, until
from treeline_sim.model.engine import EngineConfig
from treeline_sim.server import Dialect, ServerConfig, SimServer
from treeline_wire.tokenizer import TokenizerBundle

CONFIG = ServerConfig(EngineConfig(kv_tokens=8000, block_size=16), speedup=20.0, context=4000)


@pytest.mark.parametrize("dialect", Dialect)
async def test_a_picker_learns_the_caches_of_simulated_engines(model: Path, dialect: Dialect) -> None:
    config = ServerConfig(CONFIG.engine, speedup=20.0, context=4000, dialect=dialect)
    servers = [SimServer(config, TokenizerBundle.from_dir(model)) for _ in range(2)]
    try:
        for server in servers:
            await server.start()
        addresses = [f"127.0.0.1:{server.ports['http']}" for server in servers]
        flags = [f"--endpoint=sim{number}={address}" for number, address in enumerate(addresses)]
        async with (
            running_picker(*flags, f"--tokenizer=tiny={model}") as picker,
            httpx.AsyncClient(timeout=60) as client,
        ):
            body = {"messages": [{"role": "user", "content": "tell me of rivers " * 30}], "max_tokens": 4}
            answer = await client.post(f"http://{addresses[1]}/v1/chat/completions", json=body)
            assert answer.status_code == 200

            async def known() -> list[int]:
                pools = (await picker.get("/endpoints")).json()["pools"]
                return [endpoint["cached_tokens"] for endpoint in pools["default"]["endpoints"]]

            async def followed() -> bool:
                return await known() == [0, servers[1].engine.cache.cached * 16]

            await until(followed, "the picker knows what the second engine holds", timeout_s=60)
            assert servers[1].engine.cache.cached > 5
    finally:
        for server in servers:
            await server.close()
