"""The accounts of a pool at rest: the blocks that its runtimes hold, and those that the picker believes they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from treeline_wire import ports

from e2e.kit.system import Installed

SHOWS_ITS_CACHE: Final[dict[str, Any]] = {"args": ["--enable-debug-endpoints"]}
"""Fields of a pool's ``engine`` that let a runtime show its cache."""
_RUNTIME: Final = f"http://127.0.0.1:{ports.RUNTIME_HTTP}"
_RUNTIME_ADMIN: Final = f"http://127.0.0.1:{ports.RUNTIME_ADMIN}"
_PICKER: Final = f"http://127.0.0.1:{ports.PICKER_ADMIN}"


@dataclass(frozen=True)
class Book:
    """One runtime at rest: pages in its tree, the announced ones among them, and the picker's belief."""

    requests: int
    pages_used: int
    pages_cached: int
    pages_in_tree: int
    tokens_announced: int
    tokens_believed: int
    in_flight_believed: int | None

    @property
    def balances(self) -> bool:
        """Return whether no page is lost, no reservation is left, and the picker's tree equals the runtime's cache."""
        return (
            self.requests == self.pages_used == self.in_flight_believed == 0
            and self.pages_cached == self.pages_in_tree
            and self.tokens_believed == self.tokens_announced
        )


def books(treeline: Installed) -> dict[str, Book]:
    """Return the counts of each runtime pod of the namespace's one pool, by name."""
    (picker,) = treeline.ready_pods("epp")
    (pool,) = treeline.page(picker, f"{_PICKER}/endpoints")["pools"].values()
    believed = {endpoint["name"]: endpoint for endpoint in pool["endpoints"]}
    found = {}
    for pod in treeline.ready_pods("runtime"):
        name = pod["metadata"]["name"]
        (load,) = treeline.page(pod, f"{_RUNTIME}/v1/loads")["loads"]
        blocks = treeline.page(pod, f"{_RUNTIME_ADMIN}/debug/radix")["blocks"]
        width = load["max_total_num_tokens"] // load["pages_total"]
        view = believed.get(name, {})
        found[name] = Book(
            requests=load["num_total_reqs"],
            pages_used=load["pages_used"],
            pages_cached=load["pages_cached"],
            pages_in_tree=len(blocks),
            tokens_announced=width * sum(block["announced"] for block in blocks),
            tokens_believed=view.get("cached_tokens", -1),
            in_flight_believed=view.get("in_flight"),
        )
    return found
