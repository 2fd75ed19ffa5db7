"""The loop that sets replicas, in virtual time with simulated pickers and API server; and lying pickers, over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from datetime import UTC, datetime
from typing import Any

import aiohttp
import msgspec
import pytest
from support.virtual_loop import run
from treeline_kube.errors import KubeError
from treeline_operator.api.parts import API_VERSION
from treeline_operator.controller import pickers
from treeline_operator.controller.observe import Observer
from treeline_operator.controller.pickers import PickerClient
from treeline_operator.controller.scaler import Following, Scaler
from treeline_operator.controller.store import Store
from treeline_operator.world import Key, Platform, Scaling
from treeline_wire.signals import Asked, PoolSignals, Signals, Waiting, encode

NOW = datetime(2026, 11, 1, tzinfo=UTC)
A, B = ("10.0.0.1", 9004), ("10.0.0.2", 9004)
AUTO = {"type": "Picker", "minReplicas": 0, "maxReplicas": 5, "picker": {"scaleDownSeconds": 30}}
HELD = PoolSignals(Asked(held=Waiting(1, 100)))
IDLE = PoolSignals(ready=1)


class World:
    """A pool `p`, an API server that takes its scale and reports it if `tells`, and pickers with settable reports, one
    every 2 s."""

    def __init__(self, **auto: Any) -> None:
        self.store = Store()
        self.observer = Observer(self.store, Platform())
        self.says: dict[Any, PoolSignals | None] = {A: IDLE}
        self.heard: dict[Any, asyncio.Event] = {}
        self.autoscalers: list[dict[str, Any]] = []
        self.writes: list[tuple[float, int]] = []
        self.events: list[str] = []
        self.changed: list[Key] = []
        self.fails = 0
        self.tells = True
        self.version = 0
        self.spec: dict[str, Any] = {"replicas": 1, "autoscaling": AUTO | auto}
        self.scaler = Scaler(
            observer=self.observer,
            scales=self,
            source=self,
            recorder=self,  # type: ignore[arg-type]
            addresses=lambda _namespace, _gateway: list(self.says),
            changed=self.changed.append,
            clock=lambda: NOW,
            monotonic=lambda: asyncio.get_running_loop().time(),
        )
        self.store.listeners.append(self.scaler.on_change)

    def put(self, **spec: Any) -> None:
        """Write the pool, as a user does."""
        self.version += 1
        self.spec |= spec
        meta = {"name": "p", "namespace": "n", "uid": "u", "resourceVersion": str(self.version)}
        meta |= {"generation": self.version, "creationTimestamp": "2026-11-01T00:00:00Z"}  # type: ignore[dict-item]
        whole = {"model": {"uri": "builtin://tiny"}, **self.spec}
        self.store.put({"apiVersion": API_VERSION, "kind": "InferencePool", "metadata": meta, "spec": whole})

    async def scale_by_subresource(self, ref: Any, resource_version: str, replicas: int) -> None:
        if self.fails:
            self.fails -= 1
            raise KubeError("unavailable", code=503)
        assert (ref.name, resource_version) == ("p", str(self.version))
        self.writes.append((asyncio.get_running_loop().time(), replicas))
        if self.tells:
            self.put(replicas=replicas)

    async def list(self, api_version: str, kind: str, namespace: str | None = None) -> AsyncIterator[dict[str, Any]]:
        assert (api_version, kind, namespace) == ("autoscaling/v2", "HorizontalPodAutoscaler", "n")
        for one in self.autoscalers:
            yield one

    def emit(self, _ref: Any, _uid: str, _type: str, reason: str, message: str) -> None:
        self.events.append(f"{reason}: {message}")

    async def lines(self, address: Any) -> AsyncIterator[Signals]:
        event = self.heard.setdefault(address, asyncio.Event())
        while (said := self.says.get(address)) is not None:
            yield Signals(True, {"p": said})
            event.clear()
            try:
                async with asyncio.timeout(2.0):
                    await event.wait()
            except TimeoutError:
                pass

    def say(self, address: Any, what: PoolSignals | None) -> None:
        """Let the picker report something new, or None for silence."""
        self.says[address] = what
        self.heard.setdefault(address, asyncio.Event()).set()

    @property
    def scaling(self) -> Scaling | None:
        return self.observer.scaling.get(("n", "p"))


def in_time(story: Callable[[World], Awaitable[None]], world: World) -> None:
    """Run a story beside the scaler."""

    async def main() -> None:
        task = asyncio.create_task(world.scaler.run())
        world.put()
        try:
            async with asyncio.timeout(3600):
                await story(world)
        finally:
            await world.scaler.stop()
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    run(main())


def test_a_request_wakes_a_pool_at_once_and_idleness_puts_it_to_sleep_after_the_window() -> None:
    async def story(world: World) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(29)
        assert world.writes == []
        await asyncio.sleep(5)
        assert [n for _, n in world.writes] == [0]
        assert 30 <= world.writes[0][0] <= 33
        said_at = loop.time() + 0.5
        await asyncio.sleep(0.5)
        world.say(A, HELD)
        await asyncio.sleep(2)
        assert world.writes[1:] == [(pytest.approx(said_at, abs=0.1), 1)]
        assert world.scaling is not None
        assert world.scaling.last is not None
        assert world.scaling.last.replicas == 1
        assert world.events[-1].startswith("Autoscaled: replicas 0 → 1: ")
        world.say(A, PoolSignals(ready=1, queued_tokens=10_000_000))
        await asyncio.sleep(1)
        assert world.writes[-1][1] == 5
        assert "5 is the most" in world.events[-1]
        assert set(world.changed) == {Key("pool", "n", "p")}

    in_time(story, World())


def test_a_written_scale_is_not_repeated_before_it_is_observed() -> None:
    async def story(world: World) -> None:
        world.tells = False
        world.say(A, PoolSignals(ready=1, in_flight_requests=65))
        await asyncio.sleep(60)
        assert [n for _, n in world.writes] == [3]
        world.put(replicas=1)  # a user sets it back meanwhile: that is another generation
        await asyncio.sleep(3)
        assert [n for _, n in world.writes] == [3, 3]

    in_time(story, World())


@pytest.mark.parametrize("version", ["v1alpha1", "v1beta9"])
def test_a_pool_with_another_autoscaler_is_left_to_it(version: str) -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(1)  # it has been looked whether there is one
        target = {"apiVersion": f"treeline.dev/{version}", "kind": "InferencePool", "name": "p"}
        of_another = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "p"}
        for name, whom in (("other", of_another), ("theirs", target)):
            one = {"kind": "HorizontalPodAutoscaler", "metadata": {"name": name}, "spec": {"scaleTargetRef": whom}}
            world.autoscalers.append(one)
        world.say(A, PoolSignals(ready=1, queued_tokens=10_000_000))
        await asyncio.sleep(100)
        assert world.writes == []
        assert world.scaling == Scaling(True, "HorizontalPodAutoscaler theirs")
        world.autoscalers.clear()
        await asyncio.sleep(13)
        assert [n for _, n in world.writes] == [5]

    in_time(story, World())


def test_a_silent_picker_keeps_pods_and_adds_none() -> None:
    async def story(world: World) -> None:
        world.put(replicas=3)
        world.says[B] = None
        await asyncio.sleep(200)
        assert world.writes == [], "one of two is missing"
        world.say(A, PoolSignals(ready=1, in_flight_requests=100))
        await asyncio.sleep(1)
        assert [n for _, n in world.writes] == [4], "more is asked for all the same"
        world.say(A, None)
        await asyncio.sleep(200)
        assert len(world.writes) == 1
        assert world.scaling is not None
        assert not world.scaling.heard
        del world.says[B]
        world.say(A, IDLE)
        await asyncio.sleep(29)
        assert len(world.writes) == 1, "a window begins when all are heard"
        await asyncio.sleep(12)
        assert [n for _, n in world.writes] == [4, 0]

    in_time(story, World())


def test_an_api_server_that_refuses_is_asked_again() -> None:
    async def story(world: World) -> None:
        world.fails = 3
        world.say(A, PoolSignals(in_flight_requests=100))
        await asyncio.sleep(30)
        assert [n for _, n in world.writes] == [4]

    in_time(story, World())


def test_a_pool_of_another_type_is_not_scaled_and_its_pickers_are_left_alone() -> None:
    async def story(world: World) -> None:
        await asyncio.sleep(1)
        world.put(autoscaling={"type": "None"})
        world.say(A, PoolSignals(in_flight_requests=100))
        await asyncio.sleep(10)
        assert world.writes == []
        assert world.scaling is None
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("signals of")] == []
        world.put(autoscaling=AUTO)
        await asyncio.sleep(1)
        assert [n for _, n in world.writes] == [4]

    in_time(story, World())


@pytest.mark.parametrize("follows", [True, False])
def test_pods_that_compute_prompts_are_advised_and_told_of_where_they_follow(follows: bool) -> None:
    async def story(world: World) -> None:
        bounds = {"minReplicas": 1, "maxReplicas": 3} if follows else {}
        auto = AUTO if follows else {"type": "None"}
        world.put(engine={"hostCache": "1Gi"}, prefill={"replicas": 2, **bounds}, autoscaling=auto)
        world.say(A, PoolSignals(Asked(prompt_load=2.5), ready=1))
        await asyncio.sleep(1)
        assert world.scaling is not None
        assert world.scaling.prompts == (3 if follows else 4)
        say = "Autoscaled: prefill replicas 2 → 3: prompts keep 2.5 pods busy, which asks for 4; 3 is the most"
        assert (say in world.events) is follows
        world.say(A, None)
        await asyncio.sleep(400)
        assert world.scaling.prompts == (3 if follows else 4), "it stays while nothing is heard"
        world.say(A, IDLE)
        await asyncio.sleep(400)
        assert world.scaling.prompts == 1
        world.put(prefill=None)
        await asyncio.sleep(3)
        assert world.scaling is None or world.scaling.prompts == 0

    in_time(story, World())


HEAD = b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n"
LINE = encode(Signals(True, {"p": HELD}))


@pytest.mark.parametrize(
    ("answer", "lines", "trouble"),
    [
        (HEAD + LINE + LINE[:9], 1, ""),
        (HEAD + b"\n".join([b"{}", b"{}", LINE]), 1, ""),
        (HEAD + b"x" * 70_000 + b"\n", 0, "malformed"),
        (HEAD + b"[]\n", 0, "Expected `object`"),
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", 0, "answered 404"),
        (b"\x00" * 200, 0, "."),
        (HEAD, 0, "nothing more is said"),
        (HEAD + b"y" * 300_000, 0, "longer than 200000 bytes"),
    ],
)
async def test_any_answer_of_a_picker_is_bounded(
    monkeypatch: pytest.MonkeyPatch, answer: bytes, lines: int, trouble: str
) -> None:
    monkeypatch.setattr(pickers, "_FOLLOWED", aiohttp.ClientTimeout(sock_read=0.2))
    monkeypatch.setattr(pickers, "MOST_LINE_BYTES", 200_000)
    silent = trouble == "nothing more is said"

    served = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(answer)
            if silent:
                await reader.read()
        finally:
            writer.close()
            served.set()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    heard, why = 0, ""
    async with aiohttp.ClientSession() as session:
        try:
            async with asyncio.timeout(60):
                async for signals in PickerClient(session).lines(("127.0.0.1", port)):
                    heard += 1
                    assert signals == Signals(True, {"p": HELD})
        except (OSError, msgspec.MsgspecError) as exc:
            why = str(exc)
    await served.wait()
    server.close()
    await server.wait_closed()
    if trouble == "malformed" or trouble == ".":
        assert why
    elif not silent:
        assert trouble in why
    assert bool(why) == bool(trouble)
    assert heard == lines


def test_each_picker_is_followed_and_removed_ones_are_forgotten() -> None:
    async def main() -> None:
        world, told = World(), []
        loop = asyncio.get_running_loop()
        following = Following(world, lambda: told.append(loop.time()), loop.time)
        assert following.heard("p") is None
        world.says = {A: HELD, B: HELD}
        following.set([A, B])
        await asyncio.sleep(0.1)
        heard = following.heard("p")
        assert heard is not None
        assert heard.whole
        assert heard.pool.asked.held == Waiting(2, 200)
        assert following.heard("q") is None
        following.set([A])
        heard = following.heard("p")
        assert heard is not None
        assert (heard.whole, heard.pool) == (True, HELD)
        world.say(A, None)
        await asyncio.sleep(7)
        assert following.heard("p") is None
        await following.stop()

    run(main())
