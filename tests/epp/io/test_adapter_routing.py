"""Requests for adapters of our runtimes, by name: prefixes are those of the files that each runtime has for it."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any

from support.epp_io import (
    FakeEngine,
    FakePublisher,
    RunningPicker,
    engines,
    equal,
    running_picker,
    small_bundle,
    stored,
    until,
)
from support.epp_kube import models
from support.http import client
from treeline_epp.explain_api import EXPLAIN
from treeline_wire.load import TREELINE_LOAD_TOPIC, TreelineLoad
from treeline_wire.namespaces import join_namespace

PROMPT = [number % 250 for number in range(160)]
OLD, NEW = "0a" * 32, "0b" * 32


class Runtime:
    """A fake runtime with adapters, by name."""

    def __init__(self, engine: FakeEngine, epoch: int) -> None:
        self.engine, self.publisher = engine, FakePublisher(epoch=epoch)
        self.adapters: dict[str, str] = {}
        self.beats = 0
        self.pages = {
            "/server_info": {
                "kv_events": self.publisher.kv_events(),
                "epoch": epoch,
                "tokenizer_fingerprint": small_bundle().fingerprint,
            },
            "/treeline/tokenizer": small_bundle().to_json(),
        }

    def has(self, **adapters: str) -> None:
        """Have these adapters from the next question and report on."""
        self.adapters = adapters
        listed: list[dict[str, Any]] = [{"id": "base", "parent": None}]
        listed += [{"id": name, "parent": "base", "digest": digest} for name, digest in adapters.items()]
        self.engine.documents |= {**self.pages, "/v1/models": {"data": listed}}

    async def beat(self) -> None:
        """Push a report."""
        self.beats += 1
        report = TreelineLoad(self.publisher.epoch, self.beats, adapters=sorted(self.adapters), digests=self.adapters)
        await self.publisher.report(TREELINE_LOAD_TOPIC, report)

    async def computed(self, digest: str | None) -> None:
        await self.publisher.store(stored(PROMPT, namespace=join_namespace(digest, None)))


@contextlib.asynccontextmanager
async def pool(**adapters: str) -> AsyncIterator[tuple[RunningPicker, Runtime, Runtime]]:
    """Run a picker before two runtimes, e0 and e1, that have these adapters."""
    async with engines(2) as made:
        one, two = (Runtime(engine, epoch) for epoch, engine in enumerate(made, 1))
        try:
            for runtime in (one, two):
                runtime.has(**adapters)
            flags = [word for engine in made for word in ("--endpoint", f"{engine.name}={engine.address}")]
            async with running_picker(*flags) as picker:
                await one.publisher.load_subscribed()
                await two.publisher.load_subscribed()
                beating = asyncio.create_task(beat(one, two))
                try:
                    yield picker, one, two
                finally:
                    beating.cancel()
        finally:
            one.publisher.stop()
            two.publisher.stop()


async def beat(*runtimes: Runtime) -> None:
    """Report their loads, often enough that none seems to hang."""
    while True:
        for runtime in runtimes:
            await runtime.beat()
        await asyncio.sleep(0.1)


async def explained(picker: RunningPicker, **body: Any) -> dict[str, Any]:
    """Return what `pick explain` says of each endpoint, by its name, the best first."""
    data = json.dumps({"model": "sql", "prompt": PROMPT} | body).encode()
    question = {"path": "/v1/completions", "body": base64.b64encode(data).decode()}
    async with client(timeout=60) as http:
        url = f"http://127.0.0.1:{picker.options.admin_port}{EXPLAIN}"
        answer = (await http.post(url, json=question)).json()
    return {one["endpoint"]: one for one in answer["endpoints"]}


async def comes(picker: RunningPicker, what: str, e0: int | None, e1: int | None, **body: Any) -> list[str]:
    """Wait until so many tokens are cached at the two endpoints; None: it is no candidate. Return them in order."""
    last: dict[str, Any] = {}

    async def is_so() -> bool:
        nonlocal last
        last = await explained(picker, **body)
        found = [one.get("terms", {}).get("confirmed_tokens") for one in (last[name] for name in ("e0", "e1"))]
        return found == [e0, e1]

    await until(is_so, what, state=lambda: last)
    return list(last)


async def test_a_repeated_prompt_of_an_adapter_goes_where_it_is_cached() -> None:
    async with pool(sql=OLD) as (picker, one, two):
        await two.computed(OLD)
        order = await comes(picker, "the prompt to be found", 0, 144)
        assert order[0] == "e1"
        await comes(picker, "the same by SGLang's member", 0, 144, model="base", lora_path="sql")
        await comes(picker, "nothing for the base model", 0, 0, model="base")
        await one.computed(OLD)
        await comes(picker, "equal adapters to share the tree's entries", 144, 144)
        await one.computed(None)
        await comes(picker, "the base model's own", 144, 0, model="base")


async def test_a_reload_under_the_same_name_forgets() -> None:
    async with pool(sql=OLD) as (picker, one, two):
        await one.computed(OLD)
        await two.computed(OLD)
        await comes(picker, "the prompt to be found at both", 144, 144)
        one.has(sql=NEW)
        order = await comes(picker, "the reload at one of them", 0, 144)
        assert order[0] == "e1"
        await one.computed(NEW)
        await comes(picker, "each to be matched with its own", 144, 144)
        two.has(sql=NEW)
        order = await comes(picker, "the reload at the other one", 144, 0)
        assert order[0] == "e0"


async def test_an_adapter_that_one_endpoint_unloads_is_asked_of_the_other_one() -> None:
    async with pool(sql=OLD) as (picker, one, two):
        await one.computed(OLD)
        await comes(picker, "the prompt to be found", 144, 0)
        one.has()
        assert await comes(picker, "the only one that has it", None, 0) == ["e1", "e0"]
        assert (await explained(picker))["e0"]["why"] == "does not serve sql"
        assert len([at for at in (await explained(picker, model="base")).values() if at.get("rank")]) == 2
        two.has()
        await until(lambda: equal(models(picker, "default"), {"base"}), "nobody to have it")
