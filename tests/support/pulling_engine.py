"""Engines that give each other pages, and peers that behave as a test tells them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import zmq
from treeline_runtime.args import ServerArgs
from treeline_runtime.kvcache.remote import RemotePages
from treeline_runtime.page_server import PageServer
from treeline_runtime.published import TierLoad
from treeline_wire.pages import Later, encode_answer, parse_request

from support.runtime_engine import Harness


@contextmanager
def engine(tiny: Path, context: zmq.Context[Any], **settings: Any) -> Iterator[Harness]:
    """An engine that pulls."""
    made = Harness(tiny, **{"host_cache": 1 << 20} | settings)
    assert made.cache.tiers is not None
    made.cache.tiers.rates.allows = lambda _: True  # type: ignore[method-assign]  # whatever this machine measures
    made.cache.tiers.store.remote = RemotePages(context, None)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def served(made: Harness, context: zmq.Context[Any], **args: Any) -> Iterator[str]:
    """Let an engine give its pages to others as it steps; returns its address."""
    assert made.cache.tiers is not None
    settings: dict[str, Any] = {"model": "none", "host_cache": 1, "kv_transfer_port": 0} | args
    server = PageServer(context, ServerArgs(**settings), 0, made.cache.tiers.lending, made.woken.set)
    try:
        yield f"127.0.0.1:{server.port}"
    finally:
        server.close()


@contextmanager
def lending(made: Harness, context: zmq.Context[Any], **args: Any) -> Iterator[str]:
    """Let an engine give its pages to others; returns its address. It steps in a thread of its own."""
    stopped = threading.Event()

    def step() -> None:
        while not stopped.is_set():
            if not made.step():
                made.woken.wait(0.1)
                made.woken.clear()

    thread = threading.Thread(target=step)
    with served(made, context, **args) as address:
        thread.start()
        try:
            yield address
        finally:
            stopped.set()
            made.woken.set()
            thread.join()
    made.run()


@contextmanager
def fake_peer(context: zmq.Context[Any], answer: Callable[[Any], Sequence[Any] | None]) -> Iterator[str]:
    """A peer that answers requests as told, and repeats signs of life; returns its address."""
    with context.socket(zmq.ROUTER) as sock:
        sock.setsockopt(zmq.LINGER, 0)
        port = sock.bind_to_random_port("tcp://127.0.0.1")
        stopped = threading.Event()

        def run() -> None:
            living = set[bytes]()
            while not stopped.is_set():
                for peer in living:
                    sock.send_multipart([peer, *encode_answer(Later())])
                if sock.poll(20):
                    peer, *frames = sock.recv_multipart()
                    if (said := answer(parse_request(frames))) == encode_answer(Later()):
                        living.add(peer)
                    elif said is not None:
                        sock.send_multipart([peer, *said])

        thread = threading.Thread(target=run)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            stopped.set()
            thread.join()


def report(engine: Harness) -> TierLoad:
    assert engine.cache.tiers is not None
    return engine.cache.tiers.load_report()
