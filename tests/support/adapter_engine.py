"""A scheduler that serves adapters from a folder, without a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from treeline_runtime.messages import LoadAdapterReq, Reply, UnloadAdapterReq
from treeline_wire.namespaces import join_namespace

from support.adapters import ATTENTION, shapes_of, write_adapter
from support.runtime_engine import Harness

ALL = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


class AdapterHarness(Harness):
    """Adapters are below `root`."""

    def __init__(self, model: Path, root: Path, **settings: Any) -> None:
        super().__init__(model, **{"lora_root": str(root), "max_loras": 2} | settings)
        self.root = root
        self.count = 0

    def write(self, name: str, seed: int, names: tuple[str, ...] = ALL, **options: Any) -> Path:
        return write_adapter(self.root / name, shapes_of(self.residence._sites, names), seed=seed, **options)

    def ask(self, message: LoadAdapterReq | UnloadAdapterReq) -> Reply:
        """Step until it is answered."""
        self.inbox.append(message)
        while True:
            self.woken.clear()
            worked = self.step()
            for reply in self.replies:
                if reply.id == message.id:
                    return reply
            if not worked:
                assert self.woken.wait(60.0), f"no answer to {message}"

    def _woken(self) -> bool:
        """Also wait for an adapter that is being read."""
        if self.adapters._rereading is None:
            return super()._woken()
        assert self.woken.wait(60.0), f"{self.adapters._rereading} is never there"
        self.woken.clear()
        return True

    def check_integrity(self) -> None:
        super().check_integrity()
        on_host, slots = self.residence.adapters, self.cache.slots
        assert set(self.adapters.names.values()) == on_host.keys() | slots.away
        assert not on_host.keys() & slots.away
        sizes = [adapter.num_bytes for adapter in on_host.values()]
        assert sum(sizes) <= self.limits.adapter_bytes + max(sizes, default=0)

    def add(self, name: str, path: str | None = None) -> Reply:
        self.count += 1
        return self.ask(LoadAdapterReq(f"load {self.count}", name, path or name))

    def added(self, name: str, seed: int, names: tuple[str, ...] = ALL, **options: Any) -> str:
        """Write and load an adapter. Return its digest."""
        self.write(name, seed, names, **options)
        reply = self.add(name)
        assert reply.ok, reply
        assert reply.data is not None
        return str(reply.data["digest"])

    def remove(self, name: str) -> Reply:
        self.count += 1
        return self.ask(UnloadAdapterReq(f"unload {self.count}", name))


def of(digest: str | None, salt: str | None = None) -> str | None:
    """Return the namespace of requests for an adapter."""
    return join_namespace(digest, salt)
