"""`python -m treeline_runtime.fetch.adapters`: beside a runtime, gives it the adapters that a file asks for.

The file is an annotation of the pod (`treeline_wire.live_adapters`). Downloads go into `fetched` below --root, which is
the runtime's --lora-root; pvc:// is in `claims` there. Credentials come from the environment, as for
`treeline_runtime.fetch`. Standard output has a report per line, whenever it changes.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import http.client
import io
import json
import os
import shutil
import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
from treeline_wire.command_line import Parser
from treeline_wire.live_adapters import LONGEST_ERROR, AdapterReport, AdapterWish, is_version, wishes_of

from treeline_runtime.fetch.__main__ import wanted
from treeline_runtime.fetch.folder import Progress, fetch

_EVERY_S: Final = 1.0
_ANSWER_S, _CHANGE_S = 10.0, 3600.0
"""How long the runtime may take for an answer, and for a change: an unload waits for requests."""
_SAID_AGAIN_S: Final = 60.0  # a log loses lines when it is rotated
_AGAIN_S, _LONGEST_S = 20.0, 300.0
"""The first pause after a failure, which doubles, and the longest."""
_LOADS, _UNLOADS = 4, 64
"""At once. Those that wait for requests keep no other waiting."""
_FILES: Final = ("adapter_config.json", "adapter_model.safetensors")
_SPARE: Final = 0.15
"""Share of the disk that stays free: a kubelet evicts pods where less than a tenth is."""
_OPENER: Final = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class AdapterError(Exception):
    """The runtime did not do what it was asked for."""


class Failure(NamedTuple):
    """Why an adapter is not loaded, and when it is tried again."""

    text: str
    again_at: float
    pause_s: float = _AGAIN_S


def changes(
    wishes: Mapping[str, AdapterWish],
    loaded: Collection[str],
    busy: Collection[str],
    failed: Mapping[str, Failure],
    now: float,
) -> tuple[list[AdapterWish], list[str]]:
    """What to load and what to unload. What others loaded, under names that are not ours, is left alone."""
    idle = (wish for name, wish in wishes.items() if name not in loaded and name not in busy)
    loads = [wish for wish in idle if wish.name not in failed or failed[wish.name].again_at <= now]
    return loads, [name for name in loaded if is_version(name) and name not in wishes and name not in busy]


@dataclass(frozen=True, slots=True)
class Engine:
    """The runtime's ports, on loopback. All methods raise AdapterError."""

    api: str
    administration: str

    def loaded(self) -> dict[str, str]:
        """Name → digest; "" where its files cannot be read again."""
        models = self._ask(f"{self.api}/v1/models", None, _ANSWER_S)["data"]
        ranks = self._ask(f"{self.api}/server_info", None, _ANSWER_S)["internal_states"]
        lost = {name: "" for rank in ranks for name in rank["lost_adapters"]}
        return lost | {model["id"]: model["digest"] for model in models if model.get("digest")}

    def load(self, wish: AdapterWish, path: str) -> None:
        """Load from a folder below the root, if its files have the digest."""
        body = {"lora_name": wish.name, "lora_path": path, "digest": wish.digest}
        self._ask(f"{self.administration}/v1/load_lora_adapter", body, _CHANGE_S)

    def unload(self, name: str) -> None:
        """Returns once no request uses it."""
        self._ask(f"{self.administration}/v1/unload_lora_adapter", {"lora_name": name}, _CHANGE_S)

    def _ask(self, url: str, body: dict[str, str] | None, timeout_s: float) -> dict[str, Any]:
        data = None if body is None else json.dumps(body).encode()
        try:
            with _OPENER.open(urllib.request.Request(url, data), timeout=timeout_s) as answer:
                read: dict[str, Any] = json.load(answer)
                return read
        except urllib.error.HTTPError as error:
            said: Any = error.read()
            with contextlib.suppress(ValueError, LookupError, TypeError):
                said = json.loads(said)["error"]["message"]
            raise AdapterError(str(said)) from None
        except (OSError, ValueError, http.client.HTTPException) as error:
            raise AdapterError(f"the runtime does not answer: {error}") from None


@dataclass
class Keeper:
    """Keeps a runtime's adapters as they are wished for."""

    engine: Engine
    root: Path
    clock: Callable[[], float] = time.monotonic
    _busy: dict[str, Future[None]] = field(default_factory=dict)
    _failed: dict[str, Failure] = field(default_factory=dict)
    _loads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_LOADS))
    _unloads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(_UNLOADS))

    def step(self, text: str) -> AdapterReport:
        """Begin what `text` asks for and is not under way; returns how it stands. Never waits for a change."""
        try:
            wishes, loaded = wishes_of(text), self.engine.loaded()
        except (AdapterError, msgspec.MsgspecError, RecursionError) as error:
            return AdapterReport(errors={"": str(error)[:LONGEST_ERROR]})
        for name in [name for name, future in self._busy.items() if future.done()]:
            before = self._failed.pop(name, None)
            if (failure := self._busy.pop(name).exception()) is not None:
                pause_s = min(2 * before.pause_s, _LONGEST_S) if before else _AGAIN_S
                self._failed[name] = Failure(str(failure)[:LONGEST_ERROR], self.clock() + pause_s, pause_s)
        self._failed = {name: failure for name, failure in self._failed.items() if name in wishes}
        self._tidy({*wishes, *loaded, *self._busy})
        lost = {name for name, digest in loaded.items() if not digest}
        loads, unloads = changes(wishes, loaded.keys() - (lost & wishes.keys()), self._busy, self._failed, self.clock())
        self._busy |= {wish.name: self._loads.submit(self._load, wish) for wish in loads}
        self._busy |= {name: self._unloads.submit(self.engine.unload, name) for name in unloads}
        good = {name: digest[:16] for name, digest in loaded.items() if digest and name in wishes}
        return AdapterReport(good, {name: failure.text for name, failure in self._failed.items() if name not in good})

    def _load(self, wish: AdapterWish) -> None:
        scheme, _, path = wish.uri.partition("://")
        folder = self.root / "claims" / path if scheme == "pvc" else self._fetched(wish.name)
        if scheme != "pvc":
            fetch(replace(wanted(wish.uri, str(folder), files=_FILES), spare=_SPARE), Progress(io.StringIO()))
        try:
            self.engine.load(wish, str(folder.relative_to(self.root)))
        except AdapterError:
            shutil.rmtree(self._fetched(wish.name), ignore_errors=True)  # others may be there at the next try
            raise

    def _tidy(self, names: Collection[str]) -> None:
        """Remove what was downloaded, in whole or in part, for others than these adapters."""
        kept = {self._fetched(name).name for name in names}
        for path in [path for path in self.root.glob("fetched/*") if path.name.partition(".")[0] not in kept]:
            path.unlink() if path.is_file() else shutil.rmtree(path, ignore_errors=True)

    def _fetched(self, name: str) -> Path:
        return self.root / "fetched" / hashlib.sha256(name.encode()).hexdigest()[:16]


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python -m treeline_runtime.fetch.adapters", description="Load a runtime's adapters.")
    parser.add_argument("--wishes", type=Path, required=True, help="file with the adapters to have")
    parser.add_argument("--root", type=Path, required=True, help="the runtime's --lora-root")
    parser.add_argument("--port", type=int, required=True, help="the runtime's --port")
    parser.add_argument("--admin-port", type=int, required=True, help="the runtime's --admin-port")
    return parser.parse_args(argv)


def main() -> None:
    """Run until SIGTERM."""
    args = parse(None)
    # The first process of a container gets no signal that it has no handler for; an unload may wait for hours.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    api, administration = (f"http://127.0.0.1:{port}" for port in (args.port, args.admin_port))
    keeper, said, again_at = Keeper(Engine(api, administration), args.root), None, 0.0
    while True:
        report = keeper.step(args.wishes.read_text())
        if report != said or time.monotonic() >= again_at:
            said, again_at = report, time.monotonic() + _SAID_AGAIN_S
            sys.stdout.write(msgspec.json.encode(report).decode() + "\n")
            sys.stdout.flush()
        time.sleep(_EVERY_S)


if __name__ == "__main__":
    main()
