"""The informer against a cluster that is played: what kopf tells and hides is said by the test, in virtual time."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

import pytest
from support.virtual_loop import run
from treeline_operator.controller.informer import Informer, Timing
from treeline_operator.controller.kinds import KINDS, OPTIONAL, Watched
from treeline_operator.controller.store import Store
from treeline_operator.controller.stream import Deliver
from treeline_operator.kube.errors import Forbidden, KubeError, NotFound, Unavailable
from treeline_operator.kube.transport import Answer, Call

DEPLOYMENTS = next(watched for watched in KINDS if watched.kind == "Deployment")
PODS = next(watched for watched in KINDS if watched.kind == "Pod")
POOLS = next(watched for watched in KINDS if watched.kind == "InferencePool")
ROUTES = OPTIONAL[0]


class World:
    """Objects, who lists them, and the streams that were begun. A stream tells what a list and a watch would."""

    configuration = None

    def __init__(self) -> None:
        self.version = 100
        self.objects: dict[tuple[str, str, str], dict[str, Any]] = {}
        self.failing: dict[str, KubeError] = {}
        self.deaf: set[str] = set()
        self.ends: list[Exception] = []
        self.streams: list[list[str]] = []
        self.listed: dict[str, int] = {}
        self.deliver: Deliver | None = None
        self.watched_in: list[str] = []

    async def request(self, call: Call) -> Answer:
        assert call.accept.startswith("application/json;as=PartialObjectMetadataList")
        self.listed[call.path] = self.listed.get(call.path, 0) + 1
        for part, exc in self.failing.items():
            if part in call.path:
                raise exc
        watched = next(
            w
            for w in (*KINDS, *OPTIONAL)
            if call.path.endswith(f"/{w.plural}") and f"/{w.api_version}/" in call.path
        )
        query = dict(call.query)
        assert query.get("labelSelector", "") == watched.selector
        items = [
            {"metadata": obj["metadata"]}
            for (api, namespace, _), obj in self.objects.items()
            if api == watched.api and call.path in (watched.path(""), watched.path(namespace))
        ]
        first = int(query.get("continue", "0"))
        page, more = items[first : first + 2], str(first + 2) if first + 2 < len(items) else ""
        meta = {"resourceVersion": str(self.version), "continue": more}
        return Answer(200, {}, json.dumps({"metadata": meta, "items": page or None}).encode())

    async def stream(
        self, kinds: Sequence[Watched], namespaces: Sequence[str], _: Any, __: Any, deliver: Deliver
    ) -> None:
        self.streams.append([watched.plural for watched in kinds])
        self.watched_in = list(namespaces)
        self.deliver = deliver
        await asyncio.sleep(0.1)
        for watched in kinds:
            if watched.plural not in self.deaf:
                for (api, namespace, _), obj in list(self.objects.items()):
                    if api == watched.api and {"", namespace} & set(namespaces):
                        deliver(watched, None, json.loads(json.dumps(obj)))
        if self.ends:
            raise self.ends.pop(0)
        await asyncio.Event().wait()

    def put(self, watched: Watched, name: str, *, heard: bool = True) -> None:
        self.version += 1
        meta = {"namespace": "n", "name": name, "uid": f"u-{name}", "resourceVersion": str(self.version)}
        self.objects[watched.api, "n", name] = {"metadata": meta}
        if heard and self.deliver is not None:
            self.deliver(watched, "MODIFIED", {"metadata": dict(meta)})

    def delete(self, watched: Watched, name: str, *, heard: bool = True) -> None:
        self.version += 1
        meta = self.objects.pop((watched.api, "n", name))["metadata"]
        if heard and self.deliver is not None:
            last = {**meta, "resourceVersion": str(self.version)}
            self.deliver(watched, "DELETED", {"metadata": last})


class Scene:
    def __init__(self, world: World, store: Store, informer: Informer) -> None:
        self.world, self.store, self.informer = world, store, informer

    def names(self, watched: Watched = DEPLOYMENTS) -> list[str]:
        return [o.ref.name for o in self.store.of_kind(watched.api_version, watched.kind, "n")]


def play(
    act: Callable[[Scene], Coroutine[Any, Any, None]], namespaces: Sequence[str] = ("",), **timing: Any
) -> None:
    """Run a scene that begins with two Deployments and three Pods."""

    async def main() -> None:
        world, store = World(), Store()
        for name in ("a", "b"):
            world.put(DEPLOYMENTS, name)
        for name in ("p", "q", "r"):
            world.put(PODS, name)
        cluster: Any = world
        informer = Informer(cluster, store, namespaces, timing=Timing(**timing), source=world.stream)
        try:
            await act(Scene(world, store, informer))
        finally:
            await informer.stop()

    run(main())


async def begin(scene: Scene) -> None:
    scene.informer.start()
    await scene.informer.synced()


def test_synced_means_that_all_of_the_first_lists_has_been_told() -> None:
    async def act(scene: Scene) -> None:
        scene.informer.start()
        waiting = asyncio.create_task(scene.informer.synced())
        await asyncio.sleep(0.05)
        assert not waiting.done()
        await waiting
        assert scene.names() == ["a", "b"]
        assert scene.names(PODS) == ["p", "q", "r"]
        assert set(scene.informer.ages()) == {watched.api for watched in KINDS}
        assert scene.informer.troubles() == []
        assert scene.world.streams == [sorted_plurals(KINDS)]

    play(act)


def sorted_plurals(kinds: Sequence[Watched]) -> list[str]:
    return [watched.plural for watched in sorted(kinds, key=lambda w: w.api)]


def test_what_is_told_is_known_at_once() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.put(DEPLOYMENTS, "c")
        scene.world.delete(DEPLOYMENTS, "a")
        assert scene.names() == ["b", "c"]

    play(act)


def test_what_was_deleted_unseen_goes_with_the_next_audit() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.delete(DEPLOYMENTS, "a", heard=False)
        assert scene.names() == ["a", "b"]
        await asyncio.sleep(60.0)
        assert scene.names() == ["b"]

    play(act)


def test_a_list_of_kopf_brings_an_audit_at_once() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.delete(DEPLOYMENTS, "a", heard=False)
        assert scene.world.deliver is not None
        scene.world.deliver(DEPLOYMENTS, None, scene.world.objects[DEPLOYMENTS.api, "n", "b"])
        await asyncio.sleep(1.0)
        assert scene.names() == ["b"]
        assert len(scene.world.streams) == 1

    play(act)


def test_a_watch_that_has_gone_deaf_is_noticed_and_begun_anew() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.put(DEPLOYMENTS, "late", heard=False)
        await asyncio.sleep(90.0)
        assert len(scene.world.streams) == 2
        assert scene.names() == ["a", "b", "late"]
        scene.world.deaf.add("deployments")
        scene.world.put(DEPLOYMENTS, "later", heard=False)
        await asyncio.sleep(90.0)
        assert "later" not in scene.names()
        assert scene.informer.ages()[DEPLOYMENTS.api] > 60.0
        assert scene.informer.ages()[PODS.api] < 61.0, "the other kinds are as fresh as ever"
        assert "later for one" in scene.informer.troubles()[0]
        scene.world.deaf.clear()
        await asyncio.sleep(120.0)
        assert "later" in scene.names()
        assert scene.informer.troubles() == []

    play(act)


def test_when_kopf_fails_it_is_begun_again_with_a_growing_delay() -> None:
    async def act(scene: Scene) -> None:
        scene.world.ends = [RuntimeError("no credentials")] * 4
        await begin(scene)
        await asyncio.sleep(0.2)
        assert any("no credentials" in trouble for trouble in scene.informer.troubles())
        await asyncio.sleep(30.0)
        assert len(scene.world.streams) == 5

    play(act)


def test_an_absent_kind_counts_as_empty_and_is_watched_when_it_comes() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["deployments"] = NotFound("404", code=404)
        await begin(scene)
        await asyncio.sleep(1.0)
        assert scene.names() == []
        assert scene.names(PODS) == ["p", "q", "r"]
        assert "deployments" not in scene.world.streams[-1]
        assert any("is the CRD installed" in trouble for trouble in scene.informer.troubles())
        del scene.world.failing["deployments"]
        await asyncio.sleep(40.0)
        assert "deployments" in scene.world.streams[-1]
        assert scene.names() == ["a", "b"]
        assert scene.informer.troubles() == []

    play(act)


def test_an_absent_kind_that_comes_back_has_its_objects_again() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.failing["deployments"] = NotFound("404", code=404)
        await asyncio.sleep(70.0)
        assert scene.names() == []
        del scene.world.failing["deployments"]
        await asyncio.sleep(40.0)
        assert scene.names() == ["a", "b"]

    play(act)


def test_our_own_kinds_are_waited_for_and_what_is_known_of_them_stays_while_they_are_not_served() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(POOLS, "p")
        scene.world.failing["inferencepools"] = NotFound("404", code=404)
        scene.informer.start()
        waiting = asyncio.create_task(scene.informer.synced())
        await asyncio.sleep(300.0)
        assert not waiting.done()
        assert any("is the CRD installed" in trouble for trouble in scene.informer.troubles())
        assert max(scene.informer.ages().values()) < 61.0, "a new process would help nothing"
        del scene.world.failing["inferencepools"]
        await waiting
        assert scene.names(POOLS) == ["p"]
        scene.world.failing["inferencepools"] = NotFound("404", code=404)
        await asyncio.sleep(300.0)
        assert scene.names(POOLS) == ["p"], "without pools their gateways would be taken down"
        assert any("is the CRD installed" in trouble for trouble in scene.informer.troubles())

    play(act)


def test_a_namespace_that_is_taken_away_is_forgotten_and_holds_up_no_other() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["namespaces/n/"] = Forbidden("403", code=403)
        await begin(scene)
        assert scene.world.watched_in == ["m"]
        del scene.world.failing["namespaces/n/"]
        await asyncio.sleep(100.0)
        assert scene.world.watched_in == ["n", "m"]
        assert scene.names() == ["a", "b"]
        scene.world.failing["namespaces/n/"] = Forbidden("403", code=403)
        await asyncio.sleep(100.0)
        assert scene.names() == []
        assert scene.world.watched_in == ["m"]
        await asyncio.sleep(300.0)
        assert max(scene.informer.ages().values()) < 61.0
        assert await scene.informer.set_optional([ROUTES.api]) == {ROUTES.api}, "the other may use it"
        scene.world.failing["namespaces/m/"] = Forbidden("403", code=403)
        await asyncio.sleep(300.0)
        assert max(scene.informer.ages().values()) > 200.0, "nothing is left to look after"

    play(act, ("n", "m"))


def test_a_kind_that_may_not_be_read_is_not_synced_and_says_why() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["pods"] = Forbidden("403: pods is forbidden", code=403)
        scene.informer.start()
        waiting = asyncio.create_task(scene.informer.synced())
        await asyncio.sleep(100.0)
        assert not waiting.done()
        assert any("operator's role" in trouble for trouble in scene.informer.troubles())
        assert scene.names() == ["a", "b"]
        waiting.cancel()

    play(act)


def test_an_api_server_that_is_away_ages_what_is_known_and_is_asked_ever_less() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.failing["/"] = Unavailable("connection refused")
        before = sum(scene.world.listed.values())
        await asyncio.sleep(200.0)
        assert scene.names() == ["a", "b"], "what is known stays"
        assert min(scene.informer.ages().values()) > 130.0
        assert (sum(scene.world.listed.values()) - before) / len(KINDS) < 25
        assert len(scene.world.streams) == 1
        scene.world.failing.clear()
        await asyncio.sleep(25.0)
        assert max(scene.informer.ages().values()) < 25.0

    play(act)


def test_optional_kinds_come_and_go() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.put(ROUTES, "r", heard=False)
        found = await scene.informer.set_optional([ROUTES.api, "example.com/v1/Unknown"])
        assert found == {ROUTES.api, "example.com/v1/Unknown"}
        assert scene.names(ROUTES) == ["r"]
        assert "httproutes" in scene.world.streams[-1]
        assert await scene.informer.set_optional([]) == frozenset()
        assert scene.names(ROUTES) == []
        await asyncio.sleep(1.0)
        assert "httproutes" not in scene.world.streams[-1]
        scene.world.failing["httproutes"] = Forbidden("403", code=403)
        assert await scene.informer.set_optional([ROUTES.api]) == frozenset()
        await asyncio.sleep(300.0)
        assert max(scene.informer.ages().values()) < 61.0, (
            "that one may not be read is no reason to begin anew"
        )

    play(act)


def test_a_defect_in_an_audit_ends_the_wait_for_the_first_lists() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["pods"] = TypeError("a defect")  # type: ignore[assignment]
        scene.informer.start()
        with pytest.raises(TypeError, match="a defect"):
            await scene.informer.synced()

    play(act)


def test_an_answer_that_is_no_list_is_a_trouble_and_not_an_empty_cluster() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        proper = scene.world.request

        async def garbage(call: Call) -> Answer:
            return (
                Answer(200, {}, b'{"kind": "Status"}') if "deployments" in call.path else await proper(call)
            )

        scene.world.request = garbage  # type: ignore[method-assign]
        await asyncio.sleep(70.0)
        assert scene.names() == ["a", "b"]
        assert any("no list of metadata" in trouble for trouble in scene.informer.troubles())

    play(act)


def test_secrets_are_never_watched() -> None:
    assert not [watched for watched in (*KINDS, *OPTIONAL) if watched.kind == "Secret"]
    assert all(watched.selector for watched in KINDS if not watched.api.startswith("treeline.dev/"))
