"""Pages that another runtime has are pulled, and answers are those of computing, whatever the other one does."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import zmq
from support.pulling_engine import engine, fake_peer, lending, report, served
from support.runtime_engine import Harness, prompt
from support.runtime_server import eventually
from treeline_runtime.args import ServerArgs
from treeline_runtime.kvcache import page, remote, store
from treeline_runtime.kvcache.page import PageFormat
from treeline_runtime.kvcache.remote import Pull, RemotePages
from treeline_runtime.kvcache.store import Fetch, Moved
from treeline_runtime.messages import FlushReq
from treeline_runtime.page_server import MOST_IN_FLIGHT, PageServer
from treeline_runtime.scheduler.rates import LoadRates
from treeline_runtime.scheduler.tiers import STALLED_S
from treeline_wire.pages import (
    WINDOW,
    Answer,
    GetRequest,
    HaveRequest,
    Held,
    Later,
    Pages,
    encode_answer,
    encode_request,
    parse_answer,
)
from treeline_wire.security import CurveKeys

PROMPT = [*prompt(0, 200), 1]
Answered = tuple[Held | Pages, bytes]


@pytest.fixture(scope="module")
def expected(tiny: Path) -> list[int]:
    return Harness(tiny).generate("alone", PROMPT)


@pytest.mark.parametrize("settings", [{}, {"page_size": 16}, {"kv_cache_dtype": "fp8_e4m3"}, {"host_cache": 8 << 10}])
def test_what_a_peer_has_on_its_device_is_pulled_and_answered_the_same(
    tiny: Path, context: zmq.Context[Any], settings: dict[str, Any]
) -> None:
    alone = Harness(tiny, **{key: value for key, value in settings.items() if key != "host_cache"})
    expected = alone.generate("alone", PROMPT)
    with engine(tiny, context, **settings) as there:
        there.generate("there", PROMPT)
        with lending(there, context) as address, engine(tiny, context, **settings | {"host_cache": 1 << 20}) as here:
            assert here.generate("here", PROMPT, pages_from=address) == expected
            pulled, found = here.last("here").cached_tokens, report(here)
            whole = 200 // here.config.page_size * here.config.page_size
            assert 0 < pulled <= whole
            assert pulled == whole or "host_cache" in settings, "a small host passes on less"
            assert found.total_loaded_tokens == {"CPU": pulled, "DISK": 0, "PEER": pulled}
            assert report(there).total_sent_tokens >= pulled
            assert found.total_failures == {"bad_page": 0, "copy": 0, "disk": 0, "peer": int("host_cache" in settings)}
            assert here.generate("again", PROMPT) == expected, "what was pulled is cached"


def test_only_what_is_missing_is_pulled(tiny: Path, context: zmq.Context[Any], expected: list[int]) -> None:
    with engine(tiny, context) as there, engine(tiny, context) as here:
        there.generate("there", PROMPT)
        here.generate("part", PROMPT[:100])
        with lending(there, context) as address:
            assert here.generate("here", PROMPT, pages_from=address) == expected
        assert here.last("here").cached_tokens == 200
        assert report(here).total_loaded_tokens["PEER"] == 100


def test_requests_with_one_prefix_pull_it_once(tiny: Path, context: zmq.Context[Any], expected: list[int]) -> None:
    with engine(tiny, context) as there, engine(tiny, context) as here:
        there.generate("there", PROMPT)
        with lending(there, context) as address:
            for i in range(4):
                here.submit(str(i), PROMPT, pages_from=address)
            here.run()
        assert [here.tokens(str(i)) for i in range(4)] == [expected] * 4
        assert report(here).total_loaded_tokens["PEER"] == 200


def raced(
    here: Harness, tiny: Path, context: zmq.Context[Any], clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> list[int]:
    """Return an answer for which pages were pulled, where computing a page takes half a second of this clock. What was
    replaced until then is as before again."""
    with engine(tiny, context) as there:
        there.generate("there", PROMPT)
        assert here.cache.tiers is not None
        here.cache.tiers.rates.page_s = lambda: 0.5  # type: ignore[method-assign]
        with lending(there, context) as address:
            monkeypatch.setattr(store, "time", SimpleNamespace(monotonic=lambda: clock[0]))
            answer = here.generate("here", PROMPT, pages_from=address)
            monkeypatch.undo()
    return answer


@pytest.mark.parametrize("came", [8, 30, 49, 50])
def test_a_pull_that_is_slower_than_computing_is_dropped_where_it_is(
    tiny: Path, context: zmq.Context[Any], expected: list[int], came: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, pages, clock = Pull.read, count(), [0.0]

    def slower(pull: Pull, *of: Any) -> int:
        """The link is faster than computing at first."""
        clock[0] += 0.4 if next(pages) < came - 1 else 1000.0
        return read(pull, *of)

    monkeypatch.setattr(page, "CHUNK_BYTES", 1)
    monkeypatch.setattr(remote, "WINDOW", 1)  # each page comes by itself
    monkeypatch.setattr(Pull, "read", slower)
    with engine(tiny, context) as here:
        assert raced(here, tiny, context, clock, monkeypatch) == expected
        assert here.last("here").cached_tokens == 4 * came, "what has come is used"
        assert report(here).total_loaded_tokens == {"CPU": 4 * came, "DISK": 0, "PEER": 4 * came}
        assert report(here).total_failures["peer"] == 0
        assert here.generate("again", PROMPT) == expected


def test_no_page_is_dropped_that_has_come(
    tiny: Path, context: zmq.Context[Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages come many at once, a little later than computing the first of them would take."""
    receive, clock = Pull._receive, [0.0]

    def late(pull: Pull) -> None:
        clock[0] += 1.0
        receive(pull)

    monkeypatch.setattr(Pull, "_receive", late)
    with engine(tiny, context) as here:
        assert raced(here, tiny, context, clock, monkeypatch) == expected
        assert here.last("here").cached_tokens == 200


def test_a_peer_that_only_lives_is_waited_for_no_longer_than_computing_takes(
    tiny: Path, context: zmq.Context[Any], expected: list[int]
) -> None:
    now, asked = [0.0], threading.Event()

    def answer(request: Any) -> Sequence[Any] | None:
        if isinstance(request, HaveRequest):
            return encode_answer(Held(len(request.digests)))
        asked.set()
        return encode_answer(Later())

    with engine(tiny, context, clock=lambda: now[0]) as here, fake_peer(context, answer) as address:
        assert here.cache.tiers is not None
        here.cache.tiers.rates.page_s = lambda: 0.04  # type: ignore[method-assign]  # 2 s for all 50
        here.submit("waits", PROMPT, pages_from=address)
        eventually(lambda: (here.step(), asked.is_set())[1])
        now[0] = 1.9
        here.step()
        assert "waits" in here.prefill.waiting
        now[0] = 2.0
        eventually(lambda: (here.step(), here.outs.get("waits") and here.last("waits").finish)[1])
        assert here.tokens("waits") == expected
        here.run()


def test_a_slow_peer_keeps_nobody_from_others(tiny: Path, context: zmq.Context[Any], expected: list[int]) -> None:
    with engine(tiny, context) as there, engine(tiny, context) as here:
        there.generate("there", PROMPT)
        tiers = here.cache.tiers
        assert tiers is not None
        tiers.rates = LoadRates(lambda: 1000.0, here.config.page_size)
        with lending(there, context) as sound, served(there, context) as slow:
            for _ in range(2):
                fetch = Fetch({}, None, 0.0, STALLED_S, slow)
                tiers._fetches[fetch] = cast(Any, None)
                tiers._fetched(fetch, True, Moved(10, 100.0, "PEER"))
            assert here.generate("slow", PROMPT, pages_from=slow) == expected
            assert report(here).total_loaded_tokens["PEER"] == 0
            here.cache.wipe()
            assert here.generate("here", PROMPT, pages_from=sound) == expected
            assert report(here).total_loaded_tokens["PEER"] == 200


def test_another_namespace_finds_nothing(tiny: Path, context: zmq.Context[Any]) -> None:
    with engine(tiny, context) as there, engine(tiny, context) as here:
        there.generate("there", PROMPT, namespace="one")
        with lending(there, context) as address:
            for namespace in (None, "two"):
                here.generate(str(namespace), PROMPT, namespace=namespace, pages_from=address)
                assert here.last(str(namespace)).cached_tokens == 0
            here.generate("one", PROMPT, namespace="one", pages_from=address)
            assert here.last("one").cached_tokens == 200


def test_pages_of_another_model_are_not_taken(tiny: Path, context: zmq.Context[Any]) -> None:
    with engine(tiny, context, seed=1) as there, engine(tiny, context) as here:
        there.generate("there", PROMPT)
        with lending(there, context) as address:
            here.generate("here", PROMPT, pages_from=address)
            assert here.last("here").cached_tokens == 0
            assert report(here).fingerprint != report(there).fingerprint
            with context.socket(zmq.DEALER) as sock:
                sock.connect(f"tcp://{address}")
                sock.send_multipart(encode_request(HaveRequest(b"x" * 16, [b"d" * 32])))
                answer: Answer = Later()
                while answer == Later():  # signs of life, if it is slow
                    answer, _ = parse_answer(sock.recv_multipart())
                assert answer == Held(0)


def test_a_peer_that_flushes_while_it_gives_pages_gives_no_wrong_ones(
    tiny: Path, context: zmq.Context[Any], expected: list[int]
) -> None:
    with engine(tiny, context) as there, lending(there, context) as address, engine(tiny, context) as here:
        for i in range(8):
            there.submit(f"there-{i}", PROMPT)
            eventually(lambda i=i: there.outs.get(f"there-{i}") and there.is_idle)
            there.inbox.append(FlushReq(f"flush-{i}"))
            there.woken.set()
            assert here.generate(f"here-{i}", PROMPT, pages_from=address) == expected
            here.cache.wipe()
            eventually(lambda i=i: len(there.replies) > i)


def sick(form: PageFormat, sound: Callable[[Any], Sequence[Any]], how: str) -> Callable[[Any], Sequence[Any] | None]:
    """A peer that has all pages, and something wrong with it."""
    count = 0

    def answer(request: Any) -> Sequence[Any] | None:
        nonlocal count
        count += 1
        if isinstance(request, HaveRequest):
            return None if how == "silent" else [b"nonsense"] if how == "talks nonsense" else sound(request)
        size = form.nbytes * len(request.digests)
        right = [form.checksum(digest, memoryview(bytes(form.nbytes))) for digest in request.digests]
        match how:
            case "falls silent":
                return None
            case "sends wrong bytes":
                return encode_answer(Pages(request.number, right), b"\1" * size)
            case "has lost them":
                return encode_answer(Pages(request.number))
            case "sends too much":
                return encode_answer(Pages(request.number, right), bytes(size + 1))
            case "answers another request":
                return encode_answer(Pages(request.number + 7, right), bytes(size))
        return encode_answer(Held(3))

    return answer


TROUBLE = [
    "silent",
    "talks nonsense",
    "falls silent",
    "sends wrong bytes",
    "has lost them",
    "sends too much",
    "answers another request",
    "answers another question",
]


@pytest.mark.parametrize("within", ["", ";within=5"])
@pytest.mark.parametrize("how", TROUBLE)
def test_a_sick_peer_costs_nothing_but_time(
    tiny: Path, context: zmq.Context[Any], expected: list[int], how: str, within: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.2 if "silent" in how else 30.0)  # a busy machine answers late
    monkeypatch.setattr(remote, "AVOID_S", 3600.0)
    with engine(tiny, context) as here:
        assert here.cache.tiers is not None
        form = here.cache.tiers.store.form

        def sound(request: HaveRequest) -> Sequence[Any]:
            return encode_answer(Held(len(request.digests)))

        with fake_peer(context, sick(form, sound, how)) as address:
            assert here.generate("here", PROMPT, pages_from=address + within) == expected
            assert here.last("here").cached_tokens == 0
            here.cache.wipe()
            assert here.generate("again", PROMPT, pages_from=address + within) == expected
            assert here.cache.tiers.store.remote is not None
            left_alone = not here.cache.tiers.store.remote.may_ask(address)
            assert left_alone == (how != "has lost them"), "caches evict: that is no failure"
        assert report(here).total_failures["bad_page"] == (how == "sends wrong bytes")


def test_a_peer_that_hangs_holds_no_page_of_the_device_and_delays_nothing(
    tiny: Path, context: zmq.Context[Any], expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 60.0)
    now, asked, go, others = [0.0], threading.Event(), threading.Event(), [2, *prompt(7, 100)]
    with (
        engine(tiny, context) as there,
        engine(tiny, context, max_total_tokens=256, clock=lambda: now[0]) as here,
    ):
        computed = there.generate("there", others)
        assert here.cache.tiers is not None
        lost = encode_answer(Pages(0))

        def answer(request: Any) -> Sequence[Any] | None:
            if isinstance(request, HaveRequest):
                return encode_answer(Held(len(request.digests)))
            asked.set()
            return lost if go.wait(60) else None

        with fake_peer(context, answer) as address, lending(there, context) as sound:
            here.submit("waits", PROMPT, pages_from=address)
            eventually(lambda: (here.step(), asked.is_set())[1])
            assert here.cache.tiers.loads.held_pages == 0
            here.submit("other", others, pages_from=sound)
            eventually(lambda: (here.step(), here.outs.get("other") and here.last("other").finish)[1])
            assert here.tokens("other") == computed
            assert here.last("other").cached_tokens == 100
            assert "waits" in here.prefill.waiting
            now[0] += STALLED_S
            eventually(lambda: (here.step(), here.outs.get("waits") and here.last("waits").finish)[1])
            assert here.tokens("waits") == expected
            assert here.cache.tiers.is_copying, "the peer still hangs"
            go.set()
            here.run()
        assert report(here).total_loads["failed"] == 1


def test_an_audit_finds_a_peer_that_lies_and_it_is_not_asked_until_a_flush(
    tiny: Path, context: zmq.Context[Any], expected: list[int]
) -> None:
    with engine(tiny, context, cache_audit=1.0) as here:
        assert here.cache.tiers is not None
        form = here.cache.tiers.store.form

        def lie(request: Any) -> Sequence[Any]:
            if isinstance(request, HaveRequest):
                return encode_answer(Held(len(request.digests)))
            page = np.random.default_rng(0).standard_normal(form.nbytes // 4, dtype=np.float32).tobytes()
            sums = [form.checksum(digest, memoryview(page)) for digest in request.digests]
            return encode_answer(Pages(request.number, sums), page * len(sums))

        with fake_peer(context, lie) as address:
            here.generate("lied to", PROMPT, pages_from=address)
            assert here.last("lied to").cached_tokens == 200
            assert (here.audits.counts["peer"].diverged, here.audits.counts["peer"].off) == (1, True)
            assert here.generate("computed", PROMPT, pages_from=address) == expected
            assert here.last("computed").cached_tokens == 0
            here.inbox.append(FlushReq("flush"))
            here.run()
            here.generate("again", PROMPT, pages_from=address)
            assert here.last("again").cached_tokens == 200


def test_no_address_but_of_this_machine_is_asked_without_keys(context: zmq.Context[Any], tmp_path: Path) -> None:
    plain = RemotePages(context, None)
    for good in ("127.0.0.1:5", "[::1]:5"):
        assert plain.may_ask(good)
    strangers = ("10.0.0.1:5", "[fd00::1]:5", "192.168.1.2:80")
    for bad in (*strangers, "localhost:5", "example.org:5", "127.0.0.1", "127.0.0.1:", ":5", "", "127.0.0.1:x", "*:5"):
        assert not plain.may_ask(bad), bad
    keyed = RemotePages(context, CurveKeys.generate(tmp_path / "keys"))
    assert all(keyed.may_ask(one) for one in strangers)
    assert not keyed.may_ask("example.org:5")


def test_only_who_has_the_pools_keys_is_given_pages_or_asked(
    tiny: Path, context: zmq.Context[Any], expected: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote, "SILENT_S", 0.3)
    ours, others = CurveKeys.generate(tmp_path / "ours"), CurveKeys.generate(tmp_path / "others")
    with engine(tiny, context) as there, engine(tiny, context) as here:
        there.generate("there", PROMPT)
        assert here.cache.tiers is not None
        with lending(there, context, curve_dir=str(tmp_path / "ours")) as address:
            for name, keys, cached in (("none", None, 0), ("others", others, 0), ("ours", ours, 200)):
                here.cache.tiers.store.remote = RemotePages(context, keys)
                assert here.generate(name, PROMPT, pages_from=address) == expected
                assert here.last(name).cached_tokens == cached
                here.cache.wipe()


def test_every_rank_names_the_port_of_the_first_one(context: zmq.Context[Any]) -> None:
    """`/server_info` repeats the rank whose cache is smallest, and readers add a rank's number."""
    args = ServerArgs(model="none", host_cache=1, kv_transfer_port=0)
    server = PageServer(context, args, 3, None, lambda: None)  # type: ignore[arg-type]
    try:
        assert server._socket.getsockopt_string(zmq.LAST_ENDPOINT).endswith(f":{server.port + 3}")
    finally:
        server.close()


def test_a_flood_of_signs_of_life_takes_no_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    rests, wanted = list[float](), iter([True] * 100)
    frames = [SimpleNamespace(buffer=frame) for frame in encode_answer(Later())]
    floods: Any = SimpleNamespace(poll=lambda _: True, recv_multipart=lambda copy: frames)
    monkeypatch.setattr(remote, "time", SimpleNamespace(sleep=rests.append))
    with pytest.raises(remote.Lost):
        remote._Line(floods, lambda: next(wanted, False)).answer()
    assert rests == [remote.PAUSE_S] * 100


def ask(sock: zmq.Socket[Any], *requests: Any) -> None:
    for request in requests:
        sock.send_multipart(encode_request(request))


def test_a_peer_has_so_many_requests_unanswered_and_others_are_dropped(tiny: Path, context: zmq.Context[Any]) -> None:
    with engine(tiny, context) as there, context.socket(zmq.DEALER) as sock:
        there.generate("there", PROMPT)
        assert there.cache.tiers is not None
        form = there.cache.tiers.store.form
        server = PageServer(
            context,
            ServerArgs(model="none", host_cache=1, kv_transfer_port=0),
            0,
            there.cache.tiers.lending,
            there.woken.set,
        )
        sock.connect(f"tcp://127.0.0.1:{server.port}")
        ask(sock, *[GetRequest(form.fingerprint, [b"d" * 32], number) for number in range(MOST_IN_FLIGHT)])
        ask(sock, GetRequest(form.fingerprint, [b"short"], 99))
        sock.send_multipart([b"", b"treeline", b"1", b"\xc1"])
        assert there.woken.wait(30)
        found = set[int]()

        def all_came() -> bool:
            there.step()
            while sock.poll(0):
                answer, data = parse_answer(sock.recv_multipart())
                if answer == Later():
                    continue
                assert isinstance(answer, Pages)
                assert (answer.checksums, bytes(data)) == ([], b"")
                found.add(answer.number)
            return len(found) > WINDOW

        eventually(all_came)
        assert 99 not in found
        server.close()
