"""`treeline sim serve`: simulated engines as servers, many in one process."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from dataclasses import replace
from pathlib import Path

import msgspec
import uvloop
from rich.console import Console
from treeline_wire import ports
from treeline_wire.tiny_model import tiny_model
from treeline_wire.tokenizer import TokenizerBundle

from treeline_sim.model.presets import DEFAULT, PRESETS
from treeline_sim.openai import SimCase
from treeline_sim.server import Dialect, ServerConfig, SimServer

CONTEXT = 131_072
AT_ONCE_TOKENS = 1 << 24
"""Memory and longest prompt of an engine that answers at once: nothing is evicted or refused."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `treeline sim serve`."""
    add = parser.add_argument
    add("--model", type=Path, metavar="DIR", help="source of tokenizer and template (default: the tiny model)")
    add("--name", default="tiny", help="the model's name for requests (default: %(default)s)")
    add("--count", type=int, default=1, metavar="N", help="servers, each on the next ports (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address of all sockets (default: %(default)s)")
    add("--port", type=int, default=ports.RUNTIME_HTTP, help="HTTP port of the first (default: %(default)s; 0 = any)")
    add("--events-port", type=int, default=ports.EVENTS, help="port of its KV events (default: %(default)s)")
    add("--replay-port", type=int, default=ports.REPLAY, help="port of its replays (default: %(default)s)")
    add("--load-port", type=int, default=ports.LOAD, help="port of its load reports (default: %(default)s)")
    add("--engine", default=DEFAULT, choices=PRESETS, help="kind of engine (default: %(default)s)")
    add("--kv-tokens", type=int, default=0, metavar="N", help="KV memory of each (default: the engine's)")
    add("--max-waiting", type=int, metavar="N", help="waiting requests before 503 (default: no limit)")
    add("--speedup", type=float, default=1.0, metavar="X", help="time passes X times as fast")
    add(
        "--cases",
        type=Path,
        metavar="FILE",
        help="answer at once, from the fixed cache in this file (msgpack, written by the benchmarks)",
    )
    add(
        "--dialect",
        default=Dialect.TREELINE,
        choices=list(Dialect),
        help="engine whose APIs it has (default: %(default)s)",
    )


def configs_of(args: argparse.Namespace) -> list[ServerConfig]:
    """Return the servers of a command line. Raises ValueError, which says what to do."""
    if not 1 <= args.count <= 200:
        raise ValueError("--count must be from 1 to 200")
    engine = PRESETS[args.engine].engine
    engine = replace(engine, kv_tokens=args.kv_tokens or engine.kv_tokens, max_waiting=args.max_waiting)
    cases: tuple[SimCase, ...] | None = None
    if args.cases is not None:
        cases = msgspec.msgpack.decode(args.cases.read_bytes(), type=tuple[SimCase, ...])
        engine = replace(engine, kv_tokens=args.kv_tokens or AT_ONCE_TOKENS)

    def place(base: int, number: int) -> int:
        if not 0 <= base <= 65535 - args.count:
            raise ValueError(f"there are no {args.count} ports from {base} on")
        return base + number if base else 0

    return [
        ServerConfig(
            engine,
            name=args.name,
            host=args.host,
            port=place(args.port, number),
            events_port=place(args.events_port, number),
            replay_port=place(args.replay_port, number),
            load_port=place(args.load_port, number),
            epoch=number + 1,
            speedup=args.speedup,
            dialect=Dialect(args.dialect),
            context=CONTEXT if cases is None else AT_ONCE_TOKENS,
            cases=cases,
        )
        for number in range(args.count)
    ]


def serve(args: argparse.Namespace, console: Console) -> int:
    """Serve until Ctrl-C or SIGTERM. Raises ValueError, BundleError, ZMQError and OSError."""
    configs = configs_of(args)
    model = args.model or tiny_model()
    if model is None:
        raise ValueError("the tiny model is not installed: pip install treeline-tiny, or name another with --model DIR")
    uvloop.run(_serve(configs, TokenizerBundle.from_dir(model), console))
    return 0


async def _serve(configs: list[ServerConfig], bundle: TokenizerBundle, console: Console) -> None:
    stop = asyncio.Event()
    for ending in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(ending, stop.set)
    started: list[SimServer] = []
    try:
        for config in configs:
            server = SimServer(config, bundle)
            started.append(server)
            await server.start()
        console.print(f"{len(started)} simulated engines; as arguments of treeline pick:", highlight=False)
        for number, server in enumerate(started):
            print(f"--endpoint sim{number}={server.config.host}:{server.ports['http']}")
        sys.stdout.flush()
        await stop.wait()
    finally:
        await asyncio.gather(*(server.close() for server in started))
