"""Leader election on a real API server: who leads, who takes over, who must stop writing."""

from __future__ import annotations

import asyncio
import base64
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.control_plane import ControlPlane
from support.epp_io import until
from treeline_kube.client import Client
from treeline_kube.clock import now
from treeline_kube.errors import LostLease, NotFound
from treeline_operator.controller.lease import Candidate, Elector, LeaseTiming, identity_of, own_account
from treeline_operator.world import Ref

pytestmark = [pytest.mark.integration, pytest.mark.deep]

TIMING = LeaseTiming(duration_s=2.0, renew_s=1.2, retry_s=0.2)


class Candidates:
    """Electors of one lease, each with a connection of its own that is guarded by it."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = control_plane, namespace
        self.clusters: dict[str, Client] = {}

    async def add(
        self,
        identity: str,
        timing: LeaseTiming = TIMING,
        owner: dict[str, object] | None = None,
        pod: str = "",
    ) -> Elector:
        cluster = await Client.from_config(self.plane.admin)
        elector = Elector(cluster, self.namespace, "treeline-operator", identity, timing, owner, pod)
        cluster.deadline = elector.valid_until
        self.clusters[identity] = cluster
        return elector

    async def write(self, identity: str) -> None:
        """Write as the operator does."""
        metadata = {"name": "written", "namespace": self.namespace}
        obj = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"by": identity}}
        await self.clusters[identity].apply(obj)

    async def lease(self, part: str = "spec") -> dict[str, object]:
        cluster = next(iter(self.clusters.values()))
        found = await cluster.get(Ref("coordination.k8s.io/v1", "Lease", self.namespace, "treeline-operator"))
        shown: dict[str, object] = found[part]
        return shown


@pytest.fixture
async def candidates(control_plane: ControlPlane, namespace: str) -> AsyncIterator[Candidates]:
    candidates = Candidates(control_plane, namespace)
    yield candidates
    for cluster in candidates.clusters.values():
        await cluster.close()


async def test_one_of_two_candidates_leads_and_the_other_may_not_write(
    candidates: Candidates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "treeline_operator.controller.lease")
    first, second = await candidates.add("first"), await candidates.add("second")
    tasks = [asyncio.create_task(elector.acquire()) for elector in (first, second)]
    done, waiting = await asyncio.wait(tasks, timeout=60, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    assert sorted([first.is_leader, second.is_leader]) == [False, True]
    leader, other = ("first", "second") if first.is_leader else ("second", "first")
    await candidates.write(leader)
    with pytest.raises(LostLease):
        await candidates.write(other)
    holding = asyncio.create_task((first if first.is_leader else second).hold())
    # longer than the lease lasts unless it is renewed
    await asyncio.wait(waiting, timeout=TIMING.duration_s + 0.5)
    assert not holding.done()
    assert not next(iter(waiting)).done()
    assert (await candidates.lease())["holderIdentity"] == leader
    assert (second if first.is_leader else first).leader == leader
    said = [record.getMessage() for record in caplog.records if "standby" in record.getMessage()]
    assert said == [f"standby: waiting for the lease treeline-operator, held by {leader}"]
    for task in (*waiting, holding):
        task.cancel()


async def test_a_dead_leader_is_replaced_when_its_lease_expires(candidates: Candidates) -> None:
    first, second = await candidates.add("first"), await candidates.add("second")
    await first.acquire()
    started = time.monotonic()
    await asyncio.wait_for(second.acquire(), 60)
    assert TIMING.duration_s - 0.1 <= time.monotonic() - started
    assert not first.is_leader
    spec = await candidates.lease()
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("second", 1)
    await candidates.write("second")
    with pytest.raises(LostLease):
        await candidates.write("first")


LONG = LeaseTiming(duration_s=60.0, renew_s=40.0, retry_s=0.2)


async def test_a_released_lease_is_taken_at_the_next_try(candidates: Candidates) -> None:
    first, second = await candidates.add("first", LONG), await candidates.add("second", LONG)
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await until(lambda: second.leader == "first", "the other is seen to lead")
    await first.release()
    with pytest.raises(LostLease):
        await candidates.write("first")
    await asyncio.wait_for(waiting, 30)
    await first.release()
    assert (await candidates.lease())["holderIdentity"] == "second"


def of_pod(uid: str, process: str) -> tuple[str, str]:
    return identity_of({"POD_NAME": "operator-0", "POD_UID": uid}, "host", process)


async def test_the_lease_of_the_pods_former_container_is_taken_over_at_once(candidates: Candidates) -> None:
    """The container was killed: the lease was not released, and is valid for another minute."""
    (before, pod), (after, same) = of_pod("uid-1", "a"), of_pod("uid-1", "b")
    assert pod == same
    former = await candidates.add(before, LONG, pod=pod)
    await former.acquire()
    restarted = await candidates.add(after, LONG, pod=pod)
    await asyncio.wait_for(restarted.acquire(), 30)
    spec = await candidates.lease()
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == (after, 1)
    await candidates.write(after)


async def test_the_lease_of_another_pod_of_the_same_name_is_waited_for(candidates: Candidates) -> None:
    """A StatefulSet's pod may live on after its node is lost; a candidate without a uid may be anywhere."""
    leader, pod = of_pod("uid-1", "a")
    first = await candidates.add(leader, LONG, pod=pod)
    await first.acquire()
    for uid, process in (("uid-2", "b"), ("uid-", "c"), ("", "d")):
        identity, own = of_pod(uid, process)
        other = await candidates.add(identity, LONG, pod=own)
        waiting = asyncio.create_task(other.acquire())
        await until(lambda other=other: other.leader == leader, "the other is seen to lead")
        done, _ = await asyncio.wait([waiting], timeout=3 * LONG.retry_s)
        assert not done
        waiting.cancel()
    assert (await candidates.lease())["holderIdentity"] == leader


def test_an_identity_tells_the_pod_where_its_uid_is_known() -> None:
    assert of_pod("u", "1") == ("operator-0_u_1", "operator-0_u_")
    assert identity_of({"POD_NAME": "operator-0"}, "host", "1") == ("operator-0_1", "")
    assert identity_of({}, "host", "1") == ("host_1", "")


async def test_a_leader_without_an_api_server_stops_in_time(candidates: Candidates) -> None:
    timing = LeaseTiming(duration_s=60.0, renew_s=1.2, retry_s=0.2)
    elector = await candidates.add("first", timing)
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    candidates.plane.pause("apiserver")
    try:
        renewed = elector.valid_until() - timing.renew_s
        write = asyncio.create_task(candidates.write("first"))
        with pytest.raises(LostLease, match="not renewed in time"):
            await asyncio.wait_for(holding, 60)
        assert now() < renewed + timing.duration_s
        with pytest.raises(LostLease):
            await write
        with pytest.raises(LostLease):
            await candidates.write("first")
    finally:
        candidates.plane.resume("apiserver")
    # the same process could lead again, but by a new election only
    await asyncio.wait_for(elector.acquire(), 60)
    await candidates.write("first")


async def test_a_candidate_renews_while_its_callers_loop_stands_still(candidates: Candidates) -> None:
    """The causes: a long plan, or a process that gets little processor time."""
    await candidates.add("looks on")
    made: list[Elector] = []

    async def make() -> Elector:
        made.append(await candidates.add("first", LeaseTiming(duration_s=60.0, renew_s=40.0, retry_s=0.2)))
        return made[0]

    candidate = Candidate(make)
    await candidate.acquire()
    holding = asyncio.create_task(candidate.hold())
    first = candidate.valid_until()
    await until(lambda: candidate.valid_until() > first, "it to renew")
    seen, deadline = {candidate.valid_until()}, time.monotonic() + 60
    while len(seen) < 5:
        assert time.monotonic() < deadline
        time.sleep(0.01)  # noqa: ASYNC251  # the loop stands still
        seen.add(candidate.valid_until())
    await asyncio.sleep(0)
    assert not holding.done()
    holding.cancel()
    del candidates.clusters["first"]
    await candidate.close()
    assert (await candidates.lease())["holderIdentity"] == ""


async def test_an_error_with_the_lease_has_a_name(candidates: Candidates, caplog: pytest.LogCaptureFixture) -> None:
    elector = await candidates.add("first")
    await elector.acquire()
    with pytest.MonkeyPatch.context() as patch:

        async def silent(*_: object, **__: object) -> None:
            raise TimeoutError

        patch.setattr(candidates.clusters["first"], "update", silent)
        with pytest.raises(LostLease, match="not renewed in time"):
            await elector.hold()
    assert "lease treeline-operator: TimeoutError: no answer in" in caplog.text


async def test_an_outage_shorter_than_the_terms_keeps_the_leader(candidates: Candidates) -> None:
    elector = await candidates.add("first", LeaseTiming(duration_s=15, renew_s=10, retry_s=0.2))
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    before = elector.valid_until()
    await asyncio.to_thread(candidates.plane.restart_apiserver)
    while elector.valid_until() < before + 2:
        assert not holding.done()
        await asyncio.sleep(0.02)
    await candidates.write("first")
    holding.cancel()


async def test_a_lease_taken_by_hand_is_lost_at_once(candidates: Candidates) -> None:
    timing = LeaseTiming(duration_s=60.0, renew_s=40.0, retry_s=0.2)
    elector = await candidates.add("first", timing)
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    ref = Ref("coordination.k8s.io/v1", "Lease", candidates.namespace, "treeline-operator")
    other = await Client.from_config(candidates.plane.admin)
    await other.patch_merge(ref, {"spec": {"holderIdentity": "administrator"}})
    await other.close()
    with pytest.raises(LostLease, match="held by administrator"):
        await asyncio.wait_for(holding, timing.renew_s / 4)
    assert not elector.is_leader


async def test_a_lease_that_was_deleted_is_made_again(candidates: Candidates) -> None:
    elector = await candidates.add("first")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    candidates.plane.kubectl("delete", "lease", "treeline-operator", "-n", candidates.namespace)
    before = elector.valid_until()
    while elector.valid_until() <= before + TIMING.retry_s:
        assert not holding.done()
        await asyncio.sleep(0.02)
    assert (await candidates.lease())["holderIdentity"] == "first"
    holding.cancel()


async def test_the_lease_is_owned_by_the_leaders_account(candidates: Candidates, tmp_path: Path) -> None:
    former = await candidates.add("former")
    await former.acquire()
    assert "ownerReferences" not in await candidates.lease("metadata")
    await former.release()

    cluster, namespace = candidates.clusters["former"], candidates.namespace
    account = Ref("v1", "ServiceAccount", namespace, "operator")
    meta = {"name": account.name, "namespace": namespace}
    cluster.deadline = None
    made = await cluster.create({"apiVersion": "v1", "kind": account.kind, "metadata": meta})
    claims = {"namespace": namespace, "serviceaccount": {"name": "operator", "uid": made["metadata"]["uid"]}}
    owner = own_account(namespace, token_of(claims, tmp_path))
    assert owner == {"apiVersion": "v1", "kind": "ServiceAccount"} | claims["serviceaccount"]
    ours = await candidates.add("ours", owner=owner)
    await ours.acquire()
    assert (await candidates.lease("metadata"))["ownerReferences"] == [owner]

    await cluster.delete(account, uid=owner["uid"])

    async def gone() -> bool:
        try:
            return not await candidates.lease()
        except NotFound:
            return True

    await until(gone, "the lease to be collected")


def token_of(claims: dict[str, object], folder: Path) -> Path:
    """Write a token file as a pod has it."""
    text = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).decode().rstrip("=")
    token = folder / "token"
    token.write_text(f"e30.{text}.c2ln")
    return token


def test_an_uncertain_account_is_not_shown(tmp_path: Path) -> None:
    token = tmp_path / "token"
    assert own_account("here", token) is None, "not in a pod"
    for text in ("", "opaque", "a.b.c", "e30.e30.e30"):
        token.write_text(text)
        assert own_account("here", token) is None, text
    claims = {"namespace": "there", "serviceaccount": {"name": "a", "uid": "1"}}
    assert own_account("here", token_of(claims, tmp_path)) is None, "an owner must be in the same namespace"
