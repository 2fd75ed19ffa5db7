from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from support.virtual_loop import run
from treeline_operator.controller.informer import Informer, Reflector, Timing
from treeline_operator.controller.kinds import KINDS, OPTIONAL, Watched
from treeline_operator.controller.store import Store
from treeline_operator.kube.errors import Forbidden, Gone, KubeError, NotFound, Throttled, Unavailable

KIND = Watched("apps/v1", "Deployment", "deployments")


def obj(name: str, version: int) -> dict[str, Any]:
    return {"metadata": {"name": name, "namespace": "n", "uid": f"u-{name}", "resourceVersion": str(version)}}


def event(kind: str, thing: dict[str, Any]) -> bytes:
    return json.dumps(
        {"type": kind, "object": {"apiVersion": "apps/v1", "kind": "Deployment", **thing}}
    ).encode()


def bookmark(version: int) -> bytes:
    return json.dumps(
        {"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(version)}}}
    ).encode()


class Script:
    """An API server that plays its part. A list is a version and objects; a watch is lines, and seconds of silence."""

    def __init__(self, *acts: Any) -> None:
        self.acts = list(acts)
        self.asked: list[str] = []
        self.at: list[float] = []

    def next(self, what: str) -> Any:
        self.asked.append(what)
        self.at.append(round(asyncio.get_running_loop().time(), 3))
        act = self.acts.pop(0) if self.acts else Unavailable("the script is over")
        if isinstance(act, KubeError):
            raise act
        return act

    async def page(self, path: str, query: dict[str, str]) -> bytes:
        assert query.get("labelSelector", "app.kubernetes.io/managed-by=treeline") == KIND.selector
        act = self.next(f"list{' ' + query['continue'] if 'continue' in query else ''}")
        version, items, *more = act
        meta = {"resourceVersion": str(version), "continue": more[0] if more else ""}
        return json.dumps({"metadata": meta, "items": items}).encode()

    @asynccontextmanager
    async def lines(
        self, path: str, query: dict[str, str], idle_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        act = self.next(f"watch {query['resourceVersion']}")

        async def play() -> AsyncIterator[bytes]:
            for part in act:
                if isinstance(part, bytes):
                    yield part
                elif isinstance(part, KubeError):
                    raise part
                else:
                    # silence, and the reader's patience with it
                    await asyncio.sleep(min(part, idle_s))
                    if part >= idle_s:
                        raise TimeoutError

        yield play()


def play(*acts: Any, seconds: float = 0.0) -> tuple[Script, Store, Reflector]:
    """Run a reflector for so long, then stop it."""
    script, store = Script(*acts), Store()

    async def main() -> Reflector:
        reflector = Reflector(KIND, "", script, store, Timing(), chance=lambda: 0.0)
        task = asyncio.create_task(reflector.run())
        await asyncio.sleep(seconds)
        reflector.age_at_end = reflector.age()  # type: ignore[attr-defined]
        task.cancel()
        return reflector

    return script, store, run(main())


def names(store: Store) -> list[str]:
    return [o.ref.name for o in store.of_kind("apps/v1", "Deployment", "n")]


def test_a_list_in_pages_then_a_watch_from_where_the_list_was() -> None:
    script, store, reflector = play(
        (7, [obj("a", 1), obj("b", 2)], "more"),
        (7, [obj("c", 3)]),
        [event("ADDED", obj("d", 8)), event("DELETED", obj("a", 9)), 50, bookmark(20), 50],
        [1000],
        seconds=160,
    )
    assert script.asked[:3] == ["list", "list more", "watch 7"]
    assert script.asked[3] == "watch 20", "a bookmark moves the place"
    assert names(store) == ["b", "c", "d"]
    assert reflector.synced.is_set()
    assert not reflector.trouble


def test_what_was_deleted_while_nobody_watched_is_noticed_after_410() -> None:
    gone = json.dumps({"type": "ERROR", "object": {"code": 410, "message": "too old"}}).encode()
    script, store, _ = play(
        (5, [obj("a", 1), obj("b", 2)]),
        [gone],
        (90, [obj("b", 2), obj("e", 60)]),
        [30],
        seconds=5,
    )
    assert script.asked == ["list", "watch 5", "list", "watch 90"]
    assert names(store) == ["b", "e"]
    script, store, _ = play((5, [obj("a", 1)]), Gone("410: expired", code=410), (9, []), [30], seconds=5)
    assert script.asked == ["list", "watch 5", "list", "watch 9"]
    assert names(store) == []


def test_a_silent_watch_is_begun_anew_from_the_same_place() -> None:
    script, _, reflector = play((5, []), [1000], [1000], seconds=100)
    assert script.asked == ["list", "watch 5", "watch 5"]
    assert script.at == [0.0, 0.0, 70.0]
    assert reflector.age_at_end == pytest.approx(30.0)  # type: ignore[attr-defined]


def test_losses_back_off_and_a_relist_comes_when_nothing_else_helps() -> None:
    lost = Unavailable("connection reset")
    script, _, reflector = play((5, []), *[lost] * 4, *[lost] * 4, seconds=20)
    assert script.asked[:6] == ["list", *["watch 5"] * 4, "list"]
    assert [round(b - a, 2) for a, b in zip(script.at[1:6], script.at[2:7], strict=True)] == [
        0.25,
        0.5,
        1.0,
        2.0,
        4.0,
    ]
    assert "connection reset" in reflector.trouble


def test_retry_after_is_obeyed() -> None:
    script, _, _ = play(Throttled("429", code=429, retry_after_s=7.0), (5, []), [1000], seconds=20)
    assert script.at == [0.0, 7.0, 7.0]


def test_a_server_that_ends_every_watch_at_once_is_not_asked_in_a_tight_loop() -> None:
    script, _, _ = play((5, []), *[[]] * 100, seconds=10)
    assert len(script.asked) <= 22


def test_an_absent_kind_counts_as_empty_and_is_asked_for_again() -> None:
    script, store, reflector = play(
        (5, [obj("a", 1)]),
        NotFound("404", code=404),
        NotFound("404", code=404),
        (6, [obj("z", 6)]),
        [1000],
        seconds=130,
    )
    assert script.asked == ["list", "watch 5", "list", "list", "watch 6"]
    assert names(store) == ["z"]
    assert reflector.synced.is_set()


def test_a_kind_that_may_not_be_read_is_not_synced_and_says_why() -> None:
    _, _, reflector = play(*[Forbidden("403: pods is forbidden", code=403)] * 3, seconds=30)
    assert not reflector.synced.is_set()
    assert "operator's role" in reflector.trouble


@pytest.mark.parametrize(
    "garbage", [b"{", b"[]", b'{"type": 3, "object": {}}', b'{"type": "BOOKMARK", "object": []}']
)
def test_what_is_not_understood_leads_to_a_new_list(garbage: bytes) -> None:
    script, store, _ = play((5, [obj("a", 1)]), [garbage], (6, [obj("b", 6)]), [1000], seconds=5)
    assert script.asked == ["list", "watch 5", "list", "watch 6"]
    assert names(store) == ["b"]


def test_an_unknown_error_in_the_stream_backs_off() -> None:
    broken = json.dumps({"type": "ERROR", "object": {"code": 500, "message": "etcd has no leader"}}).encode()
    script, _, reflector = play((5, []), *[[broken]] * 10, seconds=3)
    assert 4 <= len(script.asked) <= 6
    assert "etcd has no leader" in reflector.trouble


class Empty:
    """An API server without any objects, that counts who watches what."""

    def __init__(self) -> None:
        self.watching: dict[str, int] = {}

    async def page(self, path: str, query: dict[str, str]) -> bytes:
        route = obj("x", 1)
        route["metadata"]["namespace"] = "a"
        items = [route] if "namespaces/a/httproutes" in path else []
        return json.dumps({"metadata": {"resourceVersion": "1"}, "items": items}).encode()

    @asynccontextmanager
    async def lines(
        self, path: str, query: dict[str, str], idle_s: float
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        async def silence() -> AsyncIterator[bytes]:
            await asyncio.sleep(idle_s)
            for line in ():
                yield line

        self.watching[path] = self.watching.get(path, 0) + 1
        try:
            yield silence()
        finally:
            self.watching[path] -= 1


def test_kinds_and_namespaces_are_all_watched_and_optional_ones_come_and_go() -> None:
    async def main() -> None:
        server, store = Empty(), Store()
        informer = Informer(server, store, ("a", "b"))
        informer.start()
        await informer.synced()
        await asyncio.sleep(1)
        assert sum(server.watching.values()) == 2 * len(KINDS)
        assert set(informer.ages()) == {watched.api for watched in KINDS}
        route = OPTIONAL[0]
        await informer.set_optional([route.api, "example.com/v1/Unknown"])
        await asyncio.sleep(1)
        assert server.watching[route.path("a")] == server.watching[route.path("b")] == 1
        assert len(store) == 1
        await informer.set_optional([])
        await asyncio.sleep(1)
        assert server.watching[route.path("a")] == 0
        assert len(store) == 0
        assert informer.troubles() == []
        await informer.stop()
        assert sum(server.watching.values()) == 0

    run(main())


def test_secrets_are_never_watched() -> None:
    assert not [watched for watched in (*KINDS, *OPTIONAL) if watched.kind == "Secret"]
    assert all(watched.selector for watched in KINDS if not watched.api.startswith("treeline.dev/"))
