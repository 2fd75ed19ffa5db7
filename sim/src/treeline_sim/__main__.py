"""`python -m treeline_sim`: one simulated engine as a process."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path

import msgspec
import uvloop
from treeline_wire import ports
from treeline_wire.command_line import Parser

from treeline_sim.engine import SimCase, SimOptions, serve

EPILOG = """example, an engine that a picker on this machine can use:
  python -m treeline_sim --model models/tiny
  python -m treeline_epp --endpoint sim=127.0.0.1:8000

It answers /ready, /server_info, /treeline/tokenizer, /v1/models, /v1/completions and /v1/chat/completions (at
once, always with the same text), publishes KV events and load, and answers hello, snapshot and replay."""


def parser() -> argparse.ArgumentParser:
    sim = Parser(
        prog="python -m treeline_sim",
        description="A simulated engine: it speaks every contract of a runtime and computes nothing.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = sim.add_argument
    add(
        "--model",
        type=Path,
        required=True,
        metavar="DIR",
        help="checkpoint folder: its tokenizer and chat template",
    )
    add("--name", default="tiny", help="the model's name for requests (default: %(default)s)")
    add("--host", default="127.0.0.1", help="address of all sockets (default: %(default)s)")
    add("--port", type=int, default=ports.RUNTIME_HTTP, help="HTTP port (default: %(default)s; 0 = any)")
    add("--events-port", type=int, default=ports.EVENTS, help="KV events (default: %(default)s)")
    add("--replay-port", type=int, default=ports.REPLAY, help="replay and snapshot (default: %(default)s)")
    add("--load-port", type=int, default=ports.LOAD, help="load reports (default: %(default)s)")
    add("--block-size", type=int, default=16, help="tokens per block (default: %(default)s)")
    add(
        "--fixed",
        action="store_true",
        help="never change the cache (default: hold every known prompt once served)",
    )
    add(
        "--cases",
        type=Path,
        metavar="FILE",
        help="requests to know beforehand (msgpack, written by the benchmarks)",
    )
    return sim


def main() -> None:
    args = vars(parser().parse_args())
    cases_path = args.pop("cases")
    cases: tuple[SimCase, ...] = ()
    if cases_path is not None:
        cases = msgspec.msgpack.decode(cases_path.read_bytes(), type=tuple[SimCase, ...])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(message)s")
    uvloop.run(serve(SimOptions(cases=cases, **args)))


if __name__ == "__main__":
    main()
