"""Endpoints by flag and by watched file."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.epp_io import until
from treeline_epp.endpoints import discovery
from treeline_epp.endpoints.discovery import (
    DiscoveryError,
    discover,
    normal_address,
    parse_file,
    parse_flag,
    unique,
)
from treeline_epp.endpoints.spec import EndpointSpec, KvPorts
from treeline_epp.endpoints.transfer import Protocol, Role

A = EndpointSpec("a", "127.0.0.1:8000")


def test_a_flag_names_an_endpoint() -> None:
    assert parse_flag("a=127.0.0.1:8000") == A
    assert parse_flag("a=localhost:8000") == A
    assert parse_flag("b=[0:0::1]:80") == EndpointSpec("b", "[::1]:80")
    assert parse_flag("p=127.0.0.1:8000,prefill") == EndpointSpec("p", A.address, role=Role.PREFILL)


@pytest.mark.parametrize(
    "text",
    [
        "a",
        "=1.2.3.4:5",
        "a=example.org:80",
        "a=1.2.3.4",
        "a=1.2.3.4:0",
        "a=1.2.3.4:99999",
        "a=1.2.3.4:5,x",
        "a=1.2.3.4:5,",
    ],
)
def test_a_wrong_flag_says_what_is_wrong(text: str) -> None:
    with pytest.raises(DiscoveryError):
        parse_flag(text)


@pytest.mark.parametrize("text", ["a=1.2.3.4:5,x", "a=1.2.3.4:5,"])
def test_a_wrong_role_lists_the_roles(text: str) -> None:
    with pytest.raises(DiscoveryError, match="none of both, prefill, decode"):
        parse_flag(text)


def test_a_file_is_yaml_or_json() -> None:
    expected = (A, EndpointSpec("b", "10.0.0.2:80", pool="big", uid="7"))
    yaml = "endpoints:\n- {name: a, address: 'localhost:8000'}\n"
    yaml += "- {name: b, address: 10.0.0.2:80, pool: big, uid: '7'}\n"
    assert parse_file(yaml) == expected
    entries = [{"name": s.name, "address": s.address, "pool": s.pool, "uid": s.uid} for s in expected]
    assert parse_file(json.dumps({"endpoints": entries})) == expected
    assert parse_file("endpoints: []") == ()


def test_a_file_gives_the_role_of_an_endpoint_and_how_it_hands_over_prompts() -> None:
    entry = "endpoints: [{name: a, address: 'localhost:8000', role: %s, kv_transfer: %s}]"
    (spec,) = parse_file(entry % ("decode", "llm-d"))
    assert (spec.role, spec.protocol) == (Role.DECODE, Protocol.LLM_D)
    assert spec.identity != A.identity
    for wrong in (("encode", "nixl"), ("prefill", "pigeon")):
        with pytest.raises(DiscoveryError):
            parse_file(entry % wrong)


def test_a_file_gives_an_engines_type_and_its_publisher() -> None:
    entry = "{name: a, address: 'localhost:8000', engine: vllm, kv_events: %s}"
    (spec,) = parse_file(f"endpoints: [{entry % '{port: 5557, replay_port: 5657, topic: kv, ranks: 2}'}]")
    assert (spec.engine, spec.kv) == ("vllm", KvPorts(5557, 5657, "kv", 2))
    (spec,) = parse_file(f"endpoints: [{entry % '{port: 5557}'}]")
    assert spec.kv == KvPorts(5557)
    for wrong in (
        "{}",
        "{port: 0}",
        "{port: 70000}",
        "{port: 1, ranks: 0}",
        "{port: 1, ranks: 9999}",
        "{port: 1, x: 1}",
    ):
        with pytest.raises(DiscoveryError):
            parse_file(f"endpoints: [{entry % wrong}]")
    with pytest.raises(DiscoveryError, match="none of treeline, sglang, vllm, openai"):
        parse_file("endpoints: [{name: a, address: 'localhost:8000', engine: vlm}]")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "endpoints: 7",
        "endpoint: []",
        "endpoints: [{name: a}]",
        "endpoints: [{name: a, address: '1.2.3.4:5', color: red}]",
        "endpoints: [{name: a, address: '1.2.3.4:5'}, {name: a, address: '1.2.3.4:6'}]",
        "endpoints: [{name: a, address: '1.2.3.4:5'}, {name: b, address: '1.2.3.4:5'}]",
    ],
)
def test_a_wrong_file_is_refused_as_a_whole(text: str) -> None:
    with pytest.raises(DiscoveryError):
        parse_file(text)


@settings(deadline=None)
@given(st.text(max_size=60))
def test_any_text_is_parsed_or_a_typed_error(text: str) -> None:
    for parse in (parse_file, parse_flag, normal_address):
        with contextlib.suppress(DiscoveryError):
            parse(text)


async def test_endpoints_by_flag_are_reported_once() -> None:
    assert [specs async for specs in discover([A], None)] == [(A,)]
    with pytest.raises(DiscoveryError, match="more than once"):
        unique([A, A])
    with pytest.raises(DiscoveryError, match=r"name 'a/12' ends like that of a data-parallel rank"):
        unique([A, EndpointSpec("a/12", "127.0.0.1:8001")])
    assert unique([A, EndpointSpec("a/b1", "127.0.0.1:8001")])


async def test_a_file_is_parsed_only_if_its_bytes_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Twenty thousand endpoints take seconds of YAML, and the folder may have other files that change."""
    file, looks, parsed = tmp_path / "endpoints.yaml", 0, list[str | bytes]()
    decode = discovery.decode_yaml

    async def looking() -> AsyncIterator[None]:
        nonlocal looks
        for text in ("endpoints: []", "endpoints: [", "endpoints: [{name: b, address: '10.0.0.2:80'}]"):
            for _ in range(3):
                looks += 1
                await asyncio.to_thread(file.write_text, text)
                yield

    def counting(text: str | bytes, into: type[Any]) -> Any:
        parsed.append(text)
        return decode(text, into)

    monkeypatch.setattr(discovery, "_looks", looking)
    monkeypatch.setattr(discovery, "decode_yaml", counting)
    told = [[spec.name for spec in specs] async for specs in discover([A], file)]
    assert (told, looks, len(parsed)) == ([["a"], ["a", "b"]], 9, 3)
    assert caplog.text.count("cannot be used") == 1


async def test_a_file_is_followed_through_renames_and_mistakes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "endpoints.yaml"
    told: list[tuple[str, ...]] = []

    def write(text: str) -> None:
        new = tmp_path / "new"
        new.write_text(text)
        new.rename(file)

    async def follow() -> None:
        async for specs in discover([A], file):
            told.append(tuple(spec.name for spec in specs))  # noqa: PERF401

    write("endpoints: [{name: b, address: '10.0.0.2:80'}]")
    task = asyncio.create_task(follow())
    try:
        await until(lambda: told == [("a", "b")], "the first list")
        with caplog.at_level(logging.ERROR):
            write("endpoints: [")
            await until(lambda: "the old list stays" in caplog.text, "the mistake is told")
            write("endpoints: [{name: a, address: '10.0.0.3:80'}]")
            await until(lambda: "name 'a'" in caplog.text, "the clash is told")
            file.unlink()
            await until(lambda: "No such file" in caplog.text, "the loss is told")
        assert told == [("a", "b")]
        write("endpoints: [{name: c, address: '10.0.0.4:80'}]")
        await until(lambda: told[-1] == ("a", "c"), "the new list")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
