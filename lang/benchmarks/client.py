"""CPU seconds that the language's client takes for a program, beside SGLang's: of the whole process.

Both run the same programs on a server that answers at once and is another process: one call, and a fork of four calls.
They take turns, so that both see the same machine; the medians are printed. SGLang's language comes from `make
engine-wheels`. Without it, only ours is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final
from unittest.mock import MagicMock

THEIRS: Final = Path(__file__).resolve().parents[2] / ".cache" / "engine-wheels" / "sglang-0.5.23-frontend"
_NOT_HERE: Final = ("IPython", "IPython.display", "pybase64", "sglang.srt", "sglang.srt.environ")
"""Modules that SGLang's language imports and does not use here."""
_ANSWER: Final = json.dumps(
    {"text": " fine", "model_path": "x", "meta_info": {"finish_reason": {"type": "stop"}, "prompt_tokens": 9}}
).encode()


def tell(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


class Server(asyncio.Protocol):
    """A server with the same answer to every request. Connections stay open for clients that keep them."""

    def connection_made(self, transport: Any) -> None:
        self._transport, self._read = transport, b""

    def data_received(self, data: bytes) -> None:
        self._read += data
        head, end, body = self._read.partition(b"\r\n\r\n")
        head = head.lower()
        length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
        if end and len(body) >= length:
            self._read = b""
            self._transport.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(_ANSWER), _ANSWER))
            if b"connection: close" in head:
                self._transport.close()


async def serve() -> None:
    server = await asyncio.get_running_loop().create_server(Server, "127.0.0.1", 0)
    tell(str(server.sockets[0].getsockname()[1]))
    await server.serve_forever()


def language(side: str, url: str) -> tuple[Any, Any]:
    """→ (the language, a backend)."""
    if side == "ours":
        import treeline_lang

        return treeline_lang, treeline_lang.RuntimeEndpoint(url, chat_template="chatml")
    sys.path.insert(0, str(THEIRS))
    sys.modules.update(dict.fromkeys(_NOT_HERE, MagicMock()))
    from sglang.lang import api  # type: ignore[import-not-found]
    from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint  # type: ignore[import-not-found]

    return api, RuntimeEndpoint(url, chat_template_name="chatml")


def programs(sgl: Any) -> dict[str, Any]:
    @sgl.function
    def call(s: Any, word: str) -> None:
        s += "Tell me of " + word + ":" + sgl.gen("a", max_tokens=8, temperature=0)

    @sgl.function
    def fork4(s: Any, word: str) -> None:
        s += "Tell me of " + word + ":"
        branches = s.fork(4)
        for number, branch in enumerate(branches):
            branch += f" {number}" + sgl.gen("a", max_tokens=8, temperature=0)
        branches.join()

    return {"call": call, "fork4": fork4}


def measure(side: str, url: str, runs: int) -> None:
    """Prints one line of JSON for each line that is read: program → CPU milliseconds of a run."""
    sgl, backend = language(side, url)
    timed: dict[str, Callable[[], Any]] = {
        name: lambda program=program: program.run(word="trees", backend=backend)["a"]
        for name, program in programs(sgl).items()
    }
    for _ in sys.stdin:
        spent = {}
        for name, run in timed.items():
            before = time.process_time()
            for _ in range(runs):
                assert run() in (" fine", [" fine"] * 4)
            spent[name] = (time.process_time() - before) * 1e3 / runs
        tell(json.dumps(spent))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--runs", type=int, default=100, help="of a program, in a round")
    options = parser.parse_args()
    sides = ("ours", "theirs") if THEIRS.is_dir() else ("ours",)
    started = []

    def start(*words: str) -> subprocess.Popen[str]:
        argv = [sys.executable, __file__, *words]
        started.append(subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        return started[-1]

    def ask(child: subprocess.Popen[str]) -> dict[str, float]:
        assert child.stdin
        assert child.stdout
        child.stdin.write("\n")
        child.stdin.flush()
        return dict(json.loads(child.stdout.readline()))

    try:
        server = start("serve")
        assert server.stdout
        url = f"http://127.0.0.1:{server.stdout.readline().strip()}"
        children = {side: start(side, url, str(options.runs)) for side in sides}
        rounds = [{side: ask(child) for side, child in children.items()} for _ in range(options.rounds + 1)][1:]
    finally:
        for child in started:
            child.kill()
            child.wait()
    found = {
        f"lang.cpu_ms.{side}.{name}": [one[side][name] for one in rounds] for side in sides for name in rounds[0][side]
    }
    if "theirs" in sides:
        for name in rounds[0]["ours"]:
            found[f"lang.vs_sglang.{name}"] = [one["ours"][name] / one["theirs"][name] for one in rounds]
    for metric, values in found.items():
        tell(json.dumps({"metric": metric, "value": round(statistics.median(values), 4)}))


if __name__ == "__main__":
    os.environ["no_proxy"] = "127.0.0.1"
    match sys.argv[1:]:
        case ["serve"]:
            asyncio.run(serve())
        case ["ours" | "theirs" as side, url, runs]:
            measure(side, url, int(runs))
        case _:
            main()
