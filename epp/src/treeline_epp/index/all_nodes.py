"""The nodes of a tree as a set, and a round of visits that reaches each of them while the tree changes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

from treeline_epp.index.node import Node


class AllNodes:
    """All nodes but the roots. A round begins with `begin_round`; `next` gives the nodes that the round has yet to
    reach, also as cuts and merges change them. All is O(1): a list of the nodes for each round would hold up the loop.
    """

    def __init__(self) -> None:
        self._reached: dict[Node, None] = {}
        self._ahead: dict[Node, None] = {}

    def __len__(self) -> int:
        return len(self._reached) + len(self._ahead)

    def __iter__(self) -> Iterator[Node]:
        return chain(self._reached, self._ahead)

    def add(self, node: Node) -> None:
        """Add a new node, which this round need not reach."""
        self._reached[node] = None

    def add_part(self, part: Node, of: Node) -> None:
        """Add a part cut from a node: it is ahead if the node is."""
        self._side(of)[part] = None

    def remove(self, node: Node, into: Node | None = None) -> None:
        """Remove a node, or merge it into another, which is ahead if either is."""
        if into is not None and node in self._ahead:
            self.visit_again(into)
        del self._side(node)[node]

    def begin_round(self) -> None:
        """Begin a round: every node is ahead. The last round must be over."""
        assert not self._ahead
        self._reached, self._ahead = self._ahead, self._reached

    @property
    def ahead(self) -> int:
        """The number of nodes ahead."""
        return len(self._ahead)

    def next(self) -> Node:
        """Return a node that was ahead, and is not any more. There must be one."""
        node, _ = self._ahead.popitem()
        self._reached[node] = None
        return node

    def visit_again(self, node: Node) -> None:
        """Put a node ahead, whether or not it was."""
        self._reached.pop(node, None)
        self._ahead[node] = None

    def _side(self, node: Node) -> dict[Node, None]:
        return self._ahead if node in self._ahead else self._reached
