"""Engines with an API key: the picker sends the configured one, and lists their models."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.epp_io import FakeEngine, running_picker, until
from treeline_epp.endpoints import engine_http
from treeline_epp.endpoints.engine_http import EngineKey


class Keyed(FakeEngine):
    """An engine that answers below /v1 only with the key."""

    def _content(self, path: str, headers: dict[str, str], body: bytes) -> tuple[int, dict[str, str], object]:
        if path.startswith("/v1/") and headers.get("authorization") != "Bearer secret":
            return 401, {}, {}
        return super()._content(path, headers, body)


async def models(*flags: str) -> list[str]:
    async with running_picker(*flags) as picker:

        async def ready() -> bool:
            (found,) = (await picker.get("/endpoints")).json()["pools"]["default"]["endpoints"]
            return bool(found["ready"])

        await until(ready, "the endpoint to be ready")
        return list((await picker.get("/endpoints")).json()["pools"]["default"]["models"])


async def test_the_models_of_an_engine_with_a_key_are_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    key, endpoints = tmp_path / "key", tmp_path / "endpoints.yaml"
    key.write_text("secret\n")
    engine = Keyed("e0")
    await engine.start()
    try:
        entry = f"name: e0, address: '{engine.address}'"
        endpoints.write_text(f"endpoints: [{{{entry}, api_key_file: '{key}'}}]")
        assert await models("--endpoints-file", str(endpoints)) == ["tiny"]
        assert await models("--endpoint", f"e0={engine.address}", "--engine-key-file", str(key)) == ["tiny"]
        assert "API key" not in caplog.text
        assert await models("--endpoint", f"e0={engine.address}") == []
        assert "--engine-key-file" in caplog.text
        key.write_text("wrong")
        assert await models("--endpoint", f"e0={engine.address}", "--engine-key-file", str(key)) == []
        assert "wrong" not in caplog.text
    finally:
        await engine.stop()


@pytest.mark.parametrize("content", [b"", b" \n", b"two\nlines", b"\xff", b"x" * 5000, "é".encode()])
async def test_an_invalid_key_is_not_sent_and_a_valid_one_is_used_later(
    content: bytes, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_http, "_REREAD_S", 0.0)
    file, seen = tmp_path / "key", list[str]()
    key = EngineKey(file)
    seen.append(key())
    file.write_bytes(content)
    seen.append(key())
    seen.append(key())
    file.write_bytes(b"secret")
    seen.append(key())
    assert seen == ["", "", "", "secret"]
    assert [record.getMessage().count("cannot be used") for record in caplog.records] == [1, 1], "each logged once"
