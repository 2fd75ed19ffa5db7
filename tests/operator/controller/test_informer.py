"""The informer, with a cluster that the test simulates in virtual time: lists, watches, kopf's reports, and losses."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from support.informer_world import DEPLOYMENTS, EVERY, PODS, Scene, begin, play
from treeline_kube.connection import Answer, Call
from treeline_kube.errors import Forbidden, Gone, NotFound, Timeout, Unavailable, Unreachable
from treeline_operator.controller.kinds import CHILDREN, OPTIONAL, OWN

POOLS, MODELS = OWN
ROUTES = OPTIONAL[0]
FAULTS = [None, Unavailable, Unreachable, Timeout, Gone, Forbidden, NotFound, TypeError]


def test_synced_means_that_all_first_lists_were_reported() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(POOLS, "x")
        await begin(scene)
        await asyncio.sleep(1.0)
        assert scene.names(POOLS) == ["x"]
        assert scene.names() == ["a", "b"]
        assert scene.names(PODS) == ["p", "q", "r"]
        assert set(scene.informer.ages()) == {watched.resource.api for watched in EVERY}
        assert scene.informer.troubles() == []
        assert scene.world.runs == [["inferencepools", "inferencemodels"]]
        assert set(scene.world.watched) == {watched.resource.api for watched in (*CHILDREN, *OPTIONAL)}

    play(act)


def test_reports_are_known_at_once() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        await asyncio.sleep(1.0)
        scene.world.put(DEPLOYMENTS, "c")
        scene.world.delete(DEPLOYMENTS, "a")
        scene.world.put(POOLS, "p")
        await asyncio.sleep(0.001)
        assert scene.names() == ["b", "c"]
        assert scene.names(POOLS) == ["p"]
        scene.world.delete(POOLS, "p")
        assert scene.names(POOLS) == []

    play(act)


def test_changes_missed_by_kopf_are_listed_within_a_minute() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(POOLS, "p")
        await begin(scene)
        scene.world.delete(POOLS, "p", heard=False)
        scene.world.put(POOLS, "late", heard=False)
        assert scene.names(POOLS) == ["p"]
        await asyncio.sleep(60.0)
        assert scene.names(POOLS) == ["late"]
        assert len(scene.world.runs) == 1

    play(act)


def test_a_deletion_that_a_dead_watch_has_missed_is_found_within_a_minute() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        await asyncio.sleep(1.0)
        before = dict(scene.world.listed)
        scene.world.dead.add("deployments")
        scene.world.delete(DEPLOYMENTS, "a")
        await asyncio.sleep(1.0)
        assert scene.names() == ["a", "b"]
        scene.world.dead.clear()
        await asyncio.sleep(59.0)
        assert scene.names() == ["b"]
        path = DEPLOYMENTS.resource.path("")
        assert scene.world.listed[path] == before[path], "it was resumed where it was"

    play(act)


def test_when_kopf_fails_it_is_started_again_with_a_growing_delay() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(POOLS, "p")
        scene.world.ends = [RuntimeError("no credentials")] * 4
        await begin(scene)
        await asyncio.sleep(30.0)
        assert len(scene.world.runs) == 5

    play(act)


def test_an_absent_kind_counts_as_empty_and_is_followed_once_it_exists() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["deployments"] = NotFound("404", code=404)
        await begin(scene)
        await asyncio.sleep(1.0)
        assert scene.names() == []
        assert scene.names(PODS) == ["p", "q", "r"]
        assert any("install the CRD" in trouble for trouble in scene.informer.troubles())
        del scene.world.failing["deployments"]
        await asyncio.sleep(40.0)
        assert scene.names() == ["a", "b"]
        assert scene.informer.troubles() == []

    play(act)


def test_our_own_kinds_are_awaited_and_keep_their_objects_while_absent() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(POOLS, "p")
        scene.world.failing["inferencepools"] = NotFound("404", code=404)
        scene.informer.start()
        waiting = asyncio.create_task(scene.informer.synced())
        await asyncio.sleep(300.0)
        assert not waiting.done()
        assert "inferencepools" not in scene.world.runs[-1]
        assert any("install the CRD" in trouble for trouble in scene.informer.troubles())
        assert max(scene.informer.ages().values()) < 61.0, "a new process would help nothing"
        del scene.world.failing["inferencepools"]
        await waiting
        assert scene.names(POOLS) == ["p"]
        scene.world.failing["inferencepools"] = NotFound("404", code=404)
        await asyncio.sleep(300.0)
        assert scene.names(POOLS) == ["p"], "without pools their gateways would be taken down"
        assert any("install the CRD" in trouble for trouble in scene.informer.troubles())

    play(act)


def test_a_removed_namespace_is_forgotten_and_delays_no_other() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["namespaces/n/"] = Forbidden("403", code=403)
        await begin(scene)
        await asyncio.sleep(1.0)
        assert scene.world.namespaces == ["m"]
        del scene.world.failing["namespaces/n/"]
        await asyncio.sleep(100.0)
        assert scene.world.namespaces == ["n", "m"]
        assert scene.names() == ["a", "b"]
        scene.world.failing["namespaces/n/"] = Forbidden("403", code=403)
        await asyncio.sleep(100.0)
        assert scene.names() == []
        assert scene.world.namespaces == ["m"]
        await asyncio.sleep(300.0)
        assert max(scene.informer.ages().values()) < 61.0
        assert ROUTES.resource.api in scene.offered[-1], "the other may use it"
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


def test_an_unreachable_api_server_ages_the_store_and_is_asked_less_often() -> None:
    async def act(scene: Scene) -> None:
        await begin(scene)
        scene.world.failing["/"] = Unavailable("connection refused")
        scene.world.stir()
        before = scene.world.asked
        await asyncio.sleep(200.0)
        assert scene.names() == ["a", "b"], "what is known stays"
        assert min(scene.informer.ages().values()) > 130.0
        assert (scene.world.asked - before) / len(EVERY) < 25
        assert len(scene.world.runs) == 1
        scene.world.failing.clear()
        await asyncio.sleep(25.0)
        assert max(scene.informer.ages().values()) < 25.0

    play(act)


def test_optional_kinds_come_and_go() -> None:
    async def act(scene: Scene) -> None:
        absent, refused = NotFound("404", code=404), Forbidden("403", code=403)
        scene.world.put(ROUTES, "r")
        scene.world.failing["httproutes"] = absent
        await begin(scene)
        assert ROUTES.resource.api not in scene.offered[-1]
        assert scene.names(ROUTES) == scene.informer.troubles() == []
        del scene.world.failing["httproutes"]
        await asyncio.sleep(40.0)
        assert ROUTES.resource.api in scene.offered[-1]
        assert scene.names(ROUTES) == ["r"]
        scene.world.put(ROUTES, "s")
        await asyncio.sleep(0.01)
        assert scene.names(ROUTES) == ["r", "s"]
        for error, left in ((Unavailable("503", code=503), ["r", "s"]), (absent, [])):
            scene.world.failing["httproutes"] = error
            await asyncio.sleep(70.0)
            assert scene.names(ROUTES) == left
            assert (ROUTES.resource.api in scene.offered[-1]) is bool(left), "an outage takes nothing away"
        scene.world.failing["httproutes"] = refused
        await asyncio.sleep(300.0)
        assert ROUTES.resource.api not in scene.offered[-1]
        assert max(scene.informer.ages().values()) < 61.0, "a forbidden kind does not restart the others"

    play(act)


def test_a_forbidden_optional_kind_delays_no_start() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["httproutes"] = Forbidden("403", code=403)
        await begin(scene)
        assert scene.offered[-1] == {watched.resource.api for watched in OPTIONAL[1:]}

    play(act)


def test_an_optional_kind_stays_forbidden_while_the_api_server_is_away() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["httproutes"] = Forbidden("403", code=403)
        await begin(scene)
        await asyncio.sleep(100.0)
        assert scene.forbidden[-1] == {ROUTES.resource.api}
        before = len(scene.forbidden)
        scene.world.failing["httproutes"] = Unavailable("503", code=503)
        await asyncio.sleep(100.0)
        assert len(scene.forbidden) == before, "an outage is no answer"

    play(act)


def test_one_refusal_takes_no_optional_kind_away() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(ROUTES, "r")
        await begin(scene)
        await asyncio.sleep(1.0)
        for error in (NotFound("404", code=404), Forbidden("403", code=403)):
            before = len(scene.offered)
            scene.world.failing["httproutes"] = error
            scene.world.stir()
            await asyncio.sleep(1.0)
            del scene.world.failing["httproutes"]
            await asyncio.sleep(60.0)
            assert len(scene.offered) == before
            assert scene.names(ROUTES) == ["r"]

    play(act)


def test_an_optional_kind_that_may_be_listed_and_not_watched_is_withdrawn_once_and_reported_as_forbidden() -> None:
    async def act(scene: Scene) -> None:
        scene.world.unwatched.add("httproutes")
        await begin(scene)
        await asyncio.sleep(300.0)
        told = [ROUTES.resource.api in apis for apis in scene.offered]
        assert told.count(False) <= 2, "not offered yet, and not any more"
        assert not told[-1]
        assert scene.forbidden[-1] == {ROUTES.resource.api}
        scene.world.unwatched.clear()
        await asyncio.sleep(60.0)
        assert ROUTES.resource.api in scene.offered[-1]
        assert scene.forbidden[-1] == frozenset()

    play(act)


def test_an_error_in_following_a_kind_is_reported_and_ages_only_that_kind() -> None:
    async def act(scene: Scene) -> None:
        scene.world.failing["pods"] = TypeError("a defect")
        scene.informer.start()
        waiting = asyncio.create_task(scene.informer.synced())
        await asyncio.sleep(250.0)
        assert not waiting.done()
        waiting.cancel()
        assert any("internal error" in trouble for trouble in scene.informer.troubles())
        assert scene.names() == ["a", "b"]
        assert scene.informer.ages()[PODS.resource.api] > 210.0, "the kubelet restarts the process"

    play(act)


def test_an_answer_that_is_not_a_list_is_an_error_and_not_an_empty_cluster() -> None:
    async def act(scene: Scene) -> None:
        scene.world.put(POOLS, "p")
        await begin(scene)
        proper = scene.world.request

        async def garbage(call: Call) -> Answer:
            return Answer(200, {}, b'{"kind": "Status"}') if "inferencepools" in call.path else await proper(call)

        scene.world.request = garbage  # type: ignore[method-assign]
        await asyncio.sleep(70.0)
        assert scene.names(POOLS) == ["p"]
        assert any("not a list" in trouble for trouble in scene.informer.troubles())

    play(act)


def test_secrets_are_never_watched() -> None:
    assert not [watched for watched in EVERY if watched.resource.kind == "Secret"]
    assert all(watched.selector for watched in (*CHILDREN, *OPTIONAL))


HAPPENINGS = st.one_of(
    st.tuples(st.just("put"), st.sampled_from([POOLS, DEPLOYMENTS, PODS]), st.sampled_from("abcd"), st.booleans()),
    st.tuples(st.just("delete"), st.sampled_from([POOLS, DEPLOYMENTS, PODS]), st.sampled_from("abcd"), st.booleans()),
    st.tuples(st.just("fail"), st.sampled_from([POOLS, DEPLOYMENTS, PODS]), st.sampled_from(FAULTS), st.booleans()),
    st.tuples(st.just("compact"), st.none(), st.none(), st.booleans()),
    st.tuples(st.just("heal"), st.none(), st.none(), st.booleans()),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(HAPPENINGS, max_size=25))
def test_the_store_converges_to_the_cluster_after_any_losses(happenings: list[Any]) -> None:
    """Events, refusals, dead watches, lost places and restarts of kopf in any order; then two minutes of peace."""

    async def act(scene: Scene) -> None:
        world = scene.world
        scene.informer.start()
        for what, watched, value, heard in happenings:
            match what:
                case "put":
                    world.put(watched, value, heard=heard)
                case "delete" if (watched.resource.api, "n", value) in world.objects:
                    world.delete(watched, value, heard=heard)
                case "fail" if value is None:
                    world.dead.add(watched.resource.plural)
                case "fail":
                    world.failing[watched.resource.plural] = value("why")
                    world.stir()
                case "compact":
                    world.compact()
                case "heal":
                    world.failing.clear()
                    world.dead.clear()
            await asyncio.sleep(20.0 if heard else 0.01)
        world.failing.clear()
        world.dead.clear()
        await asyncio.sleep(150.0)
        for watched in (POOLS, DEPLOYMENTS, PODS):
            assert scene.names(watched) == sorted(name for api, _, name in world.objects if api == watched.resource.api)
        for (_, _, name), obj in world.objects.items():
            assert obj["metadata"]["resourceVersion"] in scene.versions(name)
        assert scene.informer.troubles() == []

    logging.disable(logging.ERROR)
    try:
        play(act)
    finally:
        logging.disable(logging.NOTSET)
