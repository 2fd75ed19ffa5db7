"""Leader election on a real API server: who leads, who takes over, who must stop to write."""

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
from treeline_operator.kube.account import own_account
from treeline_operator.kube.client import Cluster
from treeline_operator.kube.clock import now
from treeline_operator.kube.errors import LostLease, NotFound
from treeline_operator.kube.lease import Elector, Terms
from treeline_operator.world import Ref

TERMS = Terms(duration_s=2.0, renew_s=1.2, retry_s=0.2)


class Candidates:
    """Electors of one lease, each with a connection of its own that is guarded by it."""

    def __init__(self, control_plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = control_plane, namespace
        self.clusters: dict[str, Cluster] = {}
        self.seen: dict[str, list[str]] = {}
        self.watched = asyncio.Event()

    async def add(
        self, identity: str, terms: Terms = TERMS, owner: dict[str, object] | None = None
    ) -> Elector:
        cluster = await Cluster.from_config(self.plane.admin)
        self.seen[identity] = []

        def seen(leader: str) -> None:
            self.seen[identity].append(leader)
            if leader != identity:
                self.watched.set()

        elector = Elector(cluster, self.namespace, "treeline-operator", identity, terms, seen, owner)
        cluster.deadline = elector.valid_until
        self.clusters[identity] = cluster
        return elector

    async def write(self, identity: str) -> None:
        """A write as the operator does it."""
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


async def test_of_two_one_leads_and_the_other_may_not_write(
    candidates: Candidates, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "treeline_operator.kube.lease")
    first, second = await candidates.add("first"), await candidates.add("second")
    tasks = [asyncio.create_task(elector.acquire()) for elector in (first, second)]
    done, waiting = await asyncio.wait(tasks, timeout=5, return_when=asyncio.FIRST_COMPLETED)
    assert len(done) == 1
    assert sorted([first.is_leader, second.is_leader]) == [False, True]
    leader, other = ("first", "second") if first.is_leader else ("second", "first")
    await candidates.write(leader)
    with pytest.raises(LostLease):
        await candidates.write(other)
    holding = asyncio.create_task((first if first.is_leader else second).hold())
    # longer than the lease lasts unless it is renewed
    await asyncio.wait(waiting, timeout=TERMS.duration_s + 0.5)
    assert not holding.done()
    assert not next(iter(waiting)).done()
    assert (await candidates.lease())["holderIdentity"] == leader
    assert candidates.seen[other] == [leader]
    said = [record.getMessage() for record in caplog.records if "standby" in record.getMessage()]
    assert said == [f"standby: waiting for the lease treeline-operator, held by {leader}"]
    for task in (*waiting, holding):
        task.cancel()


async def test_a_leader_that_died_is_followed_when_its_lease_has_run_out(candidates: Candidates) -> None:
    first, second = await candidates.add("first"), await candidates.add("second")
    await first.acquire()
    started = time.monotonic()
    await asyncio.wait_for(second.acquire(), 10)
    assert TERMS.duration_s - 0.1 <= time.monotonic() - started < TERMS.duration_s + 1
    assert not first.is_leader
    spec = await candidates.lease()
    assert (spec["holderIdentity"], spec["leaseTransitions"]) == ("second", 1)
    await candidates.write("second")
    with pytest.raises(LostLease):
        await candidates.write("first")


async def test_a_released_lease_is_taken_at_the_next_try(candidates: Candidates) -> None:
    first, second = await candidates.add("first"), await candidates.add("second")
    await first.acquire()
    waiting = asyncio.create_task(second.acquire())
    await asyncio.wait_for(candidates.watched.wait(), 5)
    started = time.monotonic()
    await first.release()
    with pytest.raises(LostLease):
        await candidates.write("first")
    await asyncio.wait_for(waiting, 5)
    assert time.monotonic() - started < 1.0
    await first.release()
    assert (await candidates.lease())["holderIdentity"] == "second"


async def test_a_leader_without_an_api_server_stops_in_time(candidates: Candidates) -> None:
    elector = await candidates.add("first")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    candidates.plane.pause("apiserver")
    try:
        renewed = elector.valid_until() - TERMS.renew_s
        write = asyncio.create_task(candidates.write("first"))
        with pytest.raises(LostLease, match="not renewed in time"):
            await asyncio.wait_for(holding, 10)
        assert now() < renewed + TERMS.duration_s
        with pytest.raises(LostLease):
            await write
        with pytest.raises(LostLease):
            await candidates.write("first")
    finally:
        candidates.plane.resume("apiserver")
    # the same process could lead again, but by a new election only
    await asyncio.wait_for(elector.acquire(), 10)
    await candidates.write("first")


async def test_an_outage_shorter_than_the_terms_is_survived(candidates: Candidates) -> None:
    elector = await candidates.add("first", Terms(duration_s=15, renew_s=10, retry_s=0.2))
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    before = elector.valid_until()
    await asyncio.to_thread(candidates.plane.restart_apiserver)
    while elector.valid_until() < before + 2:
        assert not holding.done()
        await asyncio.sleep(0.02)
    await candidates.write("first")
    holding.cancel()


async def test_a_lease_that_somebody_takes_by_hand_is_lost_at_once(candidates: Candidates) -> None:
    elector = await candidates.add("first")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    ref = Ref("coordination.k8s.io/v1", "Lease", candidates.namespace, "treeline-operator")
    other = await Cluster.from_config(candidates.plane.admin)
    await other.patch_merge(ref, {"spec": {"holderIdentity": "administrator"}})
    await other.close()
    started = time.monotonic()
    with pytest.raises(LostLease, match="held by administrator"):
        await asyncio.wait_for(holding, 5)
    assert time.monotonic() - started < 2 * TERMS.retry_s + 0.3
    assert not elector.is_leader


async def test_a_lease_that_was_deleted_is_made_again(candidates: Candidates) -> None:
    elector = await candidates.add("first")
    await elector.acquire()
    holding = asyncio.create_task(elector.hold())
    candidates.plane.kubectl("delete", "lease", "treeline-operator", "-n", candidates.namespace)
    before = elector.valid_until()
    while elector.valid_until() <= before + TERMS.retry_s:
        assert not holding.done()
        await asyncio.sleep(0.02)
    assert (await candidates.lease())["holderIdentity"] == "first"
    holding.cancel()


@pytest.mark.parametrize("terms", [(10, 10, 2), (15, 2, 2), (15, 10, 0)])
def test_terms_that_are_not_safe_are_refused(terms: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="duration > renew deadline > retry period"):
        Terms(*terms)


async def test_the_lease_goes_with_the_account_of_who_leads(candidates: Candidates, tmp_path: Path) -> None:
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

    await until(gone, "the lease to be collected", 20.0)


def token_of(claims: dict[str, object], folder: Path) -> Path:
    """A file as a pod has it."""
    text = base64.urlsafe_b64encode(json.dumps({"kubernetes.io": claims}).encode()).decode().rstrip("=")
    token = folder / "token"
    token.write_text(f"e30.{text}.c2ln")
    return token


def test_no_account_is_told_of_where_it_would_be_wrong(tmp_path: Path) -> None:
    token = tmp_path / "token"
    assert own_account("here", token) is None, "not in a pod"
    for text in ("", "opaque", "a.b.c", "e30.e30.e30"):
        token.write_text(text)
        assert own_account("here", token) is None, text
    claims = {"namespace": "there", "serviceaccount": {"name": "a", "uid": "1"}}
    assert own_account("here", token_of(claims, tmp_path)) is None, "owners of other namespaces are nobody's"
