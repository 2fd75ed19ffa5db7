"""The driver of a reflector against a server that misbehaves over real connections."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import pytest
from support.epp_io import until
from support.kube_api import FakeApi, fake_api
from treeline_kube.client import Client
from treeline_kube.driver import Driver
from treeline_kube.errors import NoCluster
from treeline_kube.objects import Objects
from treeline_kube.reflector import Reflector, State, Timing
from treeline_kube.resources import Collection, Resource

PATH = "/api/v1/namespaces/ns/pods"


class _Object(msgspec.Struct):
    value: int


def read(data: msgspec.Raw) -> int:
    return _decode(data).value


_decode = msgspec.json.Decoder(_Object).decode


class Following:
    """A reflector on a fake server, and the number of its change notices."""

    def __init__(self, api: FakeApi, client: Client, silence_s: float, optional: bool) -> None:
        self.api = api
        self.changes = 0
        self.kept = Objects(read)
        # How the pauses grow is the reflector's own test.
        timing = Timing(backoff_s=(0.02, 0.2), silence_s=silence_s)
        collection = Collection(Resource("v1", "Pod", "pods"), "ns")
        self.reflector = Reflector(collection, self.kept, timing=timing, optional=optional)
        self.driver = Driver(client, self.reflector, self.changed)

    def changed(self) -> None:
        self.changes += 1

    def put(self, name: str, value: int) -> None:
        self.api.change(PATH, lambda c: c.put({"metadata": {"name": name}, "value": value}))

    async def holds(self, **objects: int) -> None:
        await until(lambda: self.kept.objects == objects, f"{objects}", state=lambda: self.reflector.__dict__)

    @property
    def watching(self) -> bool:
        return self.reflector.state is State.WATCHING

    async def watches(self) -> None:
        await until(lambda: self.watching and self.api.open[PATH] == 1, "a watch is open")


@contextlib.asynccontextmanager
async def following(
    folder: Path,
    *,
    silence_s: float = 30.0,
    optional: bool = False,
    token: str | None = None,
    refuse: int | None = None,
) -> AsyncIterator[Following]:
    async with fake_api() as api:
        api.collection(PATH).put({"metadata": {"name": "a"}, "value": 1})
        api.refuse = {} if refuse is None else {PATH: refuse}
        api.token = token
        async with await Client.from_config(api.kubeconfig(folder)) as client:
            made = Following(api, client, silence_s, optional)
            made.driver.start()
            try:
                yield made
            finally:
                await made.driver.stop()


async def test_a_reflector_follows_its_collection(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        await it.holds(a=1)
        await it.watches()
        before = it.changes
        it.put("b", 2)
        await it.holds(a=1, b=2)
        it.api.change(PATH, lambda c: c.delete("a"))
        await it.holds(b=2)
        assert it.changes > before
        assert it.api.lists[PATH] == 1


async def test_long_lists_come_in_pages(tmp_path: Path) -> None:
    async with following(tmp_path, refuse=503) as it:
        for i in range(250):
            it.put(f"n{i}", i)
        it.api.refuse.clear()
        await until(lambda: len(it.kept.objects) == 251, "all objects")
        assert it.reflector.lists == 1
        assert it.api.lists[PATH] >= 3


async def test_a_cut_watch_resumes_at_its_version(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        for value in range(2, 5):
            await it.watches()
            it.api.drop()
            await until(lambda: not it.watching, "the loss is noticed")
            it.put("a", value)
            await it.holds(a=value)
        assert it.api.lists[PATH] == 1
        assert it.reflector.errors["unreachable"] == 3


async def test_a_version_that_is_too_old_leads_to_a_new_list(tmp_path: Path) -> None:
    async with following(tmp_path) as it:
        await it.watches()
        it.api.refuse_watch = {PATH: 410}
        it.api.drop()
        it.api.change(PATH, lambda c: c.delete("a"))
        it.api.change(PATH, lambda c: c.compact())
        await it.holds()
        it.api.refuse_watch.clear()
        await it.watches()
        assert it.api.lists[PATH] > 1
        assert it.reflector.errors["expired"] >= 1
        it.put("z", 26)
        await it.holds(z=26)


async def test_a_returning_server_is_followed_again_and_the_state_stays_meanwhile(
    tmp_path: Path,
) -> None:
    async with following(tmp_path) as it:
        await it.watches()
        await it.api.stop()
        await until(lambda: it.reflector.errors["unreachable"] >= 2, "it has tried")
        assert it.kept.objects == {"a": 1}
        assert not it.watching
        it.put("b", 2)
        await it.api.start()
        await it.holds(a=1, b=2)
        await it.watches()
        assert it.reflector.error is None
        assert it.api.lists[PATH] == 1


async def test_a_watch_that_falls_silent_is_given_up(tmp_path: Path) -> None:
    async with following(tmp_path, silence_s=0.2) as it:
        await it.watches()
        it.api.stall = True
        it.put("b", 2)
        await until(lambda: it.api.watches[PATH] >= 2, "another watch")
        it.api.stall = False
        await it.holds(a=1, b=2)


async def test_an_optional_kind_that_is_refused_is_settled_and_a_required_one_is_not(tmp_path: Path) -> None:
    for status in (403, 404):
        async with following(tmp_path, optional=True, refuse=status) as it:
            await until(lambda: it.reflector.usable, "it is known to be missing")
            assert not it.reflector.synced
            assert it.changes == 1
    async with following(tmp_path, refuse=403) as it:
        await until(lambda: it.reflector.errors["forbidden"] >= 2, "it has tried")
        assert not it.reflector.usable
        it.api.refuse.clear()
        await it.holds(a=1)


async def test_a_request_to_a_busy_server_is_retried_after_the_given_delay(tmp_path: Path) -> None:
    async with following(tmp_path, refuse=429) as it:
        it.api.retry_after = "1"
        await until(lambda: it.reflector.errors["throttled"] >= 1, "it has tried")
        it.api.refuse.clear()
        await it.holds(a=1)


async def test_a_rotated_token_is_read_again(tmp_path: Path) -> None:
    async with following(tmp_path, token="one") as it:
        await it.watches()
        it.api.token = "two"
        it.api.drop()
        await until(lambda: it.reflector.errors["unauthorized"] >= 1, "the old token is refused")
        it.api.kubeconfig(tmp_path)
        it.put("a", 2)
        await it.holds(a=2)


async def test_an_error_does_not_end_the_reflector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with following(tmp_path) as it:
        await it.watches()
        feed = it.reflector.on_data
        with caplog.at_level(logging.CRITICAL):
            monkeypatch.setattr(it.reflector, "on_data", lambda *_: 1 / 0)
            it.put("b", 2)
            await until(lambda: it.reflector.errors["malformed"] >= 1, "the defect is counted")
            monkeypatch.setattr(it.reflector, "on_data", feed)
            await it.holds(a=1, b=2)


async def test_an_error_for_a_missing_kubeconfig_names_the_flag(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(NoCluster, match=r"--kubeconfig: there is no file .*missing"):
        await Client.from_config(tmp_path / "missing")
    for value, named in (("", "~/.kube/config"), ("/nowhere/a:/nowhere/b", "/nowhere/a:/nowhere/b")):
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.setenv("KUBECONFIG", value)
        with pytest.raises(NoCluster, match=rf"no file {named}; give --kubeconfig FILE"):
            await Client.from_config()
    assert caplog.records == [], "one line, and not the library's too"
    monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.0.0.1")
    monkeypatch.delenv("KUBECONFIG")
    with pytest.raises(NoCluster, match="from the service account of this pod: "):
        await Client.from_config()


async def test_the_default_kubeconfig_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    async with fake_api() as api:
        config = api.kubeconfig(tmp_path)
        for variable, value in (("KUBECONFIG", f"/nowhere/x:{config}"), ("HOME", str(tmp_path))):
            monkeypatch.setenv(variable, value)
            if variable == "HOME":
                monkeypatch.delenv("KUBECONFIG")
                (tmp_path / ".kube").mkdir()
                config.rename(tmp_path / ".kube" / "config")
            async with await Client.from_config():
                pass
